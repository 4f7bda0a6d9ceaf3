// The next token of each row. The slow definition is ops/sample.py.
//
// Nothing is sorted whole. Every sum of weights is exact, so what is dropped can be found by counting. Where few tokens
// are kept, only the likeliest need a weight. Otherwise a histogram over the weights' bits, refined in one of its cells,
// tells the smallest weight that is kept.

#include <algorithm>
#include <cfloat>
#include <vector>

#include "glue.h"
#include "rows.h"
#include "threads.h"
#include "weights.h"

namespace tripool {
namespace {

constexpr float COLDEST = 1e-30f, HOTTEST = 1e30f;
// A weight is at most one, so it has 30 bits. The histogram goes by the first 11 of them; another one, among the weights
// of one of its cells, by the next six, and so on. A cell holds how many weights begin with these bits, and the sum of
// the bits that follow. The first has copies of each cell, since neighbours often meet in one.
constexpr int FIRST_SHIFT = 19, COPIES = 4;
constexpr int64_t NUM_CELLS = 1 << 11, LEAST_CELL = 91 << 4, NUM_FINER = 1 << 7;   // least: of 2**-36
constexpr uint64_t ONE = uint64_t(1) << 40;

struct Scratch {
    Blocks blocks;
    std::vector<float> weight;
    std::vector<uint64_t> keys;
    uint64_t cells[NUM_CELLS * COPIES], finer[NUM_FINER];
    std::vector<int32_t> members;
};

uint64_t mixed(uint64_t x) {                       // SplitMix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

double uniform(uint64_t seed, int64_t position) {
    constexpr uint64_t golden = 0x9E3779B97F4A7C15;
    const uint64_t state = mixed(seed + golden) + golden * (uint64_t(position) + 1);
    return double(mixed(state) >> 11) * 0x1p-53;
}

float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// The index of the largest number, the lowest on a tie; what is not a number is above all others.
INLINE int64_t largest(const float* x, int64_t count) {
    constexpr int64_t block = 256;
    int64_t found = 0;
    float most = NONE;
    IntLanes broken = {};
    for (int64_t start = 0; start < count; start += block) {
        const float here = most_of(x + start, std::min(block, count - start), broken);
        if (here > most) most = here, found = start;
    }
    if (any(broken)) {
        for (found = 0; x[found] == x[found];) found++;
        return found;
    }
    while (x[found] != most) found++;
    return found;
}

// Where the running sum passes a share of the total, over the weights that are not below `least`.
INLINE int64_t invert(const float* weight, int64_t count, float least, double total, double share) {
    constexpr int64_t block = 512;
    const double target = std::min(share * total, __builtin_nextafter(total, 0.0));
    double sum = 0.0;
    for (int64_t start = 0; start < count; start += block) {
        const int64_t size = std::min(block, count - start);
        const double with = sum + sum_of(weight + start, size, least);
        if (with > target) {
            for (int64_t i = start;; i++) {
                sum += weight[i] >= least ? weight[i] : 0.0f;
                if (sum > target) return i;
            }
        }
        sum = with;
    }
    __builtin_unreachable();                       // the sum of all is the total
}

// How many tokens of falling weight, starting from none, have so much weight together.
int64_t fewest(double before, double weight, double mass, int64_t most) {
    int64_t count = std::min(most, std::max(int64_t(1), int64_t((mass - before) / weight)));
    while (count < most && before + double(count) * weight < mass) count++;
    while (count > 1 && before + double(count - 1) * weight >= mass) count--;
    return count;
}

// The likeliest tokens that are kept: those of more weight than the last, and so many that weigh as much as it.
struct Cut {
    float last;
    int64_t room;
    double mass;
};

INLINE void count_one(float weight, int copy, uint64_t* cells) {
    const uint32_t bits = bits_of(weight);
    cells[(bits >> FIRST_SHIFT) * COPIES + uint32_t(copy)] += ONE | (bits & ((1u << FIRST_SHIFT) - 1));
}

// What of weights below the floor is counted is not said.
INLINE void count_cells(const float* weight, int64_t count, float floor, uint64_t* cells) {
    constexpr int64_t block = 64;
    for (int64_t start = 0; start < count; start += block) {
        const int64_t size = std::min(block, count - start);
        IntLanes broken = {};
        if (most_of(weight + start, size, broken) < floor) continue;
        int64_t i = start;
        for (; i + COPIES <= start + size; i += COPIES)
            for (int copy = 0; copy < COPIES; copy++) count_one(weight[i + copy], copy, cells);
        for (; i < start + size; i++) count_one(weight[i], 0, cells);
    }
}

// The tokens whose weights begin with these bits, the lowest index first.
INLINE void find_members(const float* weight, int64_t count, uint32_t prefix, int shift, std::vector<int32_t>& members) {
    constexpr int64_t block = 8 * LANES;
    const uint32_t wanted = prefix >> shift;
    for (int64_t start = 0; start < count; start += block) {
        const int64_t size = std::min(block, count - start);
        if (size == block) {
            IntLanes equal = {};
            for (int64_t i = 0; i < block; i += LANES) {
                Lanes value;
                load(weight + start + i, value);
                equal |= reinterpret_cast<BitLanes>(value) >> shift == wanted;
            }
            if (!any(equal)) continue;
        }
        for (int64_t i = start; i < start + size; i++)
            if (bits_of(weight[i]) >> shift == wanted) members.push_back(int32_t(i));
    }
}

// The fewest likeliest tokens that are so many, or have so much weight; all that have any, if these do not suffice.
// `s.cells` are those of `count_cells`; `s.members` become the tokens that weigh as much as the last that is kept.
INLINE Cut cut(const float* weight, int64_t count, int64_t most_tokens, double mass, Scratch& s) {
    int64_t num_before = 0, num = 0;
    double before = 0.0;
    uint32_t prefix = 0;                           // the bits of the last weight, as far as they are known
    s.members.clear();
    for (const int shift : {FIRST_SHIFT, 13, 7, 0}) {
        const bool first = shift == FIRST_SHIFT;
        if (!first) {
            std::fill(s.finer, s.finer + NUM_FINER, 0);
            for (const int32_t token : s.members) {
                const uint32_t bits = bits_of(weight[token]);
                s.finer[bits >> shift & (NUM_FINER - 1)] += ONE | (bits & ((1u << shift) - 1));
            }
        }
        const int64_t least = first ? LEAST_CELL : 0;
        for (int64_t cell = (first ? NUM_CELLS : NUM_FINER) - 1;; cell--) {
            if (cell < least) return {FLT_MIN, count, before};
            uint64_t content = first ? 0 : s.finer[cell];
            for (int copy = 0; first && copy < COPIES; copy++) content += s.cells[cell * COPIES + copy];
            if (!content) continue;
            const uint32_t base = first ? uint32_t(cell) << shift : prefix | uint32_t(cell) << shift;
            const double unit = float_of(((base >> 23) - 23) << 23), low = double(content & (ONE - 1));
            num = int64_t(content / ONE);
            const double all = double(num) * float_of(base) + low * unit;
            if (num_before + num >= most_tokens || before + all >= mass) {
                prefix = base;
                break;
            }
            num_before += num;
            before += all;
        }
        if (first) {
            find_members(weight, count, prefix, shift, s.members);
        } else {
            const auto other = [&](int32_t token) { return bits_of(weight[token]) >> shift != prefix >> shift; };
            s.members.erase(std::remove_if(s.members.begin(), s.members.end(), other), s.members.end());
        }
    }
    const float last = float_of(prefix);
    int64_t room = std::min(num, most_tokens - num_before);
    if (before + double(room) * last >= mass) room = fewest(before, last, mass, room);
    return {last, room, before + double(room) * last};
}

// Of tokens that weigh as much as the last that is kept, those of the largest logits stay, then those that come first.
void drop_equal(const float* logits, int64_t room, float* weight, Scratch& s) {
    if (room >= int64_t(s.members.size())) return;
    s.keys.clear();
    for (const int32_t token : s.members) s.keys.push_back(key(logits[token], token));
    std::nth_element(s.keys.begin(), s.keys.begin() + room, s.keys.end());
    for (size_t i = size_t(room); i < s.keys.size(); i++) weight[token_of(s.keys[i])] = 0.0f;
}

INLINE void weigh_keys(const float* logits, const Tempered& t, Scratch& s) {
    for (size_t i = 0; i < s.keys.size(); i++) s.weight[i] = logits[token_of(s.keys[i])];
    weigh(s.weight.data(), int64_t(s.keys.size()), t, s.weight.data());
}

// Where few tokens are kept.
INLINE int64_t draw_among_few(const Draw& d, const float* logits, int64_t num_tokens, const Tempered& t, Scratch& s) {
    find_likeliest(logits, num_tokens, d.top_k, s.blocks, s.keys);
    float* weight = s.weight.data();
    weigh_keys(logits, t, s);
    if (d.top_p < 1.0) {
        const double mass = d.top_p * sum_of(weight, int64_t(s.keys.size()), 0.0f);
        double sum = weight[0];
        size_t kept = 1;
        while (kept < s.keys.size() && sum < mass) sum += weight[kept++];
        s.keys.resize(kept);
    }
    std::sort(s.keys.begin(), s.keys.end(), [](uint64_t a, uint64_t b) { return uint32_t(a) < uint32_t(b); });
    weigh_keys(logits, t, s);
    const int64_t count = int64_t(s.keys.size());
    return token_of(s.keys[size_t(invert(weight, count, 0.0f, sum_of(weight, count, 0.0f),
                                         uniform(d.seed, d.position)))]);
}

INLINE int64_t draw(const Draw& d, const float* logits, int64_t num_tokens, Scratch& s) {
    const int64_t top_k = d.top_k < num_tokens ? d.top_k : 0;
    const float most = look_at_blocks(logits, num_tokens, s.blocks);
    const float temperature = std::min(std::max(d.temperature, COLDEST), HOTTEST);
    const Tempered tempered = {most, 1.0f / temperature, rounder(num_tokens), std::min(d.min_p, 1.0f)};
    s.weight.resize(size_t(num_tokens));
    float* weight = s.weight.data();
    if (most > NONE && top_k > 0 && 2 * top_k <= int64_t(s.blocks.most.size()))
        return draw_among_few(d, logits, num_tokens, tempered, s);
    if (most > NONE)
        weigh(logits, num_tokens, tempered, weight);
    else
        std::fill(weight, weight + num_tokens, 1.0f);
    double mass = sum_of(weight, num_tokens, 0.0f);
    float last = 0.0f;
    if (top_k > 0 || d.top_p < 1.0) {
        const double left = mass * (1.0 - d.top_p) * 0.999;       // what is sure to be dropped
        const float floor = top_k > 0 ? 0.0f : float(left / double(num_tokens));
        std::fill(s.cells + LEAST_CELL * COPIES, s.cells + NUM_CELLS * COPIES, 0);
        count_cells(weight, num_tokens, floor, s.cells);
        Cut kept = {0.0f, num_tokens, mass};
        if (top_k > 0) kept = cut(weight, num_tokens, top_k, DBL_MAX, s);
        if (d.top_p < 1.0) kept = cut(weight, num_tokens, num_tokens, d.top_p * kept.mass, s);
        drop_equal(logits, kept.room, weight, s);
        last = kept.last, mass = kept.mass;
    }
    return invert(weight, num_tokens, last, mass, uniform(d.seed, d.position));
}

template <class T>
INLINE int64_t next_token(const float* logits, int64_t num_tokens, const Draw& d) {
    static thread_local Scratch scratch;
    return d.temperature > 0.0f ? draw(d, logits, num_tokens, scratch) : largest(logits, num_tokens);
}

FOR_EACH_LEVEL(next_token, int64_t, (const float* logits, int64_t num_tokens, const Draw& d), (logits, num_tokens, d))

}  // namespace

void sample(int level, const float* logits, int64_t stride, int64_t num_rows, int64_t num_tokens, const Draw* draws,
            int64_t* tokens) {
    const auto next = next_token_at(level, FLOAT32);
    share(num_rows, [&](int64_t row) { tokens[row] = next(logits + row * stride, num_tokens, draws[row]); });
}

}  // namespace tripool
