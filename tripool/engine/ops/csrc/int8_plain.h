// Parts of an int8 product that are plain loops, compiled once for each instruction set that includes this file.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace tripool {
namespace {

// f(0), f(1), ... f(N - 1) with constants: arrays indexed by them become registers.
template <class F, int... I>
inline __attribute__((always_inline)) void unrolled(std::integer_sequence<int, I...>, F f) {
    (f(std::integral_constant<int, I>()), ...);
}

template <int N, class F>
inline __attribute__((always_inline)) void unrolled(F f) {
    unrolled(std::make_integer_sequence<int, N>(), f);
}

#define UNROLLED(I) [&](auto I) __attribute__((always_inline))

// exp(x) for |x| <= 87, the same bits at every level: x = n ln 2 + r, a polynomial in r, n into the exponent.
inline __attribute__((always_inline)) float exponential(float x) {
    const float magic = 12582912.0f;               // 1.5 * 2**23: rounds to an integer in the low bits
    float shifted = x * 1.44269504f + magic, n = shifted - magic;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4b400000 + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline __attribute__((always_inline)) void gate_block(const float* __restrict gate, const float* __restrict up,
                                                      float* __restrict h) {
    for (int c = 0; c < 16; c++) {
        const float x = -gate[c];
        float bounded = x > 87.0f ? 87.0f : x;
        bounded = bounded < -87.0f ? -87.0f : bounded;
        float divisor = 1.0f + exponential(bounded);
        divisor = x > 87.0f ? __builtin_inff() : divisor;    // shut for good; NaN stays one, being divided itself
        h[c] = gate[c] / divisor * up[c];
    }
}

inline __attribute__((always_inline)) void spread_int16(const int8_t* __restrict q, int64_t width,
                                                        int16_t* __restrict row) {
    for (int64_t k = 0; k < width; k++) row[k] = q[k];
    for (int64_t k = width; k % 4; k++) row[k] = 0;
}

}  // namespace
}  // namespace tripool
