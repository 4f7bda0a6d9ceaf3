// exp(x) for |x| <= 87, of one float or of a vector of them, the same bits at every level.
#pragma once

#include <cstdint>
#include <cstring>

namespace tripool {
namespace {

// x = n ln 2 + r, a polynomial in r, n into the exponent. `Bits` has as many 32-bit integers as `Floats` has floats.
template <class Floats, class Bits>
inline __attribute__((always_inline)) void exponential_of(const Floats& x, Floats& y) {
    const float magic = 12582912.0f;               // 1.5 * 2**23: rounds to an integer in the low bits
    const Floats shifted = x * 1.44269504f + magic, n = shifted - magic;
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = 1.9875691500e-4f + Floats{};
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Bits bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000 + 127) << 23;
    Floats power;
    std::memcpy(&power, &bits, sizeof power);
    y = p * power;
}

}  // namespace
}  // namespace tripool
