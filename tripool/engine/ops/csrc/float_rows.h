// What is done to rows before and after a float product: plain loops, compiled once for each instruction set that
// includes this file.
#pragma once

#include <cstdint>
#include <cstring>

#include "bfloat16.h"
#include "int8_plain.h"
#include "quantise.h"

namespace tripool {
namespace {

typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

void widen(const uint16_t* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] = widened(from[i]);
}

void round(const float* from, int64_t count, uint16_t* to) {
    for (int64_t i = 0; i < count; i++) to[i] = rounded(from[i]);
}

void gate(const float* gate, const float* up, int64_t num_rows, float* h, int64_t stride) {
    for (int64_t r = 0; r < num_rows; r++) gate_block(gate + r * 16, up + r * 16, h + r * stride);
}

void store(const float* sums, const float* scales, const float* bias, int64_t num_rows, int64_t num_channels, char* y,
           int64_t y_format, const int64_t* place, int64_t stride) {
    for (int64_t r = 0; r < num_rows; r++, sums += 16) {
        const int64_t at = (place ? place[r] : r) * stride;
        float value[16];
        std::memcpy(value, sums, sizeof value);
        if (scales)
            for (int c = 0; c < 16; c++) value[c] *= scales[c];
        if (bias)
            for (int64_t c = 0; c < num_channels; c++) value[c] += bias[c];
        if (y_format == FLOAT32) {
            float* out = reinterpret_cast<float*>(y) + at;
            if (num_channels == 16)
                std::memcpy(out, value, sizeof value);
            else
                std::memcpy(out, value, size_t(num_channels) * sizeof *out);
        } else {
            Bits bits;
            std::memcpy(&bits, value, sizeof bits);
            const Bits near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            const Bits even = (bits & 0x7fffffff) > 0x7f800000 ? Bits{} + 0x7fc0 : near;         // as `rounded`
            const auto half = __builtin_convertvector(even, Halves);
            uint16_t* out = reinterpret_cast<uint16_t*>(y) + at;
            if (num_channels == 16)
                std::memcpy(out, &half, sizeof half);
            else
                std::memcpy(out, &half, size_t(num_channels) * sizeof *out);
        }
    }
}

}  // namespace
}  // namespace tripool
