// Level 2 with bfloat16: AVX-512 whose dot products add two products of bfloat16 to each float32 sum.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "float.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")

#include "float_avx512.h"
#include "float_pairs.h"

namespace tripool {
namespace {

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

void multiply_pairs(int64_t format, const uint16_t* rows, int64_t stride, int64_t num_rows, int64_t num_inputs,
                    const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums) {
    const auto of_type = format == BFLOAT16 ? multiply_floats<InPairs<uint16_t>> : multiply_floats<InPairs<int8_t>>;
    of_type(rows, stride, num_rows, num_inputs, blocks, num_blocks, block_bytes, sums);
}

}  // namespace

const FloatProduct FLOAT_BF16 = {MOST, multiply, gate, store, widen, round, multiply_pairs};

}  // namespace tripool

#pragma GCC pop_options
