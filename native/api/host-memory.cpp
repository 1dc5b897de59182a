#include "host-memory.hpp"

#include "packing.hpp"

#include <algorithm>

#if defined(_WIN32)
#    define NOMINMAX
#    include <windows.h>
#elif defined(__APPLE__)
#    include <mach/mach.h>
#else
#    include <cstdint>
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

constexpr int64_t NO_LIMIT = INT64_MAX;

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

// Return a memory group's limit minus its used memory, without caches that can be dropped.
int64_t left_of(const std::string & group, bool version_2) {
    const int64_t limit = read_number(group + (version_2 ? "/memory.max" : "/memory.limit_in_bytes"));
    int64_t       used  = read_number(group + (version_2 ? "/memory.current" : "/memory.usage_in_bytes"));
    if (limit < 0 || used < 0) {
        return NO_LIMIT;
    }
    const std::string prefix = version_2 ? "" : "total_";
    std::ifstream     file(group + "/memory.stat");
    int64_t           value = 0;
    for (std::string key; file >> key >> value;) {
        if (key == prefix + "inactive_file" || key == prefix + "active_file") {
            used -= value;
        }
    }
    return std::max<int64_t>(0, limit - used);
}

// Return the least that is left of the groups from `path` to the root.
int64_t left_of_all(const std::string & mount, std::string path, bool version_2) {
    int64_t least = left_of(mount, version_2);
    while (path.size() > 1) {
        least = std::min(least, left_of(mount + path, version_2));
        path.resize(path.rfind('/'));
    }
    return least;
}

// Return the least that is left of the limits around this process; pyvelo/memory/cgroups.py looks at the same groups.
int64_t left_of_limits() {
    int64_t       least = NO_LIMIT;
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) { // "number:controllers:/path"
        const size_t first = line.find(':'), path = line.find(":/");
        if (path == std::string::npos) {
            continue;
        }
        const std::string rest        = line.substr(path + 1);
        const std::string controllers = first < path ? line.substr(first + 1, path - first - 1) : "";
        if (controllers.empty()) {
            for (const char * mount : {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"}) {
                least = std::min(least, left_of_all(mount, rest, true));
            }
        } else if ((',' + controllers + ',').find(",memory,") != std::string::npos) {
            for (const std::string & name : {std::string("memory"), controllers}) {
                least = std::min(least, left_of_all("/sys/fs/cgroup/" + name, rest, false));
            }
        }
    }
    return least;
}

int64_t available() { return std::min(available_to_all(), left_of_limits()); }

#endif

} // namespace

int64_t velo::free_host_memory() { return std::max<int64_t>(0, available() - reserved_memory()); }
