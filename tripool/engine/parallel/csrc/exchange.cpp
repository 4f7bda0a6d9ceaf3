// FusedDispatch and FusedCombine over memory that the ranks of one host share.
//
// Each pair (destination, source) has regions of its own, so a region has one writer: a rank that is late or comes
// back from a stop can only write where nobody looks. What is complete is said by one word per region,
// tag << 24 | rows written: the tag names epoch and exchange, so a word of another time is never taken for this one's.
// Rows are written before their count (release) and read after it (acquire).
//
// Waiting: a bounded number of pauses, then a futex on the waiter's bell. A waiter says that it sleeps before it looks
// a last time, a writer publishes before it looks whether someone sleeps, a full fence between each; so one of the two
// sees the other. Of several writers the last one to complete wakes. Sleeps are cut in slices: a lost wake costs one.
//
// The slow definition of each function, under the same name, is parallel/definition.py.

#include "exchange.h"

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tripool {
namespace {

constexpr int MAX_RANKS = 64;
constexpr int COUNT_BITS = 24;
constexpr uint64_t COUNT_MASK = (uint64_t(1) << COUNT_BITS) - 1;
constexpr int64_t GROUP_ROWS = 4;                  // rows between two publications of their count
constexpr int64_t SLICE_NS = 50'000'000;
constexpr int64_t ABORT_OFFSET = 64;               // in the segment's header

enum Kind : int { DISPATCH = 0, COMBINE = 1 };

struct Line {                                      // of one rank, on cache lines of its own
    uint32_t bell, waiting;
    char apart[56];
    uint32_t joined;
    char rest[60];
};
static_assert(sizeof(Line) == 128);

struct Flag {                                      // of one region, on a cache line of its own
    uint64_t word;
    uint32_t rows, pairs, rounds;
    char rest[44];
};
static_assert(sizeof(Flag) == 64);

struct Tail {                                      // behind a packet's row
    float scale;
    uint32_t source, token, count;
    struct { int32_t slot, pick; } pairs[1];
};

char* base(const int64_t* c) { return reinterpret_cast<char*>(c[BASE]); }
Line* line(const int64_t* c, int64_t rank) { return reinterpret_cast<Line*>(base(c) + c[LINES_OFFSET]) + rank; }
uint32_t* abort_word(const int64_t* c) { return reinterpret_cast<uint32_t*>(base(c) + ABORT_OFFSET); }
bool is_live(const int64_t* c, int64_t rank) { return uint64_t(c[LIVE]) >> rank & 1; }

int64_t place(const int64_t* c, int parity, int64_t to, int64_t from) {
    return (parity * c[NUM_RANKS] + to) * c[NUM_RANKS] + from;
}

Flag* flag(const int64_t* c, Kind kind, uint64_t tag, int64_t to, int64_t from) {
    int64_t at = kind * 2 * c[NUM_RANKS] * c[NUM_RANKS] + place(c, int(tag & 1), to, from);
    return reinterpret_cast<Flag*>(base(c) + c[FLAGS_OFFSET]) + at;
}

char* dispatch_region(const int64_t* c, uint64_t tag, int64_t to, int64_t from) {
    return base(c) + c[DISPATCH_OFFSET] + place(c, int(tag & 1), to, from) * c[DISPATCH_REGION];
}

char* combine_region(const int64_t* c, uint64_t tag, int64_t to, int64_t from) {
    return base(c) + c[COMBINE_OFFSET] + place(c, int(tag & 1), to, from) * c[COMBINE_REGION];
}

void publish(Flag* f, uint64_t tag, int64_t rows) {
    __atomic_store_n(&f->word, tag << COUNT_BITS | uint64_t(rows), __ATOMIC_RELEASE);
}

// Rows published under this tag so far; -1 before the first word.
int64_t published(const Flag* f, uint64_t tag) {
    uint64_t word = __atomic_load_n(&f->word, __ATOMIC_ACQUIRE);
    return word >> COUNT_BITS == tag ? int64_t(word & COUNT_MASK) : -1;
}

bool is_complete(const Flag* f, uint64_t tag) {
    int64_t rows = published(f, tag);
    return rows >= 0 && rows == int64_t(f->rows);
}

bool is_aborted(const int64_t* c) {
    return __atomic_load_n(abort_word(c), __ATOMIC_ACQUIRE) > uint32_t(c[EPOCH]);
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void pause() { __builtin_ia32_pause(); }

void ring(int64_t* c, int64_t rank) {
    Line* l = line(c, rank);
    __atomic_fetch_add(&l->bell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &l->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    c[WAKES]++;
}

// After a region is complete: wake its reader if it sleeps and no other live rank's region is still open.
void wake_if_last(int64_t* c, Kind kind, uint64_t tag, int64_t to) {
    if (!__atomic_load_n(&line(c, to)->waiting, __ATOMIC_RELAXED)) return;
    for (int64_t from = 0; from < c[NUM_RANKS]; from++)
        if (is_live(c, from) && !(kind == COMBINE && from == to) && !is_complete(flag(c, kind, tag, to, from), tag))
            return;
    ring(c, to);
}

enum Step { NOTHING, SOME, ALL };

// Call `look` until it has ALL, the epoch is aborted or the time is over.
template <class Look>
int wait(int64_t* c, int64_t deadline_ns, Look look) {
    Line* mine = line(c, c[RANK]);
    int64_t spins = 0, begun = 0;
    auto waited = [&](int status) {
        if (begun) c[WAITED_NS] += now_ns() - begun;
        return status;
    };
    for (;;) {
        Step step = look();
        if (step == ALL) return waited(DONE);
        if (is_aborted(c)) return waited(ABORTED);
        if (step == SOME) spins = 0;
        if (spins++ < c[SPIN]) {
            pause();
            continue;
        }
        int64_t now = now_ns(), left = deadline_ns - now;
        if (!begun) begun = now;
        if (left <= 0) return waited(LATE);
        uint32_t bell = __atomic_load_n(&mine->bell, __ATOMIC_ACQUIRE);
        __atomic_store_n(&mine->waiting, 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        step = look();
        bool come_again = false;
        if (step == NOTHING && !is_aborted(c)) {
            if (left > SLICE_NS) left = SLICE_NS;
            timespec t{time_t(left / 1'000'000'000), long(left % 1'000'000'000)};
            c[SLEEPS]++;
            come_again = syscall(SYS_futex, &mine->bell, FUTEX_WAIT, bell, &t, nullptr, 0) != 0 && errno != EAGAIN;
        }
        __atomic_store_n(&mine->waiting, 0, __ATOMIC_RELAXED);
        if (step == ALL) return waited(DONE);
        if (come_again) return waited(COME_AGAIN);  // after a signal or a slice: the caller may have signals to handle
    }
}

int level = 0;                                     // of quantising

}  // namespace

// The best instruction set that the machine has, no higher than the cap: 0 none, 1 AVX2, 2 AVX-512.
int set_level(int cap) {
    __builtin_cpu_init();
    int found = 0;
    if (__builtin_cpu_supports("avx2")) found = 1;
    if (found && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        found = 2;
    level = cap < found ? cap : found;
    return level;
}

void quantise(const void* x, int64_t format, int64_t num_rows, int64_t width, int8_t* q, float* scale) {
    const char* row = static_cast<const char*>(x);
    const int64_t stride = width * (format == FLOAT32 ? 4 : 2);
    const RowFunction function = row_function(level, format);
    for (int64_t i = 0; i < num_rows; i++) scale[i] = function(row + i * stride, width, q + i * width);
}

// ------------------------------------------------------------------------------------------------------- dispatch

// Send each token once to every rank that holds one of its slots. `order` gets the pairs (token * picks + pick) sorted
// by rank, `sent` the number of pairs to each.
int send_dispatch(int64_t* c, uint64_t tag, const char* x, int64_t x_format, int64_t num_tokens, const int64_t* slots,
                  const int32_t* rank_of_slot, const int64_t* first_slot, int64_t rounds, int32_t* order,
                  int64_t* sent) {
    const int64_t num_ranks = c[NUM_RANKS], picks = c[NUM_PICKS], me = c[RANK], num_slots = first_slot[num_ranks];
    if (is_aborted(c)) return ABORTED;
    if (num_tokens > c[CAPACITY]) return TOO_MANY;
    int64_t rows[MAX_RANKS] = {}, last[MAX_RANKS];
    for (int64_t r = 0; r < num_ranks; r++) last[r] = -1, sent[r] = 0;
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t k = 0; k < picks; k++) {
            int64_t slot = slots[t * picks + k];
            if (slot < 0 || slot >= num_slots || !is_live(c, rank_of_slot[slot])) return BAD_SLOT;
            int64_t r = rank_of_slot[slot];
            sent[r]++;
            rows[r] += last[r] != t;
            last[r] = t;
        }
    int64_t next[MAX_RANKS], total = 0;
    for (int64_t r = 0; r < num_ranks; r++) {
        if (sent[r] > num_tokens * c[FAN]) return TOO_MANY;        // some token names one slot twice
        next[r] = total;
        total += sent[r];
    }
    for (int64_t pair = 0; pair < num_tokens * picks; pair++) order[next[rank_of_slot[slots[pair]]]++] = int32_t(pair);

    Flag* flags[MAX_RANKS];
    char* packet[MAX_RANKS];
    int64_t written[MAX_RANKS] = {}, told[MAX_RANKS] = {};
    for (int64_t i = 1; i <= num_ranks; i++) {
        int64_t r = (me + i) % num_ranks;
        if (!is_live(c, r)) continue;
        flags[r] = flag(c, DISPATCH, tag, r, me);
        packet[r] = dispatch_region(c, tag, r, me);
        flags[r]->rows = uint32_t(rows[r]);
        flags[r]->pairs = uint32_t(sent[r]);
        flags[r]->rounds = uint32_t(rounds);
        publish(flags[r], tag, 0);
        last[r] = -1;
    }
    const int64_t x_stride = c[WIDTH] * (x_format == FLOAT32 ? 4 : 2);
    for (int64_t t = 0; t < num_tokens; t++) {
        const char* row = x + t * x_stride;                        // what is copied: the packet, once there is one
        float scale = 1.0f;
        bool quantised = c[ROW_FORMAT] != INT8;
        for (int64_t k = 0; k < picks; k++) {
            int64_t slot = slots[t * picks + k], r = rank_of_slot[slot];
            char* to = packet[r];
            Tail* tail;
            if (last[r] != t) {
                if (last[r] >= 0) to = packet[r] += c[PACKET_BYTES];
                last[r] = t;
                if (!quantised) {
                    scale = row_function(level, x_format)(row, c[WIDTH], reinterpret_cast<int8_t*>(to));
                    row = to;
                    quantised = true;
                } else {
                    std::memcpy(to, row, size_t(c[ROW_BYTES]));
                }
                tail = reinterpret_cast<Tail*>(to + c[TAIL_OFFSET]);
                tail->scale = scale;
                tail->source = uint32_t(me);
                tail->token = uint32_t(t);
                tail->count = 0;
                written[r]++;
            } else {
                tail = reinterpret_cast<Tail*>(to + c[TAIL_OFFSET]);
            }
            tail->pairs[tail->count].slot = int32_t(slot - first_slot[r]);
            tail->pairs[tail->count].pick = int32_t(k);
            tail->count++;
        }
        if (t % GROUP_ROWS == GROUP_ROWS - 1 || t == num_tokens - 1)
            for (int64_t r = 0; r < num_ranks; r++)
                if (written[r] > told[r]) publish(flags[r], tag, told[r] = written[r]);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int64_t r = 0; r < num_ranks; r++)
        if (r != me && is_live(c, r)) {
            c[SENT_BYTES] += rows[r] * c[PACKET_BYTES];
            wake_if_last(c, DISPATCH, tag, r);
        }
    return DONE;
}

// How many rows, pairs and rounds each rank announces: `counts` is [rows of each, pairs of each, rounds of each].
int await_counts(int64_t* c, uint64_t tag, int64_t deadline_ns, int64_t* counts) {
    const int64_t num_ranks = c[NUM_RANKS];
    return wait(c, deadline_ns, [&] {
        for (int64_t from = 0; from < num_ranks; from++) {
            const Flag* f = flag(c, DISPATCH, tag, c[RANK], from);
            bool live = is_live(c, from);
            if (live && published(f, tag) < 0) return NOTHING;
            counts[from] = live ? f->rows : 0;
            counts[num_ranks + from] = live ? f->pairs : 0;
            counts[2 * num_ranks + from] = live ? f->rounds : 0;
        }
        return ALL;
    });
}

// Copy what arrives into contiguous rows, by source, while it arrives. `progress` (rows, then pairs of each source)
// begins at zero and lets an interrupted call go on.
int assemble(int64_t* c, uint64_t tag, int64_t deadline_ns, const int64_t* counts, char* rows, float* scales,
             int64_t* row_of_pair, int64_t* expert_of_pair, int64_t* progress) {
    const int64_t num_ranks = c[NUM_RANKS], row_bytes = c[ROW_BYTES];
    return wait(c, deadline_ns, [&] {
        int64_t first_row = 0, first_pair = 0;
        bool some = false, all = true;
        for (int64_t from = 0; from < num_ranks; from++) {
            if (!is_live(c, from)) continue;
            int64_t ready = published(flag(c, DISPATCH, tag, c[RANK], from), tag);
            int64_t& row = progress[from];
            int64_t pair = progress[num_ranks + from];
            const char* region = dispatch_region(c, tag, c[RANK], from);
            some |= row < ready;
            for (; row < ready; row++) {
                const char* packet = region + row * c[PACKET_BYTES];
                const Tail* tail = reinterpret_cast<const Tail*>(packet + c[TAIL_OFFSET]);
                std::memcpy(rows + (first_row + row) * row_bytes, packet, size_t(row_bytes));
                if (scales) scales[first_row + row] = tail->scale;
                for (uint32_t i = 0; i < tail->count && pair < counts[num_ranks + from]; i++, pair++) {
                    row_of_pair[first_pair + pair] = first_row + row;
                    expert_of_pair[first_pair + pair] = tail->pairs[i].slot;
                }
            }
            progress[num_ranks + from] = pair;
            all &= row == counts[from];
            first_row += counts[from];
            first_pair += counts[num_ranks + from];
        }
        return all ? ALL : some ? SOME : NOTHING;
    });
}

// -------------------------------------------------------------------------------------------------------- combine

// Write results back to the ranks whose tokens they are; `y` holds them by rank, `received` counts them.
int send_combine(int64_t* c, uint64_t tag, const char* y, const int64_t* received) {
    const int64_t num_ranks = c[NUM_RANKS], me = c[RANK];
    if (is_aborted(c)) return ABORTED;
    int64_t first[MAX_RANKS], total = 0;
    for (int64_t r = 0; r < num_ranks; r++) {
        if (received[r] > c[CAPACITY] * c[FAN]) return TOO_MANY;
        first[r] = total;
        total += received[r];
    }
    for (int64_t i = 1; i < num_ranks; i++) {
        int64_t r = (me + i) % num_ranks;
        if (!is_live(c, r)) continue;
        Flag* f = flag(c, COMBINE, tag, r, me);
        f->rows = uint32_t(received[r]);
        publish(f, tag, 0);
        char* region = combine_region(c, tag, r, me);
        for (int64_t row = 0; row < received[r];) {
            int64_t end = row + GROUP_ROWS < received[r] ? row + GROUP_ROWS : received[r];
            for (; row < end; row++)
                std::memcpy(region + row * c[RESULT_STRIDE], y + (first[r] + row) * c[RESULT_BYTES],
                            size_t(c[RESULT_BYTES]));
            publish(f, tag, row);
        }
        c[SENT_BYTES] += received[r] * c[RESULT_BYTES];
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        wake_if_last(c, COMBINE, tag, r);
    }
    return DONE;
}

// Put the results of own tokens where they belong while they arrive; those computed here are copied from `y`.
int receive_combine(int64_t* c, uint64_t tag, int64_t deadline_ns, const char* y, const int64_t* received,
                    const int32_t* order, const int64_t* sent, char* out, int64_t* progress) {
    const int64_t num_ranks = c[NUM_RANKS], me = c[RANK], bytes = c[RESULT_BYTES];
    int64_t own = 0;
    for (int64_t r = 0; r < me; r++) own += received[r];
    return wait(c, deadline_ns, [&] {
        int64_t first = 0;
        bool some = false, all = true;
        for (int64_t from = 0; from < num_ranks; from++) {
            int64_t ready = sent[from], stride = bytes, &row = progress[from];
            const char* region = y + own * bytes;
            if (from != me) {
                if (!is_live(c, from)) continue;                   // nothing was sent there
                ready = published(flag(c, COMBINE, tag, me, from), tag);
                all &= ready >= 0;
                stride = c[RESULT_STRIDE];
                region = combine_region(c, tag, me, from);
                if (ready > sent[from]) ready = sent[from];
            }
            some |= row < ready;
            for (; row < ready; row++)
                std::memcpy(out + order[first + row] * bytes, region + row * stride, size_t(bytes));
            all &= row == sent[from];
            first += sent[from];
        }
        return all ? ALL : some ? SOME : NOTHING;
    });
}

// ---------------------------------------------------------------------------------------------- epochs and aborts

// Enter the context's epoch and wait until all live ranks have entered it, so that nobody is still in the old one.
int join(int64_t* c, int64_t deadline_ns) {
    __atomic_store_n(&line(c, c[RANK])->joined, uint32_t(c[EPOCH]), __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int64_t r = 0; r < c[NUM_RANKS]; r++)
        if (r != c[RANK] && is_live(c, r) && __atomic_load_n(&line(c, r)->waiting, __ATOMIC_RELAXED)) ring(c, r);
    return wait(c, deadline_ns, [&] {
        for (int64_t r = 0; r < c[NUM_RANKS]; r++)
            if (is_live(c, r) && __atomic_load_n(&line(c, r)->joined, __ATOMIC_ACQUIRE) < uint32_t(c[EPOCH]))
                return NOTHING;
        return ALL;
    });
}

// Nobody finishes a wait of this epoch or an earlier one; all who sleep wake at once.
void abort_epoch(int64_t* c, int64_t epoch) {
    uint32_t wanted = uint32_t(epoch) + 1, found = __atomic_load_n(abort_word(c), __ATOMIC_RELAXED);
    while (found < wanted &&
           !__atomic_compare_exchange_n(abort_word(c), &found, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (int64_t r = 0; r < c[NUM_RANKS]; r++) ring(c, r);
}

}  // namespace tripool
