// Level 0: what every x86-64 has.

#include "int8_plain.h"

#define LANES 4

namespace tripool {
namespace {
template <class T>
inline __attribute__((always_inline)) T multiply_add(T a, T b, T c) {
    return a * b + c;
}
}  // namespace
}  // namespace tripool

#include "mla_core.h"

namespace tripool {
const AttentionCore ATTENTION_PLAIN = {LANES, score_tile, weigh_and_gather, finish, widen, multiply};
}
