// One thread of a team runs its part of a graph. An exception ends its team and goes no further.
#include "team-barrier.h"

#ifdef VELO_TEAM_BARRIER

#    include "compute-failure.h"

#    include <exception>
#    include <new>

#    if defined(__GLIBCXX__)
#        include <cxxabi.h>
#    endif

namespace {

struct team_ended {}; // thrown at a barrier: another thread has left

struct computing {
    computing() {
        if (!velo_set_computing(&thread)) {
            throw std::bad_alloc();
        }
    }
    ~computing() { velo_set_computing(nullptr); }
    computing(const computing &)             = delete;
    computing & operator=(const computing &) = delete;

    velo_computing thread{};
};

void leave(void * n_rounds, ggml_status * to, ggml_status status, const char * message) {
    velo_note_failure(message);
    __atomic_store_n(to, status, __ATOMIC_RELAXED);
    velo_end_team(n_rounds);
}

} // namespace

void velo_throw_team_ended(void) { throw team_ended{}; }

void * velo_have(void * memory) {
    if (!memory) {
        throw std::bad_alloc();
    }
    return memory;
}

velo_thread_result velo_team_run(velo_thread_result (*run)(void *), void * thread, void * n_rounds,
                                 enum ggml_status * status) {
    try {
        const computing scope;
        return run(thread);
    } catch (const team_ended &) { // the thread that left first has noted the reason
    } catch (const std::bad_alloc &) {
        leave(n_rounds, status, GGML_STATUS_ALLOC_FAILED, "out of memory");
    } catch (const std::exception & error) {
        leave(n_rounds, status, GGML_STATUS_FAILED, error.what());
#    if defined(__GLIBCXX__)
    } catch (const abi::__forced_unwind &) { // the thread is cancelled
        throw;
#    endif
    } catch (...) {
        leave(n_rounds, status, GGML_STATUS_FAILED, "an unknown exception");
    }
    return {};
}

#endif
