#pragma once

#include <cstdint>

namespace velo {

// Makes sure that a team of `n_threads` can start on the calling thread, as OpenMP ends the process if one of its
// threads cannot be created. Throws VELO_OUT_OF_MEMORY.
void check_team(int32_t n_threads);
// The team of the calling thread was released: the next one starts anew.
void forget_team();

} // namespace velo
