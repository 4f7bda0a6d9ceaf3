// Attention written once for vectors of `LANES` floats; each instruction set includes this file in its own region, after
// it has said what `LANES` and `multiply_add(a, b, c)` are. No function here is shared between regions.

#include <cstring>

#include "mla.h"

namespace tripool {
namespace {

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

constexpr int64_t PAIR = 2 * LANES;                // lanes whose scores are summed together, in two vectors
constexpr int MOST_ROWS = 6;                       // of a key or value by two vectors: 12 sums fill the registers
constexpr int MOST_NARROW = 12;                    // rows by one vector
constexpr int64_t WIDE = 320;                      // of a key at once: queries of so many elements stay in L1

#define INLINED inline __attribute__((always_inline))

INLINED Vec load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
INLINED void store(float* to, Vec value) { *reinterpret_cast<Loose*>(to) = value; }
INLINED Vec all(float value) { return value - Vec{}; }

// 2**x for x <= 0, and NaN for NaN. The polynomial is that of exp, good to the last place on half a step either way.
INLINED Vec power_of_two(Vec x) {
    const Vec least = all(-126.0f), magic = all(12582912.0f);    // 1.5 * 2**23 rounds to an integer in the low bits
    const Vec bounded = x < least ? least : x;
    const Vec shifted = bounded + magic;
    const Vec f = bounded - (shifted - magic);
    Vec p = all(1.5252734e-5f);
    p = multiply_add(p, f, all(1.5403530e-4f));
    p = multiply_add(p, f, all(1.3333558e-3f));
    p = multiply_add(p, f, all(9.6181291e-3f));
    p = multiply_add(p, f, all(5.5504109e-2f));
    p = multiply_add(p, f, all(2.4022651e-1f));
    p = multiply_add(p, f, all(6.9314718e-1f));
    p = multiply_add(p, f, all(1.0f));
    const Ints bits = (reinterpret_cast<Ints>(shifted) - 0x4b400000 + 127) << 23;
    const Vec power = p * reinterpret_cast<Vec>(bits);
    return x < least ? Vec{} : power;
}

// To bfloat16, to even, as a float.
INLINED Vec rounded(Vec value) {
    const Bits bits = reinterpret_cast<Bits>(value), near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return value == value ? reinterpret_cast<Vec>(near) : value;
}

// Lines of memory are asked for one by one between products: all at once they keep the processor waiting.
template <int P, class T>
INLINED void prefetch(const T* const* next, int64_t at) {
    unrolled<P>(UNROLLED(p) { __builtin_prefetch(next[p] + at, 0, 2); });
}

// scores[p] += key p times the queries of C vectors, over `width` elements; from nothing, if they begin. What is in
// `next` is read soon.
template <int P, int C>
void score(const float* const* keys, const float* const* next, int64_t at, int64_t width, const float* queries,
           bool begins, float* scores, int64_t space) {
    Vec sum[P * C];
    const float* key[P];
    unrolled<P>(UNROLLED(p) { key[p] = keys[p] + at; });
    unrolled<P * C>(UNROLLED(i) { sum[i] = begins ? Vec{} : load(scores + i / C * space + i % C * LANES); });
    for (int64_t w = 0; w < width; w++) {
        if (w % LINE == 0) prefetch<P>(next, at + w);
        Vec query[C];
        unrolled<C>(UNROLLED(c) { query[c] = load(queries + (w * C + c) * LANES); });
        unrolled<P>(UNROLLED(p) {
            const Vec element = all(key[p][w]);
            unrolled<C>(UNROLLED(c) { sum[p * C + c] = multiply_add(element, query[c], sum[p * C + c]); });
        });
    }
    unrolled<P * C>(UNROLLED(i) { store(scores + i / C * space + i % C * LANES, sum[i]); });
}

using Score = void (*)(const float* const*, const float* const*, int64_t, int64_t, const float*, bool, float*,
                       int64_t);
const Score SCORE[MOST_ROWS + 1] = {nullptr,     score<1, 2>, score<2, 2>, score<3, 2>,
                                    score<4, 2>, score<5, 2>, score<6, 2>};
const Score SCORE_NARROW[MOST_NARROW + 1] = {nullptr,     score<1, 1>, score<2, 1>, score<3, 1>,  score<4, 1>,
                                             score<5, 1>, score<6, 1>, score<7, 1>, score<8, 1>,  score<9, 1>,
                                             score<10, 1>, score<11, 1>, score<12, 1>};

// How many lanes lie beside one another from here on: a pair of vectors, or the last one.
INLINED int64_t pair_lanes(const AttentionLanes& lanes, int64_t lane) { return lanes.space - lane < PAIR ? LANES : PAIR; }

// Where rows end that a lane sees, or one of several.
template <class T>
INLINED int64_t rows_seen(const AttentionLanes& lanes, const AttentionTile<T>& tile, int64_t position, int64_t lane) {
    const int64_t seen = lanes.limits[lane] - position;
    return seen < tile.begin ? tile.begin : seen < tile.end ? seen : tile.end;
}

template <class T>
INLINED int64_t rows_seen(const AttentionLanes& lanes, const AttentionTile<T>& tile, int64_t position, int64_t first,
                          int64_t last) {
    int64_t most = tile.begin;
    for (int64_t lane = first; lane < last && lane < lanes.count; lane++) {
        const int64_t seen = rows_seen(lanes, tile, position, lane);
        most = seen > most ? seen : most;
    }
    return most;
}

void score_tile(const AttentionLanes& lanes, const AttentionTile<float>& tile, int64_t position) {
    for (int64_t lane = 0; lane < lanes.space; lane += PAIR) {
        const int64_t num_rows = rows_seen(lanes, tile, position, lane, lane + PAIR) - tile.begin;
        const int64_t step = pair_lanes(lanes, lane);
        const bool pair = step == PAIR;
        const int64_t most = pair ? MOST_ROWS : MOST_NARROW, num_groups = (num_rows + most - 1) / most;
        const float* queries = lanes.queries + lane * lanes.query_words;
        const float* const* next = lane ? tile.keys : tile.next;
        for (int64_t at = 0; at < tile.key_width; at += WIDE) {
            const int64_t left = tile.key_width - at, width = left < WIDE ? left : WIDE;
            for (int64_t group = 0; group < num_groups; group++) {
                const int64_t from = num_rows * group / num_groups, to = num_rows * (group + 1) / num_groups;
                const int64_t row = tile.begin + from;
                (pair ? SCORE : SCORE_NARROW)[to - from](tile.keys + row, next + row, at, width, queries + at * step,
                                                         at == 0, lanes.scores + row * lanes.space + lane, lanes.space);
            }
        }
    }
}

// Scores become weights: powers of two below the running maximum, 0 where a lane does not see.
template <class T>
void weigh_scores(AttentionLanes& lanes, const AttentionTile<T>& tile, int64_t position) {
    for (int64_t lane = 0; lane < lanes.space; lane += LANES) {
        Vec limit{};                               // in the tile; small integers are exact
        for (int64_t i = 0; i < LANES && lane + i < lanes.count; i++) {
            const int64_t seen = lanes.limits[lane + i] - position;
            limit[i] = float(seen < 0 ? 0 : seen > TILE ? TILE : seen);
        }
        const int64_t end = rows_seen(lanes, tile, position, lane, lane + LANES);
        float* scores = lanes.scores + lane;
        const Vec before = load(lanes.maxima + lane);
        Vec maximum = before;
        for (int64_t row = tile.begin; row < end; row++) {
            const Vec s = load(scores + row * lanes.space);
            const Vec higher = s > maximum ? s : maximum;        // NaN is none
            maximum = all(float(row)) < limit ? higher : maximum;
        }
        const Vec shrink = before == maximum ? all(1.0f) : power_of_two(before - maximum);
        Vec sum = load(lanes.sums + lane) * shrink;
        for (int64_t row = tile.begin; row < end; row++) {
            Vec weight = power_of_two(load(scores + row * lanes.space) - maximum);
            if (lanes.rounds) weight = rounded(weight);
            const Vec seen = all(float(row)) < limit ? weight : Vec{};
            store(scores + row * lanes.space, seen);
            sum = sum + seen;
        }
        store(lanes.maxima + lane, maximum);
        store(lanes.sums + lane, sum);
        store(lanes.shrinks + lane, shrink);
    }
}

// C vectors of the values of R lanes, times their shrinking, plus weighted rows.
template <int R, int C>
void gather(const AttentionLanes& lanes, const AttentionTile<float>& tile, int64_t lane, int64_t at, int64_t begin,
            int64_t end, bool shrinks) {
    Vec sum[R * C];
    float* values = lanes.values + lane * lanes.value_width + at;
    unrolled<R * C>(UNROLLED(i) {
        sum[i] = load(values + i / C * lanes.value_width + i % C * LANES);
        if (shrinks) sum[i] = sum[i] * all(lanes.shrinks[lane + i / C]);
    });
    const float* weights = lanes.scores + begin * lanes.space + lane;
    for (int64_t row = begin; row < end; row++, weights += lanes.space) {
        Vec value[C];
        unrolled<C>(UNROLLED(c) { value[c] = load(tile.values[row] + at + c * LANES); });
        unrolled<R>(UNROLLED(r) {
            const Vec weight = all(weights[r]);
            unrolled<C>(UNROLLED(c) { sum[r * C + c] = multiply_add(weight, value[c], sum[r * C + c]); });
        });
    }
    unrolled<R * C>(UNROLLED(i) { store(values + i / C * lanes.value_width + i % C * LANES, sum[i]); });
}

using Gather = void (*)(const AttentionLanes&, const AttentionTile<float>&, int64_t, int64_t, int64_t, int64_t, bool);
const Gather GATHER[3][MOST_ROWS + 1] = {
    {nullptr, gather<1, 1>, gather<2, 1>, gather<3, 1>, gather<4, 1>, gather<5, 1>, gather<6, 1>},
    {nullptr, gather<1, 2>, gather<2, 2>, gather<3, 2>, gather<4, 2>, gather<5, 2>, gather<6, 2>},
    {nullptr, gather<1, 4>, gather<2, 4>, gather<3, 4>, nullptr, nullptr, nullptr}};

// What is left of a row after its last whole vector.
void gather_rest(const AttentionLanes& lanes, const AttentionTile<float>& tile, int64_t lane, int64_t begin, int64_t end) {
    for (int64_t at = tile.value_width / LANES * LANES; at < tile.value_width; at++) {
        float& value = lanes.values[lane * lanes.value_width + at];
        float sum = value * lanes.shrinks[lane];
        for (int64_t row = begin; row < end; row++)
            sum = multiply_add(lanes.scores[row * lanes.space + lane], tile.values[row][at], sum);
        value = sum;
    }
}

void gather_tile(const AttentionLanes& lanes, const AttentionTile<float>& tile, int64_t position) {
    const int64_t num_groups = (lanes.count + MOST_ROWS - 1) / MOST_ROWS;
    const auto end_of = [&](int64_t lane) { return rows_seen(lanes, tile, position, lane); };
    const auto common = [&](int64_t first, int64_t last) {       // the end of rows that all of them see
        int64_t least = tile.end;
        for (int64_t lane = first; lane < last; lane++) least = end_of(lane) < least ? end_of(lane) : least;
        return least;
    };
    for (int64_t at = 0, step; at + LANES <= tile.value_width; at += step * LANES) {
        const int64_t left = (tile.value_width - at) / LANES;
        step = left >= 4 && lanes.count <= 3 ? 4 : left >= 2 ? 2 : 1;
        const Gather* by_rows = GATHER[step / 2];
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t first = lanes.count * group / num_groups, last = lanes.count * (group + 1) / num_groups;
            by_rows[last - first](lanes, tile, first, at, tile.begin, common(first, last), true);
        }
    }
    for (int64_t group = 0; group < num_groups; group++) {       // and what only some of them see
        const int64_t first = lanes.count * group / num_groups, last = lanes.count * (group + 1) / num_groups;
        const int64_t begin = common(first, last);
        for (int64_t lane = first; lane < last; lane++)
            for (int64_t at = 0, step; end_of(lane) > begin && at + LANES <= tile.value_width; at += step * LANES) {
                step = (tile.value_width - at) / LANES >= 8 ? 8 : 1;
                (step == 8 ? gather<1, 8> : gather<1, 1>)(lanes, tile, lane, at, begin, end_of(lane), false);
            }
    }
    if (tile.value_width % LANES)
        for (int64_t lane = 0; lane < lanes.count; lane++) gather_rest(lanes, tile, lane, tile.begin, end_of(lane));
}

void weigh_and_gather(AttentionLanes& lanes, const AttentionTile<float>& tile, int64_t position) {
    weigh_scores(lanes, tile, position);
    gather_tile(lanes, tile, position);
}

void finish(const AttentionLanes& lanes, int64_t lane, int64_t width, char* result, int64_t format) {
    const float* values = lanes.values + lane * lanes.value_width;
    const float sum = lanes.sums[lane], share = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (format == FLOAT32) {
        float* to = reinterpret_cast<float*>(result);
        for (int64_t i = 0; i < width; i++) to[i] = values[i] * share;
    } else {
        uint16_t* to = reinterpret_cast<uint16_t*>(result);
        for (int64_t i = 0; i < width; i++) {
            const float value = values[i] * share;
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            const uint32_t even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            to[i] = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : even);
        }
    }
}

void multiply(int64_t count) {
    Vec sum[MOST_ROWS * 2];
    Vec factor = all(0.5f);
    unrolled<MOST_ROWS * 2>(UNROLLED(i) { sum[i] = all(float(i)); });
    for (; count > 0; count -= MOST_ROWS * 2 * LANES) {
        asm volatile("" : "+x"(factor));           // or the compiler would do it once
        unrolled<MOST_ROWS * 2>(UNROLLED(i) { sum[i] = multiply_add(sum[i], factor, factor); });
    }
    unrolled<MOST_ROWS * 2>(UNROLLED(i) { asm volatile("" : : "x"(sum[i])); });
}

void widen(const uint16_t* row, int64_t width, float* wide) {
    uint32_t* bits = reinterpret_cast<uint32_t*>(wide);
    for (int64_t i = 0; i < width; i++) bits[i] = uint32_t(row[i]) << 16;
}

}  // namespace
}  // namespace tripool
