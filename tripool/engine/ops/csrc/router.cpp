// The router: from logits to the chosen experts and their weights. The slow definition is ops/router.py.

#include <vector>

#include "glue.h"
#include "int8_plain.h"
#include "rows.h"

namespace tripool {
namespace {

// Not a number is above all others, as in torch; equal ones keep their order.
INLINE bool above(float a, float b) { return a > b || (a != a && b == b); }

// Indices of the highest, the lowest index first among equal ones.
INLINE void highest(const float* score, int64_t count, int64_t num_picks, int64_t* picks) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        if (found == num_picks && !above(score[i], score[picks[found - 1]])) continue;
        int64_t place = found < num_picks ? found++ : found - 1;
        for (; place > 0 && above(score[i], score[picks[place - 1]]); place--) picks[place] = picks[place - 1];
        picks[place] = i;
    }
}

INLINE float power_of_two(int32_t n) {
    const int32_t bits = (n + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return power;
}

// exp(x) for all x, as `exponential` of int8_plain.h, but that its power of two comes in two factors: so results may be
// less than normal numbers, and overflow to infinity.
INLINE float exponential_of_any(float x) {
    float within = x > 89.0f ? 89.0f : x;
    within = within < -104.0f ? -104.0f : within;
    const float magic = 12582912.0f;
    const float shifted = within * 1.44269504f + magic, n = shifted - magic;
    const int32_t power = int32_t(n), half = power / 2;
    return exponential(within - n * 0.693359375f + n * 2.12194440e-4f) * power_of_two(half) * power_of_two(power - half);
}

INLINE void sigmoids(const float* __restrict logits, int64_t count, float* __restrict score) {
    for (int64_t e = 0; e < count; e++) {
        const float x = -logits[e];
        score[e] = x == x ? 1.0f / (1.0f + exponential_of_any(x)) : x;
    }
}

INLINE void softmax(const float* __restrict logits, int64_t count, float* __restrict score) {
    float most = logits[0], sum = 0.0f;
    for (int64_t e = 1; e < count; e++) most = above(logits[e], most) ? logits[e] : most;
    for (int64_t e = 0; e < count; e++) {
        const float x = logits[e] - most;
        score[e] = x == x ? exponential_of_any(x) : x;
    }
    for (int64_t e = 0; e < count; e++) sum += score[e];
    for (int64_t e = 0; e < count; e++) score[e] = score[e] / sum;
}

struct Scratch {
    std::vector<float> score, choice, group;
    std::vector<int64_t> picks;
};

INLINE void within_chosen_groups(const Routing& r, Scratch& s) {
    const int64_t size = r.num_experts / r.num_groups;
    for (int64_t g = 0; g < r.num_groups; g++) {
        const float* choice = s.choice.data() + g * size;
        highest(choice, size, r.group_best, s.picks.data());
        float sum = choice[s.picks[0]];
        for (int64_t i = 1; i < r.group_best; i++) sum += choice[s.picks[i]];
        s.group[g] = sum;
    }
    highest(s.group.data(), r.num_groups, r.num_chosen_groups, s.picks.data());
    for (int64_t g = 0; g < r.num_groups; g++) s.group[g] = -__builtin_inff();
    for (int64_t i = 0; i < r.num_chosen_groups; i++) s.group[s.picks[i]] = 0.0f;
    for (int64_t e = 0; e < r.num_experts; e++) s.choice[e] += s.group[e / size];
}

template <class T>
INLINE void route_rows(const Routing& r, const float* logits, const float* bias, int64_t num_tokens, int64_t* experts,
                       float* weights) {
    static thread_local Scratch s;
    s.score.resize(size_t(r.num_experts));
    s.choice.resize(size_t(r.num_experts));
    s.group.resize(size_t(r.num_groups));
    s.picks.resize(size_t(r.num_experts));
    for (int64_t t = 0; t < num_tokens; t++, logits += r.num_experts, experts += r.num_picks, weights += r.num_picks) {
        float* score = s.score.data();
        float* choice = s.choice.data();
        if (r.by_softmax)
            softmax(logits, r.num_experts, score);
        else
            sigmoids(logits, r.num_experts, score);
        for (int64_t e = 0; e < r.num_experts; e++) choice[e] = bias ? score[e] + bias[e] : score[e];
        if (r.num_chosen_groups < r.num_groups) within_chosen_groups(r, s);
        highest(choice, r.num_experts, r.num_picks, experts);
        float sum = 0.0f;
        for (int64_t k = 0; k < r.num_picks; k++) sum += weights[k] = score[experts[k]];
        for (int64_t k = 0; k < r.num_picks; k++)
            weights[k] = (r.normalised ? weights[k] / (sum + 1e-20f) : weights[k]) * r.factor;
    }
}

FOR_EACH_LEVEL(route_rows, void,
               (const Routing& r, const float* logits, const float* bias, int64_t num_tokens, int64_t* experts,
                float* weights),
               (r, logits, bias, num_tokens, experts, weights))

}  // namespace

void route(int level, const Routing& routing, const float* logits, const float* bias, int64_t num_tokens,
           int64_t* experts, float* weights) {
    route_rows_at(level, FLOAT32)(routing, logits, bias, num_tokens, experts, weights);
}

}  // namespace tripool
