// AVX-512, as mla_core.h asks for it, and the attention that it makes of it.
#pragma once

#define LANES 16

namespace tripool {
namespace {
inline __attribute__((always_inline)) __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __attribute__((always_inline)) float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
}  // namespace
}  // namespace tripool

#include "mla_core.h"
