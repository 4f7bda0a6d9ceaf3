// Parts of an int8 product that are plain loops, compiled once for each instruction set that includes this file.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "exponential.h"

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

inline __attribute__((always_inline)) float exponential(float x) {
    float y;
    exponential_of<float, int32_t>(x, y);
    return y;
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
