// Log-probabilities of chosen tokens and of the likeliest. The slow definition is ops/logprobs.py.

#include <cmath>

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
INLINE void look_at_row(const float* logits, int64_t num_tokens, int64_t token, int64_t num_top, float* logprobs,
                        int64_t* top) {
    static thread_local Scratch s;
    const float most = look_at_blocks(logits, num_tokens, s.blocks);
    const double log_total = std::log(total_weight(logits, num_tokens, most, s));
    find_likeliest(logits, num_tokens, num_top, s.blocks, s.keys);
    int64_t count = 0;
    for (const uint64_t each : s.keys) top[count++] = token_of(each);
    for (int64_t other = 0; count < num_top; other++)              // those that have no weight come last
        if (!(logits[other] > NONE)) top[count++] = other;
    for (int64_t i = 0; i <= num_top; i++) {
        const float given = logits[i ? top[i - 1] : token], logit = given == given ? given : NONE;
        logprobs[i] = float((logit == most ? 0.0 : double(logit) - double(most)) - log_total);
    }
}

FOR_EACH_LEVEL(look_at_row, void,
               (const float* logits, int64_t num_tokens, int64_t token, int64_t num_top, float* logprobs, int64_t* top),
               (logits, num_tokens, token, num_top, logprobs, top))

}  // namespace

void logprobs(int level, const float* logits, int64_t stride, int64_t num_tokens, const Logprobs& wanted) {
    const auto look = look_at_row_at(level, FLOAT32);
    share(wanted.num_rows, [&](int64_t n) {
        look(logits + wanted.rows[n] * stride, num_tokens, wanted.tokens[n], wanted.num_top,
             wanted.logprobs + n * (1 + wanted.num_top), wanted.top + n * wanted.num_top);
    });
}

}  // namespace tripool
