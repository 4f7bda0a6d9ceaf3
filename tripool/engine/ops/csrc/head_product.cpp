// Products head by head: queries with the key's expansion, latents with the value's. The slow definition is
// ops/head_product.py.
//
// A head's matrix is read once, as it lies, for up to `ROWS` tokens, whose sums stay in the nearest cache meanwhile; four
// inputs go at once, so that sums are loaded and stored a fourth as often.

#include <vector>

#include "glue.h"
#include "rows.h"

namespace tripool {
namespace {

constexpr int64_t ROWS = 8, STEP = 4;

// sum += x times `STEP` inputs of the weights, for N rows.
template <int N, class T>
INLINE void add_products(const float (*x)[STEP], const T* w0, int64_t num_outputs, float* sum, float* other_sum) {
    const T *w1 = w0 + num_outputs, *w2 = w1 + num_outputs, *w3 = w2 + num_outputs;
    const float x0 = x[0][0], x1 = x[0][1], x2 = x[0][2], x3 = x[0][3];
    const float z0 = x[N - 1][0], z1 = x[N - 1][1], z2 = x[N - 1][2], z3 = x[N - 1][3];
    int64_t i = 0;
    for (; i + LANES <= num_outputs; i += LANES) {
        Lanes acc, v0, v1, v2, v3;
        load(w0 + i, v0);
        load(w1 + i, v1);
        load(w2 + i, v2);
        load(w3 + i, v3);
        load(sum + i, acc);
        acc += v0 * x0;
        acc += v1 * x1;
        acc += v2 * x2;
        acc += v3 * x3;
        store(acc, sum + i);
        if (N == 2) {
            load(other_sum + i, acc);
            acc += v0 * z0;
            acc += v1 * z1;
            acc += v2 * z2;
            acc += v3 * z3;
            store(acc, other_sum + i);
        }
    }
    for (int64_t k = 0; k < STEP; k++)
        for (int64_t j = i; j < num_outputs; j++) {
            sum[j] += load_one(w0 + k * num_outputs + j) * x[0][k];
            if (N == 2) other_sum[j] += load_one(w0 + k * num_outputs + j) * x[1][k];
        }
}

template <class T>
INLINE void add_product(float x, const T* weights, int64_t num_outputs, float* sum) {
    for (int64_t i = 0; i < num_outputs; i++) sum[i] += load_one(weights + i) * x;
}

template <class T>
INLINE void multiply_heads(const HeadProduct& p) {
    static thread_local std::vector<float> sums;
    if (int64_t(sums.size()) < ROWS * p.num_outputs) sums.resize(size_t(ROWS * p.num_outputs));
    for (int64_t head = 0; head < p.num_heads; head++) {
        const T* matrix = static_cast<const T*>(p.weights) + head * p.weight_head_stride;
        for (int64_t first = 0; first < p.num_tokens; first += ROWS) {
            const int64_t count = p.num_tokens - first < ROWS ? p.num_tokens - first : ROWS;
            const T* x = static_cast<const T*>(p.x) + first * p.x_token_stride + head * p.x_head_stride;
            T* y = static_cast<T*>(p.y) + first * p.y_token_stride + head * p.y_head_stride;
            std::memset(sums.data(), 0, size_t(count * p.num_outputs) * sizeof(float));
            const auto sum_of = [&](int64_t r) __attribute__((always_inline)) { return sums.data() + r * p.num_outputs; };
            int64_t k = 0;
            for (; k + STEP <= p.num_inputs; k += STEP)
                for (int64_t r = 0; r < count; r += 2) {
                    const int64_t rows = count - r < 2 ? 1 : 2;
                    float inputs[2][STEP];
                    for (int64_t n = 0; n < rows; n++)
                        for (int64_t i = 0; i < STEP; i++) inputs[n][i] = load_one(x + (r + n) * p.x_token_stride + k + i);
                    if (rows == 2)
                        add_products<2>(inputs, matrix + k * p.num_outputs, p.num_outputs, sum_of(r), sum_of(r + 1));
                    else
                        add_products<1>(inputs, matrix + k * p.num_outputs, p.num_outputs, sum_of(r), nullptr);
                }
            for (; k < p.num_inputs; k++)
                for (int64_t r = 0; r < count; r++)
                    add_product(load_one(x + r * p.x_token_stride + k), matrix + k * p.num_outputs, p.num_outputs,
                                sum_of(r));
            for (int64_t r = 0; r < count; r++) {
                const float* sum = sum_of(r);
                T* row = y + r * p.y_token_stride;
                int64_t i = 0;
                for (; i + LANES <= p.num_outputs; i += LANES) {
                    Lanes value;
                    load(sum + i, value);
                    store(value, row + i);
                }
                for (; i < p.num_outputs; i++) store_one(sum[i], row + i);
            }
        }
    }
}

FOR_EACH_LEVEL(multiply_heads, void, (const HeadProduct& p), (p))

}  // namespace

void head_product(int level, int64_t format, const HeadProduct& product) { multiply_heads_at(level, format)(product); }

}  // namespace tripool
