#include "team.hpp"

#include "guard.hpp"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#    include <unistd.h>
#endif

namespace {

thread_local int32_t largest = 1; // team size that the calling thread has had

// Bytes that a thread may allocate at its first computation, without a check of free memory: its thread-local variables
// (upstream's kernels for AMX have 65 KiB) and its OpenMP state.
constexpr size_t ROOM = 128 << 10;

// Threads that wait until the last of them is created.
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
        rooms.push_back(std::make_unique<char[]>(ROOM));
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

[[noreturn]] void fail_to_start(int32_t n_threads) {
    velo::fail(VELO_OUT_OF_MEMORY,
               "a team of %d threads cannot be started: use a smaller n_threads, or raise the limits of memory and "
               "threads (ulimit -v, ulimit -u)",
               n_threads);
}

#if defined(VELO_OWN_THREADS)
int64_t process_id() {
#    if defined(_WIN32)
    return 0; // without fork()
#    else
    return getpid();
#    endif
}

// Return a function of the CPU backend, which may be a library that was loaded at run time.
template <typename function> function from_backend(const char * name) {
    ggml_backend_reg_t cpu = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    return reinterpret_cast<function>(ggml_backend_reg_get_proc_address(cpu, name));
}

// ggml asserts that threads start; the threads that did start are lost then.
ggml_threadpool * start_threads(int32_t n_threads) try {
    const velo::catch_aborts catching(VELO_OUT_OF_MEMORY);
    ggml_threadpool_params   params = ggml_threadpool_params_default(n_threads);
    return from_backend<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&params);
} catch (const std::exception &) {
    fail_to_start(n_threads);
}
#endif

} // namespace

void velo::check_team(int32_t n_threads) {
    if (n_threads > largest && !can_start(n_threads)) {
        fail_to_start(n_threads);
    }
    largest = std::max(largest, n_threads);
}

#if defined(VELO_OWN_THREADS)

struct velo::team::pool {
    ggml_threadpool * threads   = nullptr;
    int32_t           n_threads = 0;
    int64_t           process   = process_id();
};

// A child of fork() has no threads to wait for.
void velo::team::pool_deleter::operator()(pool * threads) const {
    if (threads->threads && threads->process == process_id()) {
        from_backend<decltype(&ggml_threadpool_free)>("ggml_threadpool_free")(threads->threads);
    }
    delete threads;
}

void velo::team::prepare(llama_context * context) {
    const int32_t n_threads = llama_n_threads(context);
    if (!threads || !is_whole || threads->n_threads < n_threads) {
        check_team(n_threads);
        std::unique_ptr<pool, pool_deleter> made(new pool);
        made->threads   = start_threads(n_threads);
        made->n_threads = n_threads;
        if (threads) {
            before.push_back(std::move(threads));
        }
        threads  = std::move(made);
        is_whole = true;
        llama_attach_threadpool(context, threads->threads, nullptr);
    }
}

void velo::team::computed() { before.clear(); }

std::string velo::team::failure() {
    std::string reason = velo::failure();
    if (!reason.empty()) {
        computed();
        is_whole = false;
    }
    return reason;
}

#else

void        velo::team::prepare(llama_context * context) { check_team(llama_n_threads(context)); }
void        velo::team::computed() {}
std::string velo::team::failure() { return velo::failure(); }

#endif

void velo::forget_team() { largest = 1; }
