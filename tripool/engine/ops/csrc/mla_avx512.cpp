// Level 2 and above: AVX-512.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "mla.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx2,fma")

#include "int8_plain.h"

#define LANES 16

namespace tripool {
namespace {
inline __attribute__((always_inline)) __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __attribute__((always_inline)) float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
}  // namespace
}  // namespace tripool

#include "mla_core.h"

namespace tripool {
const AttentionCore ATTENTION_AVX512 = {LANES, attend, finish, widen, multiply};
}

#pragma GCC pop_options
