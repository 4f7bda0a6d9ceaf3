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

using Pass = void (*)(const char*, int64_t, int64_t, const int8_t*, const int32_t*, const int8_t*, int64_t, int32_t*);
constexpr int64_t MOST = 12;
const Pass PASS[MOST + 1] = {nullptr, pass<1, 4>, pass<2, 4>, pass<3, 2>, pass<4, 2>, pass<5, 2>, pass<6, 2>,
                             pass<7, 2>, pass<8, 2>, pass<9, 1>, pass<10, 1>, pass<11, 1>, pass<12, 1>};

void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
              int64_t num_blocks, const int32_t* sums, const int8_t* next, int32_t* acc) {
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

const Int8Product INT8_VNNI = {1, MOST_BLOCKS, spread, multiply, gate};

}  // namespace tripool

#pragma GCC pop_options
