// Level 2: AVX-512.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "float.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

#include "float_avx512.h"
#include "float_pass.h"
#include "float_rows.h"

namespace tripool {

const FloatProduct FLOAT_AVX512 = {MOST, multiply, gate, store, widen, round};

}  // namespace tripool

#pragma GCC pop_options
