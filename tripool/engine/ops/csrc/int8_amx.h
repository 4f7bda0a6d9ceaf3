// Products of int8 rows with packed int8 weights by AMX tiles: the algorithm, over tile instructions that are either
// the machine's (int8_amx.cpp) or emulated (int8_emulated.cpp).
//
// One dot-product instruction multiplies a tile of 16 rows by 64 inputs with one of 64 inputs by 16 channels, which is
// 1,024 bytes of a block as it lies:
//
//     up to 16 rows        1 by 4: one tile of rows, four blocks, each read once
//     more                 2 by 2: 32 rows by two blocks, again and again while the two blocks lie in the nearest cache
//
// The second loads two tiles of rows and two of weights for four products. All four from L2 would take longer than the
// products do, so inputs are cut in parts whose weights stay in L1 (`PART` inputs of two blocks are 16 KB, and so are the
// 32 rows that pass by); sums are kept in memory between parts, which costs less than it saves.
//
// Inputs come in 64s: `spread` fills rows up with zeros, and the end of a block is copied to where zeros follow it.
// The number of rows does not have to fit: tiles are configured with as many as there are.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "amx.h"
#include "int8.h"
#include "int8_plain.h"

namespace tripool {
namespace {

constexpr int64_t TILE_QUADS = TILE_BYTES / QUAD;
constexpr int64_t PART = 512 / TILE_BYTES;         // tiles of inputs

// Up to four blocks: their full tiles, and the last one of each if it is not full.
struct Blocks {
    const int8_t* data;
    int64_t bytes;                                 // of one block
    int64_t num_full;
    const int8_t (*ends)[TILE];
    const int8_t* next;                            // to be fetched meanwhile, from the same places
};

// A tiles of rows by B blocks from `first`, by the tiles of inputs in [begin, end). Of each tile of the next weights
// `fetch` to `fetch_end` are the lines that this pass sees to.
template <class Tiles, int A, int B>
__attribute__((noinline)) void pass(Tiles& tiles, const char* rows, int64_t stride, const Blocks& blocks, int64_t first,
                                    int64_t begin, int64_t end, int64_t fetch, int64_t fetch_end, int32_t* acc,
                                    int64_t acc_stride) {
    const auto place = [&](int a, int b) { return acc + b * acc_stride + a * TILE_ROWS * BLOCK; };
    unrolled<A * B>(UNROLLED(i) {
        constexpr int a = i % A, b = i / A, tile = sums_tile<A>(a, b);
        if (begin == 0)
            tiles.template zero<tile>();
        else
            tiles.template load<tile>(place(a, b), 4 * BLOCK);
    });
    const int64_t bytes = blocks.bytes;
    const auto step = [&](int64_t t, const int8_t* weights, int64_t apart) __attribute__((always_inline)) {
        unrolled<A>(UNROLLED(a) {
            tiles.template load<rows_tile(a)>(rows + a * TILE_ROWS * stride + t * TILE_BYTES, stride);
        });
        unrolled<B>(UNROLLED(b) {
            const int8_t* ahead = blocks.next + (first + b) * bytes + t * TILE;
            for (int64_t line = fetch; line < fetch_end; line++)
                _mm_prefetch(reinterpret_cast<const char*>(ahead + line * LINE), _MM_HINT_T1);
            tiles.template load<weights_tile(b)>(weights + b * apart, TILE_BYTES);
            unrolled<A>(UNROLLED(a) {
                tiles.template multiply_add<sums_tile<A>(a, b), rows_tile(a), weights_tile(b)>();
            });
        });
    };
    const int64_t full_end = end < blocks.num_full ? end : blocks.num_full;
    for (int64_t t = begin; t < full_end; t++) step(t, blocks.data + first * bytes + t * TILE, bytes);
    if (end > blocks.num_full) step(blocks.num_full, blocks.ends[first], TILE);
    unrolled<A * B>(UNROLLED(i) {
        constexpr int a = i % A, b = i / A;
        tiles.template store<sums_tile<A>(a, b)>(place(a, b), 4 * BLOCK);
    });
}

template <class Tiles>
inline __attribute__((always_inline)) void multiply_by_tiles(Tiles& tiles, const char* rows, int64_t stride,
                                                             int64_t num_rows, int64_t num_quads, const int8_t* data,
                                                             int64_t num_blocks, const int8_t* next, int32_t* acc) {
    alignas(64) int8_t ends[MOST_BLOCKS][TILE];
    const int64_t num_full = num_quads / TILE_QUADS, num_tiles = (num_quads + TILE_QUADS - 1) / TILE_QUADS;
    const Blocks blocks{data, num_quads * BLOCK * QUAD, num_full, ends, next};
    if (num_tiles > num_full)
        for (int64_t b = 0; b < num_blocks; b++) {
            const int64_t from = num_full * TILE, there = blocks.bytes - from;
            std::memcpy(ends[b], data + b * blocks.bytes + from, size_t(there));
            std::memset(ends[b] + there, 0, size_t(TILE - there));
        }

    const int64_t acc_stride = num_rows * BLOCK;
    if (num_rows <= TILE_ROWS) {
        tiles.configure(shapes(num_rows, 0));
        const auto all = [&](auto b) __attribute__((always_inline)) {
            pass<Tiles, 1, b>(tiles, rows, stride, blocks, 0, 0, num_tiles, 0, TILE / LINE, acc, acc_stride);
        };
        if (num_blocks == 4) all(std::integral_constant<int, 4>());
        if (num_blocks == 3) all(std::integral_constant<int, 3>());
        if (num_blocks == 2) all(std::integral_constant<int, 2>());
        if (num_blocks == 1) all(std::integral_constant<int, 1>());
        tiles.release();
        return;
    }

    const int64_t whole = num_rows / (2 * TILE_ROWS) * (2 * TILE_ROWS), num_groups = up(num_rows, 32) / 32;
    const auto lines = [&](int64_t group) { return TILE / LINE * group / num_groups; };
    // Each group of rows fetches its share of the lines of the next weights.
    const auto two_by = [&](auto b, int64_t first, int64_t row, int64_t begin, int64_t end) __attribute__((always_inline)) {
        pass<Tiles, 2, b>(tiles, rows + row * stride, stride, blocks, first, begin, end, lines(row / 32),
                          lines(row / 32 + 1), acc + first * acc_stride + row * BLOCK, acc_stride);
    };
    const auto one_by = [&](auto b, int64_t first, int64_t row) __attribute__((always_inline)) {
        pass<Tiles, 1, b>(tiles, rows + row * stride, stride, blocks, first, 0, num_tiles, lines(row / 32),
                          lines(row / 32 + 1), acc + first * acc_stride + row * BLOCK, acc_stride);
    };
    constexpr std::integral_constant<int, 1> one;
    constexpr std::integral_constant<int, 2> two;
    if (whole) {
        tiles.configure(shapes(TILE_ROWS, TILE_ROWS));
        const int64_t part = num_groups > 2 ? PART : num_tiles;
        for (int64_t b = 0; b < num_blocks; b += 2)
            for (int64_t begin = 0; begin < num_tiles; begin += part)
                for (int64_t row = 0; row < whole; row += 32) {
                    const int64_t end = begin + part < num_tiles ? begin + part : num_tiles;
                    if (b + 1 < num_blocks) two_by(two, b, row, begin, end);
                    else two_by(one, b, row, begin, end);
                }
    }
    if (const int64_t left = num_rows - whole) {
        const int64_t more = left > TILE_ROWS ? left - TILE_ROWS : 0;
        tiles.configure(shapes(more ? TILE_ROWS : left, more));
        for (int64_t b = 0; b < num_blocks; b += 2) {
            const bool both = b + 1 < num_blocks;
            if (more && both) two_by(two, b, whole, 0, num_tiles);
            else if (more) two_by(one, b, whole, 0, num_tiles);
            else if (both) one_by(two, b, whole);
            else one_by(one, b, whole);
        }
    }
    tiles.release();
}

inline __attribute__((always_inline)) void spread_to_tiles(const int8_t* q, int64_t width, char* row) {
    std::memcpy(row, q, size_t(width));
    std::memset(row + width, 0, size_t(up(width, TILE_BYTES) - width));
}

}  // namespace
}  // namespace tripool
