// Products of int8 rows with packed int8 weights.
//
// Weights lie in blocks of 16 output channels, and in a block by groups of four inputs ("quads"): `[N/16][K/4][16][4]`.
// A block is one contiguous stream, which is all that counts for a few rows. 64 bytes of it are four inputs of 16
// channels: four vectors of AVX2 after widening, one operand of VNNI's four-element dot product, one row of an AMX
// tile. So one layout, packed once, serves every level. Channels and inputs are filled up with zeros.
#pragma once

#include <cstdint>

#include "quantise.h"

namespace tripool {

constexpr int64_t BLOCK = 16;                      // channels
constexpr int64_t QUAD = 4;                        // inputs
constexpr int64_t MOST_BLOCKS = 4;                 // in one call of `multiply` with several rows
constexpr int64_t SUMS = 3 * BLOCK;                // 32-bit numbers that `multiply` needs for each row and block

inline int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// How one instruction set multiplies.
struct Int8Product {
    int64_t input_bytes;                           // of one input of a row, as `multiply` reads it
    int64_t most_of_one;                           // blocks in one call of `multiply` with one row, `MOST_BLOCKS` or more

    // One row as `multiply` reads it, filled up to whole quads.
    void (*spread)(const int8_t* q, int64_t width, void* row);

    // acc[b][r][c] = sum over inputs of row r times channel c of block b, for blocks that follow each other:
    // exact in 32 bits. `sums` are the channels' sums over inputs. `next` is where the weights go on that the caller
    // reads after these: they may be fetched meanwhile. `acc` has room for `SUMS` numbers a row and block.
    void (*multiply)(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
                     int64_t num_blocks, const int32_t* sums, const int8_t* next, int32_t* acc);

    // h = silu(gate) * up for 16 channels.
    void (*gate)(const float* gate, const float* up, float* h);
};

extern const Int8Product INT8_PLAIN, INT8_AVX2, INT8_VNNI, INT8_AMX, INT8_EMULATED;

bool may_use_amx();                                // has the machine AMX INT8, and lets the system us use it?

// Packed matrices, one or (for experts) a stack of them.
struct Int8Weight {
    const int8_t* data;                            // [E][N/16][K/4][16][4]
    const float* scales;                           // [E][N], filled up
    const int32_t* sums;                           // [E][N], filled up
    int64_t num_outputs, num_inputs;

    int64_t num_blocks() const { return up(num_outputs, BLOCK) / BLOCK; }
    int64_t num_quads() const { return up(num_inputs, QUAD) / QUAD; }
    int64_t block_bytes() const { return num_quads() * BLOCK * QUAD; }
    const int8_t* block(int64_t b) const { return data + b * block_bytes(); }

    Int8Weight expert(int64_t e) const {
        const int64_t channels = num_blocks() * BLOCK;
        return {block(e * num_blocks()), scales + e * channels, sums + e * channels, num_outputs,
                num_inputs};
    }
};

// The best level that the machine has, no higher than the cap: 0 plain, 1 AVX2, 2 AVX-512 VNNI, 3 AMX INT8. (4, for
// tests, is AMX emulated in plain C++; it is nobody's best.)
int int8_level(int cap);

// y = x times the weights. `x` are floats, or (with `x_scales`) rows that are quantised already.
void int8_linear(int level, const char* x, int64_t x_format, const float* x_scales, int64_t num_rows,
                 const Int8Weight& weight, char* y, int64_t y_format);

// y[p] = down(silu(gate(x)) * up(x)) with x the row and the weights the expert of pair p. Blocks of gate and up take
// turns in `gate_up`, which therefore has as many outputs as both have, each filled up to whole blocks. Returns -1, or
// the first pair whose row or expert is not there; then nothing has been written.
int64_t expert_ffn(int level, const char* x, int64_t x_format, const float* x_scales, int64_t num_rows,
                   const int64_t* row_of_pair, const int64_t* expert_of_pair, int64_t num_pairs, int64_t num_experts,
                   const Int8Weight& gate_up, const Int8Weight& down, char* y, int64_t y_format);

// Reads memory as fast as the process's threads can, for benchmarks; what it returns only keeps the reading alive.
int64_t read_memory(int level, const char* from, int64_t bytes);

}  // namespace tripool
