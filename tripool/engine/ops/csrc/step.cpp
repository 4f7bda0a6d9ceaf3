// Decode steps: see step.h.

#include "step.h"

#include <cstring>

#include "threads.h"

namespace tripool {
namespace {

int64_t& number(int64_t column, int64_t slot) { return at<int64_t>(column)[slot]; }
bool& flag(int64_t column, int64_t slot) { return at<bool>(column)[slot]; }
template <class T>
int64_t address(const T* from) {
    return reinterpret_cast<int64_t>(from);
}

struct Slots {
    const SlotTable& t;
    int64_t block_tokens, most_drafts;

    int64_t computed(int64_t slot) const { return number(t.rows.num_computed, slot); }
    int64_t capacity(int64_t slot) const { return number(t.num_blocks, slot) * block_tokens; }
    bool decoding(int64_t slot) const { return flag(t.decoding_flags, slot); }

    // How many drafts it may have: one token more is emitted with them.
    int64_t wished(int64_t slot) const {
        if (!flag(t.drafts_flags, slot)) return 0;
        const int64_t left = number(t.limit, slot) - number(t.rows.num_tokens, slot) - 1;
        return left < 0 ? 0 : left < most_drafts ? left : most_drafts;
    }

    // The same, as far as there are blocks.
    int64_t drafts(int64_t slot) const {
        const int64_t room = capacity(slot) - computed(slot) - 1, most = wished(slot);
        return room < 0 ? 0 : room < most ? room : most;
    }
};

struct StepRows {
    int64_t *slots, *first, *count, *one, *drafts, *tokens, *guesses, *blocks, *experts;
    float *hidden, *logits;
    Draw* draws;
    bool* stopped;

    StepRows(Pieces& pieces, const Model& m, int64_t rows, int64_t all, int64_t columns, int64_t choices, int64_t most)
        : slots(pieces.take<int64_t>(rows)), first(pieces.take<int64_t>(rows)), count(pieces.take<int64_t>(rows)),
          one(pieces.take<int64_t>(rows)), drafts(pieces.take<int64_t>(rows)), tokens(pieces.take<int64_t>(all)),
          guesses(pieces.take<int64_t>(rows * most)), blocks(pieces.take<int64_t>(rows * columns)),
          experts(pieces.take<int64_t>(choices)), hidden(pieces.take<float>(all * m.width)),
          logits(pieces.take<float>(all * m.head.num_outputs)), draws(pieces.take<Draw>(rows)),
          stopped(pieces.take<bool>(rows)) {}
};

// How many experts a token chooses in all layers, and in one.
void count_picks(const Model& m, int64_t& layers, int64_t& picks) {
    layers = picks = 0;
    for (int64_t i = 0; i < m.num_layers; i++) {
        const WholeLayer& layer = at<WholeLayer>(m.layers)[i];
        if (layer.dense) continue;
        layers++;
        picks = at<ExpertLayer>(layer.experts)->num_picks;
    }
}

}  // namespace

int64_t decode_step(int level, const Model& m, const CacheBlocks& c, const SlotTable& t, int64_t most_drafts,
                    int64_t most_tokens, const StepOutput& out, StepCounts& counts) {
    const Slots slots{t, c.block_tokens, most_drafts};
    int64_t num_rows = 0, num_tokens = 0, columns = 0;
    for (int64_t slot = 0; slot < t.num_slots; slot++) {
        if (!slots.decoding(slot) || slots.computed(slot) >= slots.capacity(slot)) continue;
        if (number(t.num_logprobs, slot) >= 0 || number(t.rows.num_tokens, slot) < number(t.plain_from, slot))
            return NOT_PLAIN;
        const int64_t drafts = slots.drafts(slot), needed = (slots.computed(slot) + drafts) / c.block_tokens + 1;
        num_rows++;
        num_tokens += drafts + 1;
        columns = needed > columns ? needed : columns;
    }
    if (!num_rows || num_tokens > most_tokens) return NOT_PLAIN;

    int64_t num_layers, num_picks;
    count_picks(m, num_layers, num_picks);
    const int64_t choices = num_tokens * (num_layers + 1) * num_picks;
    Pieces counted(nullptr);
    StepRows(counted, m, num_rows, num_tokens, columns, choices, most_drafts);
    Pieces pieces(own_memory(counted.used, Purpose::STEP));
    const StepRows rows(pieces, m, num_rows, num_tokens, columns, choices, most_drafts);

    // Rows with as many drafts lie together, those with the most first.
    int64_t filled = 0, num_drafting = 0;
    for (int64_t drafts = most_drafts; drafts >= 0; drafts--) {
        for (int64_t slot = 0; slot < t.num_slots; slot++) {
            if (!slots.decoding(slot) || slots.computed(slot) >= slots.capacity(slot) || slots.drafts(slot) != drafts) continue;
            const int64_t r = filled++, first = slots.computed(slot);
            rows.slots[r] = slot;
            rows.first[r] = first;
            rows.drafts[r] = drafts;
            rows.count[r] = drafts + 1;
            rows.one[r] = 1;
            rows.tokens[r] = at<int32_t>(t.rows.tokens)[slot * t.rows.token_stride + first];
            rows.draws[r] = at<Draw>(t.draws)[slot];
            rows.draws[r].position = number(t.rows.num_tokens, slot);
            const int64_t own = (first + drafts) / c.block_tokens + 1, *blocks = at<int64_t>(t.blocks) + slot * t.block_columns;
            for (int64_t i = 0; i < columns; i++) rows.blocks[r * columns + i] = i < own ? blocks[i] : 0;
        }
        if (drafts) num_drafting = filled;
    }
    if (num_drafting) {
        const TokenRows last{address(rows.tokens), num_drafting, address(rows.blocks), columns, address(rows.first),
                             address(rows.one), num_drafting};
        const int64_t astray = guess(level, m, c, last, rows.drafts, most_drafts, rows.draws, rows.guesses, rows.experts);
        if (astray >= 0) return astray;
        int64_t num_guesses = 0;
        for (int64_t r = 0; r < num_drafting; r++) num_guesses += rows.drafts[r];
        int64_t* loads = at<int64_t>(out.loads) + num_layers * out.num_experts;
        for (int64_t i = 0; i < num_guesses * num_picks; i++) loads[rows.experts[i]]++;
    }
    for (int64_t r = num_rows - 1, end = num_tokens; r >= 0; r--) {      // backwards, as last tokens lie at the front
        end -= rows.count[r];
        const int64_t last = rows.tokens[r];
        int32_t* known = at<int32_t>(t.rows.tokens) + rows.slots[r] * t.rows.token_stride + rows.first[r];
        for (int64_t i = 0; i < rows.drafts[r]; i++) {
            rows.tokens[end + 1 + i] = rows.guesses[r * most_drafts + i];
            known[1 + i] = int32_t(rows.guesses[r * most_drafts + i]);
        }
        rows.tokens[end] = last;
    }

    const TokenRows all{address(rows.tokens), num_tokens, address(rows.blocks), columns, address(rows.first),
                        address(rows.count), num_rows};
    const int64_t astray = forward(level, m, c, all, rows.hidden, rows.experts);
    if (astray >= 0) return astray;
    for (int64_t layer = 0; layer < num_layers; layer++)
        for (int64_t i = 0; i < num_tokens * num_picks; i++)
            at<int64_t>(out.loads)[layer * out.num_experts + rows.experts[layer * num_tokens * num_picks + i]]++;
    multiply(level, m.head, rows.hidden, nullptr, num_tokens, rows.logits);
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t slot = rows.slots[r];
        number(t.rows.num_computed, slot)++;
        number(out.slots, r) = slot;
        number(out.starts, r) = number(t.rows.num_tokens, slot) - number(t.rows.num_prompt, slot);
    }
    choose(level, t.rows, rows.logits, m.head.num_outputs, m.head.num_outputs, rows.slots, rows.drafts, rows.draws, num_rows,
           most_drafts + 1, at<int64_t>(out.counts), at<int64_t>(out.tokens), rows.stopped);

