// For tests: the algorithm of level 3 on machines without AMX. No machine's best.

#include <cstdint>

#include "amx_emulated.h"
#include "int8.h"
#include "int8_amx.h"

namespace tripool {
namespace {

struct EmulatedInt8Tiles : EmulatedTiles {
    template <int SUMS, int ROWS, int WEIGHTS>
    void multiply_add() {
        add_products<int32_t, SUMS, ROWS, WEIGHTS>([](int32_t sum, const char* row, const char* column, int64_t quads) {
            for (int64_t i = 0; i < QUAD * quads; i++) sum += int8_t(row[i]) * int8_t(column[i]);
            return sum;
        });
    }
};

void spread(const int8_t* q, int64_t width, void* row) { spread_to_tiles(q, width, static_cast<char*>(row)); }

void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
              int64_t num_blocks, const int32_t*, const int8_t* next, int32_t* acc) {
    EmulatedInt8Tiles tiles;
    tiles.release();
    multiply_by_tiles(tiles, rows, stride, num_rows, num_quads, blocks, num_blocks, next, acc);
}

void gate(const float* gate, const float* up, float* h) { gate_block(gate, up, h); }

}  // namespace

const Int8Product INT8_EMULATED = {1, MOST_BLOCKS, spread, multiply, gate};

}  // namespace tripool
