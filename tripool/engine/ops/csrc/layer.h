// Halves of a layer in one call each: attention, and a mixture of experts that are all here. The operations are those of
// the other files, in the order in which engine/model calls them one by one, and so are the bits. All rows are float32.
//
// *Attention* is what the paper calls MLAProlog (norm, projections, rotation, cache entries) and Fused Attention
// (absorbed attention and its output), and the sum and norm after them.
//
// What a layer is and what a step is are written down by ops/layer.py, as integers in the order of these fields.
#pragma once

#include <cstdint>
#include <cstring>

namespace tripool {

// Addresses and float32 numbers come from Python as integers.
template <class T>
T* at(int64_t address) {
    return reinterpret_cast<T*>(address);
}

inline float float_of(int64_t bits) {
    const uint32_t low = uint32_t(bits);
    float value;
    std::memcpy(&value, &low, 4);
    return value;
}

// Packed matrices: `kind` is FLOAT32 or BFLOAT16 with floats, INT8 with integers, or NOTHING. INT8 without `sums` is
// widened, and rows stay floats.
constexpr int64_t NOTHING = -1;

struct Product {
    int64_t kind, data, num_outputs, num_inputs, scales, sums, bias;
};

// y = x times the weights. With `scales`, x are eight-bit integers, and so are the weights.
void multiply(int level, const Product& product, const float* x, const float* scales, int64_t num_rows, float* y);

struct AttentionLayer {
    int64_t width, heads, plain, rotary, value, latent, eps, scale, interleaved, rounds;    // floats by their bits
    int64_t input_norm, query_norm, latent_norm, post_norm;
    Product in, query, out;                        // without `query` the first one gives the queries
    Product latent_of_key, value_of_latent;        // of each head; INT8 has scales of the inputs, or of the outputs
};

struct AttentionStep {
    int64_t num_tokens, turns, num_pairs, block_of_token, offset_of_token;
    int64_t blocks, columns, firsts, counts, num_rows, first_seen;
    int64_t num_blocks, block_stride, block_tokens;
};

// x becomes x + attention(x), and y its norm. Returns -1, or the first token or row that does not fit; then x is as before.
int64_t attention_layer(int level, const AttentionLayer& layer, const AttentionStep& step, char* entries, float* x,
                        float* y);

struct ExpertLayer {
    int64_t width, num_experts, num_picks, by_softmax, num_groups, num_chosen_groups, group_best, normalised, factor, bias;
    Product gate, gate_up, down, shared_gate_up, shared_down;
};

// x becomes x + experts(y), and `experts` those that each token chose.
void expert_layer(int level, const ExpertLayer& layer, int64_t num_tokens, const float* y, float* x, int64_t* experts);

struct DenseLayer {
    Product gate_up, down;
};

// x becomes x + down(silu(gate(y)) * up(y)).
void dense_layer(int level, const DenseLayer& layer, int64_t num_tokens, const float* y, float* x);

}  // namespace tripool
