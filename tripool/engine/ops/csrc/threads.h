// The threads that the kernels of a process share.
//
// A kernel cuts its work into parts that do not depend on each other; threads take one after another until none is left.
// So results are the same to the bit whatever the number of threads, and a thread that is not running (another process
// has its core) delays nobody by more than the part it has begun: the caller never waits for one that has begun none.
//
// Nothing waits actively for long. A thread without work looks for some for a few microseconds, because the kernels of a
// layer follow each other closely, and then sleeps; so does a caller that waits for the last parts.
//
// The pool serves one caller at a time. Another one meanwhile, and a part that shares out work itself, do all their parts
// on their own thread. A forked child starts without threads and makes its own when it needs them.
#pragma once

#include <cstdint>

namespace tripool {

constexpr int MOST_THREADS = 256;

int num_threads();                                 // of this process's pool, with the caller; 1 means: no pool

// From now on so many threads work, the caller included. Those there are end; others are made when they are needed.
void set_num_threads(int num_threads);

// Runs work(part) for part = 0 .. parts-1, on the calling thread and the pool's, and returns when all are done.
void share(int64_t parts, void (*work)(void* closure, int64_t part), void* closure);

template <class F>
inline void share(int64_t parts, const F& f) {
    share(parts, [](void* c, int64_t p) { (*static_cast<const F*>(c))(p); }, const_cast<void*>(static_cast<const void*>(&f)));
}

// Memory of the calling thread, good until the thread asks again for the same purpose. It starts at a cache line.
enum class Purpose { PART, OPERATION, LAYER, PASS, GUESSES, STEP };         // one uses those before it
char* own_memory(int64_t bytes, Purpose purpose = Purpose::PART);

// Hands out pieces of memory, each at a cache line; without memory, it counts.
class Pieces {
  public:
    explicit Pieces(char* base) : base_(base) {}

    template <class T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(base_ ? base_ + used : nullptr);
        used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }

    int64_t used = 0;

  private:
    char* base_;
};

}  // namespace tripool
