// Rows as eight-bit integers with one scale each. The slow definition is parallel/quantise.py.
#pragma once

#include <cstdint>

namespace tripool {

enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

// Writes one row and returns its scale. Levels: 0 plain, 1 AVX2, 2 and 3 AVX-512; all give the same bits.
using RowFunction = float (*)(const void* x, int64_t width, int8_t* q);

RowFunction row_function(int level, int64_t format);

constexpr int AMX = 3, AMX_EMULATED = 4;           // levels

// The plain vectors that go with a level: of AMX they are those of AVX-512, of the emulation none.
inline int vectors_of(int level) { return level < AMX ? level : level == AMX ? 2 : 0; }

}  // namespace tripool
