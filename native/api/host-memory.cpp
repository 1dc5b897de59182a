#include "host-memory.hpp"

#include "packing.hpp"

#include <algorithm>

#if defined(_WIN32)
#    define NOMINMAX
#    include <windows.h>
#elif defined(__APPLE__)
#    include <mach/mach.h>
#else
#    include <fstream>
#    include <string>
#endif

namespace {

#if defined(_WIN32)

// Return what neither memory nor the page file has given to others: a pool is charged whole when it is made.
int64_t available() {
    MEMORYSTATUSEX status = {};
    status.dwLength       = sizeof(status);
    return GlobalMemoryStatusEx(&status) ? static_cast<int64_t>(std::min(status.ullAvailPhys, status.ullAvailPageFile))
                                         : 0;
}

#elif defined(__APPLE__)

// Pages that are inactive or read ahead can be taken without swapping.
int64_t available() {
    vm_statistics64_data_t pages = {};
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    vm_size_t              size  = 0;
    const mach_port_t      host  = mach_host_self();
    host_page_size(host, &size);
    const auto found = host_statistics64(host, HOST_VM_INFO64, reinterpret_cast<host_info64_t>(&pages), &count);
    mach_port_deallocate(mach_task_self(), host);
    return found == KERN_SUCCESS ? static_cast<int64_t>(size) * (pages.free_count + pages.inactive_count) : 0;
}

#else

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

int64_t available() {
    const int64_t free = available_to_all(), limit = left_of_limit();
    return limit < 0 ? free : std::min(free, limit);
}

#endif

} // namespace

int64_t velo::free_host_memory() { return std::max<int64_t>(0, available() - reserved_memory()); }
