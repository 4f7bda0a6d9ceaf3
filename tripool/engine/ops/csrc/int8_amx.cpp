// Level 3: AMX INT8.

#include <cstdint>

#include "amx_machine.h"
#include "int8.h"

#ifdef ASSEMBLES_AMX

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl")

#include "int8_amx.h"

namespace tripool {
namespace {

struct Int8Tiles : MachineTiles {
    template <int SUMS, int ROWS, int WEIGHTS>
    void multiply_add() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
    }
};

void spread(const int8_t* q, int64_t width, void* row) { spread_to_tiles(q, width, static_cast<char*>(row)); }

void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
              int64_t num_blocks, const int32_t*, const int8_t* next, int32_t* acc) {
    Int8Tiles tiles;
    multiply_by_tiles(tiles, rows, stride, num_rows, num_quads, blocks, num_blocks, next, acc);
}

void gate(const float* gate, const float* up, float* h) { gate_block(gate, up, h); }

}  // namespace

const Int8Product INT8_AMX = {1, MOST_BLOCKS, spread, multiply, gate};

}  // namespace tripool

#pragma GCC pop_options

namespace tripool {

bool may_use_amx() {
    unsigned a, b, c, d;
    constexpr unsigned TILES = 1u << 24, INT8_TILES = 1u << 25;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) == 0 || (d & INT8_TILES) == 0) return false;
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

}  // namespace tripool

#else

namespace tripool {

const Int8Product INT8_AMX = INT8_EMULATED;      // never the best
bool may_use_amx() { return false; }

}  // namespace tripool

#endif
