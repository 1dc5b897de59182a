#pragma once

#include "guard.hpp"

#include "ggml.h"

#include <algorithm>
#include <thread>

namespace velo {

// Return the number of computing threads. asked = 0: all logical cores.
inline int32_t threads_for(int32_t asked) {
    check_range("n_threads", asked, 0, GGML_MAX_N_THREADS);
    const auto cores = static_cast<int32_t>(std::thread::hardware_concurrency());
    return asked ? asked : std::clamp<int32_t>(cores, 1, GGML_MAX_N_THREADS);
}

} // namespace velo
