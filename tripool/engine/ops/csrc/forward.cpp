// Whole forward passes: see forward.h.

#include "forward.h"

#include <cstring>

#include "float.h"
#include "threads.h"

namespace tripool {
namespace {

int64_t num_picks_of(const WholeLayer& layer) { return layer.dense ? 0 : at<ExpertLayer>(layer.experts)->num_picks; }

// Where tokens and blocks are, worked out once for all layers.
struct Pass {
    const Model& m;
    const CacheBlocks& c;
    const TokenRows& r;
    float *x, *y, *embedded, *previous, *joined, *turns;
    int64_t *block, *offset;                       // of each token's entry

    Pass(Pieces& pieces, const Model& m, const CacheBlocks& c, const TokenRows& r, bool joins)
        : m(m), c(c), r(r), x(pieces.take<float>(r.num_tokens * m.width)), y(pieces.take<float>(r.num_tokens * m.width)),
          embedded(pieces.take<float>(joins ? r.num_tokens * m.width : 0)),
          previous(pieces.take<float>(joins ? r.num_tokens * m.width : 0)),
          joined(pieces.take<float>(joins ? 2 * r.num_tokens * m.width : 0)),
          turns(pieces.take<float>(2 * r.num_tokens * m.num_pairs)), block(pieces.take<int64_t>(r.num_tokens)),
          offset(pieces.take<int64_t>(r.num_tokens)) {}

    // Returns -1, or the first token that is nowhere, or sees what is nowhere.
    int64_t find_places() {
        int64_t t = 0;
        for (int64_t row = 0; row < r.num_rows; row++) {
            const int64_t end = first(row) + count(row), columns = (end + c.block_tokens - 1) / c.block_tokens;
            if (!count(row)) continue;
            if (first(row) < 0 || end > m.max_position || columns > r.columns) return t;
            for (int64_t column = 0; column < columns; column++)
                if (table(row)[column] < 0 || table(row)[column] >= c.num_blocks) return t;
            for (int64_t position = first(row); position < end; position++, t++) {
                if (token(t) < 0 || token(t) >= m.vocabulary) return t;
                block[t] = table(row)[position / c.block_tokens];
                offset[t] = position % c.block_tokens;
                std::memcpy(turns + 2 * t * m.num_pairs, at<float>(m.turns) + 2 * position * m.num_pairs,
                            size_t(2 * m.num_pairs) * sizeof(float));
            }
        }
        return -1;
    }

    // The states in the cache before the first tokens of rows; before position 0, zeros.
    void find_states_before() {
        int64_t t = 0;
        for (int64_t row = 0; row < r.num_rows; t += count(row), row++) {
            if (!count(row)) continue;
            if (first(row))
                copy(state_of(table(row)[(first(row) - 1) / c.block_tokens]), 1, previous + t * m.width);
            else
                std::memset(previous + t * m.width, 0, size_t(m.width) * sizeof(float));
        }
    }

    // Those before the other tokens.
    void find_states_within(const float* hidden) {
        int64_t t = 0;
        for (int64_t row = 0; row < r.num_rows; t += count(row), row++)
            if (count(row) > 1) copy(hidden + t * m.width, count(row) - 1, previous + (t + 1) * m.width);
    }

    void copy(const float* from, int64_t rows, float* to) {
        std::memcpy(to, from, size_t(rows * m.width) * sizeof(float));
    }

    // Blocks that these tokens start and do not fill: their ends stay zeros.
    void clear_fresh() {
        int64_t t = 0;
        for (int64_t row = 0; row < r.num_rows; t += count(row), row++) {
            const int64_t end = first(row) + count(row), start = end / c.block_tokens * c.block_tokens;
            if (count(row) && end > start && start >= first(row))
                std::memset(block_of(block[t + count(row) - 1]), 0, size_t(c.block_stride) * sizeof(float));
        }
    }

