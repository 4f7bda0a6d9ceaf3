// Latent attention: what is the same at every level. The plain definitions are ops/mla.py.

#include "mla.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "rows.h"
#include "threads.h"

namespace tripool {
namespace {

constexpr float LOG2_E = 1.44269504f;              // with it in the queries, weights are powers of two
constexpr int64_t CHANNELS = 32;                   // of values that are worked on together
constexpr int64_t ABSORBED_LANES = 64, EXPANDED_LANES = 128;    // together: queries, results and a tile stay in L2

const AttentionCore& core_of(int level) {
    const AttentionCore* const cores[] = {&ATTENTION_PLAIN, &ATTENTION_AVX2, &ATTENTION_AVX512};
    __builtin_cpu_init();
    if (vectors_of(level) == 2 && __builtin_cpu_supports("avx512bf16")) return ATTENTION_BF16;
    return *cores[vectors_of(level)];
}

int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
int64_t element_bytes(int64_t format) { return format == FLOAT32 ? 4 : 2; }
const char* bytes_of(const float* row) { return reinterpret_cast<const char*>(row); }

// Rows are multiplied as floats, or in bfloat16 two elements at a time.
template <class T>
constexpr bool IN_PAIRS = !std::is_same<T, float>::value;

// Words of 32 bits that hold so many elements.
template <class T>
int64_t words_of(int64_t width) {
    return IN_PAIRS<T> ? (width + 1) / 2 : width;
}

// A row as it is multiplied, `words_of` its width. Where products are of pairs, zero follows an odd number of elements.
template <class T>
T* copy_row(const AttentionCore& core, const char* row, int64_t format, bool rounds, int64_t width, T* to) {
    if constexpr (IN_PAIRS<T>) {
        if (format == FLOAT32)
            core.round(reinterpret_cast<const float*>(row), width, to);
        else
            std::memcpy(to, row, size_t(width) * sizeof *to);
        if (width % 2) to[width] = 0;
    } else if (format != FLOAT32) {
        core.widen(reinterpret_cast<const uint16_t*>(row), width, to);
    } else {
        std::memcpy(to, row, size_t(width) * sizeof *to);
        for (int64_t i = 0; rounds && i < width; i++) {
            uint16_t half;
            store_one(to[i], &half);
            to[i] = load_one(&half);
        }
    }
    return to;
}

// Lanes in the thread's own memory, and behind them room for so many words.
template <class T>
T* prepare(const AttentionCore& core, AttentionLanes& lanes, int64_t count, int64_t query_words, int64_t value_width,
           bool rounds, int64_t room) {
    lanes.count = count;
    lanes.space = up(count, core.vector);
    lanes.query_words = query_words;
    lanes.value_width = IN_PAIRS<T> ? up(value_width, core.vector) : value_width;
    lanes.rounds = rounds;
    const int64_t sizes[] = {lanes.space * query_words, TILE * lanes.space, count * lanes.value_width, lanes.space,
                             lanes.space, lanes.space, room};
    int64_t total = 0;
    for (int64_t size : sizes) total += up(size, LINE) + LINE;
    float* at = reinterpret_cast<float*>(own_memory(total * 4));
    float** const pieces[] = {&lanes.queries, &lanes.scores, &lanes.values, &lanes.maxima, &lanes.sums, &lanes.shrinks};
    for (int64_t i = 0; i < 6; i++) {
        *pieces[i] = at;
        at += up(sizes[i], LINE) + LINE;
    }
    if (count != lanes.space) std::memset(lanes.queries, 0, size_t(lanes.space * query_words) * 4);
    std::memset(lanes.values, 0, size_t(count * lanes.value_width) * 4);
    std::memset(lanes.sums, 0, size_t(lanes.space) * 4);
    for (int64_t i = 0; i < lanes.space; i++) lanes.maxima[i] = -INFINITY;
    return reinterpret_cast<T*>(at);
}

// Elements of a query into its lane, from word `at` on, times a factor: a word of each lane of a pair of vectors, or of the
// last vector, then the next word. `room` is for twice as many words.
template <class T>
void set_query(const AttentionCore& core, AttentionLanes& lanes, int64_t lane, int64_t at, const char* query,
               int64_t format, int64_t width, float factor, T* room) {
    const int64_t pair = 2 * core.vector, first = lane / pair * pair, left = lanes.space - first;
    const int64_t step = left < pair ? left : pair, words = words_of<T>(width);
    float *row = reinterpret_cast<float*>(room), *to = lanes.queries + first * lanes.query_words + at * step + lane - first;
    copy_row<float>(core, query, format, false, width, row);
    for (int64_t i = 0; i < width; i++) row[i] *= factor;
    const float* made = reinterpret_cast<float*>(
        copy_row<T>(core, bytes_of(row), FLOAT32, lanes.rounds, width, reinterpret_cast<T*>(row + width)));
    for (int64_t i = 0; i < words; i++) to[i * step] = made[i];
}

int64_t last_limit(const AttentionLanes& lanes) {
    int64_t last = 0;
    for (int64_t i = 0; i < lanes.count; i++) last = lanes.limits[i] > last ? lanes.limits[i] : last;
    return last;
}

// How many parts to cut `lanes` of one sequence into, where there are so many sequences: as few as `ABSORBED_LANES` allow,
// for each reads the sequence, but enough to give every thread one.
int64_t parts_of(int64_t lanes, int64_t vector, int64_t sequences) {
    const int64_t least = (lanes + ABSORBED_LANES - 1) / ABSORBED_LANES;
    const int64_t wanted = (num_threads() + sequences - 1) / sequences, possible = (lanes + vector - 1) / vector;
    const int64_t most = wanted < possible ? wanted : possible;
    return least > most ? least : most;
}

template <class T>
void score(const AttentionCore& core, const AttentionLanes& lanes, const AttentionTile<T>& tile, int64_t position) {
    if constexpr (IN_PAIRS<T>)
        core.score_pairs(lanes, tile, position);
    else
        core.score(lanes, tile, position);
}

template <class T>
void gather(const AttentionCore& core, AttentionLanes& lanes, const AttentionTile<T>& tile, int64_t position) {
    if constexpr (IN_PAIRS<T>)
        core.gather_pairs(lanes, tile, position);
    else
        core.gather(lanes, tile, position);
}

// Lanes of one row, counted over its tokens and heads, that attend together.
struct LanesOfRow {
    int64_t row, token, first, last;               // `token` is the row's first of all

