// Packed weights, one at a time.
#pragma once

#include <cstdint>

#include "bfloat16.h"
#include "float.h"

namespace tripool {
namespace {

// Channel c of a block, of the input that lies here.
inline float weight_at(int64_t format, const char* input, int64_t c) {
    if (format == FLOAT32) return reinterpret_cast<const float*>(input)[c];
    if (format == INT8) return reinterpret_cast<const int8_t*>(input)[c];
    return widened(reinterpret_cast<const uint16_t*>(input)[c % 8 * 2 + c / 8]);
}

}  // namespace
}  // namespace tripool
