// The pool is one word that all threads watch: the number of the job, whether it is open, and how many workers are at it.
// A worker joins by adding itself to the word, which only works while the job is open; the caller, when no part is left,
// closes it, and waits for those who joined. So a worker that wakes late has simply missed the job.

#include "threads.h"

#include <atomic>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <new>

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace tripool {
namespace {

constexpr uint32_t OPEN = 1 << 10, WORKERS = OPEN - 1, NEXT_JOB = OPEN << 1;
static_assert(MOST_THREADS <= WORKERS);
constexpr int64_t SPIN_NS = 20000;                 // what waking a thread takes: 18 us were measured, 0.7 us without
constexpr int PAUSES = 8;                          // between two looks at the clock

enum Role : uint32_t { WORKER = 0, CALLER = 1 };

struct Pool {
    explicit Pool(int wanted) : wanted(wanted) {}

    std::mutex busy;                               // held by the caller that is served
    std::atomic<int> wanted;                       // threads, with the caller
    int num_workers = 0;
    pthread_t workers[MOST_THREADS];

    // The job. Workers read it after they have joined.
    void (*work)(void*, int64_t) = nullptr;        // nullptr: end
    void* closure = nullptr;
    int64_t parts = 0;
    unsigned rounding = 0;                         // the caller's rules for floats: denormals may be off

    alignas(64) std::atomic<uint32_t> state{0};
    std::atomic<int> asleep[2] = {{0}, {0}};
    alignas(64) std::atomic<int64_t> next{0};      // part
};

Pool pool(1);                                      // never destroyed: workers may outlive static objects
static_assert(std::is_trivially_destructible<Pool>::value);

thread_local bool inside = false;                  // this thread works on a part, so it has no claim to the pool

int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

void futex(int operation, uint32_t value, Role role) {
    syscall(SYS_futex, &pool.state, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 1u << role);
}

// Returns the first state that suits.
template <class Suits>
uint32_t await(Role role, Suits suits) {
    const int64_t end = now() + SPIN_NS;
    do {
        for (int i = 0; i < PAUSES; i++) {
            const uint32_t state = pool.state.load();
            if (suits(state)) return state;
            _mm_pause();
        }
    } while (now() < end);
    // Whoever changes the state looks at `asleep` afterwards; whoever sleeps looks at the state after adding itself.
    pool.asleep[role]++;
    uint32_t state;
    while (!suits(state = pool.state.load())) futex(FUTEX_WAIT_BITSET, state, role);
    pool.asleep[role]--;
    return state;
}

void wake(int most, Role role) {
    if (pool.asleep[role].load()) futex(FUTEX_WAKE_BITSET, uint32_t(most), role);
}

void take_parts() {
    const int64_t parts = pool.parts;
    for (int64_t part; (part = pool.next.fetch_add(1, std::memory_order_relaxed)) < parts;) pool.work(pool.closure, part);
}

void* serve(void*) {
    inside = true;
    uint32_t last = UINT_MAX;                      // job
    for (;;) {
        uint32_t state = await(WORKER, [&](uint32_t s) { return s & OPEN && s / NEXT_JOB != last; });
        if (!pool.state.compare_exchange_strong(state, state + 1)) continue;
        last = state / NEXT_JOB;
        const bool end = !pool.work;
        if (!end) {
            _mm_setcsr(pool.rounding);
            take_parts();
        }
        if (!((pool.state.fetch_sub(1) - 1) & (OPEN | WORKERS))) wake(1, CALLER);
        if (end) return nullptr;
    }
}

void open(int64_t parts, void (*work)(void*, int64_t), void* closure) {
    pool.work = work;
    pool.closure = closure;
    pool.parts = parts;
    pool.rounding = _mm_getcsr() & ~unsigned(_MM_EXCEPT_MASK);
    pool.next.store(0, std::memory_order_relaxed);
    pool.state.store((pool.state.load() / NEXT_JOB + 1) * NEXT_JOB | OPEN);
    wake(parts - 1 < pool.num_workers ? int(parts - 1) : pool.num_workers, WORKER);
}

void close() {
    pool.state.fetch_and(~OPEN);
    await(CALLER, [](uint32_t s) { return !(s & WORKERS); });
}

void forget_in_child() { new (&pool) Pool(pool.wanted.load()); }

// As many workers as are wanted, or as there can be. Signals are for the threads of Python.
void make_workers() {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
    (void)registered;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_workers + 1 < pool.wanted && !pthread_create(&pool.workers[pool.num_workers], nullptr, serve, nullptr))
        pthread_setname_np(pool.workers[pool.num_workers++], "tripool kernels");
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pool.wanted = pool.num_workers + 1;
}

struct Memory {
    char* base = nullptr;
    int64_t bytes = 0;
    ~Memory() { std::free(base); }
};

thread_local Memory memories[6];                  // by purpose

}  // namespace

int num_threads() { return pool.wanted.load(std::memory_order_relaxed); }

void set_num_threads(int num_threads) {
    std::lock_guard<std::mutex> hold(pool.busy);
    if (pool.num_workers && num_threads != pool.wanted) {
        open(pool.num_workers + 1, nullptr, nullptr);
        for (; pool.num_workers; pool.num_workers--) pthread_join(pool.workers[pool.num_workers - 1], nullptr);
        close();
    }
    pool.wanted = num_threads < 1 ? 1 : num_threads < MOST_THREADS ? num_threads : MOST_THREADS;
}

void share(int64_t parts, void (*work)(void* closure, int64_t part), void* closure) {
    if (parts < 2 || num_threads() < 2 || inside || !pool.busy.try_lock()) {
        for (int64_t part = 0; part < parts; part++) work(closure, part);
        return;
    }
    if (pool.num_workers + 1 < pool.wanted) make_workers();
    inside = true;
    open(parts, work, closure);
    take_parts();
    close();
    inside = false;
    pool.busy.unlock();
}

char* own_memory(int64_t bytes, Purpose purpose) {
    Memory& memory = memories[int(purpose)];
    if (bytes > memory.bytes) {
        std::free(memory.base);
        memory.bytes = (bytes + 4095) / 4096 * 4096;
        memory.base = static_cast<char*>(std::aligned_alloc(64, size_t(memory.bytes)));
        if (!memory.base) std::abort();            // as the system would, somewhat later, by itself
    }
    return memory.base;
}

}  // namespace tripool
