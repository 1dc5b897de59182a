#pragma once

#include <cstddef>
#include <functional>

namespace velo {

// Runs `body` on a stack of at least that many bytes and throws what it throws. Memory is taken only as it is used.
void on_big_stack(size_t bytes, const std::function<void()> & body);

} // namespace velo
