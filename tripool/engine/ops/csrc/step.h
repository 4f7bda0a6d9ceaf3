// A decode step of a rank that is alone, in one call: which rows take part, their drafts, the forward pass that proves
// them, the choice of tokens and what becomes of the rows. The slow definition is `Executor` in engine/executor.py, which
// does every other step.
//
// What the slots hold and where results go is written down by ops/step.py, as integers in the order of these fields.
#pragma once

#include "forward.h"

namespace tripool {

// Addresses of columns with one number for each slot: int64, or bool where the last word is `flags`. Row s of the block
// table has `block_columns` numbers.
struct SlotTable {
    RowTable rows;
    int64_t num_slots, blocks, block_columns, num_blocks, limit, num_logprobs, plain_from, draws;
    int64_t decodes_flags, drafts_flags, decoding_flags;
};

// What a step brings: addresses, by row in the order of the batch, but `need` and `want`, which are lists of slots, and
// `drafted` and `right`, by draft.
struct StepOutput {
    int64_t slots, starts, counts, tokens, ended;      // `counts[r]` tokens from tokens[r * (most_drafts + 1)]
    int64_t need, want, drafted, right;
    int64_t loads, num_experts;                        // tokens for each expert, layer by layer, the MTP layer's last
};

struct StepCounts {
    int64_t rows, need, want;
};

enum : int64_t { GOES_ON, STOPPED, AT_LIMIT, HANDED }; // what `ended` says

constexpr int64_t TAKEN = -1, NOT_PLAIN = -2;

// Returns TAKEN; NOT_PLAIN, when there is no row, or more than `most_tokens`, or logits are wanted or changed, before
// anything has changed; or the first token that is not in the vocabulary or has no place in the cache.
int64_t decode_step(int level, const Model& model, const CacheBlocks& cache, const SlotTable& table, int64_t most_drafts,
                    int64_t most_tokens, const StepOutput& out, StepCounts& counts);

}  // namespace tripool
