// Level 0: for machines without AVX2, and for tests.

#include "int8_plain.h"

#include "int8.h"

namespace tripool {
namespace {

void spread(const int8_t* q, int64_t width, void* row) { spread_int16(q, width, static_cast<int16_t*>(row)); }

void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
              int64_t num_blocks, const int32_t*, const int8_t*, int32_t* acc) {
    for (int64_t b = 0; b < num_blocks; b++, blocks += num_quads * BLOCK * QUAD)
        for (int64_t r = 0; r < num_rows; r++, acc += BLOCK) {
            const int16_t* x = reinterpret_cast<const int16_t*>(rows + r * stride);
            int32_t sum[BLOCK] = {};
            for (int64_t k = 0; k < num_quads; k++)
                for (int64_t c = 0; c < BLOCK; c++)
                    for (int64_t i = 0; i < QUAD; i++) sum[c] += x[QUAD * k + i] * blocks[(k * BLOCK + c) * QUAD + i];
            std::memcpy(acc, sum, sizeof sum);
        }
}

void gate(const float* gate, const float* up, float* h) { gate_block(gate, up, h); }

}  // namespace

const Int8Product INT8_PLAIN = {2, MOST_BLOCKS, spread, multiply, gate};

}  // namespace tripool
