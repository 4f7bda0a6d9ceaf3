// The exchange between ranks of one host: what the Python module offers. Addresses are plain integers there.
#pragma once

#include <cstdint>

#include "../../ops/csrc/quantise.h"

namespace tripool {

// Words of the context that a rank hands to every call; `parallel/segment.py` fills them under the same names.
enum Word : int {
    BASE,              // address of the segment
    RANK,              // who calls
    EPOCH,             // the epoch it is in
    LIVE,              // bit r: rank r takes part
    SPIN,              // pauses before it sleeps
    NUM_RANKS, CAPACITY, NUM_PICKS, WIDTH,
    ROW_FORMAT,        // 0 float32, 1 bfloat16, 2 int8
    ROW_BYTES, TAIL_OFFSET, PACKET_BYTES, RESULT_BYTES, RESULT_STRIDE, FAN,
    LINES_OFFSET, FLAGS_OFFSET, DISPATCH_OFFSET, COMBINE_OFFSET, DISPATCH_REGION, COMBINE_REGION,
    SLEEPS, WAKES, WAITED_NS, SENT_BYTES,          // counted here; waits as long as the spin lasts are not, nor own rows
    NUM_WORDS
};

enum Status : int { DONE = 0, LATE = 1, ABORTED = 2, COME_AGAIN = 3, BAD_SLOT = 4, TOO_MANY = 5 };

int set_level(int cap);
void quantise(const void* x, int64_t format, int64_t num_rows, int64_t width, int8_t* q, float* scale);
int send_dispatch(int64_t* context, uint64_t tag, const char* x, int64_t x_format, int64_t num_tokens,
                  const int64_t* slots, const int32_t* rank_of_slot, const int64_t* first_slot, int64_t rounds,
                  int32_t* order, int64_t* sent);
int await_counts(int64_t* context, uint64_t tag, int64_t deadline_ns, int64_t* counts);
int assemble(int64_t* context, uint64_t tag, int64_t deadline_ns, const int64_t* counts, char* rows, float* scales,
             int64_t* row_of_pair, int64_t* expert_of_pair, int64_t* progress);
int send_combine(int64_t* context, uint64_t tag, const char* y, const int64_t* received);
int receive_combine(int64_t* context, uint64_t tag, int64_t deadline_ns, const char* y, const int64_t* received,
                    const int32_t* order, const int64_t* sent, char* out, int64_t* progress);
int join(int64_t* context, int64_t deadline_ns);
void abort_epoch(int64_t* context, int64_t epoch);

}  // namespace tripool