    for (int64_t draft = 0; draft < most_drafts; draft++) number(out.drafted, draft) = number(out.right, draft) = 0;
    for (int64_t r = 0, start = 0; r < num_rows; start += rows.count[r], r++) {
        const int64_t slot = rows.slots[r], taken = number(out.counts, r);
        if (taken <= rows.drafts[r]) {           // a block keeps the state of its last token: not of a wrong guess
            const int64_t block = rows.blocks[r * columns + (slots.computed(slot) - 1) / c.block_tokens];
            std::memcpy(at<float>(c.data) + block * c.block_stride + c.hidden, rows.hidden + (start + taken - 1) * m.width,
                        size_t(m.width) * sizeof(float));
        }
        for (int64_t draft = 0; draft < rows.drafts[r]; draft++) number(out.drafted, draft)++;
        for (int64_t draft = 0; draft < taken - 1; draft++) number(out.right, draft)++;
        const bool at_limit = number(t.rows.num_tokens, slot) >= number(t.limit, slot);
        number(out.ended, r) = rows.stopped[r] ? STOPPED : at_limit ? AT_LIMIT : flag(t.decodes_flags, slot) ? GOES_ON : HANDED;
        flag(t.decoding_flags, slot) = number(out.ended, r) == GOES_ON;
    }
    counts = {num_rows, 0, 0};
    for (int64_t slot = 0; slot < t.num_slots; slot++) {
        if (!slots.decoding(slot)) continue;
        if (slots.computed(slot) >= slots.capacity(slot)) number(out.need, counts.need++) = slot;
        if (slots.drafts(slot) < slots.wished(slot)) number(out.want, counts.want++) = slot;
    }
    return TAKEN;
}

}  // namespace tripool
