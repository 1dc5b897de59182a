#pragma once

#include <cstdint>

namespace velo {

// Bytes that a process can take without pushing others out, within the limit of its container where there is one.
int64_t free_host_memory();

} // namespace velo
