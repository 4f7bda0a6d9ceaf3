// A whole forward pass, and a draft, in one call each: for steps whose tokens all attend over the paged cache, by a rank
// that is alone. The operations are those of the other files, in the order in which engine/model/deepseek.py calls them
// one by one, and so are the bits. All rows are float32.
//
// What a model is and what a batch is are written down by ops/forward.py, as integers in the order of these fields.
#pragma once

#include "glue.h"
#include "layer.h"

namespace tripool {

// Addresses of the halves of a layer, of which the second is the one or the other. `entries` is where those of the layer
// begin in a block.
struct WholeLayer {
    int64_t attention, experts, dense, entries;
};

struct Model {
    int64_t width, embedding, embedding_kind, vocabulary, norm, eps;
    int64_t turns, num_pairs, max_position, interleaved;
    int64_t layers, num_layers;
    int64_t mtp;                                   // address of the MTP layer, or 0
    Product head;
};

struct MtpLayer {
    int64_t embed_norm, hidden_norm, input_norm, latent_norm, latent, entries, norm;
    Product join, entry;
    int64_t layer;                                 // address of a `WholeLayer`; 0: it is not run
};

struct CacheBlocks {
    int64_t data, num_blocks, block_stride, block_tokens, hidden;      // `hidden`: where the state begins in a block
};

// Tokens of rows that follow one another: row r has `counts[r]` at positions from `firsts[r]`, in the blocks that row r
// of the table names.
struct TokenRows {
    int64_t tokens, num_tokens, blocks, columns, firsts, counts, num_rows;
};

// The final-normed hidden states of all tokens, and what experts each chose, layer by layer. Writes entries and states
// to the cache. Returns -1, or the first token that is not in the vocabulary or has no place in the cache; then nothing
// has been written.
int64_t forward(int level, const Model& model, const CacheBlocks& cache, const TokenRows& rows, float* hidden,
                int64_t* experts);

// Runs the MTP layer on rows of one token. `previous` are the states before them, or nullptr: those in the cache.
int64_t draft(int level, const Model& model, const CacheBlocks& cache, const TokenRows& rows, const float* previous,
              float* states, int64_t* experts);

// Guesses at the tokens after `rows`, of which each has the last one it knows: row r gets `num_drafts[r]`, no more than
// the row before it, in `tokens[r * most_drafts]` and on. `draws` say how the first is drawn. Returns as `draft` does.
int64_t guess(int level, const Model& model, const CacheBlocks& cache, const TokenRows& rows, const int64_t* num_drafts,
              int64_t most_drafts, const Draw* draws, int64_t* tokens, int64_t* experts);

}  // namespace tripool
