// INT8 linear and grouped expert FFN: what is the same at every level. The slow definitions are ops/int8_linear.py and
// ops/expert_ffn.py.
//
// Blocks of channels do not depend on each other, nor do rows: threads share both (threads.h). Rows are worked on in
// panels that stay in the caches; a panel is quantised before it is multiplied, which are two shares.

#include "int8.h"

#include <atomic>
#include <cstring>

#include "bfloat16.h"
#include "threads.h"

namespace tripool {
namespace {

constexpr int64_t ROWS_BYTES = 192 << 10;          // of rows that one pass over the weights serves: they stay in L2
constexpr int64_t LEAST_ROWS = 12;
constexpr int64_t PANEL = 8;                       // passes between two barriers

// What is worth handing to another thread: some microseconds of work.
constexpr int64_t PART_ELEMENTS = 8 << 10;         // of rows, to quantise or to spread
constexpr int64_t PART_BYTES = 64 << 10;           // of weights, for one row
constexpr int64_t ROWS_PER_READ = 8;               // so many rows take about the time that reading takes
constexpr int64_t PARTS_PER_THREAD = 16;           // or more; the last ones end nearly together

const Int8Product& product_of(int level) {
    const Int8Product* const products[] = {&INT8_PLAIN, &INT8_AVX2, &INT8_VNNI, &INT8_AMX, &INT8_EMULATED};
    return *products[level];
}

// Not a multiple of 4096, so that the same inputs of several rows do not meet in one set of the cache.
int64_t row_stride(const Int8Product& product, int64_t num_inputs) {
    return up(up(num_inputs, QUAD) * product.input_bytes, 64) + 64;
}

int64_t rows_at_once(int64_t stride, int64_t num_rows) {
    int64_t rows = ROWS_BYTES / stride / LEAST_ROWS * LEAST_ROWS;
    rows = rows < LEAST_ROWS ? LEAST_ROWS : rows;
    return rows < num_rows ? rows : num_rows;
}

// What a block's sums mean.
inline void rescale(const int32_t* acc, float row_scale, const float* scales, float* value) {
    for (int64_t c = 0; c < BLOCK; c++) value[c] = float(acc[c]) * row_scale * scales[c];
}

inline void store(const float* value, int64_t count, char* y, int64_t format, int64_t at) {
    if (format == FLOAT32) {
        float* out = reinterpret_cast<float*>(y) + at;
        if (count == BLOCK)
            std::memcpy(out, value, 4 * BLOCK);
        else
            std::memcpy(out, value, size_t(4 * count));
    } else {
        uint16_t* out = reinterpret_cast<uint16_t*>(y) + at;
        for (int64_t c = 0; c < count; c++) out[c] = rounded(value[c]);
    }
}

// What a call works in.
template <class Scratch, class... Sizes>
Scratch in_own_memory(Sizes... sizes) {
    Pieces counted(nullptr);
    Scratch(counted, sizes...);
    Pieces pieces(own_memory(counted.used, Purpose::OPERATION));
    return Scratch(pieces, sizes...);
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls f(row) for all rows; `width` says how much work one is.
template <class F>
void for_rows(int64_t num_rows, int64_t width, const F& f) {
    const int64_t each = width < PART_ELEMENTS ? PART_ELEMENTS / width : 1;
    share((num_rows + each - 1) / each, [&](int64_t part) {
        for (int64_t r = part * each; r < least(num_rows, (part + 1) * each); r++) f(r);
    });
}

// Shares out passes of rows over weights: parts are groups of blocks, `groups` for each pass.
struct Groups {
    int64_t blocks, groups;

    Groups(int64_t num_blocks, int64_t block_bytes, int64_t num_passes, int64_t num_rows) {
        const int64_t threads = num_threads();
        blocks = up(num_blocks, MOST_BLOCKS);
        if (threads > 1) {
            const int64_t work = block_bytes * (ROWS_PER_READ + num_rows / num_passes) / ROWS_PER_READ;
            const int64_t even = num_blocks * num_passes / (PARTS_PER_THREAD * threads), worth = PART_BYTES / work;
            blocks = least(blocks, up((even > worth ? even : worth) + 1, MOST_BLOCKS));
        }
        groups = (num_blocks + blocks - 1) / blocks;
    }
};

int64_t bytes_of(int64_t format) { return format == FLOAT32 ? 4 : format == BFLOAT16 ? 2 : 1; }

}  // namespace

int int8_level(int cap) {
    __builtin_cpu_init();
    int found = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found = 1;
    if (found && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        found = 2;
    if (found == 2 && cap > 2 && may_use_amx()) found = AMX;
    return cap < found ? cap : found;
}

// --------------------------------------------------------------------------------------------------------- linear

namespace {

struct LinearScratch {
    int64_t stride, most, panel;
    char* rows;
    float* scales;

    LinearScratch(Pieces& pieces, int level, int64_t num_rows, int64_t num_inputs)
        : stride(row_stride(product_of(level), num_inputs)), most(rows_at_once(stride, num_rows)),
          panel(least(PANEL * most, num_rows)), rows(pieces.take<char>(panel * stride)),
          scales(pieces.take<float>(panel)) {}
};

// Blocks in a call of `multiply`, and memory for their sums.
int64_t blocks_at_once(const Int8Product& product, int64_t num_rows) {
    return num_rows == 1 ? product.most_of_one : MOST_BLOCKS;
}

int32_t* own_sums(int64_t num_blocks, int64_t num_rows) {
    return reinterpret_cast<int32_t*>(own_memory(num_blocks * num_rows * SUMS * int64_t(sizeof(int32_t))));
}

}  // namespace

void int8_linear(int level, const char* x, int64_t x_format, const float* x_scales, int64_t num_rows,
                 const Int8Weight& weight, char* y, int64_t y_format) {
    const Int8Product& product = product_of(level);
    const int64_t width = weight.num_inputs, num_blocks = weight.num_blocks();
    const auto s = in_own_memory<LinearScratch>(level, num_rows, width);
    for (int64_t first = 0; first < num_rows; first += s.panel) {
        const int64_t in_panel = least(num_rows - first, s.panel), passes = (in_panel + s.most - 1) / s.most;
        for_rows(in_panel, width, [&](int64_t r) {
            const char* row = x + (first + r) * width * bytes_of(x_format);
            const int8_t* q = reinterpret_cast<const int8_t*>(row);
            if (x_format == INT8) {
                s.scales[r] = x_scales[first + r];
            } else {
                int8_t* own = reinterpret_cast<int8_t*>(own_memory(width));
                s.scales[r] = row_function(level, x_format)(row, width, own);
                q = own;
            }
            product.spread(q, width, s.rows + r * s.stride);
        });

        const Groups cut(num_blocks, weight.block_bytes(), passes, in_panel);
        const int64_t parts = passes * cut.groups, threads = num_threads();
        share(parts, [&](int64_t part) {
            const int64_t begin = part / cut.groups * s.most, count = least(in_panel - begin, s.most);
            const int64_t from = part % cut.groups * cut.blocks, end = least(num_blocks, from + cut.blocks);
            const int64_t later = (part + threads) % cut.groups * cut.blocks;                // what comes next, likely
            const int64_t most = blocks_at_once(product, count);
            int32_t* acc = own_sums(most, count);
            for (int64_t b = from; b < end; b += most) {
                const int64_t blocks = least(end - b, most);
                product.multiply(s.rows + begin * s.stride, s.stride, count, weight.num_quads(), weight.block(b), blocks,
                                 weight.sums + b * BLOCK, weight.block(b + blocks < end ? b + blocks : later), acc);
                for (int64_t i = 0; i < blocks * count; i++) {
                    const int64_t r = begin + i % count, channel = (b + i / count) * BLOCK;
                    const int64_t left = weight.num_outputs - channel;
                    float value[BLOCK];
                    rescale(acc + i * BLOCK, s.scales[r], weight.scales + channel, value);
                    store(value, least(left, BLOCK), y, y_format, (first + r) * weight.num_outputs + channel);
                }
            }
        });
    }
}

// ----------------------------------------------------------------------------------------------------- expert FFN

namespace {

// Rows of one expert that one pass over its weights serves: pairs `first` to `first + count` of a panel.
struct PassOfExpert {
    int64_t expert, first, count;
};

struct FfnScratch {
    int64_t stride, hidden_stride, most, panel, hidden_width;
    int64_t* order;                                // pairs by expert
    int64_t* first;                                // of each expert, in that order
    int8_t* q;                                     // rows, if they come as floats
    float* q_scales;
    PassOfExpert* passes;
    char* rows;
    char* hidden_rows;
    float* hidden;
    float* hidden_scales;

    FfnScratch(Pieces& pieces, int level, int64_t x_format, int64_t num_rows, int64_t num_pairs, int64_t num_experts,
               int64_t width, int64_t num_hidden)
        : stride(row_stride(product_of(level), width)), hidden_stride(row_stride(product_of(level), num_hidden)),
          most(rows_at_once(stride > hidden_stride ? stride : hidden_stride, num_pairs)),
          panel(least(PANEL * most, num_pairs)), hidden_width(up(num_hidden, BLOCK)),
          order(pieces.take<int64_t>(num_pairs)), first(pieces.take<int64_t>(num_experts + 1)),
          q(pieces.take<int8_t>(x_format == INT8 ? 0 : num_rows * width)),
          q_scales(pieces.take<float>(x_format == INT8 ? 0 : num_rows)), passes(pieces.take<PassOfExpert>(panel)),
          rows(pieces.take<char>(panel * stride)), hidden_rows(pieces.take<char>(panel * hidden_stride)),
          hidden(pieces.take<float>(panel * hidden_width)), hidden_scales(pieces.take<float>(panel)) {}
};

}  // namespace

int64_t expert_ffn(int level, const char* x, int64_t x_format, const float* x_scales, int64_t num_rows,
                   const int64_t* row_of_pair, const int64_t* expert_of_pair, int64_t num_pairs, int64_t num_experts,
                   const Int8Weight& gate_up, const Int8Weight& down, char* y, int64_t y_format) {
    for (int64_t p = 0; p < num_pairs; p++)
        if (row_of_pair[p] < 0 || row_of_pair[p] >= num_rows || expert_of_pair[p] < 0 ||
            expert_of_pair[p] >= num_experts)
            return p;
    const Int8Product& product = product_of(level);
    const int64_t width = gate_up.num_inputs, num_hidden = down.num_inputs, threads = num_threads();
    const auto s = in_own_memory<FfnScratch>(level, x_format, num_rows, num_pairs, num_experts, width, num_hidden);

    const int8_t* q = reinterpret_cast<const int8_t*>(x);
    if (x_format != INT8) {
        for_rows(num_rows, width, [&](int64_t r) {
            s.q_scales[r] = row_function(level, x_format)(x + r * width * bytes_of(x_format), width, s.q + r * width);
        });
        q = s.q;
        x_scales = s.q_scales;
    }

    std::memset(s.first, 0, size_t(num_experts + 1) * sizeof *s.first);
    for (int64_t p = 0; p < num_pairs; p++) s.first[expert_of_pair[p] + 1]++;
    for (int64_t e = 0; e < num_experts; e++) s.first[e + 1] += s.first[e];
    for (int64_t p = 0; p < num_pairs; p++) s.order[s.first[expert_of_pair[p]]++] = p;
    // Now first[e] is the end of expert e, and so the beginning of the next.

    for (int64_t start = 0, e = 0; start < num_pairs; start += s.panel) {
        const int64_t* pairs = s.order + start;
        const int64_t in_panel = least(num_pairs - start, s.panel);
        int64_t num_passes = 0;
        for (int64_t at = 0; at < in_panel;) {
            while (s.first[e] <= start + at) e++;
            const int64_t count = least(least(s.first[e] - start, in_panel) - at, s.most);
            s.passes[num_passes++] = {e, at, count};
            at += count;
        }
        for_rows(in_panel, width, [&](int64_t i) {
            product.spread(q + row_of_pair[pairs[i]] * width, width, s.rows + i * s.stride);
        });

        const Groups in_cut(gate_up.num_blocks(), gate_up.block_bytes(), num_passes, in_panel);
        const Groups out_cut(down.num_blocks(), down.block_bytes(), num_passes, in_panel);
        const int64_t in_parts = num_passes * in_cut.groups, out_parts = num_passes * out_cut.groups;
        const auto block_of_part = [&](const Int8Weight& stack, const Groups& cut, int64_t part) {
            const int64_t expert = s.passes[part / cut.groups].expert;
            return stack.expert(expert).block(part % cut.groups * cut.blocks);
        };

        share(in_parts, [&](int64_t part) {
            const PassOfExpert pass = s.passes[part / in_cut.groups];
            const Int8Weight in = gate_up.expert(pass.expert);
            const int64_t from = part % in_cut.groups * in_cut.blocks, end = least(in.num_blocks(), from + in_cut.blocks);
            const int64_t later = part + threads;                                            // what comes next, likely
            const int8_t* next = later < in_parts ? block_of_part(gate_up, in_cut, later)
                                                  : block_of_part(down, out_cut, least(later - in_parts, out_parts - 1));
            const int64_t most = blocks_at_once(product, pass.count);
            int32_t* acc = own_sums(most, pass.count);
            for (int64_t b = from; b < end; b += most) {
                const int64_t blocks = least(end - b, most);
                product.multiply(s.rows + pass.first * s.stride, s.stride, pass.count, in.num_quads(), in.block(b), blocks,
                                 in.sums + b * BLOCK, b + blocks < end ? in.block(b + blocks) : next, acc);
                for (int64_t at = 0; at < blocks; at += 2)                   // of gate, and then of up
                    for (int64_t i = 0; i < pass.count; i++) {
                        const float scale = x_scales[row_of_pair[pairs[pass.first + i]]];
                        float gate[BLOCK], up[BLOCK];
                        rescale(acc + (at * pass.count + i) * BLOCK, scale, in.scales + (b + at) * BLOCK, gate);
                        rescale(acc + ((at + 1) * pass.count + i) * BLOCK, scale, in.scales + (b + at + 1) * BLOCK, up);
                        product.gate(gate, up, s.hidden + (pass.first + i) * s.hidden_width + (b + at) / 2 * BLOCK);
                    }
            }
        });
        for_rows(in_panel, num_hidden, [&](int64_t i) {
            int8_t* own = reinterpret_cast<int8_t*>(own_memory(num_hidden));
            s.hidden_scales[i] = row_function(level, FLOAT32)(s.hidden + i * s.hidden_width, num_hidden, own);
            product.spread(own, num_hidden, s.hidden_rows + i * s.hidden_stride);
        });
        share(out_parts, [&](int64_t part) {
            const PassOfExpert pass = s.passes[part / out_cut.groups];
            const Int8Weight out = down.expert(pass.expert);
            const int64_t from = part % out_cut.groups * out_cut.blocks;
            const int64_t end = least(out.num_blocks(), from + out_cut.blocks);
            const int8_t* next = block_of_part(down, out_cut, least(part + threads, out_parts - 1));
            const int64_t most = blocks_at_once(product, pass.count);
            int32_t* acc = own_sums(most, pass.count);
            for (int64_t b = from; b < end; b += most) {
                const int64_t blocks = least(end - b, most);
                product.multiply(s.hidden_rows + pass.first * s.hidden_stride, s.hidden_stride, pass.count,
                                 out.num_quads(), out.block(b), blocks, out.sums + b * BLOCK,
                                 b + blocks < end ? out.block(b + blocks) : next, acc);
                for (int64_t i = 0; i < blocks * pass.count; i++) {
                    const int64_t pair = pass.first + i % pass.count, channel = (b + i / pass.count) * BLOCK;
                    const int64_t left = width - channel;
                    float value[BLOCK];
                    rescale(acc + i * BLOCK, s.hidden_scales[pair], out.scales + channel, value);
                    store(value, least(left, BLOCK), y, y_format, pairs[pair] * width + channel);
                }
            }
        });
    }
    return -1;
}

// -------------------------------------------------------------------------------------------------------- reading

namespace {

typedef uint64_t Half __attribute__((vector_size(32), aligned(1)));

// Four streams keep more lines under way than one.
inline __attribute__((always_inline)) int64_t read_streams(const char* from, int64_t bytes) {
    constexpr int64_t LINE = 64;
    const int64_t share = bytes / 4 / LINE * LINE;
    Half sum[8] = {};
    for (int64_t at = 0; at < share; at += LINE) {
        const Half* lines[4] = {
            reinterpret_cast<const Half*>(from + at), reinterpret_cast<const Half*>(from + share + at),
            reinterpret_cast<const Half*>(from + 2 * share + at), reinterpret_cast<const Half*>(from + 3 * share + at)};
        sum[0] += lines[0][0], sum[1] += lines[0][1], sum[2] += lines[1][0], sum[3] += lines[1][1];
        sum[4] += lines[2][0], sum[5] += lines[2][1], sum[6] += lines[3][0], sum[7] += lines[3][1];
    }
    uint64_t all = 0;
    for (const Half& each : sum) all += each[0] + each[1] + each[2] + each[3];
    return int64_t(all);
}

int64_t read_plain(const char* from, int64_t bytes) { return read_streams(from, bytes); }
__attribute__((target("avx2"))) int64_t read_avx2(const char* from, int64_t bytes) { return read_streams(from, bytes); }
__attribute__((target("avx512f"))) int64_t read_avx512(const char* from, int64_t bytes) {
    return read_streams(from, bytes);
}

}  // namespace

int64_t read_memory(int level, const char* from, int64_t bytes) {
    int64_t (*const functions[])(const char*, int64_t) = {read_plain, read_avx2, read_avx512};
    const int64_t threads = num_threads(), parts = threads == 1 ? 1 : PARTS_PER_THREAD * threads;
    std::atomic<int64_t> all{0};
    share(parts, [&](int64_t part) {
        const int64_t begin = bytes * part / parts, end = bytes * (part + 1) / parts;
        all += functions[vectors_of(level)](from + begin, end - begin);
    });
    return all;
}

}  // namespace tripool
