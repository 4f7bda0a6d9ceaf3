// Level 1: AVX2.
//
// AVX2 has one instruction for bytes, vpmaddubsw, and it saturates: 255 * 127 twice does not fit in 16 bits. Made exact
// with signs (or with sums that are widened at once) it costs as many operations as 16-bit products do. So weights are
// widened in a register, on the way from memory, and rows once for each call; vpmaddwd and vpaddd are exact.
//
// A pass keeps R rows by 4 J channels in registers. One or two rows take a block in one pass. More take half a block at
// a time, up to six rows at once: 12 sums, 2 weights, a row and a product fill the 16 registers.

#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "int8.h"

#pragma GCC push_options
#pragma GCC target("avx2")

#include "int8_plain.h"

namespace tripool {
namespace {

template <int R, int J>
void pass(const char* rows, int64_t stride, int64_t num_quads, const int8_t* weights, const int8_t* ahead, int64_t step,
          int32_t* acc) {
    __m256i sum[R][J];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j++) sum[r][j] = _mm256_setzero_si256();
    for (int64_t k = 0; k < num_quads; k++) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
        ahead += step;
        __m256i w[J];
        for (int j = 0; j < J; j++)
            w[j] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + 16 * j)));
        for (int r = 0; r < R; r++) {
            int64_t quad;
            std::memcpy(&quad, rows + r * stride, 8);
            const __m256i x = _mm256_set1_epi64x(quad);
            for (int j = 0; j < J; j++) sum[r][j] = _mm256_add_epi32(sum[r][j], _mm256_madd_epi16(x, w[j]));
        }
        weights += BLOCK * QUAD;
        rows += 2 * QUAD;
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < J; j += 2) {           // two sums of each channel beside one another
            __m256i both = _mm256_hadd_epi32(sum[r][j], sum[r][j + 1]);
            both = _mm256_permute4x64_epi64(both, 0xd8);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc + r * BLOCK + 4 * j), both);
        }
}

using Pass = void (*)(const char*, int64_t, int64_t, const int8_t*, const int8_t*, int64_t, int32_t*);
constexpr int64_t MOST = 6;
const Pass HALF[MOST + 1] = {nullptr, pass<1, 2>, pass<2, 2>, pass<3, 2>, pass<4, 2>, pass<5, 2>, pass<6, 2>};

void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* block,
              const int32_t*, const int8_t* next, int32_t* acc) {
    if (num_rows <= 2) {
        (num_rows == 2 ? pass<2, 4> : pass<1, 4>)(rows, stride, num_quads, block, next, BLOCK * QUAD, acc);
        return;
    }
    const int64_t num_groups = (num_rows + MOST - 1) / MOST;
    const int64_t step = (BLOCK * QUAD + 2 * num_groups - 1) / (2 * num_groups);     // each pass fetches its share
    for (int64_t group = 0; group < num_groups; group++) {
        const int64_t first = num_rows * group / num_groups, end = num_rows * (group + 1) / num_groups;
        for (int64_t half = 0; half < 2; half++) {
            HALF[end - first](rows + first * stride, stride, num_quads, block + 32 * half, next, step,
                              acc + first * BLOCK + 8 * half);
            next += num_quads * step;
        }
    }
}

void spread(const int8_t* q, int64_t width, void* row) { spread_int16(q, width, static_cast<int16_t*>(row)); }

void gate(const float* gate, const float* up, float* h) { gate_block(gate, up, h); }

}  // namespace

const Int8Product INT8_AVX2 = {2, spread, multiply, gate};

}  // namespace tripool

#pragma GCC pop_options
