// Root-mean-square norm, with the residual added before it and rows quantised after it. The slow definition is
// ops/rms_norm.py.

#include <vector>

#include "glue.h"
#include "norm.h"

namespace tripool {
namespace {

template <class T>
INLINE void add_row(const T* x, const T* more, int64_t width, T* sum) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        Lanes value, other;
        load(x + i, value);
        load(more + i, other);
        store(value + other, sum + i);
    }
    for (; i < width; i++) store_one(load_one(x + i) + load_one(more + i), sum + i);
}

template <class T>
INLINE void norm_rows(const RmsNorm& n, RowFunction quantise_row) {
    static thread_local std::vector<T> kept;
    if (!n.y && int64_t(kept.size()) < n.width) kept.resize(size_t(n.width));
    const T* x = static_cast<const T*>(n.x);
    const T* more = static_cast<const T*>(n.more);
    T* y = static_cast<T*>(n.y);
    for (int64_t r = 0; r < n.num_rows; r++, x += n.x_stride) {
        T* sum = static_cast<T*>(n.sum) + r * n.width;
        if (more) add_row(x, more + r * n.width, n.width, sum);
        T* row = y ? y + r * n.width : kept.data();
        norm_row(more ? sum : x, static_cast<const T*>(n.weight), n.width, n.eps, row);
        if (n.q) n.scales[r] = quantise_row(row, n.width, n.q + r * n.width);
    }
}

FOR_EACH_LEVEL(norm_rows, void, (const RmsNorm& n, RowFunction quantise_row), (n, quantise_row))

}  // namespace

void rms_norm(int level, int64_t format, const RmsNorm& n) {
    norm_rows_at(level, format)(n, row_function(level, format));
}

}  // namespace tripool
