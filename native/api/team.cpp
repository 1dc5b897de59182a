#include "team.hpp"

#include "guard.hpp"

#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

thread_local int32_t largest = 1; // team that the calling thread has had

// Threads that live until the last of them is made.
class trial {
public:
    ~trial() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            over = true;
        }
        ended.notify_all();
        for (std::thread & one : threads) {
            one.join();
        }
    }

    void add() {
        threads.emplace_back([this] {
            std::unique_lock<std::mutex> lock(mutex);
            ended.wait(lock, [this] { return over; });
        });
    }

private:
    std::mutex               mutex;
    std::condition_variable  ended;
    bool                     over = false;
    std::vector<std::thread> threads;
};

} // namespace

void velo::check_team(int32_t n_threads) {
    if (n_threads <= largest) {
        return;
    }
    try {
        trial threads;
        for (int32_t i = 1; i < n_threads; ++i) {
            threads.add();
        }
    } catch (const std::system_error &) {
        fail(VELO_OUT_OF_MEMORY,
             "a team of %d threads cannot be started: use a smaller n_threads, or raise the limits of memory and "
             "threads "
             "(ulimit -v, ulimit -u)",
             n_threads);
    }
    largest = n_threads;
}

void velo::forget_team() { largest = 1; }
