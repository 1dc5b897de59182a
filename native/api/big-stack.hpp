#pragma once

#include <cstddef>
#include <functional>

namespace velo {

// Run `body` on a stack of at least `bytes` bytes and rethrow its exception. The system provides memory as it is used.
void on_big_stack(size_t bytes, const std::function<void()> & body);

} // namespace velo
