// For tests: what level 3 does with bfloat16, on machines without AMX.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "amx_emulated.h"
#include "bfloat16.h"
#include "float.h"
#include "float_amx.h"
#include "float_plain.h"

namespace tripool {
namespace {

// What is too small for a normal number is zero, before and after.
inline float flushed(float value) {
    return std::fabs(value) < std::numeric_limits<float>::min() ? std::copysign(0.0f, value) : value;
}

struct EmulatedFloatTiles : EmulatedTiles {
    template <int SUMS, int ROWS, int WEIGHTS>
    void multiply_add() {
        add_products<float, SUMS, ROWS, WEIGHTS>([](float sum, const char* row, const char* column, int64_t num_pairs) {
            uint16_t x[TILE_INPUTS], w[TILE_INPUTS];
            std::memcpy(x, row, size_t(4 * num_pairs));
            std::memcpy(w, column, size_t(4 * num_pairs));
            float even_and_odd[2] = {};
            for (int64_t i = 0; i < 2 * num_pairs; i++) {
                float& all = even_and_odd[i % 2];
                all = flushed(std::fma(flushed(widened(x[i])), flushed(widened(w[i])), all));
            }
            return flushed(flushed(sum) + flushed(even_and_odd[0] + even_and_odd[1]));
        });
    }

    template <class T>
    void pair(const T* from, int64_t num_inputs, char* to) {
        constexpr int64_t FORMAT = sizeof(T) == sizeof(uint16_t) ? BFLOAT16 : INT8;
        std::memset(to, 0, TILE);
        for (int64_t k = 0; k < num_inputs; k++)
            for (int64_t c = 0; c < BLOCK; c++) {
                const uint16_t weight = rounded(weight_at(FORMAT, reinterpret_cast<const char*>(from + k * BLOCK), c));
                std::memcpy(to + k / 2 * TILE_BYTES + 4 * c + 2 * (k % 2), &weight, sizeof weight);
            }
    }
};

}  // namespace

MultiplyPairs pairs_emulated() { return multiply_by_tiles<EmulatedFloatTiles>; }

}  // namespace tripool
