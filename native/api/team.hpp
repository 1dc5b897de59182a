#pragma once

#include <cstdint>

namespace velo {

// Throw VELO_OUT_OF_MEMORY if a team of `n_threads` cannot start on the calling thread: OpenMP or ggml would end the
// process.
void check_team(int32_t n_threads);
// Record that the team of the calling thread was released. The next one starts new threads.
void forget_team();

} // namespace velo