    void embed(float* to) {
        for (int64_t t = 0; t < r.num_tokens; t++, to += m.width) {
            const int64_t from = token(t) * m.width;
            if (m.embedding_kind == FLOAT32) {
                copy(at<float>(m.embedding) + from, 1, to);
            } else {
                for (int64_t i = 0; i < m.width; i++) {
                    const uint32_t bits = uint32_t(at<uint16_t>(m.embedding)[from + i]) << 16;
                    std::memcpy(to + i, &bits, sizeof bits);
                }
            }
        }
    }

    // The input of the MTP layer, to `to`.
    void join(int level, const MtpLayer& mtp, float* to) {
        for (int64_t t = 0; t < r.num_tokens; t++) {
            float* both = joined + 2 * t * m.width;
            norm(level, embedded + t * m.width, 1, mtp.embed_norm, both);
            norm(level, previous + t * m.width, 1, mtp.hidden_norm, both + m.width);
        }
        multiply(level, mtp.join, joined, nullptr, r.num_tokens, to);
    }

    void norm(int level, const float* from, int64_t rows, int64_t weight, float* to) {
        rms_norm(level, FLOAT32, {from, m.width, rows, m.width, nullptr, nullptr, at<void>(weight), float_of(m.eps), to,
                                  nullptr, nullptr});
    }

    // x goes through a layer. Returns how many choices of experts were written.
    int64_t run(int level, const WholeLayer& layer, int64_t first_seen, int64_t* experts) {
        const AttentionStep step{r.num_tokens, address(turns), m.num_pairs, address(block), address(offset), r.blocks,
                                 r.columns, r.firsts, r.counts, r.num_rows, first_seen, c.num_blocks, c.block_stride,
                                 c.block_tokens};
        attention_layer(level, *at<AttentionLayer>(layer.attention), step, entries(layer.entries), x, y);
        if (layer.dense) {
            dense_layer(level, *at<DenseLayer>(layer.dense), r.num_tokens, y, x);
            return 0;
        }
        expert_layer(level, *at<ExpertLayer>(layer.experts), r.num_tokens, y, x, experts);
        return r.num_tokens * num_picks_of(layer);
    }

    void write_mtp_entries(int level, const MtpLayer& mtp) {
        const int64_t width = mtp.entry.num_outputs;
        join(level, mtp, x);
        norm(level, x, r.num_tokens, mtp.input_norm, y);
        multiply(level, mtp.entry, y, nullptr, r.num_tokens, joined);
        write_entries(level, FLOAT32, joined, width, r.num_tokens, mtp.latent, at<void>(mtp.latent_norm), float_of(m.eps),
                      {turns, m.num_pairs, m.interleaved != 0},
                      {entries(mtp.entries), c.block_stride, width, c.num_blocks, c.block_tokens, block, offset});
    }

    // A block keeps the state of its last token.
    void keep_states(const float* hidden) {
        int64_t t = 0;
        for (int64_t row = 0; row < r.num_rows; row++)
            for (int64_t i = 0; i < count(row); i++, t++)
                if (i + 1 == count(row) || offset[t] + 1 == c.block_tokens)
                    copy(hidden + t * m.width, 1, state_of(block[t]));
    }

    int64_t first(int64_t row) const { return at<int64_t>(r.firsts)[row]; }
    int64_t count(int64_t row) const { return at<int64_t>(r.counts)[row]; }
    const int64_t* table(int64_t row) const { return at<int64_t>(r.blocks) + row * r.columns; }
    int64_t token(int64_t t) const { return at<int64_t>(r.tokens)[t]; }
    float* block_of(int64_t block) const { return at<float>(c.data) + block * c.block_stride; }
    float* state_of(int64_t block) const { return block_of(block) + c.hidden; }
    char* entries(int64_t offset) const { return reinterpret_cast<char*>(at<float>(c.data) + offset); }

    template <class T>
    static int64_t address(T* from) {
        return reinterpret_cast<int64_t>(from);
    }
};

struct GuessRows {
    float *states, *logits;
    int64_t *token, *first, *one;
    Draw* draw;

