// Level 1: AVX2.
//
// AVX2 has one instruction for bytes, vpmaddubsw, and it saturates: 255 * 127 twice does not fit in 16 bits. Made exact
// with signs (or with sums that are widened at once) it costs as many operations as 16-bit products do. So weights are
// widened in a register, on the way from memory, and rows once for each call; vpmaddwd and vpaddd are exact.
//
// A pass keeps rows by channels in registers: 12 sums, 2 weights, a row and a product fill the 16 there are. So six rows
// go at once, by half a block at a time, and fetch the next weights meanwhile. Up to three rows wait for memory more than
// for anything else; they go through several blocks in turn, two of them side by side, because memory gives several
// streams more than one (reading alone on one core of Zen 3: 12 GB/s from two or four against 8 GB/s from one). One row
// goes through four at once: bytes made exact with signs need half the registers for sums, which leaves room for that.

#include <cstdint>
#include <cstring>
#include <utility>

#include <immintrin.h>

#include "int8.h"

#pragma GCC push_options
#pragma GCC target("avx2")

#include "int8_plain.h"

namespace tripool {
namespace {

constexpr int64_t NEAR = 512;                      // bytes ahead: what one core can have under way
constexpr int STREAMS = 4;

// sum += x * w, pairs of products added. Written out, because a compiler that reorders intrinsics needs more registers
// than there are (gcc 12 kept seven sums in memory).
inline __attribute__((always_inline)) void multiply_add(__m256i& sum, __m256i x, __m256i w) {
    __m256i product;
    asm volatile("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(x), "x"(w));
}

// Adds to the sums of R rows by 4 J channels of S blocks. Sums lie as they are in registers, two for each channel:
// `[block][row][4][8]`, with `sum_stride` between blocks.
template <int R, int J, int S>
void pass(const char* rows, int64_t stride, int64_t num_quads, const int8_t* weights, int64_t block_bytes,
          const int8_t* ahead, int64_t step, int32_t* sums, int64_t sum_stride) {
    const auto place = [&](int i) {
        return reinterpret_cast<__m256i*>(sums + i / (R * J) * sum_stride + (i / J % R * 4 + i % J) * 8);
    };
    __m256i sum[S * R * J];
    unrolled<S * R * J>(UNROLLED(i) { sum[i] = _mm256_loadu_si256(place(i)); });
    for (int64_t k = 0; k < num_quads; k++) {
        unrolled<S>(UNROLLED(s) {
            _mm_prefetch(reinterpret_cast<const char*>(ahead + s * block_bytes), _MM_HINT_T0);
            __m256i w[J];
            unrolled<J>(UNROLLED(j) {
                const int8_t* from = weights + s * block_bytes + 16 * j;
                w[j] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            });
            unrolled<R>(UNROLLED(r) {
                int64_t quad;
                std::memcpy(&quad, rows + r * stride, 8);
                const __m256i x = _mm256_set1_epi64x(quad);
                unrolled<J>(UNROLLED(j) { multiply_add(sum[(s * R + r) * J + j], x, w[j]); });
            });
        });
        ahead += step;
        weights += BLOCK * QUAD;
        rows += 2 * QUAD;
    }
    unrolled<S * R * J>(UNROLLED(i) { _mm256_storeu_si256(place(i), sum[i]); });
}

// Sums of one row by S blocks, `apart` bytes from each other. Weights give their signs to the inputs: an input is never
// -128, which has no opposite. `next` is where the blocks after these begin.
template <int S>
void pass_of_one(const char* row, int64_t num_quads, const int8_t* weights, int64_t apart, const int8_t* next,
                 int32_t* acc, int64_t acc_apart) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[2 * S];
    unrolled<2 * S>(UNROLLED(i) { sum[i] = _mm256_setzero_si256(); });
    const auto quads = [&](int64_t count, const int8_t* ahead) __attribute__((always_inline)) {
        for (int64_t k = 0; k < count; k++) {
            const __m128i quad = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row));
            const __m256i x = _mm256_broadcastd_epi32(_mm_packs_epi16(quad, quad));
            unrolled<2 * S>(UNROLLED(i) {
                if (i % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead + i / 2 * apart), _MM_HINT_T0);
                const int8_t* from = weights + i / 2 * apart + i % 2 * 32;
                const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
                sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(pairs, ones));
            });
            ahead += BLOCK * QUAD;
            weights += BLOCK * QUAD;
            row += 2 * QUAD;
        }
    };
    const int64_t last = num_quads < NEAR / (BLOCK * QUAD) ? num_quads : NEAR / (BLOCK * QUAD);
    quads(num_quads - last, weights + NEAR);
    quads(last, next);
    unrolled<2 * S>(UNROLLED(i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc + i / 2 * acc_apart + i % 2 * 8), sum[i]);
    });
}

