// What lies between the large products of a layer: norms, rotary positions, the router, sums.
// The slow definitions are the Python files of the same names.
#pragma once

#include <cstdint>

namespace tripool {

struct RmsNorm {
    const void* x;                 // rows `x_stride` elements apart
    int64_t x_stride, num_rows, width;
    const void* more;              // added to x first, if there is something,
    void* sum;                     // and where the sum goes
    const void* weight;
    float eps;
    void* y;                       // normed rows, if wanted,
    int8_t* q;                     // and the same as eight-bit integers, if wanted,
    float* scales;                 // with their scales
};

void rms_norm(int level, int64_t format, const RmsNorm& norm);

// Pairs of neighbours, or of numbers half the width apart, turned by complex numbers `[T, P]`. May be done in place.
struct Rotation {
    const float* turns;
    int64_t num_pairs;
    bool interleaved;
};

// Of each token `num_heads` rows.
void rotate(int level, int64_t format, const void* x, int64_t x_token_stride, int64_t x_head_stride, int64_t num_tokens,
            int64_t num_heads, const Rotation& rotation, void* y, int64_t y_token_stride, int64_t y_head_stride);

struct Entries {
    void* data;
    int64_t block_stride, token_stride, num_blocks, block_tokens;
    const int64_t* block;          // of each token
    const int64_t* offset;
};

// Normed latent and rotated key of each token into its entry. Returns -1, or the first token whose entry is not there;
// then nothing has been written.
int64_t write_entries(int level, int64_t format, const void* x, int64_t x_stride, int64_t num_tokens, int64_t width,
                      const void* weight, float eps, const Rotation& rotation, const Entries& entries);

struct Routing {
    int64_t num_experts, num_picks;
    bool by_softmax;
    int64_t num_groups, num_chosen_groups;   // all groups: no limit
    int64_t group_best;                      // a group's score is the sum of so many of its highest
    bool normalised;
    float factor;
};

void route(int level, const Routing& routing, const float* logits, const float* bias, int64_t num_tokens,
           int64_t* experts, float* weights);

// out = sum over picks of weight * y, plus `more`, plus `and_more`, each of these if it is there.
struct WeightedSum {
    const void* y;
    int64_t y_token_stride, num_tokens, num_picks, width;
    const float* weights;
    const void* more;
    int64_t more_stride;
    const void* and_more;
    int64_t and_more_stride;
    void* out;
};

void weighted_sum(int level, int64_t format, const WeightedSum& sum);

// How a row's next token is drawn from its logits.
struct Draw {
    float temperature;             // zero: not drawn, but the largest logit
    float min_p;                   // less likely than this part of the likeliest: dropped
    int64_t top_k;                 // so many are kept; zero: all
    double top_p;                  // as few as have this share are kept; one: all
    uint64_t seed;
    int64_t position;
};

void sample(int level, const float* logits, int64_t stride, int64_t num_rows, int64_t num_tokens, const Draw* draws,
            int64_t* tokens);

// Of chosen rows of logits the log-probability of a token, and behind it those of the likeliest tokens
// `[num_rows, 1 + num_top]`; there are no fewer tokens than `num_top`.
struct Logprobs {
    const int64_t* rows;
    const int64_t* tokens;
    int64_t num_rows, num_top;
    float* logprobs;
    int64_t* top;
};

void logprobs(int level, const float* logits, int64_t stride, int64_t num_tokens, const Logprobs& wanted);

// What is known of all rows, by slot: addresses of columns. Stop tokens are filled up with -1.
struct RowTable {
    int64_t tokens, token_stride, stops, num_stops;            // int32 tokens
    int64_t num_tokens, num_prompt, num_computed, min_tokens;
};

// Writes the next tokens of some rows: one, and one more as long as what is chosen is the draft that stood there and no
// stop token. Row n has `num_drafts[n] + 1` rows of logits, and `draws[n]` is of its first. Row n gets `counts[n]` tokens
// in `chosen[n * most]` and on.
void choose(int level, const RowTable& table, const float* logits, int64_t stride, int64_t vocabulary, const int64_t* slots,
            const int64_t* num_drafts, const Draw* draws, int64_t num_rows, int64_t most, int64_t* counts, int64_t* chosen,
            bool* stopped);

}  // namespace tripool
