// Level 2 and above: AVX-512.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "mla.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx2,fma")

#include "int8_plain.h"

#include "mla_avx512.h"

namespace tripool {
const AttentionCore ATTENTION_AVX512 = {LANES, score_tile, weigh_and_gather, finish, widen, multiply};
}

#pragma GCC pop_options
