// Level 1: AVX2 and FMA. The same bits as level 2: lanes do not meet, and sums have the same order.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "mla.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

#include "int8_plain.h"

#define LANES 8

namespace tripool {
namespace {
inline __attribute__((always_inline)) __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __attribute__((always_inline)) float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
}  // namespace
}  // namespace tripool

#include "mla_core.h"

namespace tripool {
const AttentionCore ATTENTION_AVX2 = {LANES, score_tile, weigh_and_gather, finish, widen, multiply};
}

#pragma GCC pop_options
