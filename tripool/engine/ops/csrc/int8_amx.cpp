// Level 3: AMX INT8.
//
// Tile instructions are written out. gcc 12's `_tile_loadconfig` says that it reads eight of its 64 bytes, so that the
// others are never written, and its `_tile_loadd` says of nothing that it is read.

#include <cstdint>

#include "int8.h"

// Older compilers come with assemblers that do not know the instructions.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl")

#include "int8_amx.h"

namespace tripool {
namespace {

struct MachineTiles {
    void configure(const TileShapes& shape) { asm volatile("ldtilecfg %0" : : "m"(shape) : "memory"); }
    void release() { asm volatile("tilerelease" : : : "memory"); }

    template <int T>
    void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }

    template <int T>
    void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
    }

    template <int T>
    void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
    }

    template <int SUMS, int ROWS, int WEIGHTS>
    void multiply_add() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(ROWS), "i"(WEIGHTS));
    }
};

void spread(const int8_t* q, int64_t width, void* row) { spread_to_tiles(q, width, static_cast<char*>(row)); }

void multiply(const char* rows, int64_t stride, int64_t num_rows, int64_t num_quads, const int8_t* blocks,
              int64_t num_blocks, const int32_t*, const int8_t* next, int32_t* acc) {
    MachineTiles tiles;
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
