#pragma once

#include "handles.hpp"

namespace velo {

// Throws if no pool can be made with these parameters: a size or a type is not allowed, or memory is too short.
void check_pool(const velo_model & model, const velo_context_params & params);

} // namespace velo
