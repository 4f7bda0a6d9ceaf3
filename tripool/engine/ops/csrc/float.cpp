// Float linear, products head by head, and grouped expert FFN: what is the same at every level. The slow definitions are
// ops/float_linear.py, ops/head_product.py and ops/float_experts.py.
//
// Rows go through in panels, channels in chunks. A part of the work is a panel by a chunk: it copies as many inputs of its
// rows as stay in the second cache, adds their products to the sums of its chunk, and goes on with the next inputs. Parts
// do not depend on each other: threads share them out.

#include "float.h"

#include <cstring>
#include <vector>

#include "threads.h"

namespace tripool {
namespace {

constexpr int64_t MOST_ROWS = 96;                  // of a panel
constexpr int64_t ROW_FLOATS = 48 << 10;           // of a panel, as copied
constexpr int64_t SUM_FLOATS = 48 << 10;           // of a part
constexpr int64_t ROWS_BY_TILES = 32;              // in one pass over weights
constexpr int64_t TOGETHER = 4;                    // blocks, at the least, in a chunk
constexpr int64_t PARTS_PER_THREAD = 4;
constexpr int64_t FEW_ROWS = 4, PARTS_OF_FEW = 32; // of few rows, parts cost nothing but their beginning
constexpr int64_t WORTH_SHARING = 1 << 19;         // products in a part that pay for waking a thread
constexpr int64_t MIDDLE_FLOATS = 4 << 20;         // of experts, between their two products

const FloatProduct& of_vectors(int level) {
    __builtin_cpu_init();
    if (level < 1 || !__builtin_cpu_supports("fma")) return FLOAT_PLAIN;
    if (level < 2 || !__builtin_cpu_supports("avx512dq")) return FLOAT_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? FLOAT_BF16 : FLOAT_AVX512;
}

FloatProduct product_of(int level) {
    static const MultiplyPairs by_amx = pairs_by_amx();
    const MultiplyPairs by_tiles = level == AMX ? by_amx : level == AMX_EMULATED ? pairs_emulated() : nullptr;
    FloatProduct product = of_vectors(vectors_of(level));
    if (by_tiles) {
        product.most = ROWS_BY_TILES;
        product.multiply_pairs = by_tiles;
    }
    return product;
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// Rows of a matrix, all or some.
struct Rows {
    const char* data;
    int64_t format, stride;
    const int64_t* which;                          // or nullptr: as they come
    const float* scales = nullptr;                 // of inputs

    void copy(const FloatProduct& product, int64_t r, int64_t k, int64_t count, float* to) const {
        const int64_t at = (which ? which[r] : r) * stride + k;
        if (format == FLOAT32)
            std::memcpy(to, reinterpret_cast<const float*>(data) + at, size_t(count) * sizeof *to);
        else
            product.widen(reinterpret_cast<const uint16_t*>(data) + at, count, to);
        if (!scales) return;
        for (int64_t i = 0; i < count; i++) to[i] *= scales[k + i];
    }
};

// Panels are about equal, and all but the last one whole passes.
int64_t panel_rows(const FloatProduct& product, int64_t num_rows) {
    return up(parts_of(num_rows, parts_of(num_rows, MOST_ROWS)), product.most);
}

// Blocks of a chunk. With several threads there are some parts for each, if they are worth it.
int64_t chunk_blocks(const FloatWeight& weight, int64_t num_panels, int64_t num_rows) {
    const int64_t rows = least(num_rows, MOST_ROWS), threads = num_threads();
    int64_t blocks = weight.num_blocks();
    if (threads > 1) {
        const int64_t even = parts_of(blocks * num_panels, (num_rows > FEW_ROWS ? PARTS_PER_THREAD : PARTS_OF_FEW) * threads);
        const int64_t worth = WORTH_SHARING / (rows * weight.num_inputs * BLOCK);
        blocks = least(blocks, even > worth ? even : worth);
    }
    return up(least(blocks, SUM_FLOATS / (rows * BLOCK)), TOGETHER);
}

// finish(block, its sums) for blocks from `begin` to `end`, of rows `first` to `first + count`.
template <class Finish>
void multiply_part(const FloatProduct& product, const Rows& rows, int64_t first, int64_t count, const FloatWeight& weight,
                   int64_t begin, int64_t end, const Finish& finish) {
    const int64_t most = least(weight.num_inputs, ROW_FLOATS / count / TILE_INPUTS * TILE_INPUTS);
    const int64_t stride = up(most, TILE_INPUTS) + TILE_INPUTS;
    const int64_t num_sums = (end - begin) * count * BLOCK;
    const bool rounds = weight.format & ROUNDED, in_pairs = rounds && product.multiply_pairs;
    float* sums = reinterpret_cast<float*>(own_memory((num_sums + (count + 2) * stride) * int64_t(sizeof(float))));
    float *panel = sums + num_sums, *row = panel + count * stride;
    uint16_t *halves = reinterpret_cast<uint16_t*>(panel), *half_row = reinterpret_cast<uint16_t*>(row + stride);
    std::memset(sums, 0, size_t(num_sums) * sizeof *sums);
    for (int64_t k = 0; k < weight.num_inputs; k += most) {
        const int64_t inputs = least(most, weight.num_inputs - k);
        for (int64_t r = 0; r < count; r++) {
            float* to = in_pairs ? row : panel + r * stride;
            rows.copy(product, first + r, k, inputs, to);
            if (!rounds) continue;
            uint16_t* half = in_pairs ? halves + r * stride : half_row;
            product.round(to, inputs, half);
            std::memset(half + inputs, 0, size_t(up(inputs, TILE_INPUTS) - inputs) * sizeof *half);
            if (!in_pairs) product.widen(half, inputs, to);
        }
        const char* blocks = weight.block(begin) + k * weight.input_bytes();
        const int64_t format = stored(weight.format), num_blocks = end - begin, block_bytes = weight.block_bytes();
        if (in_pairs)
            product.multiply_pairs(format, halves, stride, count, inputs, blocks, num_blocks, block_bytes, sums);
        else
            product.multiply(format, panel, stride, count, inputs, blocks, num_blocks, block_bytes, sums);
    }
    for (int64_t b = begin; b < end; b++, sums += count * BLOCK) finish(b, sums);
}

}  // namespace

void float_linear(int level, const char* x, int64_t x_format, int64_t num_rows, const FloatWeight& weight,
                  const float* bias, char* y, int64_t y_format) {
    if (!num_rows) return;
    const FloatProduct product = product_of(level);
    const Rows rows{x, x_format, weight.num_inputs, nullptr};
    const int64_t panel = panel_rows(product, num_rows), num_blocks = weight.num_blocks();
    const int64_t panels = parts_of(num_rows, panel), chunk = chunk_blocks(weight, panels, panel);
    const int64_t chunks = parts_of(num_blocks, chunk);
    share(panels * chunks, [&](int64_t part) {
        const int64_t first = part / chunks * panel, begin = part % chunks * chunk;
        const int64_t count = least(panel, num_rows - first);
        multiply_part(product, rows, first, count, weight, begin, least(begin + chunk, num_blocks),
                      [&](int64_t b, const float* sums) {
            const int64_t channel = b * BLOCK, at = first * weight.num_outputs + channel;
            product.store(sums, weight.output_scales ? weight.output_scales + channel : nullptr,
                          bias ? bias + channel : nullptr, count, least(BLOCK, weight.num_outputs - channel),
                          y + at * element_bytes(y_format), y_format, nullptr, weight.num_outputs);
        });
    });
}

void head_product(int level, const HeadRows& x, int64_t num_tokens, int64_t num_heads, const FloatWeight& weight,
                  const HeadRows& y) {
    if (!num_tokens) return;
    const FloatProduct product = product_of(level);
    const int64_t panel = panel_rows(product, num_tokens), num_blocks = weight.num_blocks();
    const int64_t panels = parts_of(num_tokens, panel), chunk = chunk_blocks(weight, panels * num_heads, panel);
    const int64_t chunks = parts_of(num_blocks, chunk);
    share(num_heads * panels * chunks, [&](int64_t part) {
        const int64_t head = part / (panels * chunks), first = part / chunks % panels * panel;
        const int64_t count = least(panel, num_tokens - first), begin = part % chunks * chunk;
        const FloatWeight own = weight.expert(head);
        const Rows rows{x.at(0, head), x.format, x.token_stride, nullptr, own.input_scales};
        multiply_part(product, rows, first, count, own, begin, least(begin + chunk, num_blocks),
                      [&](int64_t b, const float* sums) {
            const int64_t channel = b * BLOCK;
            product.store(sums, own.output_scales ? own.output_scales + channel : nullptr, nullptr, count,
                          least(BLOCK, weight.num_outputs - channel),
                          y.at(first, head) + channel * element_bytes(y.format), y.format, nullptr, y.token_stride);
        });
    });
}

// ----------------------------------------------------------------------------------------------------- expert FFN

namespace {

struct Panel {                                     // of pairs of one expert, in the order of experts
    int64_t expert, first, count;
};

int64_t middle_width(int64_t num_hidden) { return up(num_hidden, BLOCK) + BLOCK; }

int64_t pairs_at_once(int64_t num_pairs, int64_t num_hidden) {
    return least(num_pairs, up(MIDDLE_FLOATS / middle_width(num_hidden) + 1, MOST_ROWS));
}

}  // namespace

int64_t float_experts(int level, const char* x, int64_t x_format, int64_t num_rows, const int64_t* row_of_pair,
                      const int64_t* expert_of_pair, int64_t num_pairs, int64_t num_experts, const FloatWeight& gate_up,
                      const FloatWeight& down, char* y, int64_t y_format) {
    for (int64_t p = 0; p < num_pairs; p++)
        if (row_of_pair[p] < 0 || row_of_pair[p] >= num_rows || expert_of_pair[p] < 0 ||
            expert_of_pair[p] >= num_experts)
            return p;
    if (!num_pairs) return -1;
    std::vector<int64_t> end(size_t(num_experts + 1)), pair(size_t(num_pairs), 0), row(size_t(num_pairs), 0);
    for (int64_t p = 0; p < num_pairs; p++) end[size_t(expert_of_pair[p] + 1)]++;
    for (size_t e = 0; e < size_t(num_experts); e++) end[e + 1] += end[e];
    for (int64_t p = 0; p < num_pairs; p++) {
        const size_t at = size_t(end[size_t(expert_of_pair[p])]++);
        pair[at] = p;
        row[at] = row_of_pair[p];
    }
    // Now end[e] is the end of expert e, and so the beginning of the next.

    const FloatProduct product = product_of(level);
    const int64_t num_hidden = down.num_inputs, middle = middle_width(num_hidden), width = down.num_outputs;
    const int64_t most = pairs_at_once(num_pairs, num_hidden);
    char* scratch = own_memory(most * middle * int64_t(sizeof(float)), Purpose::OPERATION);
    for (int64_t start = 0, e = 0; start < num_pairs; start += most) {
        std::vector<Panel> panels;
        int64_t largest = 0;
        for (int64_t first = start, stop = least(start + most, num_pairs); first < stop;) {
            while (end[size_t(e)] <= first) e++;
            const int64_t last = least(end[size_t(e)], stop), count = panel_rows(product, last - first);
            for (; first < last; first += panels.back().count) {
                panels.push_back({e, first, least(count, last - first)});
                largest = largest > panels.back().count ? largest : panels.back().count;
            }
        }
        float* hidden = reinterpret_cast<float*>(scratch) - start * middle;          // of all pairs
        // part(the panel, its first block, the last one's next) for chunks of a product with this weight.
        const auto each = [&](const FloatWeight& weight, const auto& part) {
            const int64_t num_blocks = weight.num_blocks(), chunk = chunk_blocks(weight, int64_t(panels.size()), largest);
            const int64_t chunks = parts_of(num_blocks, chunk);
            share(int64_t(panels.size()) * chunks, [&](int64_t number) {
                const int64_t begin = number % chunks * chunk;
                part(panels[size_t(number / chunks)], begin, least(begin + chunk, num_blocks));
            });
        };
        const Rows rows{x, x_format, width, row.data()}, middles{reinterpret_cast<char*>(hidden), FLOAT32, middle, nullptr};
        each(gate_up, [&](const Panel& panel, int64_t begin, int64_t end_block) {
            multiply_part(product, rows, panel.first, panel.count, gate_up.expert(panel.expert), begin, end_block,
                          [&](int64_t b, const float* sums) {
                if (b % 2)
                    product.gate(sums - panel.count * BLOCK, sums, panel.count,
                                 hidden + panel.first * middle + b / 2 * BLOCK, middle);
            });
        });
        each(down, [&](const Panel& panel, int64_t begin, int64_t end_block) {
            multiply_part(product, middles, panel.first, panel.count, down.expert(panel.expert), begin, end_block,
                          [&](int64_t b, const float* sums) {
                const int64_t channel = b * BLOCK;
                product.store(sums, nullptr, nullptr, panel.count, least(BLOCK, width - channel),
                              y + channel * element_bytes(y_format), y_format, pair.data() + panel.first, width);
            });
        });
    }
    return -1;
}

}  // namespace tripool
