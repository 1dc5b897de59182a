#pragma once

#include <cstdint>

namespace velo {

// Return the bytes that can be allocated without swapping, within the limit of the container if it has one.
int64_t free_host_memory();

} // namespace velo
