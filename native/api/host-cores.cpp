#include "guard.hpp"
#include "velo.h"

#include <algorithm>
#include <vector>

#if defined(_WIN32)
#    define NOMINMAX
#    include <windows.h>
#elif defined(__APPLE__)
#    include <sys/sysctl.h>
#endif

namespace {

struct cores {
    int32_t physical    = 0;
    int32_t performance = 0;
};

#if defined(_WIN32)

// Windows writes a list of records of different sizes, one for each core. The fastest cores have the highest class.
// Only cores that the process may use count; the mask is 0 if it has threads in several groups of processors.
cores count_cores() {
    DWORD     bytes = 0;
    DWORD_PTR may = 0, all = 0;
    GetProcessAffinityMask(GetCurrentProcess(), &may, &all);
    GetLogicalProcessorInformationEx(RelationProcessorCore, nullptr, &bytes);
    std::vector<char> list(bytes);
    const auto        first = reinterpret_cast<SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX *>(list.data());
    if (bytes == 0 || !GetLogicalProcessorInformationEx(RelationProcessorCore, first, &bytes)) {
        return {};
    }
    cores found;
    int   fastest = -1;
    for (DWORD at = 0; at < bytes;) {
        const auto * record = reinterpret_cast<const SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX *>(&list[at]);
        at += record->Size;
        if (may != 0 && (record->Processor.GroupMask[0].Mask & may) == 0) {
            continue;
        }
        const int speed   = record->Processor.EfficiencyClass;
        found.performance = speed > fastest ? 1 : found.performance + (speed == fastest);
        fastest           = std::max(fastest, speed);
        ++found.physical;
    }
    return found;
}

#elif defined(__APPLE__)

int32_t system_value(const char * name) {
    int32_t value = 0;
    size_t  size  = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value : 0;
}

cores count_cores() {
    const int32_t fast = system_value("hw.perflevel0.physicalcpu"); // absent if all cores are alike
    const int32_t all  = system_value("hw.physicalcpu");
    return {all, fast > 0 ? fast : all};
}

#else

cores count_cores() { return {}; }

#endif

} // namespace

velo_status velo_cores(int32_t * physical, int32_t * performance) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(physical, "physical");
        velo::check_pointer(performance, "performance");
        const cores found = count_cores();
        *physical         = found.physical;
        *performance      = found.performance;
    });
}
