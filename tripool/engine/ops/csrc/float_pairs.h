// AVX-512: pairs of weights in bfloat16, of two inputs that follow each other. A 32-bit lane is one channel's.
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "float_avx512.h"

namespace tripool {
namespace {

// In memory 32 bits are channels c and c + 8 of one input: 8 times of the first, and then 8 times of the second.
inline __attribute__((always_inline)) Vector paired(__m512i two_inputs) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30,
                                                       1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(~0u, _mm512_load_si512(ORDER), two_inputs));
}

inline __attribute__((always_inline)) void pairs_at(const uint16_t* from, Vector* w) {
    w[0] = paired(_mm512_loadu_si512(from));
}

inline __attribute__((always_inline)) void last_pairs_at(const uint16_t* from, Vector* w) {
    w[0] = paired(_mm512_maskz_broadcast_i64x4(0x0f, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

// Integers of eight bits are exact in bfloat16, which is the upper half of a float.
inline __attribute__((always_inline)) __m512i widened_bits(__m128i bytes) {
    return _mm512_castps_si512(_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes)));
}

inline __attribute__((always_inline)) void pairs_at(const int8_t* from, Vector* w) {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(from);
    const __m512i first = _mm512_maskz_srli_epi32(0xffff, widened_bits(_mm_loadu_si128(bytes)), 16);
    w[0] = _mm512_castsi512_ps(_mm512_or_si512(first, widened_bits(_mm_loadu_si128(bytes + 1))));
}

inline __attribute__((always_inline)) void last_pairs_at(const int8_t* from, Vector* w) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    w[0] = _mm512_castsi512_ps(_mm512_maskz_srli_epi32(0xffff, widened_bits(bytes), 16));
}

}  // namespace
}  // namespace tripool
