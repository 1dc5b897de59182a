#include "big-stack.hpp"

#include "guard.hpp"

#include <exception>

#if defined(_WIN32)
#    include <windows.h>
#else
#    include <pthread.h>
#endif

namespace {

struct task {
    const std::function<void()> & body;
    std::exception_ptr            raised;
};

void run(task & work) {
    try {
        work.body();
    } catch (...) {
        work.raised = std::current_exception();
    }
}

#if defined(_WIN32)

DWORD WINAPI start(void * argument) {
    run(*static_cast<task *>(argument));
    return 0;
}

// Run the task in a thread with this stack. Return false if none can start.
bool run_in_thread(size_t bytes, task & work) {
    const HANDLE thread = CreateThread(nullptr, bytes, start, &work, STACK_SIZE_PARAM_IS_A_RESERVATION, nullptr);
    if (!thread) {
        return false;
    }
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
    return true;
}

#else

void * start(void * argument) {
    run(*static_cast<task *>(argument));
    return nullptr;
}

bool run_in_thread(size_t bytes, task & work) {
    constexpr size_t page = 1 << 16;
    pthread_t        thread;
    pthread_attr_t   attributes;
    pthread_attr_init(&attributes);
    const bool started = pthread_attr_setstacksize(&attributes, (bytes + page - 1) / page * page) == 0 &&
                         pthread_create(&thread, &attributes, start, &work) == 0;
    pthread_attr_destroy(&attributes);
    if (started) {
        pthread_join(thread, nullptr);
    }
    return started;
}

#endif

} // namespace

void velo::on_big_stack(size_t bytes, const std::function<void()> & body) {
    task work{body, nullptr};
    if (!run_in_thread(bytes, work)) {
        fail(VELO_OUT_OF_MEMORY, "no memory for a stack of %zu MiB", bytes >> 20);
    }
    if (work.raised) {
        std::rethrow_exception(work.raised);
    }
}
