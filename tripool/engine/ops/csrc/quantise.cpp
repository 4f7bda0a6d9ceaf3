// Rows as eight-bit integers: one loop, compiled for each instruction set.
//
// Largest magnitudes are compared as integers (finite floats order like their bits, and what is not finite comes out on
// top); rounding to even is done by adding 1.5 * 2**23.

#include "quantise.h"

#include <cstring>

namespace tripool {
namespace {

inline __attribute__((always_inline)) float widen(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline __attribute__((always_inline)) float widen(float value) { return value; }

template <class T>
inline __attribute__((always_inline)) float quantise_row(const T* __restrict x, int64_t width, int8_t* __restrict q) {
    uint32_t most = 0;
    for (int64_t i = 0; i < width; i++) {
        float value = widen(x[i]);
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float amax;
    std::memcpy(&amax, &most, 4);
    if (most >= 0x7f800000 || amax < 1e-30f) {
        std::memset(q, 0, size_t(width));
        return most >= 0x7f800000 ? __builtin_nanf("") : 0.0f;
    }
    const float inverse = 127.0f / amax, magic = 12582912.0f;
    for (int64_t i = 0; i < width; i++) {
        float shifted = widen(x[i]) * inverse + magic;
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        q[i] = int8_t(bits - 0x4b400000);
    }
    return amax / 127.0f;
}

#define ROW_FUNCTIONS(NAME, TARGET)                                                                                   \
    TARGET float f32_##NAME(const void* x, int64_t n, int8_t* q) {                                                    \
        return quantise_row(static_cast<const float*>(x), n, q);                                                      \
    }                                                                                                                 \
    TARGET float bf16_##NAME(const void* x, int64_t n, int8_t* q) {                                                   \
        return quantise_row(static_cast<const uint16_t*>(x), n, q);                                                   \
    }

ROW_FUNCTIONS(scalar, )
ROW_FUNCTIONS(avx2, __attribute__((target("avx2"))))
ROW_FUNCTIONS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl"))))

const RowFunction ROW_F32[] = {f32_scalar, f32_avx2, f32_avx512};
const RowFunction ROW_BF16[] = {bf16_scalar, bf16_avx2, bf16_avx512};

}  // namespace

RowFunction row_function(int level, int64_t format) { return (format == FLOAT32 ? ROW_F32 : ROW_BF16)[vectors_of(level)]; }

}  // namespace tripool
