// The halves of a layer: see layer.h.

#include "layer.h"

#include <cmath>
#include <cstring>

#include "float.h"
#include "glue.h"
#include "int8.h"
#include "mla.h"
#include "threads.h"

namespace tripool {
namespace {

char* bytes_of(const float* rows) { return reinterpret_cast<char*>(const_cast<float*>(rows)); }

Int8Weight int8_weight(const Product& p) {
    return {at<int8_t>(p.data), at<float>(p.scales), at<int32_t>(p.sums), p.num_outputs, p.num_inputs};
}

FloatWeight float_weight(const Product& p) { return {at<char>(p.data), p.kind, p.num_outputs, p.num_inputs}; }

FloatWeight with_input_scales(const Product& p) {
    return {at<char>(p.data), p.kind, p.num_outputs, p.num_inputs, at<float>(p.scales), nullptr};
}

FloatWeight with_output_scales(const Product& p) {
    return {at<char>(p.data), p.kind, p.num_outputs, p.num_inputs, nullptr, at<float>(p.scales)};
}

void feed_forward(int level, const Product& gate_up, const Product& down, const float* x, int64_t num_rows,
                  const int64_t* row, const int64_t* expert, int64_t num_pairs, int64_t num_experts, float* y) {
    if (down.kind == INT8)
        expert_ffn(level, bytes_of(x), FLOAT32, nullptr, num_rows, row, expert, num_pairs, num_experts,
                   int8_weight(gate_up), int8_weight(down), bytes_of(y), FLOAT32);
    else
        float_experts(level, bytes_of(x), FLOAT32, num_rows, row, expert, num_pairs, num_experts, float_weight(gate_up),
                      float_weight(down), bytes_of(y), FLOAT32);
}

struct AttentionRows {
    float *normed, *scales, *projected, *query, *absorbed, *latents, *values, *attended;

    AttentionRows(Pieces& pieces, const AttentionLayer& a, int64_t tokens)
        : normed(pieces.take<float>(tokens * (a.width > a.query.num_inputs ? a.width : a.query.num_inputs))),
          scales(pieces.take<float>(tokens)), projected(pieces.take<float>(tokens * a.in.num_outputs)),
          query(pieces.take<float>(tokens * a.query.num_outputs)),
          absorbed(pieces.take<float>(tokens * a.heads * (a.latent + a.rotary))),
          latents(pieces.take<float>(tokens * a.heads * a.latent)), values(pieces.take<float>(tokens * a.heads * a.value)),
          attended(pieces.take<float>(tokens * a.width)) {}
};

struct ExpertRows {
    float *logits, *weights, *results, *shared;
    int64_t *row, *zeros;

    ExpertRows(Pieces& pieces, const ExpertLayer& e, int64_t tokens)
        : logits(pieces.take<float>(tokens * e.num_experts)), weights(pieces.take<float>(tokens * e.num_picks)),
          results(pieces.take<float>(tokens * e.num_picks * e.width)), shared(pieces.take<float>(tokens * e.width)),
          row(pieces.take<int64_t>(tokens * e.num_picks)), zeros(pieces.take<int64_t>(tokens)) {}
};

struct DenseRows {
    float* results;
    int64_t *row, *zeros;

    DenseRows(Pieces& pieces, const DenseLayer& d, int64_t tokens)
        : results(pieces.take<float>(tokens * d.down.num_outputs)), row(pieces.take<int64_t>(tokens)),
          zeros(pieces.take<int64_t>(tokens)) {}
};

template <class Rows, class Layer>
Rows rows_of(const Layer& layer, int64_t tokens) {
    Pieces counted(nullptr);
    Rows(counted, layer, tokens);
    Pieces pieces(own_memory(counted.used, Purpose::LAYER));
    return Rows(pieces, layer, tokens);
}

}  // namespace

void multiply(int level, const Product& p, const float* x, const float* scales, int64_t num_rows, float* y) {
    if (p.kind != INT8 || !p.sums)
        return float_linear(level, bytes_of(x), FLOAT32, num_rows, with_output_scales(p), at<float>(p.bias), bytes_of(y), FLOAT32);
    int8_linear(level, bytes_of(x), scales ? INT8 : FLOAT32, scales, num_rows, int8_weight(p), bytes_of(y), FLOAT32);
    if (!p.bias) return;
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t c = 0; c < p.num_outputs; c++) y[r * p.num_outputs + c] += at<float>(p.bias)[c];
}

