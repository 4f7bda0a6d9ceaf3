// What log-probabilities of a row are made of. The slow definition is ops/logprobs.py.

#include "glue.h"
#include "rows.h"
#include "threads.h"
#include "weights.h"

namespace tripool {
namespace {

struct Scratch {
    Blocks blocks;
    std::vector<float> weight;
    std::vector<uint64_t> keys;
};

INLINE double total_weight(const float* logits, int64_t num_tokens, float most, Scratch& s) {
    if (!(most > NONE)) return double(num_tokens);
    const Tempered tempered = {most, 1.0f, rounder(num_tokens), 0.0f};
    s.weight.resize(size_t(s.blocks.size));
    double total = 0.0;
    for (int64_t start = 0, number = 0; start < num_tokens; start += s.blocks.size, number++) {
        if (s.blocks.most[size_t(number)] - most <= LOWEST_POWER) continue;        // nothing there weighs anything
        const int64_t size = std::min(s.blocks.size, num_tokens - start);
        weigh(logits + start, size, tempered, s.weight.data());
        total += sum_of(s.weight.data(), size, 0.0f);
    }
    return total;
}

template <class T>
INLINE void look_at_row(const float* logits, int64_t num_tokens, int64_t num_top, float& most, double& total,
                        int64_t* top) {
    static thread_local Scratch s;
    most = look_at_blocks(logits, num_tokens, s.blocks);
    total = total_weight(logits, num_tokens, most, s);
    find_likeliest(logits, num_tokens, num_top, s.blocks, s.keys);
    int64_t count = 0;
    for (const uint64_t each : s.keys) top[count++] = token_of(each);
    for (int64_t token = 0; count < num_top; token++)              // those that have no weight come last
        if (!(logits[token] > NONE)) top[count++] = token;
}

FOR_EACH_LEVEL(look_at_row, void,
               (const float* logits, int64_t num_tokens, int64_t num_top, float& most, double& total, int64_t* top),
               (logits, num_tokens, num_top, most, total, top))

}  // namespace

void logprobs(int level, const float* logits, int64_t stride, const int64_t* rows, int64_t num_rows, int64_t num_tokens,
              int64_t num_top, const Likelihoods& found) {
    const auto look = look_at_row_at(level, FLOAT32);
    share(num_rows, [&](int64_t n) {
        look(logits + rows[n] * stride, num_tokens, num_top, found.most[n], found.total[n], found.top + n * num_top);
    });
}

}  // namespace tripool
