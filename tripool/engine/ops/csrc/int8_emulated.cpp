// For tests: the algorithm of level 3 on machines without AMX, with tile instructions as Intel's manual describes them.
// No machine's best.

#include <cstdint>
#include <cstring>

#include "int8.h"
#include "int8_amx.h"

namespace tripool {
namespace {

class EmulatedTiles {
  public:
    void configure(const TileShapes& shape) {
        shape_ = shape;
        std::memset(tile_, 0, sizeof tile_);
    }

    void release() { shape_.palette = 0; }

    template <int T>
    void zero() {
        check(T);
        std::memset(tile_[T], 0, TILE);
    }

    template <int T>
    void load(const void* from, int64_t stride) {
        zero<T>();
        for (int64_t r = 0; r < shape_.rows[T]; r++)
            std::memcpy(tile_[T][r], static_cast<const char*>(from) + r * stride, shape_.row_bytes[T]);
    }

    template <int T>
    void store(void* to, int64_t stride) {
        check(T);
        for (int64_t r = 0; r < shape_.rows[T]; r++)
            std::memcpy(static_cast<char*>(to) + r * stride, tile_[T][r], shape_.row_bytes[T]);
    }

    template <int SUMS, int ROWS, int WEIGHTS>
    void multiply_add() {
        static_assert(SUMS != ROWS && SUMS != WEIGHTS && ROWS != WEIGHTS);
        check(SUMS), check(ROWS), check(WEIGHTS);
        const int64_t num_quads = shape_.row_bytes[ROWS] / QUAD;
        if (shape_.rows[SUMS] != shape_.rows[ROWS] || shape_.row_bytes[SUMS] != shape_.row_bytes[WEIGHTS] ||
            shape_.rows[WEIGHTS] != num_quads)
            __builtin_trap();
        for (int64_t r = 0; r < shape_.rows[SUMS]; r++)
            for (int64_t c = 0; c < shape_.row_bytes[SUMS] / 4; c++) {
                int32_t sum;
                std::memcpy(&sum, &tile_[SUMS][r][4 * c], 4);
                for (int64_t k = 0; k < num_quads; k++)
                    for (int64_t i = 0; i < QUAD; i++) sum += tile_[ROWS][r][QUAD * k + i] * tile_[WEIGHTS][k][QUAD * c + i];
                std::memcpy(&tile_[SUMS][r][4 * c], &sum, 4);
            }
    }

  private:
    // What makes the machine raise an exception.
    void check(int t) const {
        if (shape_.palette != 1 || shape_.rows[t] == 0 || shape_.rows[t] > TILE_ROWS || shape_.row_bytes[t] == 0 ||
            shape_.row_bytes[t] > TILE_BYTES)
            __builtin_trap();
    }

    TileShapes shape_;
    int8_t tile_[8][TILE_ROWS][TILE_BYTES];
};

void spread(const int8_t* q, int64_t width, void* row) { spread_to_tiles(q, width, static_cast<char*>(row)); }

void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
              int64_t num_blocks, const int32_t*, const int8_t* next, int32_t* acc) {
    EmulatedTiles tiles;
    tiles.release();
    multiply_by_tiles(tiles, rows, stride, num_rows, num_quads, blocks, num_blocks, next, acc);
}

void gate(const float* gate, const float* up, float* h) { gate_block(gate, up, h); }

}  // namespace

const Int8Product INT8_EMULATED = {1, MOST_BLOCKS, spread, multiply, gate};

}  // namespace tripool