    GuessRows(Pieces& pieces, const Model& m, int64_t rows)
        : states(pieces.take<float>(rows * m.width)), logits(pieces.take<float>(rows * m.head.num_outputs)),
          token(pieces.take<int64_t>(rows)), first(pieces.take<int64_t>(rows)), one(pieces.take<int64_t>(rows)),
          draw(pieces.take<Draw>(rows)) {}
};

Pass pass_of(const Model& m, const CacheBlocks& c, const TokenRows& rows, bool joins) {
    Pieces counted(nullptr);
    Pass(counted, m, c, rows, joins);
    Pieces pieces(own_memory(counted.used, Purpose::PASS));
    return Pass(pieces, m, c, rows, joins);
}

}  // namespace

int64_t forward(int level, const Model& m, const CacheBlocks& c, const TokenRows& rows, float* hidden, int64_t* experts) {
    Pass pass = pass_of(m, c, rows, m.mtp != 0);
    const int64_t astray = pass.find_places();
    if (astray >= 0) return astray;
    if (m.mtp) pass.find_states_before();
    pass.clear_fresh();
    pass.embed(pass.x);
    if (m.mtp) pass.copy(pass.x, rows.num_tokens, pass.embedded);
    for (int64_t i = 0; i < m.num_layers; i++) experts += pass.run(level, at<WholeLayer>(m.layers)[i], 0, experts);
    pass.norm(level, pass.x, rows.num_tokens, m.norm, hidden);
    if (!m.mtp) return -1;
    pass.find_states_within(hidden);
    pass.write_mtp_entries(level, *at<MtpLayer>(m.mtp));
    pass.keep_states(hidden);
    return -1;
}

int64_t draft(int level, const Model& m, const CacheBlocks& c, const TokenRows& rows, const float* previous, float* states,
              int64_t* experts) {
    const MtpLayer& mtp = *at<MtpLayer>(m.mtp);
    Pass pass = pass_of(m, c, rows, true);
    const int64_t astray = pass.find_places();
    if (astray >= 0) return astray;
    if (previous)
        pass.copy(previous, rows.num_tokens, pass.previous);
    else
        pass.find_states_before();
    pass.clear_fresh();
    pass.embed(pass.embedded);
    pass.join(level, mtp, pass.x);
    pass.run(level, *at<WholeLayer>(mtp.layer), 1, experts);
    pass.norm(level, pass.x, rows.num_tokens, mtp.norm, states);
    return -1;
}

int64_t guess(int level, const Model& m, const CacheBlocks& c, const TokenRows& rows, const int64_t* num_drafts,
              int64_t most_drafts, const Draw* draws, int64_t* tokens, int64_t* experts) {
    Pieces counted(nullptr);
    GuessRows(counted, m, rows.num_rows);
    Pieces pieces(own_memory(counted.used, Purpose::GUESSES));
    const GuessRows own(pieces, m, rows.num_rows);
    const auto address = [](const int64_t* from) { return reinterpret_cast<int64_t>(from); };
    for (int64_t r = 0; r < rows.num_rows; r++) {
        own.token[r] = at<int64_t>(rows.tokens)[r];
        own.first[r] = at<int64_t>(rows.firsts)[r];
        own.one[r] = 1;
        own.draw[r] = draws[r];
    }
    for (int64_t number = 0, going = rows.num_rows; number < most_drafts; number++) {
        while (going && num_drafts[going - 1] <= number) going--;
        if (!going) break;
        const TokenRows now{address(own.token), going, rows.blocks, rows.columns, address(own.first), address(own.one), going};
        const int64_t astray = draft(level, m, c, now, number ? own.states : nullptr, own.states, experts);
        if (astray >= 0) return astray;
        experts += going * num_picks_of(*at<WholeLayer>(at<MtpLayer>(m.mtp)->layer));
        multiply(level, m.head, own.states, nullptr, going, own.logits);
        sample(level, own.logits, m.head.num_outputs, going, m.head.num_outputs, own.draw, own.token);
        for (int64_t r = 0; r < going; r++) {
            tokens[r * most_drafts + number] = own.token[r];
            own.first[r]++;
            own.draw[r].position++;
        }
    }
    return -1;
}

}  // namespace tripool
