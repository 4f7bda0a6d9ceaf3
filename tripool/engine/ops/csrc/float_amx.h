// Products of rows in bfloat16 with weights that are exact in it, by AMX tiles: the algorithm, over tile instructions
// that are either the machine's (float_amx.cpp) or emulated (float_emulated.cpp).
//
// One instruction multiplies a tile of 16 rows by 32 inputs with one of 16 pairs of inputs by 16 channels. Weights do
// not lie in pairs (see float.h). So they are paired, a tile while the one before is multiplied, in memory that stays in
// the nearest cache:
//
//     up to 16 rows        1 by 4: four streams of blocks, the whole width at once
//     up to 32             2 by 2: two streams
//     more                 2 by 2: a part of two blocks, which the first 32 rows pair for all others
//
// An instruction adds the products of even inputs and those of odd ones from zero, then both to the sum. So the bits of a
// row are the same whatever passes with it, as long as inputs are cut between tiles. What is missing in the last tile is
// zero.
#pragma once

#include <cstdint>
#include <utility>

#include <immintrin.h>

#include "amx.h"
#include "float.h"
#include "int8_plain.h"

namespace tripool {
namespace {

constexpr int64_t PAIRED = 16;                     // tiles of weights
constexpr int64_t PART = PAIRED / 2;               // tiles of inputs, of two blocks
constexpr int64_t AHEAD = 4;                       // tiles, in a stream
static_assert(TILE_INPUTS * 2 == TILE_BYTES);

// A part of the inputs of up to four blocks.
struct Part {
    const char* weights;                           // of the first block
    int64_t apart;                                 // bytes, from block to block
    int64_t num_inputs;
    const char* ahead;                             // to be fetched meanwhile: as much, as far apart
    char* paired;                                  // tiles, for one after the other
};

// Adds to the sums of A tiles of rows by B blocks. The first pass of a part `pairs` its weights. Of each tile ahead
// `fetch` to `fetch_end` are the lines that this pass sees to.
template <class Tiles, class T, int A, int B>
__attribute__((noinline)) void pass(Tiles& tiles, const uint16_t* rows, int64_t stride, const Part& part, bool pairs,
                                    int64_t fetch, int64_t fetch_end, float* sums, int64_t sum_stride) {
    constexpr int64_t SOURCE = TILE_INPUTS * BLOCK * int64_t(sizeof(T));
    const auto place = [&](int a, int b) { return sums + b * sum_stride + a * TILE_ROWS * BLOCK; };
    const auto paired = [&](int64_t t, int b) { return part.paired + (t % (PAIRED / B) * B + b) * TILE; };
    const auto pair = [&](int64_t t) __attribute__((always_inline)) {
        const int64_t left = part.num_inputs - t * TILE_INPUTS, inputs = left < TILE_INPUTS ? left : TILE_INPUTS;
        if (inputs <= 0) return;
        unrolled<B>(UNROLLED(b) {
            tiles.pair(reinterpret_cast<const T*>(part.weights + b * part.apart + t * SOURCE), inputs, paired(t, b));
        });
    };
    unrolled<A * B>(UNROLLED(i) {
        constexpr int a = i % A, b = i / A;
        tiles.template load<sums_tile<A>(a, b)>(place(a, b), 4 * BLOCK);
    });
    if (pairs) pair(0);
    for (int64_t t = 0; t * TILE_INPUTS < part.num_inputs; t++) {
        if (pairs) pair(t + 1);
        unrolled<A>(UNROLLED(a) {
            tiles.template load<rows_tile(a)>(rows + a * TILE_ROWS * stride + t * TILE_INPUTS, 2 * stride);
        });
        unrolled<B>(UNROLLED(b) {
            const char* ahead = part.ahead + b * part.apart + t * SOURCE;
            for (int64_t line = fetch; line < fetch_end; line++) _mm_prefetch(ahead + line * LINE, _MM_HINT_T1);
            tiles.template load<weights_tile(b)>(paired(t, b), TILE_BYTES);
            unrolled<A>(UNROLLED(a) {
                tiles.template multiply_add<sums_tile<A>(a, b), rows_tile(a), weights_tile(b)>();
            });
        });
    }
    unrolled<A * B>(UNROLLED(i) {
        constexpr int a = i % A, b = i / A;
        tiles.template store<sums_tile<A>(a, b)>(place(a, b), 4 * BLOCK);
    });
}

// Groups of A tiles of rows by all blocks, in B streams of several blocks each and what is left over.
template <class Tiles, class T, int A, int B>
void multiply_groups(Tiles& tiles, const uint16_t* rows, int64_t stride, int64_t num_groups, int64_t num_inputs,
                     const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums, int64_t sum_stride) {
    constexpr int64_t GROUP = A * TILE_ROWS, INPUT = BLOCK * sizeof(T), LINES = TILE_INPUTS * INPUT / LINE;
    alignas(64) char paired[PAIRED * TILE];
    const int64_t most = num_groups > 1 ? PART * TILE_INPUTS : num_inputs;
    const auto by = [&](auto count, int64_t b, int64_t apart) {
        for (int64_t k = 0; k < num_inputs; k += most) {
            const char *from = blocks + b * block_bytes + k * INPUT, *next = blocks + (b + 1) * block_bytes;
            const char* ahead = num_groups == 1 ? from + AHEAD * TILE_INPUTS * INPUT
                                : k + most < num_inputs ? from + most * INPUT : next;
            const int64_t inputs = num_inputs - k < most ? num_inputs - k : most;
            const Part part{from, apart * block_bytes, inputs, ahead, paired};
            for (int64_t g = 0; g < num_groups; g++)
                pass<Tiles, T, A, count>(tiles, rows + g * GROUP * stride + k, stride, part, g == 0,
                                         LINES * g / num_groups, LINES * (g + 1) / num_groups,
                                         sums + b * sum_stride + g * GROUP * BLOCK, apart * sum_stride);
        }
    };
    const int64_t length = num_blocks / B;
    for (int64_t b = 0; b < length; b++) by(std::integral_constant<int, B>(), b, length);
    for (int64_t b = B * length; b < num_blocks; b++) by(std::integral_constant<int, 1>(), b, 0);
}

template <class Tiles, class T>
void multiply_all(Tiles& tiles, const uint16_t* rows, int64_t stride, int64_t num_rows, int64_t num_inputs,
                  const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums) {
    constexpr int64_t TWO = 2 * TILE_ROWS;
    const int64_t whole = num_rows / TWO * TWO, left = num_rows - whole;
    const auto multiply = [&](const auto& of_shape, int64_t first, int64_t num_groups) {
        of_shape(tiles, rows + first * stride, stride, num_groups, num_inputs, blocks, num_blocks, block_bytes,
                 sums + first * BLOCK, num_rows * BLOCK);
    };
    if (whole) {
        tiles.configure(shapes(TILE_ROWS, TILE_ROWS));
        multiply(multiply_groups<Tiles, T, 2, 2>, 0, whole / TWO);
    }
    if (left > TILE_ROWS) {
        tiles.configure(shapes(TILE_ROWS, left - TILE_ROWS));
        multiply(multiply_groups<Tiles, T, 2, 2>, whole, 1);
    } else if (left) {
        tiles.configure(shapes(left, 0));
        multiply(multiply_groups<Tiles, T, 1, 4>, whole, 1);
    }
    tiles.release();
}

template <class Tiles>
void multiply_by_tiles(int64_t format, const uint16_t* rows, int64_t stride, int64_t num_rows, int64_t num_inputs,
                       const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums) {
    Tiles tiles;
    const auto of_type = format == BFLOAT16 ? multiply_all<Tiles, uint16_t> : multiply_all<Tiles, int8_t>;
    of_type(tiles, rows, stride, num_rows, num_inputs, blocks, num_blocks, block_bytes, sums);
}

}  // namespace
}  // namespace tripool
