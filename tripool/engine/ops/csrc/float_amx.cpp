// Level 3 with bfloat16: AMX BF16.

#include <cstdint>
#include <cstring>

#include "amx_machine.h"
#include "float.h"

#ifdef ASSEMBLES_AMX

#include <cpuid.h>
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

#include "float_amx.h"
#include "float_pairs.h"

namespace tripool {
namespace {

struct FloatTiles : MachineTiles {
    template <int SUMS, int ROWS, int WEIGHTS>
    void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
    }

    template <class T>
    void pair(const T* from, int64_t num_inputs, char* to) {
        const char* end = to + TILE;
        Vector pairs;
        for (; num_inputs > 1; num_inputs -= 2, from += 2 * BLOCK, to += TILE_BYTES) {
            pairs_at(from, &pairs);
            keep(reinterpret_cast<float*>(to), pairs);
        }
        if (num_inputs) {
            last_pairs_at(from, &pairs);
            keep(reinterpret_cast<float*>(to), pairs);
            to += TILE_BYTES;
        }
        std::memset(to, 0, size_t(end - to));
    }
};

constexpr MultiplyPairs MULTIPLY_PAIRS = multiply_by_tiles<FloatTiles>;

}  // namespace
}  // namespace tripool

#pragma GCC pop_options

namespace tripool {

MultiplyPairs pairs_by_amx() {
    unsigned a, b, c, d;
    constexpr unsigned BF16_TILES = 1u << 22;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BF16_TILES) ? MULTIPLY_PAIRS : nullptr;
}

}  // namespace tripool

#else

namespace tripool {

MultiplyPairs pairs_by_amx() { return nullptr; }

}  // namespace tripool

#endif
