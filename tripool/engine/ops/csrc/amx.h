// Tiles of AMX: how they are numbered and configured. Instructions are the machine's (amx_machine.h) or emulated
// (amx_emulated.h).
//
// A tile is up to 16 rows of up to 64 bytes. A product takes three: a tile of rows by one of weights is added to one of
// 16 by 16 sums of 32 bits. Of the eight tiles, four hold sums, so that a loaded tile is used twice: one tile of rows by
// four blocks of weights, or two by two.
#pragma once

#include <cstdint>

namespace tripool {
namespace {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64, TILE = TILE_ROWS * TILE_BYTES;
constexpr int64_t LINE = 64;

// What `ldtilecfg` reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

// Sums of rows a and block b, rows a, weights of block b; with two tiles of rows the sums of both take turns.
template <int A>
constexpr int sums_tile(int a, int b) { return A * b + a; }
constexpr int rows_tile(int a) { return 4 + a; }
constexpr int weights_tile(int b) { return 7 - b % 3; }

// Of one tile of rows, or (with `more_rows`) of two.
inline TileShapes shapes(int64_t rows, int64_t more_rows) {
    TileShapes shape;
    const bool two = more_rows > 0;
    for (int t = 0; t < 8; t++) {
        const bool is_weights = t >= (two ? 6 : 5), is_second = two && t % 2;
        shape.rows[t] = uint8_t(is_weights ? TILE_ROWS : is_second ? more_rows : rows);
        shape.row_bytes[t] = TILE_BYTES;
    }
    return shape;
}

}  // namespace
}  // namespace tripool
