#include "team.hpp"

#include "guard.hpp"

#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

thread_local int32_t largest = 1; // team size that the calling thread has had

// Bytes that a thread may allocate at its first computation, without a check of free memory: its thread-local variables
// (upstream's kernels for AMX have 65 KiB) and its OpenMP state.
constexpr size_t ROOM = 128 << 10;

// Threads that wait until the last of them is created. (libstdc++ before GCC 12 has another condition_variable::wait.)
class trial {
public:
    trial() { gate.lock(); }

    ~trial() {
        rooms.clear(); // a thread may allocate when it ends
        gate.unlock();
        for (std::thread & one : threads) {
            one.join();
        }
    }

    void add() {
        rooms.push_back(std::make_unique<char[]>(ROOM));
        threads.emplace_back([this] { const std::lock_guard<std::mutex> wait(gate); });
    }

private:
    std::mutex               gate; // locked until the end
    std::vector<std::thread> threads;

    std::vector<std::unique_ptr<char[]>> rooms;
};

bool can_start(int32_t n_threads) try {
    trial threads;
    for (int32_t i = 1; i < n_threads; ++i) {
        threads.add();
    }
    return true;
} catch (const std::system_error &) { // no thread
    return false;
} catch (const std::bad_alloc &) {
    return false;
}

} // namespace

void velo::check_team(int32_t n_threads) {
    if (n_threads <= largest) {
        return;
    }
    if (!can_start(n_threads)) {
        fail(VELO_OUT_OF_MEMORY,
             "a team of %d threads cannot be started: use a smaller n_threads, or raise the limits of memory and "
             "threads (ulimit -v, ulimit -u)",
             n_threads);
    }
    largest = n_threads;
}

void velo::forget_team() { largest = 1; }
