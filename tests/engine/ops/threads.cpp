// What test_threads.py runs: `threads CHECK` ends with 0 if the pool of csrc/threads.h does what the check says.

#include "../../../tripool/engine/ops/csrc/threads.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include <dirent.h>
#include <pmmintrin.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

using namespace tripool;

#define EXPECT(WHAT)                                                                                                  \
    do {                                                                                                              \
        if (!(WHAT)) std::printf("line %d: not so: %s\n", __LINE__, #WHAT), std::fflush(stdout), _exit(1);            \
    } while (0)

double cpu_seconds() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

void rest(int milliseconds) { usleep(useconds_t(1000 * milliseconds)); }

int pool_threads() {
    int found = 0;
    DIR* tasks = opendir("/proc/self/task");
    while (dirent* each = readdir(tasks)) {
        char path[300], name[32] = "";
        std::snprintf(path, sizeof path, "/proc/self/task/%s/comm", each->d_name);
        if (FILE* file = std::fopen(path, "r")) {
            if (!std::fgets(name, sizeof name, file)) name[0] = 0;
            std::fclose(file);
        }
        found += !std::strcmp(name, "tripool kernels\n");
    }
    closedir(tasks);
    return found;
}

// So many threads does the pool have besides the caller; one that has ended is seen for a moment more.
bool has_workers(int count) {
    for (int again = 0; again < 2000 && pool_threads() != count; again++) rest(1);
    return pool_threads() == count;
}

// Returns when `count` parts are here at once, so each of them on a thread of its own.
void meet(std::atomic<int>& here, int count) {
    here++;
    while (here < count) rest(0);
}

bool all_work(int count) {
    std::atomic<int> here{0};
    share(count, [&](int64_t) { meet(here, count); });
    return here == count;
}

void once() {
    for (int threads : {1, 2, 3, 7}) {
        set_num_threads(threads);
        EXPECT(num_threads() == threads);
        for (int64_t parts : {0, 1, 2, 5, 7, 64, 1001, 20000}) {
            std::vector<std::atomic<int>> times(size_t(parts + 1));
            share(parts, [&](int64_t part) { times[size_t(part)]++; });
            for (int64_t part = 0; part < parts; part++) EXPECT(times[size_t(part)] == 1);
            EXPECT(times[size_t(parts)] == 0);
        }
    }
}

void together() {
    for (int threads : {2, 3, 7}) {
        set_num_threads(threads);
        for (int again = 0; again < 50; again++) EXPECT(all_work(threads));
        EXPECT(has_workers(threads - 1));
    }
}

void one_part() {
    set_num_threads(3);
    share(1, [](int64_t) {});
    EXPECT(has_workers(0));             // nothing was there to be shared
}

void ends() {
    set_num_threads(4);
    EXPECT(all_work(4) && has_workers(3));
    set_num_threads(4);
    EXPECT(has_workers(3));
    set_num_threads(2);
    EXPECT(has_workers(0));             // others are made when they are needed
    EXPECT(all_work(2) && has_workers(1));
    set_num_threads(1);
    EXPECT(has_workers(0) && num_threads() == 1);
    EXPECT(all_work(1));
    set_num_threads(0);
    EXPECT(num_threads() == 1);
}

void nested() {
    set_num_threads(3);
    std::atomic<int> times[20][30] = {};
    std::atomic<bool> same{true};
    share(20, [&](int64_t part) {
        const auto thread = std::this_thread::get_id();
        share(30, [&](int64_t inner) {
            times[part][inner]++;
            if (std::this_thread::get_id() != thread) same = false;
        });
    });
    for (auto& row : times)
        for (auto& each : row) EXPECT(each == 1);
    EXPECT(same);
}

void callers() {
    set_num_threads(3);
    std::atomic<int64_t> sum{0};
    std::vector<std::thread> all;
    for (int caller = 0; caller < 4; caller++)
        all.emplace_back([&] {
            for (int again = 0; again < 1000; again++) share(9, [&](int64_t part) { sum += part; });
        });
    for (int again = 0; again < 60; again++) set_num_threads(1 + again % 4);
    for (auto& each : all) each.join();
    EXPECT(sum == 4 * 1000 * 36);
}

// A caller that finds the pool taken does not wait for it.
void taken() {
    set_num_threads(2);
    std::atomic<int> here{0};
    std::atomic<bool> done{false};
    std::thread other([&] {
        share(2, [&](int64_t) {
            meet(here, 2);
            while (!done) rest(0);
        });
    });
    while (here < 2) rest(0);
    std::set<std::thread::id> threads;
    share(5, [&](int64_t) { threads.insert(std::this_thread::get_id()); });
    EXPECT(threads.size() == 1 && *threads.begin() == std::this_thread::get_id());
    done = true;
    other.join();
}

void child() {
    set_num_threads(3);
    EXPECT(all_work(3));
    std::atomic<int> here{0};
    std::atomic<bool> end{false};
    std::thread other([&] {                        // the pool is at work while the process forks
        while (!end) share(2, [&](int64_t) { here++; });
    });
    for (int again = 0; again < 20; again++) {
        const pid_t pid = fork();
        if (!pid) {
            EXPECT(has_workers(0) && num_threads() == 3);
            EXPECT(all_work(3) && has_workers(2));
            set_num_threads(1);
            EXPECT(has_workers(0));
            std::exit(0);
        }
        int status = 1;
        EXPECT(waitpid(pid, &status, 0) == pid && status == 0);
    }
    end = true;
    other.join();
    EXPECT(all_work(3));
}

// Workers and a caller without work sleep.
void sleeps() {
    set_num_threads(4);
    EXPECT(all_work(4));
    rest(20);
    const double idle = cpu_seconds();
    rest(400);
    EXPECT(cpu_seconds() - idle < 0.04);
    std::atomic<int> here{0};
    const auto caller = std::this_thread::get_id();
    const double waiting = cpu_seconds();
    share(4, [&](int64_t) {
        meet(here, 4);
        if (std::this_thread::get_id() != caller) rest(400);
    });
    EXPECT(cpu_seconds() - waiting < 0.2);
}

// Denormals are as the caller has them, on every thread.
void rounding() {
    set_num_threads(3);
    for (unsigned mode : {0u, unsigned(_MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON), 0u}) {
        _mm_setcsr((_mm_getcsr() & ~0x8040u) | mode);
        std::atomic<int> here{0}, alike{0};
        share(3, [&](int64_t) {
            meet(here, 3);
            alike += (_mm_getcsr() & 0x8040u) == mode;
        });
        EXPECT(alike == 3);
    }
}

void memory() {
    set_num_threads(3);
    for (int64_t bytes : {1, 100, 5000, 2000000, 64}) {
        std::atomic<int> here{0};
        std::atomic<char*> found[3];
        share(3, [&](int64_t part) {
            char* own = own_memory(bytes);
            std::memset(own, int(part), size_t(bytes));
            meet(here, 3);
            for (int64_t i = 0; i < bytes; i++) EXPECT(own[i] == char(part));
            EXPECT(uintptr_t(own) % 64 == 0);
            found[part] = own;
        });
        EXPECT(found[0] != found[1] && found[1] != found[2] && found[0] != found[2]);
    }
}

int main(int count, char** words) {
    const struct {
        const char* name;
        void (*check)();
    } checks[] = {{"once", once},   {"together", together}, {"one_part", one_part}, {"ends", ends},
                  {"nested", nested}, {"callers", callers}, {"taken", taken},       {"child", child},
                  {"sleeps", sleeps}, {"rounding", rounding}, {"memory", memory}};
    for (int i = 1; i < count; i++)
        for (const auto& each : checks)
            if (!std::strcmp(each.name, words[i])) {
                each.check();
                std::printf("%s\n", each.name);
            }
    return 0;
}
