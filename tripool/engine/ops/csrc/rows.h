// Rows of float32 or bfloat16, eight numbers at a time: one loop, compiled for each instruction set.
//
// Products and sums are rounded one by one (no fused multiply-add), and sums along a row go through the same lanes at
// every level. So all levels give the same bits, and a row's bits depend on nothing but the row.
#pragma once

#include <cstdint>
#include <cstring>

#include "quantise.h"

namespace tripool {
namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int64_t LANES = 8;
typedef float Lanes __attribute__((vector_size(32)));
typedef int32_t IntLanes __attribute__((vector_size(32)));
typedef uint32_t BitLanes __attribute__((vector_size(32)));
typedef uint16_t HalfLanes __attribute__((vector_size(16)));
typedef float LanesAnywhere __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t HalfLanesAnywhere __attribute__((vector_size(16), aligned(2), may_alias));

INLINE float load_one(const float* x) { return *x; }

INLINE float load_one(const uint16_t* x) {
    const uint32_t bits = uint32_t(*x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

INLINE void store_one(float value, float* y) { *y = value; }

INLINE void store_one(float value, uint16_t* y) {      // rounded to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    *y = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE void load(const float* x, Lanes& value) { value = *reinterpret_cast<const LanesAnywhere*>(x); }

INLINE void load(const uint16_t* x, Lanes& value) {
    const HalfLanes half = *reinterpret_cast<const HalfLanesAnywhere*>(x);
    value = reinterpret_cast<Lanes>(__builtin_convertvector(half, BitLanes) << 16);
}

INLINE void store(const Lanes& value, float* y) { *reinterpret_cast<LanesAnywhere*>(y) = value; }

INLINE void store(const Lanes& value, uint16_t* y) {
    const BitLanes bits = reinterpret_cast<BitLanes>(value);
    const BitLanes even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const IntLanes broken = value != value;
    const BitLanes chosen = (even & ~reinterpret_cast<BitLanes>(broken)) | (reinterpret_cast<BitLanes>(broken) & 0x7fc0);
    *reinterpret_cast<HalfLanesAnywhere*>(y) = __builtin_convertvector(chosen, HalfLanes);
}


// NAME_at(level, format): TEMPLATE<float> or TEMPLATE<uint16_t> as compiled for a level.
#define FOR_EACH_LEVEL(NAME, RESULT, PARAMETERS, ARGUMENTS)                                                           \
    template <class T> RESULT NAME##_plain PARAMETERS { return NAME<T> ARGUMENTS; }                                   \
    template <class T> __attribute__((target("avx2"))) RESULT NAME##_avx2 PARAMETERS { return NAME<T> ARGUMENTS; }    \
    template <class T> __attribute__((target("avx512f,avx512bw,avx512vl"))) RESULT NAME##_avx512 PARAMETERS {         \
        return NAME<T> ARGUMENTS;                                                                                     \
    }                                                                                                                 \
    using NAME##_function = RESULT (*) PARAMETERS;                                                                    \
    NAME##_function NAME##_at(int level, int64_t format) {                                                            \
        static const NAME##_function functions[][3] = {                                                               \
            {NAME##_plain<float>, NAME##_avx2<float>, NAME##_avx512<float>},                                          \
            {NAME##_plain<uint16_t>, NAME##_avx2<uint16_t>, NAME##_avx512<uint16_t>}};                                \
        return functions[format == BFLOAT16][vectors_of(level)];                                                  \
    }

}  // namespace
}  // namespace tripool