    int64_t count() const { return last - first; }
};

void set_limits(const AbsorbedAttention& a, const LanesOfRow& of, AttentionLanes& lanes) {
    for (int64_t i = 0; i < of.count(); i++) lanes.limits[i] = a.firsts[of.row] + (of.first + i) / a.num_heads + 1;
}

template <class T>
void set_queries(const AttentionCore& core, const AbsorbedAttention& a, const LanesOfRow& of, AttentionLanes& lanes,
                 T* room) {
    const int64_t lane_0 = of.token * a.num_heads + of.first, query_bytes = a.width * element_bytes(a.query_format);
    for (int64_t i = 0; i < of.count(); i++)
        set_query(core, lanes, i, 0, a.query + (lane_0 + i) * query_bytes, a.query_format, a.width, a.scale * LOG2_E, room);
}

// Calls each(tile, its position) for tiles from one to another, of whose entries it takes `width` elements from `at` on:
// whole keys, or channels of values.
template <class T, class Each>
void for_tiles(const AttentionCore& core, const AbsorbedAttention& a, int64_t row, int64_t first, int64_t end,
               int64_t limit, int64_t at, int64_t width, T* copies, const Each& each) {
    const bool as_they_lie = IN_PAIRS<T> ? a.entry_format != FLOAT32 && a.width % 2 == 0
                                         : a.entry_format == FLOAT32 && !a.rounds;
    const int64_t elements = words_of<T>(width) * int64_t(4 / sizeof(T)), entry_bytes = element_bytes(a.entry_format);
    AttentionTile<T> tile;
    tile.key_width = elements, tile.value_width = width < a.latent ? width : a.latent;
    const auto entry_of = [&](int64_t position) {
        const int64_t block = a.blocks[row * a.columns + position / a.block_tokens];
        return a.entries + entry_bytes * (block * a.block_stride + position % a.block_tokens * a.width + at);
    };
    for (int64_t position = first * TILE; position < end * TILE && position < limit; position += TILE) {
        tile.begin = a.first_seen > position ? a.first_seen - position : 0;
        tile.end = limit - position < TILE ? limit - position : TILE;
        for (int64_t i = tile.begin; i < tile.end; i++) {
            const char* entry = entry_of(position + i);
            const char* next = position + TILE + i < limit ? entry_of(position + TILE + i) : nullptr;
            tile.keys[i] = tile.values[i] = as_they_lie
                ? reinterpret_cast<const T*>(entry)
                : copy_row(core, entry, a.entry_format, a.rounds, width, copies + i * elements);
            // The next tile comes from memory while this one is worked on: whole keys while scores are made of these.
            const bool by_scores = next && as_they_lie && width == a.width;
            tile.next[i] = by_scores ? reinterpret_cast<const T*>(next) : tile.keys[i];
            for (int64_t byte = 0; next && !by_scores && byte < width * entry_bytes; byte += 64)
                __builtin_prefetch(next + byte, 0, 2);
        }
        each(tile, position);
    }
}

template <class T>
void absorb(const AttentionCore& core, const AbsorbedAttention& a, const LanesOfRow& of) {
    AttentionLanes lanes;
    const int64_t words = words_of<T>(a.width);
    T* copies = prepare<T>(core, lanes, of.count(), words, a.latent, a.rounds, TILE * words);
    set_queries(core, a, of, lanes, copies);
    set_limits(a, of, lanes);
    const int64_t limit = last_limit(lanes);
    for_tiles(core, a, of.row, a.first_seen / TILE, limit / TILE + 1, limit, 0, a.width, copies,
              [&](const AttentionTile<T>& tile, int64_t position) {
        score(core, lanes, tile, position);
        gather(core, lanes, tile, position);
    });
    const int64_t lane_0 = of.token * a.num_heads + of.first, bytes = a.latent * element_bytes(a.query_format);
    for (int64_t i = 0; i < lanes.count; i++)
        core.finish(lanes, i, a.latent, a.result + (lane_0 + i) * bytes, a.query_format);
}

// The same by several threads where there are more of them than rows: scores of tiles each, and then, of all tiles,
// channels of values each. Bits stay the same, as no sum is cut.
template <class T>
void score_tiles(const AttentionCore& core, const AbsorbedAttention& a, const LanesOfRow& of, int64_t first, int64_t end,
                 float* scores) {
    AttentionLanes lanes;
    const int64_t words = words_of<T>(a.width);
    T* copies = prepare<T>(core, lanes, of.count(), words, 0, a.rounds, TILE * words);
    set_queries(core, a, of, lanes, copies);
    set_limits(a, of, lanes);
    for_tiles(core, a, of.row, first, end, last_limit(lanes), 0, a.width, copies,
              [&](const AttentionTile<T>& tile, int64_t position) {
        lanes.scores = scores + position * lanes.space;
        score(core, lanes, tile, position);
    });
}

template <class T>
void gather_channels(const AttentionCore& core, const AbsorbedAttention& a, const LanesOfRow& of, int64_t channel,
                     int64_t width, const float* scores) {
    AttentionLanes lanes;
    T* copies = prepare<T>(core, lanes, of.count(), 0, width, a.rounds, TILE * words_of<T>(width));
    set_limits(a, of, lanes);
    const int64_t limit = last_limit(lanes);
    for_tiles(core, a, of.row, a.first_seen / TILE, limit / TILE + 1, limit, channel, width, copies,
              [&](const AttentionTile<T>& tile, int64_t position) {
        std::memcpy(lanes.scores, scores + position * lanes.space, size_t(TILE * lanes.space) * sizeof *scores);
        gather(core, lanes, tile, position);
    });
    const int64_t lane_0 = of.token * a.num_heads + of.first, bytes = element_bytes(a.query_format);
    for (int64_t i = 0; i < lanes.count; i++)
        core.finish(lanes, i, width, a.result + ((lane_0 + i) * a.latent + channel) * bytes, a.query_format);
}

// The same of one head, tokens from `token` on.
template <class T>
void expand_part(const AttentionCore& core, const ExpandedAttention& a, int64_t head, int64_t token) {
    AttentionLanes lanes;
    AttentionTile<T> tile;
    const int64_t bytes = element_bytes(a.format), left = a.num_tokens - token;
    // Words of a row: key without position, rotary key, value. Each begins with a word.
    const int64_t plain = words_of<T>(a.n), key = plain + words_of<T>(a.r), all = key + words_of<T>(a.v);
    constexpr int64_t IN_WORD = 4 / sizeof(T);
    T* copies = prepare<T>(core, lanes, left < EXPANDED_LANES ? left : EXPANDED_LANES, key, a.v, a.rounds, TILE * all);
    for (int64_t i = 0; i < lanes.count; i++) {
        const int64_t t = token + i;
        set_query(core, lanes, i, 0, a.query_plain + (t * a.plain_stride + head * a.plain_head) * bytes, a.format, a.n,
                  a.scale * LOG2_E, copies);
        set_query(core, lanes, i, plain, a.query_rotated + (t * a.rotated_stride + head * a.rotated_head) * bytes,
                  a.format, a.r, a.scale * LOG2_E, copies);
        lanes.limits[i] = a.first + t + 1;
    }
    tile.key_width = key * IN_WORD, tile.value_width = a.v;
    const int64_t limit = last_limit(lanes);
    for (int64_t position = 0; position < limit; position += TILE) {
        tile.begin = 0;
        tile.end = limit - position < TILE ? limit - position : TILE;
        for (int64_t i = 0; i < tile.end; i++) {
            const int64_t at = position + i;
            // Copied: rows of all heads lie so far apart that those of one head meet in few sets of the cache.
            const auto copy = [&](const char* rows, int64_t stride, int64_t first, int64_t width, int64_t to) {
                const char* row = rows + (at * stride + first) * bytes;
                if (at + TILE < limit)             // comes from memory while this tile is worked on
                    for (int64_t byte = 0; byte < width * bytes; byte += 64)
                        __builtin_prefetch(row + TILE * stride * bytes + byte, 0, 2);
                return copy_row(core, row, a.format, a.rounds, width, copies + (i * all + to) * IN_WORD);
            };
            tile.keys[i] = tile.next[i] = copy(a.key_plain, a.key_stride, head * a.key_head, a.n, 0);
            copy(a.key_rotated, a.key_rotated_stride, 0, a.r, plain);
            tile.values[i] = copy(a.value, a.value_stride, head * a.value_head, a.v, key);
        }
        score(core, lanes, tile, position);
        gather(core, lanes, tile, position);
    }
    for (int64_t i = 0; i < lanes.count; i++)
        core.finish(lanes, i, a.v, a.result + ((token + i) * a.num_heads + head) * a.v * bytes, a.format);
}

}  // namespace

int64_t absorbed_attention(int level, const AbsorbedAttention& a) {
    int64_t num_tokens = 0, most = 0, longest = 0;
    for (int64_t row = 0; row < a.num_rows; row++) {
        const int64_t end = a.firsts[row] + a.counts[row];
        if (a.firsts[row] < 0 || a.counts[row] < 0 || (a.counts[row] && end > a.columns * a.block_tokens)) return row;
        for (int64_t b = 0; b * a.block_tokens < end && a.counts[row]; b++)
            if (a.blocks[row * a.columns + b] < 0 || a.blocks[row * a.columns + b] >= a.num_blocks) return row;
        num_tokens += a.counts[row];
        most = a.counts[row] > most ? a.counts[row] : most;
        longest = a.counts[row] && end > longest ? end : longest;
    }
    if (num_tokens != a.num_tokens) return a.num_rows;
    const AttentionCore& core = core_of(level);
    // Every row is cut as the longest must be; those of a shorter one that are left over have nothing to do.
    const int64_t cuts = most ? parts_of(most * a.num_heads, core.vector, a.num_rows) : 0;
    const int64_t width = cuts ? up((most * a.num_heads + cuts - 1) / cuts, core.vector) : 0;
    const int64_t groups = a.num_rows * cuts, longest_tiles = (longest + TILE - 1) / TILE, threads = num_threads();
    const auto lanes_of = [&](int64_t group) {
        const int64_t row = group / cuts, first = group % cuts * width, num_lanes = a.counts[row] * a.num_heads;
        int64_t token = 0;
        for (int64_t r = 0; r < row; r++) token += a.counts[r];
        return LanesOfRow{row, token, first, first + width < num_lanes ? first + width : num_lanes};
    };
    const bool in_pairs = a.rounds && core.score_pairs;
    if (groups * 2 > threads || longest_tiles < 2) {
        const auto absorb_lanes = in_pairs ? absorb<uint16_t> : absorb<float>;
        share(groups, [&](int64_t group) {
            const LanesOfRow of = lanes_of(group);
            if (of.count() > 0) absorb_lanes(core, a, of);
        });
        return -1;
    }
    const int64_t pieces = threads / groups, space = longest_tiles * TILE * width;
    const int64_t channels = up((a.latent + pieces - 1) / pieces, CHANNELS);
    float* scores = reinterpret_cast<float*>(own_memory(groups * space * int64_t(sizeof(float)), Purpose::OPERATION));
    const auto score_some = in_pairs ? score_tiles<uint16_t> : score_tiles<float>;
    const auto gather_some = in_pairs ? gather_channels<uint16_t> : gather_channels<float>;
    share(groups * pieces, [&](int64_t part) {
        const int64_t group = part / pieces, piece = part % pieces, first = a.first_seen / TILE;
        const LanesOfRow of = lanes_of(group);
        const int64_t tiles = (a.firsts[of.row] + a.counts[of.row] + TILE - 1) / TILE - first;
        if (of.count() > 0 && tiles > 0)
            score_some(core, a, of, first + tiles * piece / pieces, first + tiles * (piece + 1) / pieces,
                       scores + group * space);
    });
    share(groups * pieces, [&](int64_t part) {
        const int64_t group = part / pieces, channel = part % pieces * channels, left = a.latent - channel;
        const LanesOfRow of = lanes_of(group);
        if (of.count() > 0 && left > 0)
            gather_some(core, a, of, channel, left < channels ? left : channels, scores + group * space);
    });
    return -1;
}

void expanded_attention(int level, const ExpandedAttention& a) {
    const AttentionCore& core = core_of(level);
    const int64_t num_groups = (a.num_tokens + EXPANDED_LANES - 1) / EXPANDED_LANES;
    const auto expand = a.rounds && core.score_pairs ? expand_part<uint16_t> : expand_part<float>;
    // The last tokens see most: their parts begin first.
    share(num_groups * a.num_heads, [&](int64_t part) {
        expand(core, a, part % a.num_heads, (num_groups - 1 - part / a.num_heads) * EXPANDED_LANES);
    });
}

void multiply_numbers(int level, bool rounds, int64_t count) {
    const AttentionCore& core = core_of(level);
    (rounds && core.multiply_pairs ? core.multiply_pairs : core.multiply)(count);
}

}  // namespace tripool
