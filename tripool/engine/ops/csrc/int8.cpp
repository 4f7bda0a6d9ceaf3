// INT8 linear and grouped expert FFN: what is the same at every level. The slow definitions are ops/int8_linear.py and
// ops/expert_ffn.py.
//
// One thread for now. Blocks of channels do not depend on each other: a pool would share out the loops over blocks.

#include "int8.h"

#include <cstring>

namespace tripool {
namespace {

constexpr int64_t ROWS_BYTES = 192 << 10;          // of rows that one pass over the weights serves: they stay in L2
constexpr int64_t LEAST_ROWS = 12;

const Int8Product& product_of(int level) {
    const Int8Product* const products[] = {&INT8_PLAIN, &INT8_AVX2, &INT8_VNNI};
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

// Hands out pieces of the scratch memory; without memory, it counts.
class Pieces {
  public:
    explicit Pieces(char* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(base_ ? base_ + used : nullptr);
        used += up(count * int64_t(sizeof(T)), 64);
        return piece;
    }

    int64_t used = 0;

  private:
    char* base_;
};

inline uint16_t rounded(float value) {             // to bfloat16, to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
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

int64_t bytes_of(int64_t format) { return format == FLOAT32 ? 4 : format == BFLOAT16 ? 2 : 1; }

}  // namespace

int int8_level(int cap) {
    __builtin_cpu_init();
    int found = 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found = 1;
    if (found && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        found = 2;
    return cap < found ? cap : found;
}

// --------------------------------------------------------------------------------------------------------- linear

namespace {

struct LinearScratch {
    int64_t stride, most;
    int8_t* q;
    char* rows;
    float* scales;
    int32_t* acc;

    LinearScratch(Pieces& pieces, int level, int64_t num_rows, int64_t num_inputs)
        : stride(row_stride(product_of(level), num_inputs)), most(rows_at_once(stride, num_rows)),
          q(pieces.take<int8_t>(num_inputs)), rows(pieces.take<char>(most * stride)), scales(pieces.take<float>(most)),
          acc(pieces.take<int32_t>(MOST_BLOCKS * most * SUMS)) {}
};

}  // namespace

int64_t int8_linear_scratch(int level, int64_t num_rows, int64_t num_inputs) {
    Pieces pieces(nullptr);
    LinearScratch(pieces, level, num_rows, num_inputs);
    return pieces.used;
}

void int8_linear(int level, const char* x, int64_t x_format, const float* x_scales, int64_t num_rows,
                 const Int8Weight& weight, char* y, int64_t y_format, char* scratch) {
    const Int8Product& product = product_of(level);
    const int64_t width = weight.num_inputs, num_blocks = weight.num_blocks();
    Pieces pieces(scratch);
    LinearScratch s(pieces, level, num_rows, width);
    for (int64_t first = 0; first < num_rows; first += s.most) {
        const int64_t count = num_rows - first < s.most ? num_rows - first : s.most;
        for (int64_t r = 0; r < count; r++) {
            const char* row = x + (first + r) * width * bytes_of(x_format);
            const int8_t* q = s.q;
            if (x_format == INT8) {
                q = reinterpret_cast<const int8_t*>(row);
                s.scales[r] = x_scales[first + r];
            } else {
                s.scales[r] = row_function(level, x_format)(row, width, s.q);
            }
            product.spread(q, width, s.rows + r * s.stride);
        }
        for (int64_t b = 0; b < num_blocks; b += MOST_BLOCKS) {
            const int64_t blocks = num_blocks - b < MOST_BLOCKS ? num_blocks - b : MOST_BLOCKS;
            const int8_t* next = b + blocks < num_blocks ? weight.block(b + blocks) : weight.data;
            product.multiply(s.rows, s.stride, count, weight.num_quads(), weight.block(b), blocks,
                             weight.sums + b * BLOCK, next, s.acc);
            for (int64_t i = 0; i < blocks * count; i++) {
                const int64_t r = i % count, channel = (b + i / count) * BLOCK, left = weight.num_outputs - channel;
                float value[BLOCK];
                rescale(s.acc + i * BLOCK, s.scales[r], weight.scales + channel, value);
                store(value, left < BLOCK ? left : BLOCK, y, y_format, (first + r) * weight.num_outputs + channel);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------- expert FFN

namespace {

struct FfnScratch {
    int64_t stride, hidden_stride, most, hidden_width;
    int64_t* order;                                // pairs by expert
    int64_t* first;                                // of each expert, in that order
    int8_t* q;                                     // rows, if they come as floats
    float* q_scales;
    char* rows;
    char* hidden_rows;
    float* hidden;
    int8_t* hidden_q;
    float* hidden_scales;
    int32_t* acc;

    FfnScratch(Pieces& pieces, int level, int64_t x_format, int64_t num_rows, int64_t num_pairs, int64_t num_experts,
               int64_t width, int64_t num_hidden)
        : stride(row_stride(product_of(level), width)), hidden_stride(row_stride(product_of(level), num_hidden)),
          most(rows_at_once(stride > hidden_stride ? stride : hidden_stride, num_pairs)),
          hidden_width(up(num_hidden, BLOCK)), order(pieces.take<int64_t>(num_pairs)),
          first(pieces.take<int64_t>(num_experts + 1)), q(pieces.take<int8_t>(x_format == INT8 ? 0 : num_rows * width)),
          q_scales(pieces.take<float>(x_format == INT8 ? 0 : num_rows)), rows(pieces.take<char>(most * stride)),
          hidden_rows(pieces.take<char>(most * hidden_stride)), hidden(pieces.take<float>(most * hidden_width)),
          hidden_q(pieces.take<int8_t>(num_hidden)), hidden_scales(pieces.take<float>(most)),
          acc(pieces.take<int32_t>(MOST_BLOCKS * most * SUMS)) {}
};

}  // namespace

int64_t expert_ffn_scratch(int level, int64_t x_format, int64_t num_rows, int64_t num_pairs, int64_t num_experts,
                           int64_t width, int64_t hidden) {
    Pieces pieces(nullptr);
    FfnScratch(pieces, level, x_format, num_rows, num_pairs, num_experts, width, hidden);
    return pieces.used;
}

int64_t expert_ffn(int level, const char* x, int64_t x_format, const float* x_scales, int64_t num_rows,
                   const int64_t* row_of_pair, const int64_t* expert_of_pair, int64_t num_pairs, int64_t num_experts,
                   const Int8Weight& gate_up, const Int8Weight& down, char* y, int64_t y_format, char* scratch) {
    for (int64_t p = 0; p < num_pairs; p++)
        if (row_of_pair[p] < 0 || row_of_pair[p] >= num_rows || expert_of_pair[p] < 0 ||
            expert_of_pair[p] >= num_experts)
            return p;
    const Int8Product& product = product_of(level);
    const int64_t width = gate_up.num_inputs, num_hidden = down.num_inputs;
    Pieces pieces(scratch);
    FfnScratch s(pieces, level, x_format, num_rows, num_pairs, num_experts, width, num_hidden);

    const int8_t* q = reinterpret_cast<const int8_t*>(x);
    if (x_format != INT8) {
        for (int64_t r = 0; r < num_rows; r++)
            s.q_scales[r] = row_function(level, x_format)(x + r * width * bytes_of(x_format), width, s.q + r * width);
        q = s.q;
        x_scales = s.q_scales;
    }

    std::memset(s.first, 0, size_t(num_experts + 1) * sizeof *s.first);
    for (int64_t p = 0; p < num_pairs; p++) s.first[expert_of_pair[p] + 1]++;
    for (int64_t e = 0; e < num_experts; e++) s.first[e + 1] += s.first[e];
    for (int64_t p = 0; p < num_pairs; p++) s.order[s.first[expert_of_pair[p]]++] = p;
    // Now first[e] is the end of expert e, and so the beginning of the next.

    for (int64_t e = 0, begin = 0; e < num_experts; begin = s.first[e++]) {
        const Int8Weight in = gate_up.expert(e), out = down.expert(e);
        for (int64_t start = begin; start < s.first[e]; start += s.most) {
            const int64_t* pairs = s.order + start;
            const int64_t count = s.first[e] - start < s.most ? s.first[e] - start : s.most;
            for (int64_t i = 0; i < count; i++)
                product.spread(q + row_of_pair[pairs[i]] * width, width, s.rows + i * s.stride);
            for (int64_t b = 0; b < in.num_blocks(); b += MOST_BLOCKS) {
                const int64_t left = in.num_blocks() - b, blocks = left < MOST_BLOCKS ? left : MOST_BLOCKS;
                const int8_t* next = b + blocks < in.num_blocks() ? in.block(b + blocks) : out.data;
                product.multiply(s.rows, s.stride, count, in.num_quads(), in.block(b), blocks, in.sums + b * BLOCK,
                                 next, s.acc);
                for (int64_t at = 0; at < blocks; at += 2)                   // of gate, and then of up
                    for (int64_t i = 0; i < count; i++) {
                        const float scale = x_scales[row_of_pair[pairs[i]]];
                        float gate[BLOCK], up[BLOCK];
                        rescale(s.acc + (at * count + i) * BLOCK, scale, in.scales + (b + at) * BLOCK, gate);
                        rescale(s.acc + ((at + 1) * count + i) * BLOCK, scale, in.scales + (b + at + 1) * BLOCK, up);
                        product.gate(gate, up, s.hidden + i * s.hidden_width + (b + at) / 2 * BLOCK);
                    }
            }
            for (int64_t i = 0; i < count; i++) {
                s.hidden_scales[i] = row_function(level, FLOAT32)(s.hidden + i * s.hidden_width, num_hidden, s.hidden_q);
                product.spread(s.hidden_q, num_hidden, s.hidden_rows + i * s.hidden_stride);
            }
            for (int64_t b = 0; b < out.num_blocks(); b += MOST_BLOCKS) {
                const int64_t left_blocks = out.num_blocks() - b;
                const int64_t blocks = left_blocks < MOST_BLOCKS ? left_blocks : MOST_BLOCKS;
                product.multiply(s.hidden_rows, s.hidden_stride, count, out.num_quads(), out.block(b), blocks,
                                 out.sums + b * BLOCK, out.block(b + blocks), s.acc);
                for (int64_t i = 0; i < blocks * count; i++) {
                    const int64_t pair = i % count, channel = (b + i / count) * BLOCK, left = width - channel;
                    float value[BLOCK];
                    rescale(s.acc + i * BLOCK, s.hidden_scales[pair], out.scales + channel, value);
                    store(value, left < BLOCK ? left : BLOCK, y, y_format, pairs[pair] * width + channel);
                }
            }
        }
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
    return functions[level](from, bytes);
}

}  // namespace tripool
