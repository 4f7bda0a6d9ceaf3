// Float products in vectors, compiled once for each instruction set that includes this file. It brings along `Vector`,
// `VECTORS` (in 16 channels), `broadcast`, `load`, `keep`, `multiply_add` and `weights_at` (16 weights as floats); and
// where pairs of inputs are multiplied, `broadcast_pair`, `multiply_add_pairs`, `pairs_at` (16 pairs of weights as
// bfloat16) and `last_pairs_at` (of an odd number of inputs the last, with zeros).
//
// A pass keeps rows by channels in registers. One row and two wait for memory, or for one sum after the other; they go
// through four blocks or two side by side (see int8_avx2.cpp for why), the whole width at once. More rows go group by
// group through a part of a block that stays in the nearest cache, and fetch the next part meanwhile; a few of them do so
// in two blocks in turn.
// (Parts of one page in two blocks were best: the same places of several blocks meet in the same sets of the cache.)
// With AVX-512, where a few rows are multiplied faster than memory gives weights, those of one group go through whole
// blocks and fetch the next one into the second cache: a third faster, measured on Zen 4.
#pragma once

#include "int8_plain.h"

namespace tripool {
namespace {

constexpr int64_t LINE = 64;
constexpr int64_t NEAR = 512;                      // bytes ahead: what one core can have under way
constexpr int64_t FEW_GROUPS = 4;                  // of rows: they may wait for memory
constexpr int64_t FEW_BYTES = 4 << 10, MANY_BYTES = 16 << 10;    // of a part of a block

template <class T>
struct InPairs {};                                 // stands for weights of type T, of rows in bfloat16

template <class T>
struct Kind {
    using Stored = T;
    using Row = float;
    static constexpr int64_t INPUTS = 1;           // that one step takes
};

template <class T>
struct Kind<InPairs<T>> {
    using Stored = T;
    using Row = uint16_t;
    static constexpr int64_t INPUTS = 2;
};

template <class T>
using Pass = void (*)(const typename Kind<T>::Row*, int64_t, int64_t, const char*, int64_t, const char*, int64_t, float*,
                      int64_t);

// Adds to the sums of R rows by S blocks. `ahead` moves by `step` bytes for each line of weights, and is fetched.
template <class T, int R, int S, _mm_hint HINT = _MM_HINT_T0>
void pass(const typename Kind<T>::Row* rows, int64_t stride, int64_t num_inputs, const char* weights,
          int64_t block_bytes, const char* ahead, int64_t step, float* sums, int64_t sum_stride) {
    using Stored = typename Kind<T>::Stored;
    constexpr int64_t INPUTS = Kind<T>::INPUTS, INPUT_BYTES = BLOCK * sizeof(Stored), IN_LINE = LINE / INPUT_BYTES;
    const auto place = [&](int i) {
        return sums + i / (R * VECTORS) * sum_stride + i % (R * VECTORS) * (BLOCK / VECTORS);
    };
    Vector sum[S * R * VECTORS];
    unrolled<S * R * VECTORS>(UNROLLED(i) { sum[i] = load(place(i)); });
    const auto input = UNROLLED(k) {
        unrolled<S>(UNROLLED(s) {
            Vector w[VECTORS];
            const Stored* from = reinterpret_cast<const Stored*>(weights + s * block_bytes) + k * INPUTS * BLOCK;
            if constexpr (INPUTS == 1)
                weights_at(from, w);
            else if constexpr (k >= 0)
                pairs_at(from, w);
            else
                last_pairs_at(reinterpret_cast<const Stored*>(weights + s * block_bytes), w);
            unrolled<R>(UNROLLED(r) {
                if constexpr (INPUTS == 1) {
                    const Vector x = broadcast(rows + r * stride + k);
                    unrolled<VECTORS>(UNROLLED(v) { multiply_add(sum[(s * R + r) * VECTORS + v], x, w[v]); });
                } else {
                    const Vector x = broadcast_pair(rows + r * stride + (k > 0 ? k : 0) * INPUTS);
                    unrolled<VECTORS>(UNROLLED(v) { multiply_add_pairs(sum[(s * R + r) * VECTORS + v], x, w[v]); });
                }
            });
        });
    };
    for (int64_t k = 0; k < num_inputs / IN_LINE; k++) {
        unrolled<S>(UNROLLED(s) { _mm_prefetch(ahead + s * block_bytes, HINT); });
        unrolled<int(IN_LINE / INPUTS)>(input);
        ahead += step;
        weights += LINE;
        rows += IN_LINE;
    }
    int64_t left = num_inputs % IN_LINE;
    for (; left >= INPUTS; left -= INPUTS) {
        input(std::integral_constant<int, 0>());
        weights += INPUT_BYTES * INPUTS;
        rows += INPUTS;
    }
    if constexpr (INPUTS > 1)
        if (left) input(std::integral_constant<int, -1>());
    unrolled<S * R * VECTORS>(UNROLLED(i) { keep(place(i), sum[i]); });
}

template <class T, _mm_hint HINT, int... R>
Pass<T> one_block(int64_t num_rows, std::integer_sequence<int, R...>) {
    static constexpr Pass<T> PASSES[] = {pass<T, R + 1, 1, HINT>...};
    return PASSES[num_rows - 1];
}

// R rows by all blocks, in S streams of several blocks each and what is left over.
template <class T, int R, int S>
void multiply_streams(const typename Kind<T>::Row* rows, int64_t stride, int64_t num_inputs, const char* blocks,
                      int64_t num_blocks, int64_t block_bytes, float* sums) {
    const int64_t length = num_blocks / S;
    for (int64_t b = 0; b < length; b++, blocks += block_bytes, sums += R * BLOCK)
        pass<T, R, S>(rows, stride, num_inputs, blocks, length * block_bytes, blocks + NEAR, LINE, sums,
                      length * R * BLOCK);
    blocks += (S - 1) * length * block_bytes;
    sums += (S - 1) * length * R * BLOCK;
    for (int64_t b = length * S; b < num_blocks; b++, blocks += block_bytes, sums += R * BLOCK)
        pass<T, R, 1>(rows, stride, num_inputs, blocks, 0, blocks + NEAR, LINE, sums, 0);
}

template <class T>
void multiply_floats(const typename Kind<T>::Row* rows, int64_t stride, int64_t num_rows, int64_t num_inputs,
                     const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums) {
    if (num_rows <= 2)
        return (num_rows == 1 ? multiply_streams<T, 1, 4> : multiply_streams<T, 2, 2>)(rows, stride, num_inputs, blocks,
                                                                                      num_blocks, block_bytes, sums);
    if (VECTORS == 1 && num_rows <= MOST) {
        const auto whole = one_block<T, _MM_HINT_T1>(num_rows, std::make_integer_sequence<int, MOST>());
        for (int64_t b = 0; b < num_blocks; b++, blocks += block_bytes, sums += num_rows * BLOCK)
            whole(rows, stride, num_inputs, blocks, 0, blocks + block_bytes, LINE, sums, 0);
        return;
    }
    const auto of_one = [](int64_t count) { return one_block<T, _MM_HINT_T0>(count, std::make_integer_sequence<int, MOST>()); };
    const int64_t sum_stride = num_rows * BLOCK;
    constexpr int64_t INPUT = BLOCK * sizeof(typename Kind<T>::Stored);
    const int64_t num_groups = (num_rows + MOST - 1) / MOST;
    const int64_t step = (LINE + num_groups - 1) / num_groups;                       // each pass fetches its share
    const bool few = num_groups <= FEW_GROUPS;
    const int64_t side = few ? 2 : 1, part_inputs = (few ? FEW_BYTES : MANY_BYTES) / INPUT;
    for (int64_t b = 0; b < num_blocks; b += side)
        for (int64_t k = 0; k < num_inputs; k += part_inputs)
            for (int64_t at = b; at < b + side && at < num_blocks; at++) {
                const int64_t inputs = num_inputs - k < part_inputs ? num_inputs - k : part_inputs;
                const char* part = blocks + at * block_bytes + k * INPUT;
                const char* next = blocks + (at + side) * block_bytes;
                const char* ahead = k + part_inputs < num_inputs ? part + inputs * INPUT : next;
                for (int64_t group = 0; group < num_groups; group++) {
                    const int64_t first = num_rows * group / num_groups, end = num_rows * (group + 1) / num_groups;
                    of_one(end - first)(rows + first * stride + k, stride, inputs, part, 0, ahead, step,
                                        sums + at * sum_stride + first * BLOCK, 0);
                    ahead += inputs * INPUT / LINE * step;
                }
            }
}

void multiply(int64_t format, const float* rows, int64_t stride, int64_t num_rows, int64_t num_inputs,
              const char* blocks, int64_t num_blocks, int64_t block_bytes, float* sums) {
    const auto of_type = format == FLOAT32    ? multiply_floats<float>
                         : format == BFLOAT16 ? multiply_floats<uint16_t>
                                              : multiply_floats<int8_t>;
    of_type(rows, stride, num_rows, num_inputs, blocks, num_blocks, block_bytes, sums);
}

}  // namespace
}  // namespace tripool
