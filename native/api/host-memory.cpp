#include "host-memory.hpp"

#include "packing.hpp"

#include "ggml-backend.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace {

// Return the number in a file, or -1 if it has none (such as "max").
int64_t read_number(const std::string & path) {
    std::ifstream file(path);
    int64_t       value = -1;
    return file >> value ? value : -1;
}

// "MemAvailable:  1234 kB" -> bytes
int64_t available_to_all() {
    std::ifstream file("/proc/meminfo");
    for (std::string key, rest; file >> key && std::getline(file, rest);) {
        if (key == "MemAvailable:") {
            return std::stoll(rest) * 1024;
        }
    }
    return -1;
}

// Return the container's limit minus its used memory, without caches that can be dropped; -1: no limit.
int64_t left_of_limit() {
    int64_t     limit = read_number("/sys/fs/cgroup/memory.max");
    int64_t     used  = read_number("/sys/fs/cgroup/memory.current");
    std::string stat = "/sys/fs/cgroup/memory.stat", cached = "inactive_file";
    if (limit < 0) {
        limit = read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes");
        used  = read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes");
        stat = "/sys/fs/cgroup/memory/memory.stat", cached = "total_inactive_file";
    }
    if (limit < 0 || used < 0) {
        return -1;
    }
    std::ifstream file(stat);
    int64_t       value = 0;
    for (std::string key; file >> key >> value;) {
        if (key == cached) {
            used -= value;
        }
    }
    return std::max<int64_t>(0, limit - used);
}

} // namespace

int64_t velo::free_host_memory() {
    int64_t free = available_to_all();
    if (free < 0) { // not Linux: ask the backend
        size_t unused = 0, total = 0;
        ggml_backend_dev_memory(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), &unused, &total);
        return static_cast<int64_t>(unused);
    }
    const int64_t limit = left_of_limit();
    free                = limit < 0 ? free : std::min(free, limit);
    return std::max<int64_t>(0, free - reserved_memory());
}
