// Products of float rows with packed weights that are widened to floats, and what is made of them.
//
// Weights are bfloat16 or float32, or int8 with scales, and lie in blocks of 16 output channels: `[N/16][K][16]`, so
// that a block is one stream from memory. Blocks are filled up with zeros. In a bfloat16 block channel c lies beside
// channel c + 8: 32 bits of it become two floats by a shift and a mask, and they are of two vectors.
//
// All arithmetic is float32, and one rule gives the bits: a result is one chain of fused multiply-adds over the inputs
// in their order, beginning with zero, and then the bias is added. Scales of inputs multiply the row before, scales of
// outputs the chain's end. So a row's results depend on nothing but the row: not on its company, the level, the parts
// that the work is cut into, or the threads.
//
// A weight may ask that rows be rounded to bfloat16 before they are multiplied (`ROUNDED`), as the instructions of some
// processors take them. Those add two products at a time to a float32 sum, or those of 32 inputs: the chain is one over
// pairs of inputs then, or over tiles of them, still in their order, and its bits are those of the processor.
#pragma once

#include <cstdint>

#include "int8.h"

namespace tripool {

constexpr int64_t TILE_INPUTS = 32;                // of a row in bfloat16

// The same as `FloatProduct::multiply` for rows in bfloat16. Behind the last input of a row there are zeros, up to whole
// tiles; parts of inputs before others are whole tiles. A weight in float32 would have to be rounded itself.
using MultiplyPairs = void (*)(int64_t format, const uint16_t* rows, int64_t stride, int64_t num_rows,
                               int64_t num_inputs, const char* blocks, int64_t num_blocks, int64_t block_bytes,
                               float* sums);

// How one instruction set multiplies. `format` is that of the weights; sums are `[block][row][16]`.
struct FloatProduct {
    int64_t most;                                  // rows in one pass over weights

    // sums += rows times weights, for `num_inputs` inputs. Blocks are `block_bytes` apart.
    void (*multiply)(int64_t format, const float* rows, int64_t stride, int64_t num_rows, int64_t num_inputs,
                     const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums);

    // h = silu(gate) * up for the sums of two blocks; rows of h are `stride` apart.
    void (*gate)(const float* gate, const float* up, int64_t num_rows, float* h, int64_t stride);

    // Copies the sums of one block, times scales and with a bias if there are any, to where they belong: row r begins at
    // y + place[r] * stride elements, or at y + r * stride without `place`.
    void (*store)(const float* sums, const float* scales, const float* bias, int64_t num_rows, int64_t num_channels,
                  char* y, int64_t y_format, const int64_t* place, int64_t stride);

    void (*widen)(const uint16_t* from, int64_t count, float* to);

    // To bfloat16, to even.
    void (*round)(const float* from, int64_t count, uint16_t* to);

    MultiplyPairs multiply_pairs = nullptr;        // where no instruction does so rows are widened again
};

extern const FloatProduct FLOAT_PLAIN, FLOAT_AVX2, FLOAT_AVX512, FLOAT_BF16;

MultiplyPairs pairs_by_amx();                      // nullptr: this processor has no tiles of bfloat16
MultiplyPairs pairs_emulated();

constexpr int64_t ROUNDED = 4;                     // beside the format of weights: rows are rounded to bfloat16
inline int64_t stored(int64_t format) { return format & ~ROUNDED; }

inline int64_t element_bytes(int64_t format) {
    return stored(format) == FLOAT32 ? 4 : stored(format) == BFLOAT16 ? 2 : 1;
}

// Packed matrices, one or (for experts and heads) a stack of them. Those of heads may be int8, with scales of one kind,
// and that of a linear layer, with scales of outputs.
struct FloatWeight {
    const char* data;                              // [E][N/16][K][16]
    int64_t format, num_outputs, num_inputs;
    const float* input_scales = nullptr;           // [E][K]
    const float* output_scales = nullptr;          // [E][N], filled up

    int64_t input_bytes() const { return BLOCK * element_bytes(format); }
    int64_t num_blocks() const { return up(num_outputs, BLOCK) / BLOCK; }
    int64_t block_bytes() const { return num_inputs * input_bytes(); }
    const char* block(int64_t b) const { return data + b * block_bytes(); }

    FloatWeight expert(int64_t e) const {
        return {block(e * num_blocks()), format, num_outputs, num_inputs,
                input_scales ? input_scales + e * num_inputs : nullptr,
                output_scales ? output_scales + e * num_blocks() * BLOCK : nullptr};
    }
};

// y = x times the weights, plus the bias unless it is nullptr. Levels are those of `int8_level`.
void float_linear(int level, const char* x, int64_t x_format, int64_t num_rows, const FloatWeight& weight,
                  const float* bias, char* y, int64_t y_format);

// Rows of heads: that of token t and head h begins at data + t * token_stride + h * head_stride elements.
struct HeadRows {
    char* data;
    int64_t format, token_stride, head_stride;

    char* at(int64_t token, int64_t head) const {
        return data + (token * token_stride + head * head_stride) * element_bytes(format);
    }
};

// y[t, h] = x[t, h] times the matrix of head h.
void head_product(int level, const HeadRows& x, int64_t num_tokens, int64_t num_heads, const FloatWeight& weight,
                  const HeadRows& y);

// y[p] = down(silu(gate(x)) * up(x)) with x the row and the weights the expert of pair p. Blocks of gate and up take
// turns in `gate_up`, as in `expert_ffn`. Returns -1, or the first pair whose row or expert is not there;
// then nothing has been written.
int64_t float_experts(int level, const char* x, int64_t x_format, int64_t num_rows, const int64_t* row_of_pair,
                      const int64_t* expert_of_pair, int64_t num_pairs, int64_t num_experts, const FloatWeight& gate_up,
                      const FloatWeight& down, char* y, int64_t y_format);

}  // namespace tripool
