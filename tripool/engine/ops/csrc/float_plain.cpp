// Level 0: for machines without AVX2, and for tests.

#include <cmath>

#include "float.h"
#include "float_plain.h"
#include "float_rows.h"

namespace tripool {
namespace {

void multiply(int64_t format, const float* rows, int64_t stride, int64_t num_rows, int64_t num_inputs,
              const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums) {
    const int64_t input_bytes = BLOCK * element_bytes(format);
    for (int64_t b = 0; b < num_blocks; b++)
        for (int64_t r = 0; r < num_rows; r++, sums += BLOCK)
            for (int64_t k = 0; k < num_inputs; k++)
                for (int64_t c = 0; c < BLOCK; c++)
                    sums[c] = std::fma(rows[r * stride + k],
                                       weight_at(format, blocks + b * block_bytes + k * input_bytes, c), sums[c]);
}

}  // namespace

const FloatProduct FLOAT_PLAIN = {1, multiply, gate, store, widen, round};

}  // namespace tripool
