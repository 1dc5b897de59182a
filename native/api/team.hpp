#pragma once

#include "llama.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace velo {

// Throw VELO_OUT_OF_MEMORY if a team of `n_threads` cannot start on the calling thread. OpenMP or ggml would end the
// process.
void check_team(int32_t n_threads);

// The threads that compute for one context. Those of OpenMP belong to the calling thread. In builds without OpenMP,
// ggml would start threads for each graph, so the context has a pool of them.
class team {
public:
    // Make sure that as many threads as the context asks for can compute. Throws as check_team does.
    void prepare(llama_context * context);
    // Record that a graph was computed with these threads.
    void computed();
    // Return ": " and the reason why a thread failed since forget_failure(), or an empty string. Such a thread has left
    // its team, so the next prepare() makes another one.
    std::string failure();

private:
#if defined(VELO_OWN_THREADS)
    struct pool;
    struct pool_deleter {
        void operator()(pool * threads) const;
    };
    std::unique_ptr<pool, pool_deleter>              threads;
    std::vector<std::unique_ptr<pool, pool_deleter>> before; // the context uses its last pool until the next graph
    bool                                             is_whole = true;
#endif
};

// Record that the team of the calling thread was released. The next one starts new threads.
void forget_team();

} // namespace velo