int64_t attention_layer(int level, const AttentionLayer& a, const AttentionStep& s, char* entries, float* x, float* y) {
    const int64_t tokens = s.num_tokens, width = a.latent + a.rotary, in_width = a.in.num_outputs;
    const auto rows = rows_of<AttentionRows>(a, tokens);
    const float eps = float_of(a.eps);
    const auto norm_and_multiply = [&](const float* from, int64_t stride, int64_t weight, const Product& p, float* to) {
        const bool integers = p.kind == INT8;
        int8_t* q = integers ? reinterpret_cast<int8_t*>(rows.normed) : nullptr;
        rms_norm(level, FLOAT32, {from, stride, tokens, p.num_inputs, nullptr, nullptr, at<void>(weight), eps,
                                  integers ? nullptr : rows.normed, q, integers ? rows.scales : nullptr});
        multiply(level, p, rows.normed, integers ? rows.scales : nullptr, tokens, to);
    };
    // MLAProlog
    norm_and_multiply(x, a.width, a.input_norm, a.in, rows.projected);
    const Rotation rotation{at<float>(s.turns), s.num_pairs, a.interleaved != 0};
    const Entries places{entries, s.block_stride, width, s.num_blocks, s.block_tokens, at<int64_t>(s.block_of_token),
                         at<int64_t>(s.offset_of_token)};
    const int64_t astray = write_entries(level, FLOAT32, rows.projected + in_width - width, in_width, tokens, a.latent,
                                         at<void>(a.latent_norm), eps, rotation, places);
    if (astray >= 0) return astray;
    float* query = rows.projected;
    int64_t query_stride = in_width;
    if (a.query.kind != NOTHING) {
        norm_and_multiply(rows.projected, in_width, a.query_norm, a.query, rows.query);
        query = rows.query;
        query_stride = a.query.num_outputs;
    }
    const int64_t head_width = a.plain + a.rotary;
    rotate(level, FLOAT32, query + a.plain, query_stride, head_width, tokens, a.heads, rotation, rows.absorbed + a.latent,
           a.heads * width, width);
    head_product(level, {bytes_of(query), FLOAT32, query_stride, head_width}, tokens, a.heads,
                 with_input_scales(a.latent_of_key), {bytes_of(rows.absorbed), FLOAT32, a.heads * width, width});
    // Fused Attention
    const int64_t wrong = absorbed_attention(level, {
        bytes_of(rows.absorbed), FLOAT32, tokens, a.heads, width, a.latent, entries, FLOAT32, s.num_blocks, s.block_stride,
        s.block_tokens, at<int64_t>(s.blocks), s.columns, at<int64_t>(s.firsts), at<int64_t>(s.counts), s.num_rows,
        s.first_seen, float_of(a.scale), a.rounds != 0, bytes_of(rows.latents)});
    if (wrong >= 0) return wrong;
    head_product(level, {bytes_of(rows.latents), FLOAT32, a.heads * a.latent, a.latent}, tokens, a.heads,
                 with_output_scales(a.value_of_latent), {bytes_of(rows.values), FLOAT32, a.heads * a.value, a.value});
    multiply(level, a.out, rows.values, nullptr, tokens, rows.attended);
    rms_norm(level, FLOAT32, {x, a.width, tokens, a.width, rows.attended, x, at<void>(a.post_norm), eps, y, nullptr,
                              nullptr});
    return -1;
}

void expert_layer(int level, const ExpertLayer& e, int64_t num_tokens, const float* y, float* x, int64_t* experts) {
    const auto rows = rows_of<ExpertRows>(e, num_tokens);
    const int64_t num_pairs = num_tokens * e.num_picks;
    multiply(level, e.gate, y, nullptr, num_tokens, rows.logits);
    route(level, {e.num_experts, e.num_picks, e.by_softmax != 0, e.num_groups, e.num_chosen_groups, e.group_best,
                  e.normalised != 0, float_of(e.factor)},
          rows.logits, at<float>(e.bias), num_tokens, experts, rows.weights);
    for (int64_t pair = 0; pair < num_pairs; pair++) rows.row[pair] = pair / e.num_picks;
    feed_forward(level, e.gate_up, e.down, y, num_tokens, rows.row, experts, num_pairs, e.num_experts, rows.results);
    const bool shared = e.shared_down.kind != NOTHING;
    if (shared) {
        for (int64_t token = 0; token < num_tokens; token++) rows.row[token] = token, rows.zeros[token] = 0;
        feed_forward(level, e.shared_gate_up, e.shared_down, y, num_tokens, rows.row, rows.zeros, num_tokens, 1, rows.shared);
    }
    weighted_sum(level, FLOAT32, {rows.results, e.num_picks * e.width, num_tokens, e.num_picks, e.width, rows.weights,
                                  shared ? rows.shared : x, e.width, shared ? x : nullptr, e.width, x});
}

void dense_layer(int level, const DenseLayer& d, int64_t num_tokens, const float* y, float* x) {
    const auto rows = rows_of<DenseRows>(d, num_tokens);
    for (int64_t token = 0; token < num_tokens; token++) rows.row[token] = token, rows.zeros[token] = 0;
    feed_forward(level, d.gate_up, d.down, y, num_tokens, rows.row, rows.zeros, num_tokens, 1, rows.results);
    for (int64_t i = 0; i < num_tokens * d.down.num_outputs; i++) x[i] += rows.results[i];
}

}  // namespace tripool