// One row by all blocks: by four streams of several blocks each, because a stream's beginning is waited for.
void multiply_one(const char* row, int64_t num_quads, const int8_t* blocks, int64_t num_blocks, int64_t block_bytes,
                  const int8_t* next, int32_t* acc) {
    const int64_t length = num_blocks / STREAMS;
    for (int64_t b = 0; b < length; b++) {
        const int8_t* block = blocks + b * block_bytes;
        pass_of_one<STREAMS>(row, num_quads, block, length * block_bytes, b + 1 < length ? block + block_bytes : next,
                             acc + b * BLOCK, length * BLOCK);
    }
    for (int64_t b = length * STREAMS; b < num_blocks; b++)
        pass_of_one<1>(row, num_quads, blocks + b * block_bytes, 0, next, acc + b * BLOCK, 0);
}

using Pass = void (*)(const char*, int64_t, int64_t, const int8_t*, int64_t, const int8_t*, int64_t, int32_t*, int64_t);
constexpr int64_t MOST = 6;
const Pass HALF[MOST + 1] = {nullptr,       pass<1, 2, 1>, pass<2, 2, 1>, pass<3, 2, 1>,
                             pass<4, 2, 1>, pass<5, 2, 1>, pass<6, 2, 1>};
const Pass HALF_OF_TWO[] = {nullptr, nullptr, pass<2, 2, 2>, pass<3, 2, 2>};
constexpr int64_t FEW_QUADS = 8, MANY_QUADS = 64;   // in a part of a block
constexpr int64_t RAW = 2 * BLOCK;                 // sums of one row and block

// Two or three rows by a part of all blocks, two and two side by side.
void multiply_few(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* part,
                  int64_t num_blocks, int64_t block_bytes, int32_t* sums) {
    const int64_t sum_stride = num_rows * RAW;
    for (int64_t b = 0; b < num_blocks; b += 2, part += 2 * block_bytes, sums += 2 * sum_stride) {
        const bool two = b + 1 < num_blocks;
        for (int64_t half = 0; half < 2; half++)
            (two ? HALF_OF_TWO : HALF)[num_rows](rows, stride, num_quads, part + 32 * half, block_bytes, part + NEAR,
                                                 BLOCK * QUAD, sums + 16 * half, sum_stride);
    }
}

// All rows by a part of one block. All passes but the first find it in the nearest cache, and fetch the next part.
void multiply_many(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* part,
                   int32_t* sums) {
    const int64_t num_groups = (num_rows + MOST - 1) / MOST;
    const int64_t step = (BLOCK * QUAD + 2 * num_groups - 1) / (2 * num_groups);         // each pass fetches its share
    const int8_t* ahead = part + num_quads * BLOCK * QUAD;
    for (int64_t half = 0; half < 2; half++)
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t first = num_rows * group / num_groups, end = num_rows * (group + 1) / num_groups;
            HALF[end - first](rows + first * stride, stride, num_quads, part + 32 * half, 0, ahead, step,
                              sums + first * RAW + 16 * half, 0);
            ahead += num_quads * step;
        }
}

void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
              int64_t num_blocks, const int32_t*, const int8_t* next, int32_t* acc) {
    const int64_t block_bytes = num_quads * BLOCK * QUAD, num_sums = num_blocks * num_rows;
    if (num_rows == 1) return multiply_one(rows, num_quads, blocks, num_blocks, block_bytes, next, acc);
    int32_t* sums = acc + num_sums * BLOCK;
    std::memset(sums, 0, size_t(num_sums * RAW) * sizeof *sums);
    const bool few = num_rows <= 3;
    const int64_t part = few ? FEW_QUADS : MANY_QUADS;
    for (int64_t b = 0; b < num_blocks; b += few ? num_blocks : 1)
        for (int64_t k = 0; k < num_quads; k += part) {
            const char* inputs = rows + k * 2 * QUAD;
            const int8_t* weights = blocks + b * block_bytes + k * BLOCK * QUAD;
            const int64_t quads = num_quads - k < part ? num_quads - k : part;
            if (few)
                multiply_few(inputs, stride, num_rows, quads, weights, num_blocks, block_bytes, sums);
            else
                multiply_many(inputs, stride, num_rows, quads, weights, sums + b * num_rows * RAW);
        }
    for (int64_t i = 0; i < num_sums; i++)
        for (int64_t half = 0; half < 2; half++) { // two sums of each channel lie beside one another
            const __m256i* pair = reinterpret_cast<const __m256i*>(sums + i * RAW + 16 * half);
            const __m256i both = _mm256_hadd_epi32(_mm256_loadu_si256(pair), _mm256_loadu_si256(pair + 1));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc + i * BLOCK + 8 * half),
                                _mm256_permute4x64_epi64(both, 0xd8));
        }
}

void spread(const int8_t* q, int64_t width, void* row) { spread_int16(q, width, static_cast<int16_t*>(row)); }

void gate(const float* gate, const float* up, float* h) { gate_block(gate, up, h); }

}  // namespace

const Int8Product INT8_AVX2 = {2, 32, spread, multiply, gate};

}  // namespace tripool

#pragma GCC pop_options
