// Level 2 and above with bfloat16: AVX-512 whose dot products add two products of bfloat16 to each float32 sum.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "mla.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")

#include "int8_plain.h"

#include "mla_avx512.h"

namespace tripool {
namespace {

constexpr int MOST_GATHERED = 8;             // of values by two vectors
constexpr int64_t TILE_PAIRS = TILE / 2, SIDE = 2 * LANES;     // channels of values that are paired at a time

INLINED Vec multiply_add_pairs(Vec sum, Bits a, Bits b) {
    return reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a),
                                                  reinterpret_cast<__m512bh>(b)));
}

INLINED Bits load_words(const void* from) { return reinterpret_cast<Bits>(load(static_cast<const float*>(from))); }

INLINED Bits all_words(const void* from) {
    uint32_t both;
    std::memcpy(&both, from, sizeof both);
    return both - Bits{};
}

// Of up to `LANES` numbers; all of them are asked for with a constant, as writing under a mask takes its time.
INLINED void round_some(const float* row, __mmask16 here, uint16_t* halves) {
    const __m256i near = reinterpret_cast<__m256i>(_mm512_maskz_cvtneps_pbh(here, _mm512_maskz_loadu_ps(here, row)));
    if (here == 0xffff)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves), near);
    else
        _mm256_mask_storeu_epi16(halves, here, near);
}

void round(const float* row, int64_t width, uint16_t* halves) {
    for (; width >= LANES; width -= LANES, row += LANES, halves += LANES) round_some(row, 0xffff, halves);
    if (width) round_some(row, __mmask16((1u << width) - 1), halves);
}

// As `score`, for `count` pairs of elements.
template <int P, int C>
void score_pairs(const uint16_t* const* keys, const uint16_t* const* next, int64_t at, int64_t count,
                 const float* queries, bool begins, float* scores, int64_t space) {
    Vec sum[P * C];
    const uint16_t* key[P];
    unrolled<P>(UNROLLED(p) { key[p] = keys[p] + 2 * at; });
    unrolled<P * C>(UNROLLED(i) { sum[i] = begins ? Vec{} : load(scores + i / C * space + i % C * LANES); });
    for (int64_t w = 0; w < count; w++) {
        if (w % LINE == 0) prefetch<P>(next, 2 * (at + w));
        Bits query[C];
        unrolled<C>(UNROLLED(c) { query[c] = load_words(queries + (w * C + c) * LANES); });
        unrolled<P>(UNROLLED(p) {
            const Bits elements = all_words(key[p] + 2 * w);
            unrolled<C>(UNROLLED(c) { sum[p * C + c] = multiply_add_pairs(sum[p * C + c], query[c], elements); });
        });
    }
    unrolled<P * C>(UNROLLED(i) { store(scores + i / C * space + i % C * LANES, sum[i]); });
}

using ScorePairs = void (*)(const uint16_t* const*, const uint16_t* const*, int64_t, int64_t, const float*, bool, float*,
                            int64_t);

template <int C, int... P>
ScorePairs score_of(int64_t num_rows, std::integer_sequence<int, P...>) {
    static constexpr ScorePairs SCORES[] = {score_pairs<P + 1, C>...};
    return SCORES[num_rows - 1];
}

void score_tile(const AttentionLanes& lanes, const AttentionTile<uint16_t>& tile, int64_t position) {
    for (int64_t lane = 0; lane < lanes.space; lane += PAIR) {
        const int64_t num_rows = rows_seen(lanes, tile, position, lane, lane + PAIR) - tile.begin;
        const int64_t step = pair_lanes(lanes, lane), words = tile.key_width / 2;
        const int64_t most = step == PAIR ? MOST_ROWS : MOST_NARROW, num_groups = (num_rows + most - 1) / most;
        const float* queries = lanes.queries + lane * lanes.query_words;
        const uint16_t* const* next = lane ? tile.keys : tile.next;
        for (int64_t at = 0; at < words; at += WIDE) {
            const int64_t width = words - at < WIDE ? words - at : WIDE;
            for (int64_t group = 0; group < num_groups; group++) {
                const int64_t from = num_rows * group / num_groups, to = num_rows * (group + 1) / num_groups;
                const int64_t row = tile.begin + from;
                const ScorePairs score = step == PAIR
                    ? score_of<2>(to - from, std::make_integer_sequence<int, MOST_ROWS>())
                    : score_of<1>(to - from, std::make_integer_sequence<int, MOST_NARROW>());
                score(tile.keys + row, next + row, at, width, queries + at * step, at == 0,
                      lanes.scores + row * lanes.space + lane, lanes.space);
            }
        }
    }
}

