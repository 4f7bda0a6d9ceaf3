// The tokens of a step, along its drafts: see glue.h.

#include "glue.h"
#include "layer.h"
#include "threads.h"

namespace tripool {
namespace {

struct Positions {
    Draw* draw;
    int64_t* token;

    Positions(Pieces& pieces, int64_t count) : draw(pieces.take<Draw>(count)), token(pieces.take<int64_t>(count)) {}
};

}  // namespace

void choose(int level, const RowTable& table, const float* logits, int64_t stride, int64_t vocabulary, const int64_t* slots,
            const int64_t* num_drafts, const Draw* draws, int64_t num_rows, int64_t most, int64_t* counts, int64_t* chosen,
            bool* stopped) {
    int64_t num_positions = 0;
    for (int64_t n = 0; n < num_rows; n++) num_positions += num_drafts[n] + 1;
    Pieces counted(nullptr);
    Positions(counted, num_positions);
    Pieces pieces(own_memory(counted.used, Purpose::PASS));
    const Positions all(pieces, num_positions);
    Draw* draw = all.draw;
    for (int64_t n = 0; n < num_rows; n++)
        for (int64_t ahead = 0; ahead <= num_drafts[n]; ahead++, draw++) {
            *draw = draws[n];
            draw->position += ahead;
        }
    sample(level, logits, stride, num_positions, vocabulary, all.draw, all.token);

    const int64_t* token = all.token;
    for (int64_t n = 0; n < num_rows; token += num_drafts[n] + 1, n++) {
        const int64_t slot = slots[n];
        int64_t& length = at<int64_t>(table.num_tokens)[slot];
        int32_t* known = at<int32_t>(table.tokens) + slot * table.token_stride + length;
        const int64_t* stops = at<int64_t>(table.stops) + slot * table.num_stops;
        const int64_t may_stop = at<int64_t>(table.min_tokens)[slot] - (length - at<int64_t>(table.num_prompt)[slot]);
        int64_t count = 0;
        for (bool goes_on = true; goes_on; count++) {
            const bool right = count < num_drafts[n] && known[count] == int32_t(token[count]);
            known[count] = int32_t(token[count]);
            chosen[n * most + count] = token[count];
            bool stops_here = false;
            for (int64_t i = 0; i < table.num_stops && count >= may_stop; i++) stops_here |= stops[i] == token[count];
            stopped[n] = stops_here;
            goes_on = right && !stops_here;
        }
        counts[n] = count;
        length += count;
        at<int64_t>(table.num_computed)[slot] += count - 1;
    }
}

}  // namespace tripool
