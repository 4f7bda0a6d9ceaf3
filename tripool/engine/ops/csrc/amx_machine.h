// Tile instructions of the machine, but for products.
//
// They are written out. gcc 12's `_tile_loadconfig` says that it reads eight of its 64 bytes, so that the others are
// never written, and its `_tile_loadd` says of nothing that it is read.
#pragma once

#include <cstdint>

#include "amx.h"

// Older compilers come with assemblers that do not know the instructions.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define ASSEMBLES_AMX

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
};

}  // namespace
}  // namespace tripool

#endif