// Weights of rows 2p and 2p + 1 side by side, where those of row p were. Rows that nobody sees have none.
void pair_weights(AttentionLanes& lanes, const AttentionTile<uint16_t>& tile, int64_t position) {
    for (int64_t lane = 0; lane < lanes.space; lane += LANES) {
        const int64_t end = rows_seen(lanes, tile, position, lane, lane + LANES);
        float* scores = lanes.scores + lane;
        for (int64_t row = tile.begin / 2 * 2; row < end; row += 2) {
            const Bits even = row < tile.begin ? Bits{} : load_words(scores + row * lanes.space);
            const Bits odd = row + 1 < end ? load_words(scores + (row + 1) * lanes.space) : Bits{};
            store(scores + row / 2 * lanes.space, reinterpret_cast<Vec>(even >> 16 | odd));
        }
    }
}

// Some channels of rows 2p and 2p + 1 side by side: [TILE_PAIRS][count], with zeros for what nobody sees and for channels
// behind the last.
void pair_values(const AttentionTile<uint16_t>& tile, int64_t at, int64_t count, uint32_t* pairs) {
    for (int64_t c = 0; c < count; c += LANES) {
        const int64_t left = tile.value_width - at - c;
        const auto pair = [&](__mmask16 here) __attribute__((always_inline)) {
            const auto halves = [&](int64_t row) __attribute__((always_inline)) {
                if (row < tile.begin || row >= tile.end) return Bits{};
                const __m256i found = _mm256_maskz_loadu_epi16(here, tile.values[row] + at + c);
                return reinterpret_cast<Bits>(_mm512_maskz_cvtepu16_epi32(0xffff, found));
            };
            for (int64_t p = tile.begin / 2; 2 * p < tile.end; p++) {
                const Bits both = halves(2 * p) | halves(2 * p + 1) << 16;
                store(reinterpret_cast<float*>(pairs + p * count + c), reinterpret_cast<Vec>(both));
            }
        };
        if (left < LANES)
            pair(__mmask16((1u << left) - 1));
        else
            pair(0xffff);
    }
}

// C vectors of the values of R lanes, times their shrinking, plus weighted pairs of rows from `begin` to `end`.
template <int R, int C>
void gather_pairs(const AttentionLanes& lanes, const uint32_t* pairs, int64_t lane, int64_t at, int64_t begin,
                  int64_t end) {
    Vec sum[R * C];
    float* values = lanes.values + lane * lanes.value_width + at;
    unrolled<R * C>(UNROLLED(i) {
        sum[i] = load(values + i / C * lanes.value_width + i % C * LANES) * all(lanes.shrinks[lane + i / C]);
    });
    const float* weights = lanes.scores + begin * lanes.space + lane;
    for (int64_t p = begin; p < end; p++, weights += lanes.space) {
        Bits value[C];
        unrolled<C>(UNROLLED(c) { value[c] = load_words(pairs + (p * C + c) * LANES); });
        unrolled<R>(UNROLLED(r) {
            const Bits weight = all_words(weights + r);
            unrolled<C>(UNROLLED(c) { sum[r * C + c] = multiply_add_pairs(sum[r * C + c], weight, value[c]); });
        });
    }
    unrolled<R * C>(UNROLLED(i) { store(values + i / C * lanes.value_width + i % C * LANES, sum[i]); });
}

using GatherPairs = void (*)(const AttentionLanes&, const uint32_t*, int64_t, int64_t, int64_t, int64_t);

template <int C, int... R>
GatherPairs gather_of(int64_t num_lanes, std::integer_sequence<int, R...>) {
    static constexpr GatherPairs GATHERS[] = {gather_pairs<R + 1, C>...};
    return GATHERS[num_lanes - 1];
}

