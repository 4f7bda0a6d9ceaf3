// For tests: tile instructions, but for products, as Intel's manual describes them.
#pragma once

#include <cstdint>
#include <cstring>

#include "amx.h"

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

  protected:
    // sum = add(sum, a row of a tile, a column of weights, both in 32-bit groups) for each of the sums.
    template <class Sum, int SUMS, int ROWS, int WEIGHTS, class Add>
    void add_products(Add add) {
        static_assert(SUMS != ROWS && SUMS != WEIGHTS && ROWS != WEIGHTS);
        check(SUMS), check(ROWS), check(WEIGHTS);
        const int64_t num_groups = shape_.row_bytes[ROWS] / 4;
        if (shape_.rows[SUMS] != shape_.rows[ROWS] || shape_.row_bytes[SUMS] != shape_.row_bytes[WEIGHTS] ||
            shape_.rows[WEIGHTS] != num_groups)
            __builtin_trap();
        for (int64_t c = 0; c < shape_.row_bytes[SUMS] / 4; c++) {
            alignas(64) char column[TILE_BYTES];
            for (int64_t k = 0; k < num_groups; k++) std::memcpy(column + 4 * k, &tile_[WEIGHTS][k][4 * c], 4);
            for (int64_t r = 0; r < shape_.rows[SUMS]; r++) {
                Sum sum;
                std::memcpy(&sum, &tile_[SUMS][r][4 * c], 4);
                sum = add(sum, tile_[ROWS][r], column, num_groups);
                std::memcpy(&tile_[SUMS][r][4 * c], &sum, 4);
            }
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
    alignas(64) char tile_[8][TILE_ROWS][TILE_BYTES];
};

}  // namespace
}  // namespace tripool
