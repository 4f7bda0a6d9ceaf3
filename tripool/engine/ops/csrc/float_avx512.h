// AVX-512, as float_pass.h asks for it: a vector holds the 16 channels of a block.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "float.h"

namespace tripool {
namespace {

using Vector = __m512;
constexpr int VECTORS = 1, MOST = 12;

inline __attribute__((always_inline)) Vector broadcast(const float* from) { return _mm512_set1_ps(*from); }
inline __attribute__((always_inline)) Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline __attribute__((always_inline)) void keep(float* to, Vector value) { _mm512_storeu_ps(to, value); }

inline __attribute__((always_inline)) void multiply_add(Vector& sum, Vector x, Vector w) {
    sum = _mm512_fmadd_ps(x, w, sum);
}

inline __attribute__((always_inline)) void weights_at(const float* from, Vector* w) { w[0] = load(from); }

inline __attribute__((always_inline)) void weights_at(const uint16_t* from, Vector* w) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m512i low = _mm512_castsi256_si512(_mm256_slli_epi32(both, 16));
    w[0] = _mm512_castsi512_ps(
        _mm512_maskz_inserti64x4(0xff, low, _mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))), 1));
}

inline __attribute__((always_inline)) void weights_at(const int8_t* from, Vector* w) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    w[0] = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes));
}

}  // namespace
}  // namespace tripool
