// How likely tokens are, by their logits: weights, and the likeliest ones. The slow definition is `weights` of
// ops/sample.py.
//
// Weights are multiples of a grain so coarse that every sum of them is exact: it does not matter in which order they are
// added.
#pragma once

#include <algorithm>
#include <cfloat>
#include <vector>

#include "exponential.h"
#include "rows.h"

namespace tripool {
namespace {

constexpr float NONE = -__builtin_inff();
constexpr float LOWEST_POWER = -26.0f;             // exp of it is less than half a grain
constexpr int64_t MOST_BLOCKS = 512;

typedef int64_t PairLanes __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(32)));
typedef float HalfOfLanes __attribute__((vector_size(16)));
typedef float HalfOfLanesAnywhere __attribute__((vector_size(16), aligned(4), may_alias));

// The largest logits of blocks of tokens that lie side by side.
struct Blocks {
    int64_t size;
    std::vector<float> most, sorted;
};

// Added and taken away again, it rounds a weight to a multiple of the grain: 2**-35 for up to 2**18 tokens.
float rounder(int64_t num_tokens) {
    float at = 3.0f * 0x1p-13f;
    for (int64_t most = 1 << 18; most < num_tokens; most *= 2) at *= 2.0f;
    return at;
}

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// In rising order: the largest logits first, what is no number last, the lowest index first among equal ones.
uint64_t key(float logit, int64_t token) {
    const uint32_t bits = bits_of(logit == logit ? logit + 0.0f : NONE);   // zeros are equal
    const uint32_t rising = bits >> 31 ? ~bits : bits | 0x80000000;
    return uint64_t(~rising) << 32 | uint64_t(token);
}

int64_t token_of(uint64_t key) { return int64_t(uint32_t(key)); }

INLINE bool any(const IntLanes& lanes) {
    const auto pairs = reinterpret_cast<const PairLanes&>(lanes);
    return pairs[0] | pairs[1] | pairs[2] | pairs[3];
}

// The largest of some numbers. What is not a number does not count, but `broken` says whether there is such a thing.
INLINE float most_of(const float* x, int64_t count, IntLanes& broken) {
    Lanes most[4], value;
    for (Lanes& each : most) each = NONE + Lanes{};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES) {
        for (int part = 0; part < 4; part++) {
            load(x + i + part * LANES, value);
            broken |= value != value;
            most[part] = value > most[part] ? value : most[part];
        }
    }
    for (; i + LANES <= count; i += LANES) {
        load(x + i, value);
        broken |= value != value;
        most[0] = value > most[0] ? value : most[0];
    }
    for (int part = 1; part < 4; part++) most[0] = most[part] > most[0] ? most[part] : most[0];
    float all = NONE;
    for (; i < count; i++) {
        broken[0] |= -(x[i] != x[i]);
        all = x[i] > all ? x[i] : all;
    }
    for (int lane = 0; lane < LANES; lane++) all = most[0][lane] > all ? most[0][lane] : all;
    return all;
}

struct Tempered {
    float most, inverse, rounder, least;           // least: what is less likely than this part of the likeliest is dropped
};

INLINE void weigh(const float* logits, const Tempered& t, float* weight) {
    Lanes value;
    load(logits, value);
    const Lanes below = value == t.most ? Lanes{} : value - t.most, lowest = LOWEST_POWER + Lanes{};
    Lanes power = below * t.inverse;
    power = power > lowest ? power : lowest;
    exponential_of<Lanes, IntLanes>(power, value);
    value = (value + t.rounder) - t.rounder;
    store(value >= t.least ? value : Lanes{}, weight);
}

// Where weights go may be where logits are.
INLINE void weigh(const float* logits, int64_t count, const Tempered& t, float* weight) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) weigh(logits + i, t, weight + i);
    if (i == count) return;
    float rest[LANES] = {};
    std::copy(logits + i, logits + count, rest);
    weigh(rest, t, rest);
    std::copy(rest, rest + (count - i), weight + i);
}

INLINE double sum_of(const float* weight, int64_t count, float least) {
    Doubles low = {}, high = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const HalfOfLanes first = *reinterpret_cast<const HalfOfLanesAnywhere*>(weight + i);
        const HalfOfLanes second = *reinterpret_cast<const HalfOfLanesAnywhere*>(weight + i + LANES / 2);
        low += __builtin_convertvector(first >= least ? first : HalfOfLanes{}, Doubles);
        high += __builtin_convertvector(second >= least ? second : HalfOfLanes{}, Doubles);
    }
    low += high;
    double sum = (low[0] + low[1]) + (low[2] + low[3]);
    for (; i < count; i++) sum += weight[i] >= least ? weight[i] : 0.0f;
    return sum;
}

// Fills the blocks. The largest logit of all; what is not a number does not count.
INLINE float look_at_blocks(const float* logits, int64_t num_tokens, Blocks& blocks) {
    blocks.size = (std::max(num_tokens / MOST_BLOCKS, int64_t(1)) + 15) / 16 * 16;
    blocks.most.clear();
    IntLanes broken = {};
    float most = NONE;
    for (int64_t start = 0; start < num_tokens; start += blocks.size) {
        blocks.most.push_back(most_of(logits + start, std::min(blocks.size, num_tokens - start), broken));
        most = std::max(most, blocks.most.back());
    }
    return most;
}

// Keys of the k likeliest tokens, in rising order; without those that have no weight. Where there are k blocks, k of
// them have a logit that is not below the bound, so no token below it can be among the k likeliest.
INLINE void find_likeliest(const float* logits, int64_t num_tokens, int64_t k, Blocks& blocks, std::vector<uint64_t>& keys) {
    keys.clear();
    if (k < 1) return;
    float bound = -FLT_MAX;
    if (k <= int64_t(blocks.most.size())) {
        blocks.sorted = blocks.most;
        std::nth_element(blocks.sorted.begin(), blocks.sorted.begin() + (k - 1), blocks.sorted.end(),
                         std::greater<float>());
        bound = std::max(bound, blocks.sorted[size_t(k - 1)]);
    }
    for (int64_t start = 0, number = 0; start < num_tokens; start += blocks.size, number++) {
        if (blocks.most[size_t(number)] < bound) continue;
        for (int64_t i = start; i < std::min(start + blocks.size, num_tokens); i++)
            if (logits[i] >= bound) keys.push_back(key(logits[i], i));
    }
    if (int64_t(keys.size()) > k) {
        std::nth_element(keys.begin(), keys.begin() + k, keys.end());
        keys.resize(size_t(k));
    }
    std::sort(keys.begin(), keys.end());
}

}  // namespace
}  // namespace tripool
