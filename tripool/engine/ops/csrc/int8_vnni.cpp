// Level 2: AVX-512 VNNI.
//
// vpdpbusd multiplies unsigned by signed bytes and adds four products to a sum of 32 bits without saturation. Rows are
// therefore shifted by 128, and sums begin at minus 128 times the sum of the channel's weights. All is exact modulo
// 2**32, so the result is.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "int8.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")

#include "int8_plain.h"

namespace tripool {
namespace {

constexpr int64_t NEAR = 512;                      // bytes ahead: what one core can have under way
constexpr int STREAMS = 4;

// R rows by one block; U sums of each, so that a few rows need not wait for their own sums.
template <int R, int U>
void pass(const char* rows, int64_t stride, int64_t num_quads, const int8_t* weights, const int32_t* sums,
          const int8_t* ahead, int64_t step, int32_t* acc) {
    __m512i sum[R * U];
    const __m512i start = _mm512_mullo_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi32(-128));
    unrolled<R * U>(UNROLLED(i) { sum[i] = i % U ? _mm512_setzero_si512() : start; });
    int64_t k = 0;
    auto quad = UNROLLED(u) {
        const __m512i w = _mm512_loadu_si512(weights + (k + u) * BLOCK * QUAD);
        unrolled<R>(UNROLLED(r) {
            int32_t bytes;
            std::memcpy(&bytes, rows + r * stride + (k + u) * QUAD, 4);
            sum[r * U + u] = _mm512_dpbusd_epi32(sum[r * U + u], _mm512_set1_epi32(bytes), w);
        });
    };
    for (; k + U <= num_quads; k += U)
        unrolled<U>(UNROLLED(u) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead + (k + u) * step), _MM_HINT_T1);
            quad(u);
        });
    for (; k < num_quads; k++) quad(std::integral_constant<int, 0>());
    unrolled<R>(UNROLLED(r) {
        unrolled<U - 1>(UNROLLED(u) { sum[r * U] = _mm512_add_epi32(sum[r * U], sum[r * U + u + 1]); });
        _mm512_storeu_si512(acc + r * BLOCK, sum[r * U]);
    });
}

// Sums of one row by S blocks, `apart` bytes from each other: memory gives several streams more than one. `next` is
// where the blocks after these begin.
template <int S>
void pass_of_one(const char* row, int64_t num_quads, const int8_t* weights, int64_t apart, const int32_t* sums,
                 int64_t sums_apart, const int8_t* next, int32_t* acc) {
    __m512i sum[S];
    unrolled<S>(UNROLLED(s) {
        sum[s] = _mm512_mullo_epi32(_mm512_loadu_si512(sums + s * sums_apart), _mm512_set1_epi32(-128));
    });
    const auto quads = [&](int64_t count, const int8_t* ahead) __attribute__((always_inline)) {
        for (int64_t k = 0; k < count; k++) {
            int32_t bytes;
            std::memcpy(&bytes, row, 4);
            const __m512i x = _mm512_set1_epi32(bytes);
            unrolled<S>(UNROLLED(s) {
                _mm_prefetch(reinterpret_cast<const char*>(ahead + s * apart), _MM_HINT_T0);
                sum[s] = _mm512_dpbusd_epi32(sum[s], x, _mm512_loadu_si512(weights + s * apart));
            });
            ahead += BLOCK * QUAD;
            weights += BLOCK * QUAD;
            row += QUAD;
        }
    };
    const int64_t last = num_quads < NEAR / (BLOCK * QUAD) ? num_quads : NEAR / (BLOCK * QUAD);
    quads(num_quads - last, weights + NEAR);
    quads(last, next);
    unrolled<S>(UNROLLED(s) { _mm512_storeu_si512(acc + s * sums_apart, sum[s]); });
}

// One row by all blocks: by four streams of several blocks each.
void multiply_one(const char* row, int64_t num_quads, const int8_t* blocks, int64_t num_blocks, const int32_t* sums,
                  const int8_t* next, int32_t* acc) {
    const int64_t length = num_blocks / STREAMS, bytes = num_quads * BLOCK * QUAD;
    for (int64_t b = 0; b < length; b++) {
        const int8_t* block = blocks + b * bytes;
        pass_of_one<STREAMS>(row, num_quads, block, length * bytes, sums + b * BLOCK, length * BLOCK,
                             b + 1 < length ? block + bytes : next, acc + b * BLOCK);
    }
    for (int64_t b = length * STREAMS; b < num_blocks; b++)
        pass_of_one<1>(row, num_quads, blocks + b * bytes, 0, sums + b * BLOCK, 0, next, acc + b * BLOCK);
}

using Pass = void (*)(const char*, int64_t, int64_t, const int8_t*, const int32_t*, const int8_t*, int64_t, int32_t*);
constexpr int64_t MOST = 12;
const Pass PASS[MOST + 1] = {nullptr, pass<1, 4>, pass<2, 4>, pass<3, 2>, pass<4, 2>, pass<5, 2>, pass<6, 2>,
                             pass<7, 2>, pass<8, 2>, pass<9, 1>, pass<10, 1>, pass<11, 1>, pass<12, 1>};


void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
              int64_t num_blocks, const int32_t* sums, const int8_t* next, int32_t* acc) {
    if (num_rows == 1) return multiply_one(rows, num_quads, blocks, num_blocks, sums, next, acc);
    const int64_t num_groups = (num_rows + MOST - 1) / MOST;
    const int64_t step = (BLOCK * QUAD + num_groups - 1) / num_groups;               // each pass fetches its share
    for (int64_t b = 0; b < num_blocks; b++) {
        const int8_t* block = blocks + b * num_quads * BLOCK * QUAD;
        const int8_t* ahead = next + b * num_quads * BLOCK * QUAD;
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t first = num_rows * group / num_groups, end = num_rows * (group + 1) / num_groups;
            PASS[end - first](rows + first * stride, stride, num_quads, block, sums + b * BLOCK, ahead, step,
                              acc + (b * num_rows + first) * BLOCK);
            ahead += num_quads * step;
        }
    }
}

void spread(const int8_t* q, int64_t width, void* row) {
    uint8_t* shifted = static_cast<uint8_t*>(row);
    for (int64_t k = 0; k < width; k++) shifted[k] = uint8_t(q[k] + 128);
    for (int64_t k = width; k % QUAD; k++) shifted[k] = 128;
}

void gate(const float* gate, const float* up, float* h) { gate_block(gate, up, h); }

}  // namespace

const Int8Product INT8_VNNI = {1, 32, spread, multiply, gate};

}  // namespace tripool

#pragma GCC pop_options
