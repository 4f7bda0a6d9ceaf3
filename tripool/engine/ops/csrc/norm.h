// One row's root-mean-square norm, for whoever norms on the way to something else.
#pragma once

#include <cmath>

#include "rows.h"

namespace tripool {
namespace {

template <class T>
INLINE float norm_factor(const T* x, int64_t width, float eps) {
    Lanes a = {}, b = {}, c = {}, d = {}, v0, v1, v2, v3;
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) {
        load(x + i, v0);
        load(x + i + LANES, v1);
        load(x + i + 2 * LANES, v2);
        load(x + i + 3 * LANES, v3);
        a += v0 * v0;
        b += v1 * v1;
        c += v2 * v2;
        d += v3 * v3;
    }
    for (; i + LANES <= width; i += LANES) {
        load(x + i, v0);
        a += v0 * v0;
    }
    a = (a + b) + (c + d);
    float rest = 0.0f;
    for (; i < width; i++) rest += load_one(x + i) * load_one(x + i);
    const float all = ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7])) + rest;
    return 1.0f / std::sqrt(all / float(width) + eps);
}

template <class T>
INLINE void norm_row(const T* x, const T* weight, int64_t width, float eps, T* y) {
    const float factor = norm_factor(x, width, eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        Lanes value, by;
        load(x + i, value);
        load(weight + i, by);
        store(value * factor * by, y + i);
    }
    for (; i < width; i++) store_one(load_one(x + i) * factor * load_one(weight + i), y + i);
}

}  // namespace
}  // namespace tripool
