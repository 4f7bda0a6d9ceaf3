// Level 1: AVX2 with FMA. 12 sums of six rows by 16 channels, two weights and an input leave one of 16 registers; a mask
// in it was one too many (gcc 12 then kept sums in memory, and reached two thirds of the peak), so the mask is in memory.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "float.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

namespace tripool {
namespace {

using Vector = __m256;
constexpr int VECTORS = 2, MOST = 6;

inline __attribute__((always_inline)) Vector broadcast(const float* from) { return _mm256_broadcast_ss(from); }
inline __attribute__((always_inline)) Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline __attribute__((always_inline)) void keep(float* to, Vector value) { _mm256_storeu_ps(to, value); }

inline __attribute__((always_inline)) void multiply_add(Vector& sum, Vector x, Vector w) {
    sum = _mm256_fmadd_ps(x, w, sum);
}

inline __attribute__((always_inline)) void weights_at(const float* from, Vector* w) {
    w[0] = load(from);
    w[1] = load(from + 8);
}

alignas(32) const uint32_t UPPER[8] = {0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                       0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000};

inline __attribute__((always_inline)) void weights_at(const uint16_t* from, Vector* w) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    asm("vandps %2, %1, %0" : "=x"(w[1]) : "x"(both), "m"(UPPER));
}

inline __attribute__((always_inline)) void weights_at(const int8_t* from, Vector* w) {
    for (int v = 0; v < VECTORS; v++)
        w[v] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * v))));
}

}  // namespace
}  // namespace tripool

#include "float_pass.h"
#include "float_rows.h"

namespace tripool {

const FloatProduct FLOAT_AVX2 = {MOST, multiply, gate, store, widen, round};

}  // namespace tripool

#pragma GCC pop_options
