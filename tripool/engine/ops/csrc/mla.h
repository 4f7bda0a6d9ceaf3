// Attention of many queries ("lanes") over one sequence of positions, for both forms of latent attention.
//
// Lanes lie beside one another in vectors, so scores, maxima and sums of a lane never meet those of another: what a
// lane computes is the same to the bit whoever shares the vector, the call or the machine. In the absorbed form lanes
// are tokens and heads of one row, over the paged entries; in the expanded form they are tokens of one head, over keys
// and values written out. Positions are taken in tiles of `TILE`, counted from position 0 whatever a block holds, with a
// running maximum. So the order of all sums of a lane follows from its position alone.
//
// Queries (with their factor), keys, values and weights may be rounded to bfloat16 on their way into the two products, as
// the instructions of some processors take them: two products at a time are added to a float32 sum. Scores add up pairs
// of elements then, and values pairs of positions (an even one and the next), still in their order, and the bits are
// those of the processor. Weights are summed as they are multiplied, so that those of a lane add up to one.
#pragma once

#include <cstdint>

#include "quantise.h"

namespace tripool {

constexpr int64_t TILE = 64;                       // positions
constexpr int64_t MOST_LANES = 128;                // together
constexpr int64_t LINE = 16;                       // words of 32 bits

// Rows of one tile: keys and values in float32, or in bfloat16, and then a key has an even number of elements.
template <class T>
struct AttentionTile {
    const T* keys[TILE];
    const T* values[TILE];
    const T* next[TILE];                           // as wide as keys: they come from memory while scores are made
    int64_t key_width, value_width;
    int64_t begin, end;                            // those from begin to end are seen by some lane
};

// Lanes that attend together, filled up to whole vectors (`space` of them).
struct AttentionLanes {
    int64_t count, space;
    int64_t query_words;                           // of 32 bits: a float, or two elements in bfloat16
    int64_t value_width;                           // filled up to whole vectors, where products are of pairs
    bool rounds;                                   // weights
    int64_t limits[MOST_LANES];                    // of each lane: positions before it are seen
    float* queries;                                // [query_words] of the first lanes, then of the next: see `set_query`
    float* scores;                                 // [TILE][space]
    float* values;                                 // [count][value_width]: sums so far
    float* maxima;                                 // [space], of scores so far
    float* sums;                                   // [space]
    float* shrinks;                                // [space]: by this `values` are less once the maximum has grown
};

// How one instruction set attends.
struct AttentionCore {
    int64_t vector;                                // lanes in one

    // Scores of a tile whose first row stands at `position`.
    void (*score)(const AttentionLanes& lanes, const AttentionTile<float>& tile, int64_t position);

    // Makes weights of them, and adds the tile's values to what lanes have gathered.
    void (*gather)(AttentionLanes& lanes, const AttentionTile<float>& tile, int64_t position);

    // What a lane has gathered, divided by its sum; zeros for a lane that saw nothing.
    void (*finish)(const AttentionLanes& lanes, int64_t lane, int64_t width, char* result, int64_t format);

    void (*widen)(const uint16_t* row, int64_t width, float* wide);

    void (*multiply)(int64_t count);               // see `multiply_numbers`

    // The same for rows in bfloat16, and what makes them. nullptr: the processor has no such instructions, and rows are
    // rounded but stay floats.
    void (*score_pairs)(const AttentionLanes& lanes, const AttentionTile<uint16_t>& tile, int64_t position) = nullptr;
    void (*gather_pairs)(AttentionLanes& lanes, const AttentionTile<uint16_t>& tile, int64_t position) = nullptr;
    void (*round)(const float* row, int64_t width, uint16_t* halves) = nullptr;
    void (*multiply_pairs)(int64_t count) = nullptr;
};

extern const AttentionCore ATTENTION_PLAIN, ATTENTION_AVX2, ATTENTION_AVX512, ATTENTION_BF16;

// Tokens of rows that follow one another, over the paged cache.
struct AbsorbedAttention {
    const char* query;                             // [T][H][W]
    int64_t query_format;                          // the result has it too
    int64_t num_tokens, num_heads, width, latent;  // W, and L of it are the value
    const char* entries;                           // [num_blocks][block_tokens][W]
    int64_t entry_format, num_blocks, block_stride, block_tokens;    // the stride in elements
    const int64_t* blocks;                         // [R][columns]
    int64_t columns;
    const int64_t* firsts;                         // [R]: position of a row's first token
    const int64_t* counts;                         // [R]: its tokens
    int64_t num_rows, first_seen;                  // positions before `first_seen` are barred
    float scale;
    bool rounds;                                   // to bfloat16, before products
    char* result;                                  // [T][H][L]
};

// Returns -1, or the first row that does not fit (number of rows: the tokens are not as many); then nothing has been
// written.
int64_t absorbed_attention(int level, const AbsorbedAttention& a);

// Tokens of one row over keys and values of every head. All of one format; strides in elements.
struct ExpandedAttention {
    const char* query_plain;                       // [C][H][n]
    const char* query_rotated;                     // [C][H][r]
    const char* key_plain;                         // [N][H][n]
    const char* key_rotated;                       // [N][r]
    const char* value;                             // [N][H][v]
    int64_t format;
    int64_t plain_stride, plain_head, rotated_stride, rotated_head, key_stride, key_head, key_rotated_stride, value_stride,
        value_head;
    int64_t num_tokens, num_heads, n, r, v, first;
    float scale;
    bool rounds;
    char* result;                                  // [C][H][v]
};

void expanded_attention(int level, const ExpandedAttention& a);

// About so many multiplications and additions of numbers from registers, as fast as one core can, for benchmarks: of
// floats, or, where rows are rounded and such instructions are there, of pairs in bfloat16.
void multiply_numbers(int level, bool rounds, int64_t count);

}  // namespace tripool