// What one lane sees beyond what its company sees too: pairs from `begin` on, and of the last one, if it sees an odd number
// of rows, the first.
template <int C>
void gather_rest(const AttentionLanes& lanes, const uint32_t* pairs, int64_t lane, int64_t at, int64_t begin,
                 int64_t end) {
    float* values = lanes.values + lane * lanes.value_width + at;
    const float* weights = lanes.scores + lane;
    Vec sum[C];
    unrolled<C>(UNROLLED(c) { sum[c] = load(values + c * LANES); });
    for (int64_t p = begin; 2 * p < end; p++) {
        const Bits weight = all_words(weights + p * lanes.space);
        const uint32_t seen = 2 * p + 1 < end ? 0xffffffff : 0xffff;
        unrolled<C>(UNROLLED(c) {
            sum[c] = multiply_add_pairs(sum[c], weight, load_words(pairs + (p * C + c) * LANES) & seen);
        });
    }
    unrolled<C>(UNROLLED(c) { store(values + c * LANES, sum[c]); });
}

void gather_tile(const AttentionLanes& lanes, const AttentionTile<uint16_t>& tile, int64_t position) {
    alignas(64) uint32_t pairs[TILE_PAIRS * SIDE];               // of some channels: they stay in the nearest cache
    int64_t ends[MOST_LANES];
    for (int64_t lane = 0; lane < lanes.count; lane++) ends[lane] = rows_seen(lanes, tile, position, lane);
    const int64_t num_groups = (lanes.count + MOST_GATHERED - 1) / MOST_GATHERED;
    for (int64_t at = 0; at < lanes.value_width; at += SIDE) {
        const int64_t count = lanes.value_width - at < SIDE ? LANES : SIDE;
        const auto by_lanes = [&](int64_t number) {
            constexpr auto LANE_NUMBERS = std::make_integer_sequence<int, MOST_GATHERED>();
            return count == SIDE ? gather_of<2>(number, LANE_NUMBERS) : gather_of<1>(number, LANE_NUMBERS);
        };
        pair_values(tile, at, count, pairs);
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t first = lanes.count * group / num_groups, last = lanes.count * (group + 1) / num_groups;
            int64_t common = tile.end;             // rows that all of them see
            for (int64_t lane = first; lane < last; lane++) common = ends[lane] < common ? ends[lane] : common;
            // Behind the tile's last row there are zeros.
            const int64_t end = common > tile.begin ? (common + (common == tile.end)) / 2 : tile.begin / 2;
            by_lanes(last - first)(lanes, pairs, first, at, tile.begin / 2, end);
            for (int64_t lane = first; lane < last; lane++)
                if (ends[lane] > 2 * end && ends[lane] > tile.begin)
                    (count == SIDE ? gather_rest<2> : gather_rest<1>)(lanes, pairs, lane, at, end, ends[lane]);
        }
    }
}

void weigh_and_gather_pairs(AttentionLanes& lanes, const AttentionTile<uint16_t>& tile, int64_t position) {
    weigh_scores(lanes, tile, position);
    pair_weights(lanes, tile, position);
    gather_tile(lanes, tile, position);
}

void multiply_pairs(int64_t count) {
    constexpr int SUMS = 2 * MOST_ROWS;
    Vec sum[SUMS];
    Bits factor = Bits{} + 0x3f003f00;             // halves
    unrolled<SUMS>(UNROLLED(i) { sum[i] = all(float(i)); });
    for (; count > 0; count -= SUMS * 2 * LANES) {
        asm volatile("" : "+x"(factor));
        unrolled<SUMS>(UNROLLED(i) { sum[i] = multiply_add_pairs(sum[i], factor, factor); });
    }
    unrolled<SUMS>(UNROLLED(i) { asm volatile("" : : "x"(sum[i])); });
}

}  // namespace

const AttentionCore ATTENTION_BF16 = {LANES,    score_tile, weigh_and_gather, finish, widen,
                                      multiply, score_tile, weigh_and_gather_pairs, round, multiply_pairs};

}  // namespace tripool

#pragma GCC pop_options
