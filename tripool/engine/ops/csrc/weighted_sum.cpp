// The sum over a token's picks, with what else is added to its row. The slow definition is ops/weighted_sum.py.

#include "glue.h"
#include "rows.h"

namespace tripool {
namespace {

template <class T>
INLINE void sum_rows(const WeightedSum& s) {
    for (int64_t t = 0; t < s.num_tokens; t++) {
        const T* y = static_cast<const T*>(s.y) + t * s.y_token_stride;
        const float* weights = s.weights + t * s.num_picks;
        const T* more = s.more ? static_cast<const T*>(s.more) + t * s.more_stride : nullptr;
        const T* and_more = s.and_more ? static_cast<const T*>(s.and_more) + t * s.and_more_stride : nullptr;
        T* out = static_cast<T*>(s.out) + t * s.width;
        int64_t i = 0;
        for (; i + LANES <= s.width; i += LANES) {
            Lanes sum = {}, value;
            for (int64_t k = 0; k < s.num_picks; k++) {
                load(y + k * s.width + i, value);
                sum += value * weights[k];
            }
            if (more) {
                load(more + i, value);
                sum += value;
            }
            if (and_more) {
                load(and_more + i, value);
                sum += value;
            }
            store(sum, out + i);
        }
        for (; i < s.width; i++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < s.num_picks; k++) sum += load_one(y + k * s.width + i) * weights[k];
            if (more) sum += load_one(more + i);
            if (and_more) sum += load_one(and_more + i);
            store_one(sum, out + i);
        }
    }
}

FOR_EACH_LEVEL(sum_rows, void, (const WeightedSum& s), (s))

}  // namespace

void weighted_sum(int level, int64_t format, const WeightedSum& sum) { sum_rows_at(level, format)(sum); }

}  // namespace tripool
