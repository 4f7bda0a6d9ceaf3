// Rotary positions, and the latent cache's entries. The slow definition is ops/rotary.py.

#include <cstring>

#include "glue.h"
#include "norm.h"

namespace tripool {
namespace {

const IntLanes EVEN = {0, 0, 2, 2, 4, 4, 6, 6}, ODD = {1, 1, 3, 3, 5, 5, 7, 7}, OTHER = {1, 0, 3, 2, 5, 4, 7, 6};
const IntLanes REAL = {0, 2, 4, 6, 8, 10, 12, 14}, IMAGINARY = {1, 3, 5, 7, 9, 11, 13, 15};
const BitLanes SIGN_OF_EVEN = {0x80000000, 0, 0x80000000, 0, 0x80000000, 0, 0x80000000, 0};

// Four pairs of neighbours by as many turns.
template <class T>
INLINE void rotate_neighbours(const T* from, const float* turn, T* to) {
    Lanes x, turns;
    load(from, x);
    load(turn, turns);
    const BitLanes sine = reinterpret_cast<BitLanes>(__builtin_shuffle(turns, ODD)) ^ SIGN_OF_EVEN;
    store(x * __builtin_shuffle(turns, EVEN) + __builtin_shuffle(x, OTHER) * reinterpret_cast<Lanes>(sine), to);
}

// Eight pairs, `apart` numbers from each other.
template <class T>
INLINE void rotate_apart(const T* from, int64_t apart, const float* turn, T* to) {
    Lanes a, b, first, second;
    load(from, a);
    load(from + apart, b);
    load(turn, first);
    load(turn + LANES, second);
    const Lanes cosine = __builtin_shuffle(first, second, REAL), sine = __builtin_shuffle(first, second, IMAGINARY);
    store(a * cosine + (-b) * sine, to);
    store(a * sine + b * cosine, to + apart);
}

// Of a difference and a sum side by side gcc 12 makes one instruction that fuses multiplying and adding, though it was
// told not to fuse. So both are sums, and it must not see through the sign.
INLINE float negative(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits ^= 0x80000000;
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

template <class T>
INLINE void rotate_pair(const T* from, int64_t apart, const float* turn, T* to) {
    const float a = load_one(from), b = load_one(from + apart);
    const float real = a * turn[0] + negative(b) * turn[1], imaginary = a * turn[1] + b * turn[0];
    store_one(real, to);
    store_one(imaginary, to + apart);
}

// It may be done in place.
template <class T>
INLINE void rotate_row(const T* x, const float* turns, int64_t num_pairs, bool interleaved, T* y) {
    const int64_t at_once = interleaved ? LANES / 2 : LANES, step = interleaved ? 2 : 1;
    const int64_t apart = interleaved ? 1 : num_pairs;
    int64_t pair = 0;
    for (; pair + at_once <= num_pairs; pair += at_once) {
        if (interleaved)
            rotate_neighbours(x + step * pair, turns + 2 * pair, y + step * pair);
        else
            rotate_apart(x + pair, apart, turns + 2 * pair, y + pair);
    }
    for (; pair < num_pairs; pair++) rotate_pair(x + step * pair, apart, turns + 2 * pair, y + step * pair);
}

struct Heads {
    const void* x;
    int64_t x_token_stride, x_head_stride, num_tokens, num_heads;
    void* y;
    int64_t y_token_stride, y_head_stride;
};

template <class T>
INLINE void rotate_rows(const Heads& h, const Rotation& r) {
    for (int64_t t = 0; t < h.num_tokens; t++)
        for (int64_t head = 0; head < h.num_heads; head++) {
            const T* x = static_cast<const T*>(h.x) + t * h.x_token_stride + head * h.x_head_stride;
            T* y = static_cast<T*>(h.y) + t * h.y_token_stride + head * h.y_head_stride;
            const float* turns = r.turns + t * 2 * r.num_pairs;
            if (r.interleaved)
                rotate_row(x, turns, r.num_pairs, true, y);
            else
                rotate_row(x, turns, r.num_pairs, false, y);
        }
}

FOR_EACH_LEVEL(rotate_rows, void, (const Heads& h, const Rotation& r), (h, r))

struct Rows {
    const void* x;
    int64_t stride, num_tokens, width;
    const void* weight;
    float eps;
};

template <class T>
INLINE void write_rows(const Rows& rows, const Rotation& r, const Entries& entries) {
    for (int64_t t = 0; t < rows.num_tokens; t++) {
        const T* x = static_cast<const T*>(rows.x) + t * rows.stride;
        T* entry = static_cast<T*>(entries.data) + entries.block[t] * entries.block_stride +
                   entries.offset[t] * entries.token_stride;
        norm_row(x, static_cast<const T*>(rows.weight), rows.width, rows.eps, entry);
        rotate_row(x + rows.width, r.turns + t * 2 * r.num_pairs, r.num_pairs, r.interleaved, entry + rows.width);
    }
}

FOR_EACH_LEVEL(write_rows, void, (const Rows& rows, const Rotation& r, const Entries& entries), (rows, r, entries))

}  // namespace

void rotate(int level, int64_t format, const void* x, int64_t x_token_stride, int64_t x_head_stride, int64_t num_tokens,
            int64_t num_heads, const Rotation& rotation, void* y, int64_t y_token_stride, int64_t y_head_stride) {
    rotate_rows_at(level, format)(
        {x, x_token_stride, x_head_stride, num_tokens, num_heads, y, y_token_stride, y_head_stride}, rotation);
}

int64_t write_entries(int level, int64_t format, const void* x, int64_t x_stride, int64_t num_tokens, int64_t width,
                      const void* weight, float eps, const Rotation& rotation, const Entries& entries) {
    for (int64_t t = 0; t < num_tokens; t++)
        if (entries.block[t] < 0 || entries.block[t] >= entries.num_blocks || entries.offset[t] < 0 ||
            entries.offset[t] >= entries.block_tokens)
            return t;
    write_rows_at(level, format)({x, x_stride, num_tokens, width, weight, eps}, rotation, entries);
    return -1;
}

}  // namespace tripool
