// Level 2 with bfloat16: AVX-512 whose dot products add two products of bfloat16 to each float32 sum.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "float.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")

#include "float_avx512.h"

namespace tripool {
namespace {

// A 32-bit lane of a pair is one channel's; in memory it holds channels c and c + 8 of one input, 8 lanes of the first
// input and then 8 of the second.
inline __attribute__((always_inline)) Vector paired(__m512i two_inputs) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30,
                                                       1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(~0u, _mm512_load_si512(ORDER), two_inputs));
}

inline __attribute__((always_inline)) void pairs_at(const uint16_t* from, Vector* w) {
    w[0] = paired(_mm512_loadu_si512(from));
}

inline __attribute__((always_inline)) void last_pairs_at(const uint16_t* from, Vector* w) {
    w[0] = paired(_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
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

inline __attribute__((always_inline)) Vector broadcast_pair(const uint16_t* from) {
    int both;
    std::memcpy(&both, from, sizeof both);
    return _mm512_castsi512_ps(_mm512_set1_epi32(both));
}

inline __attribute__((always_inline)) void multiply_add_pairs(Vector& sum, Vector x, Vector w) {
    sum = _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w));
}

}  // namespace
}  // namespace tripool

#include "float_pass.h"
#include "float_rows.h"

namespace tripool {
namespace {

// A weight in float32 would have to be rounded itself.
void multiply_pairs(int64_t format, const uint16_t* rows, int64_t stride, int64_t num_rows, int64_t num_inputs,
                    const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums) {
    const auto of_type = format == BFLOAT16 ? multiply_floats<InPairs<uint16_t>> : multiply_floats<InPairs<int8_t>>;
    of_type(rows, stride, num_rows, num_inputs, blocks, num_blocks, block_bytes, sums);
}

}  // namespace

const FloatProduct FLOAT_BF16 = {MOST, multiply, gate, store, widen, round, multiply_pairs};

}  // namespace tripool

#pragma GCC pop_options
