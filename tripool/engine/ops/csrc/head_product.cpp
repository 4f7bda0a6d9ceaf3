// Products head by head: queries with the key's expansion, latents with the value's. The slow definition is
// ops/head_product.py.
//
// Sums of two tokens by 32 outputs stay in registers while the inputs go by. For more tokens a part of the matrix is
// first laid side by side as floats: rows of a matrix are often a power of two apart, and would meet in a few sets of the
// nearest cache. Every sum takes its inputs in order, so a row's bits do not depend on the others.

#include <vector>

#include "glue.h"
#include "rows.h"

namespace tripool {
namespace {

constexpr int64_t AHEAD = 8;                       // inputs: what is fetched meanwhile
constexpr int64_t PART = 128, OUTPUTS = 4 * LANES; // inputs and outputs of a part: 16 KB

// Adds to the sums of one token by V vectors of outputs (1 or 4).
template <int V, class T>
INLINE void multiply_one(const float* x, int64_t num_inputs, const T* weights, int64_t num_outputs, float* sum) {
    Lanes a[V], w;
    for (int v = 0; v < V; v++) load(sum + v * LANES, a[v]);
    for (int64_t k = 0; k < num_inputs; k++, weights += num_outputs) {
        for (int v = 0; v < V; v += 2) __builtin_prefetch(weights + AHEAD * num_outputs + v * LANES);
        for (int v = 0; v < V; v++) {
            load(weights + v * LANES, w);
            a[v] += w * x[k];
        }
    }
    for (int v = 0; v < V; v++) store(a[v], sum + v * LANES);
}

// Adds to the sums of two tokens by a part.
INLINE void multiply_two(const float* x, const float* z, int64_t num_inputs, const float* part, float* sum) {
    Lanes a[4], b[4], w;
    for (int v = 0; v < 4; v++) load(sum + v * LANES, a[v]);
    for (int v = 0; v < 4; v++) load(sum + OUTPUTS + v * LANES, b[v]);
    for (int64_t k = 0; k < num_inputs; k++, part += OUTPUTS)
        for (int v = 0; v < 4; v++) {
            load(part + v * LANES, w);
            a[v] += w * x[k];
            b[v] += w * z[k];
        }
    for (int v = 0; v < 4; v++) store(a[v], sum + v * LANES);
    for (int v = 0; v < 4; v++) store(b[v], sum + OUTPUTS + v * LANES);
}

template <class T>
INLINE void widen_row(const T* x, int64_t count, float* row) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes value;
        load(x + i, value);
        store(value, row + i);
    }
    for (; i < count; i++) row[i] = load_one(x + i);
}

template <class T>
INLINE void narrow_row(const float* sum, int64_t count, T* y) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes value;
        load(sum + i, value);
        store(value, y + i);
    }
    for (; i < count; i++) store_one(sum[i], y + i);
}

template <class T>
INLINE void multiply_heads(const HeadProduct& p) {
    static thread_local std::vector<float> kept;
    const int64_t needed = PART * OUTPUTS + p.num_tokens * (p.num_inputs + OUTPUTS);
    if (int64_t(kept.size()) < needed) kept.resize(size_t(needed));
    float* const part = kept.data();
    float* const sums = part + PART * OUTPUTS;
    float* const rows = sums + p.num_tokens * OUTPUTS;
    const int64_t K = p.num_inputs, N = p.num_outputs;
    for (int64_t head = 0; head < p.num_heads; head++) {
        const T* matrix = static_cast<const T*>(p.weights) + head * p.weight_head_stride;
        const T* x = static_cast<const T*>(p.x) + head * p.x_head_stride;
        T* y = static_cast<T*>(p.y) + head * p.y_head_stride;
        for (int64_t t = 0; t < p.num_tokens; t++) widen_row(x + t * p.x_token_stride, K, rows + t * K);
        for (int64_t n = 0; n < N; n += OUTPUTS) {
            const int64_t width = N - n < OUTPUTS ? N - n : OUTPUTS;
            std::memset(sums, 0, size_t(p.num_tokens * OUTPUTS) * sizeof *sums);
            if (p.num_tokens == 1 && width == OUTPUTS) {
                multiply_one<4>(rows, K, matrix + n, N, sums);
            } else {
                for (int64_t first = 0; first < K; first += PART) {
                    const int64_t count = K - first < PART ? K - first : PART;
                    for (int64_t k = 0; k < count; k++) widen_row(matrix + (first + k) * N + n, width, part + k * OUTPUTS);
                    int64_t t = 0;
                    for (; t + 2 <= p.num_tokens; t += 2)
                        multiply_two(rows + t * K + first, rows + (t + 1) * K + first, count, part, sums + t * OUTPUTS);
                    if (t < p.num_tokens)
                        multiply_one<4>(rows + t * K + first, count, part, OUTPUTS, sums + t * OUTPUTS);
                }
            }
            for (int64_t t = 0; t < p.num_tokens; t++)
                narrow_row(sums + t * OUTPUTS, width, y + t * p.y_token_stride + n);
        }
    }
}

FOR_EACH_LEVEL(multiply_heads, void, (const HeadProduct& p), (p))

}  // namespace

void head_product(int level, int64_t format, const HeadProduct& product) { multiply_heads_at(level, format)(product); }

}  // namespace tripool
