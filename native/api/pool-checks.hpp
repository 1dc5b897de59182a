#pragma once

#include "handles.hpp"

namespace velo {

// Throw if these parameters give no valid pool: a size or type is not allowed, or memory is too small.
void check_pool(const velo_model & model, const velo_context_params & params);

} // namespace velo
