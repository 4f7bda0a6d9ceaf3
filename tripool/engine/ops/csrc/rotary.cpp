// Rotary positions, and the latent cache's entries. The slow definition is ops/rotary.py.

#include <cstring>

#include "glue.h"
#include "norm.h"

namespace tripool {
namespace {

constexpr int64_t PAIRS = 16;      // at a time, through a buffer, so that it may be done in place

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
INLINE void rotate_pairs(const T* from, const float* turn, int64_t count, int64_t step, int64_t other, T* to) {
    float real[PAIRS], imaginary[PAIRS];
    for (int64_t p = 0; p < count; p++) {
        const float a = load_one(from + step * p), b = load_one(from + step * p + other);
        real[p] = a * turn[2 * p] + negative(b) * turn[2 * p + 1];
        imaginary[p] = a * turn[2 * p + 1] + b * turn[2 * p];
    }
    for (int64_t p = 0; p < count; p++) {
        store_one(real[p], to + step * p);
        store_one(imaginary[p], to + step * p + other);
    }
}

template <class T>
INLINE void rotate_row(const T* x, const float* turns, int64_t num_pairs, bool interleaved, T* y) {
    const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : num_pairs;
    int64_t first = 0;
    for (; first + PAIRS <= num_pairs; first += PAIRS)
        rotate_pairs(x + step * first, turns + 2 * first, PAIRS, step, other, y + step * first);
    if (first < num_pairs)
        rotate_pairs(x + step * first, turns + 2 * first, num_pairs - first, step, other, y + step * first);
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
