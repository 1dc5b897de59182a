#include "big-stack.hpp"

#include "guard.hpp"

#if defined(_WIN32)

void velo::on_big_stack(size_t, const std::function<void()> & body) { body(); }

#else

#    include <pthread.h>

#    include <exception>

namespace {

struct task {
    const std::function<void()> & body;
    std::exception_ptr            raised;
};

void * run(void * argument) {
    task & work = *static_cast<task *>(argument);
    try {
        work.body();
    } catch (...) {
        work.raised = std::current_exception();
    }
    return nullptr;
}

} // namespace

void velo::on_big_stack(size_t bytes, const std::function<void()> & body) {
    constexpr size_t page = 1 << 16;
    task             work{body, nullptr};
    pthread_t        thread;
    pthread_attr_t   attributes;
    pthread_attr_init(&attributes);
    const bool started = pthread_attr_setstacksize(&attributes, (bytes + page - 1) / page * page) == 0 &&
                         pthread_create(&thread, &attributes, run, &work) == 0;
    pthread_attr_destroy(&attributes);
    if (!started) {
        fail(VELO_OUT_OF_MEMORY, "no memory for a stack of %zu MiB", bytes >> 20);
    }
    pthread_join(thread, nullptr);
    if (work.raised) {
        std::rethrow_exception(work.raised);
    }
}

#endif
