// bfloat16, which is the upper half of a float.
#pragma once

#include <cstdint>
#include <cstring>

namespace tripool {
namespace {

inline uint16_t rounded(float value) {             // to bfloat16, to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t near = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near;
}

inline float widened(uint16_t value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

}  // namespace
}  // namespace tripool
