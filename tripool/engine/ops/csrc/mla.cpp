// Latent attention: what is the same at every level. The plain definitions are ops/mla.py.

#include "mla.h"
#include "quantise.h"

#include <cmath>
#include <cstring>

#include "threads.h"

namespace tripool {
namespace {

constexpr float LOG2_E = 1.44269504f;              // with it in the queries, weights are powers of two
constexpr int64_t LINE = 16;                       // floats

const AttentionCore& core_of(int level) {
    const AttentionCore* const cores[] = {&ATTENTION_PLAIN, &ATTENTION_AVX2, &ATTENTION_AVX512};
    return *cores[vectors_of(level)];
}

int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
int64_t bytes_of(int64_t format) { return format == FLOAT32 ? 4 : 2; }

// Lanes in the thread's own memory, and behind them room for `wide` floats of widened rows.
float* prepare(const AttentionCore& core, AttentionLanes& lanes, int64_t count, int64_t query_width, int64_t value_width,
               int64_t wide) {
    lanes.count = count;
    lanes.space = up(count, core.vector);
    lanes.query_width = query_width;
    const int64_t sizes[] = {lanes.space * query_width, TILE * lanes.space, count * value_width, lanes.space, lanes.space,
                             lanes.space, wide};
    int64_t total = 0;
    for (int64_t size : sizes) total += up(size, LINE) + LINE;
    float* at = reinterpret_cast<float*>(own_memory(total * 4));
    float** const pieces[] = {&lanes.queries, &lanes.scores, &lanes.values, &lanes.maxima, &lanes.sums, &lanes.shrinks};
    for (int64_t i = 0; i < 6; i++) {
        *pieces[i] = at;
        at += up(sizes[i], LINE) + LINE;
    }
    if (count != lanes.space) std::memset(lanes.queries, 0, size_t(lanes.space * query_width) * 4);
    std::memset(lanes.values, 0, size_t(count * value_width) * 4);
    std::memset(lanes.sums, 0, size_t(lanes.space) * 4);
    for (int64_t i = 0; i < lanes.space; i++) lanes.maxima[i] = -INFINITY;
    return at;
}

int64_t last_limit(const AttentionLanes& lanes) {
    int64_t last = 0;
    for (int64_t i = 0; i < lanes.count; i++) last = lanes.limits[i] > last ? lanes.limits[i] : last;
    return last;
}

// How many parts to cut `lanes` of one sequence into, where there are so many sequences: as few as `MOST_LANES` allow,
// for each reads the sequence, but enough to give every thread one.
int64_t parts_of(int64_t lanes, int64_t vector, int64_t sequences) {
    const int64_t least = (lanes + MOST_LANES - 1) / MOST_LANES;
    const int64_t wanted = (num_threads() + sequences - 1) / sequences, possible = (lanes + vector - 1) / vector;
    const int64_t most = wanted < possible ? wanted : possible;
    return least > most ? least : most;
}

// Lanes of row `row` from `first` to `last`, counted over its tokens and heads.
void absorb_part(const AttentionCore& core, const AbsorbedAttention& a, int64_t row, int64_t token, int64_t first,
                 int64_t last) {
    AttentionLanes lanes;
    AttentionTile tile;
    const bool widens = a.entry_format != FLOAT32;
    float* wide = prepare(core, lanes, last - first, a.width, a.latent, widens ? TILE * a.width : 0);
    const int64_t query_bytes = bytes_of(a.query_format), entry_bytes = bytes_of(a.entry_format);
    const int64_t lane_0 = token * a.num_heads + first;          // of all
    for (int64_t i = 0; i < lanes.count; i++) {
        core.set_query(lanes, i, 0, a.query + (lane_0 + i) * a.width * query_bytes, a.query_format, a.width,
                       a.scale * LOG2_E);
        lanes.limits[i] = a.firsts[row] + (first + i) / a.num_heads + 1;
    }
    tile.key_widths[0] = a.width, tile.key_widths[1] = 0, tile.value_width = a.latent;
    const auto entry_of = [&](int64_t position) {
        const int64_t block = a.blocks[row * a.columns + position / a.block_tokens];
        return a.entries + entry_bytes * (block * a.block_stride + position % a.block_tokens * a.width);
    };
    const int64_t limit = last_limit(lanes);
    for (int64_t position = a.first_seen / TILE * TILE; position < limit; position += TILE) {
        tile.begin = a.first_seen > position ? a.first_seen - position : 0;
        tile.end = limit - position < TILE ? limit - position : TILE;
        for (int64_t i = tile.begin; i < tile.end; i++) {
            const char* entry = entry_of(position + i);
            if (position + TILE + i < limit) {     // comes from memory while this tile is worked on
                const char* next = entry_of(position + TILE + i);
                for (int64_t at = 0; at < a.width * entry_bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
            }
            if (widens) core.widen(reinterpret_cast<const uint16_t*>(entry), a.width, wide + i * a.width);
            tile.keys[0][i] = tile.values[i] = widens ? wide + i * a.width : reinterpret_cast<const float*>(entry);
        }
        core.attend(lanes, tile, position);
    }
    for (int64_t i = 0; i < lanes.count; i++)
        core.finish(lanes, i, a.latent, a.result + (lane_0 + i) * a.latent * query_bytes, a.query_format);
}

}  // namespace

int64_t absorbed_attention(int level, const AbsorbedAttention& a) {
    int64_t num_tokens = 0, most = 0;
    for (int64_t row = 0; row < a.num_rows; row++) {
        const int64_t end = a.firsts[row] + a.counts[row];
        if (a.firsts[row] < 0 || a.counts[row] < 0 || (a.counts[row] && end > a.columns * a.block_tokens)) return row;
        for (int64_t b = 0; b * a.block_tokens < end && a.counts[row]; b++)
            if (a.blocks[row * a.columns + b] < 0 || a.blocks[row * a.columns + b] >= a.num_blocks) return row;
        num_tokens += a.counts[row];
        most = a.counts[row] > most ? a.counts[row] : most;
    }
    if (num_tokens != a.num_tokens) return a.num_rows;
    const AttentionCore& core = core_of(level);
    // Every row is cut as the longest must be; those of a shorter one that are left over have nothing to do.
    const int64_t cuts = most ? parts_of(most * a.num_heads, core.vector, a.num_rows) : 0;
    const int64_t width = cuts ? up((most * a.num_heads + cuts - 1) / cuts, core.vector) : 0;
    share(a.num_rows * cuts, [&](int64_t part) {
        const int64_t row = part / cuts, num_lanes = a.counts[row] * a.num_heads, first = part % cuts * width;
        if (first >= num_lanes) return;
        int64_t token = 0;
        for (int64_t r = 0; r < row; r++) token += a.counts[r];
        absorb_part(core, a, row, token, first, first + width < num_lanes ? first + width : num_lanes);
    });
    return -1;
}

void expanded_attention(int level, const ExpandedAttention& a) {
    const AttentionCore& core = core_of(level);
    const int64_t bytes = bytes_of(a.format), num_groups = (a.num_tokens + MOST_LANES - 1) / MOST_LANES;
    const int64_t row_width = a.n + a.r + a.v;
    // The last tokens see most: their parts begin first.
    share(num_groups * a.num_heads, [&](int64_t part) {
        const int64_t head = part % a.num_heads, group = num_groups - 1 - part / a.num_heads;
        const int64_t token = group * MOST_LANES, left = a.num_tokens - token;
        AttentionLanes lanes;
        AttentionTile tile;
        float* wide = prepare(core, lanes, left < MOST_LANES ? left : MOST_LANES, a.n + a.r, a.v,
                              TILE * row_width);
        for (int64_t i = 0; i < lanes.count; i++) {
            const int64_t t = token + i;
            core.set_query(lanes, i, 0, a.query_plain + (t * a.plain_stride + head * a.plain_head) * bytes, a.format, a.n,
                           a.scale * LOG2_E);
            core.set_query(lanes, i, a.n, a.query_rotated + (t * a.rotated_stride + head * a.rotated_head) * bytes,
                           a.format, a.r, a.scale * LOG2_E);
            lanes.limits[i] = a.first + t + 1;
        }
        tile.key_widths[0] = a.n, tile.key_widths[1] = a.r, tile.value_width = a.v;
        const int64_t limit = last_limit(lanes);
        for (int64_t position = 0; position < limit; position += TILE) {
            tile.begin = 0;
            tile.end = limit - position < TILE ? limit - position : TILE;
            for (int64_t i = 0; i < tile.end; i++) {
                const int64_t at = position + i;
                const char* const rows[] = {a.key_plain + (at * a.key_stride + head * a.key_head) * bytes,
                                            a.key_rotated + at * a.key_rotated_stride * bytes,
                                            a.value + (at * a.value_stride + head * a.value_head) * bytes};
                const float** const places[] = {&tile.keys[0][i], &tile.keys[1][i], &tile.values[i]};
                const int64_t widths[] = {a.n, a.r, a.v};
                // Copied: rows of all heads lie so far apart that those of one head meet in few sets of the cache.
                float* to = wide + i * row_width;
                for (int64_t k = 0; k < 3; k++) {
                    if (a.format == FLOAT32)
                        std::memcpy(to, rows[k], size_t(widths[k]) * 4);
                    else
                        core.widen(reinterpret_cast<const uint16_t*>(rows[k]), widths[k], to);
                    *places[k] = to;
                    to += widths[k];
                }
            }
            core.attend(lanes, tile, position);
        }
        for (int64_t i = 0; i < lanes.count; i++)
            core.finish(lanes, i, a.v, a.result + ((token + i) * a.num_heads + head) * a.v * bytes, a.format);
    });
}

void multiply_floats(int level, int64_t count) { core_of(level).multiply(count); }

}  // namespace tripool
