#include "amx-tiles.h"

#include <cstdlib>

#if defined(__x86_64__) || defined(__i386__)
#    include <cpuid.h>
#endif
#if defined(VELO_AMX_TILES)
#    include <sys/syscall.h>
#    include <unistd.h>
#endif

namespace amx {

bool processor_has(feature wanted) {
#if defined(__x86_64__) || defined(__i386__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    return !std::getenv("PYVELO_NO_AMX") && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d >> static_cast<int>(wanted) & 1);
#else
    (void) wanted;
    return false;
#endif
}

#if defined(VELO_AMX_TILES)

namespace {

bool request_tiles() {
    constexpr long request = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM of arch_prctl, the tiles' state
    // a portable build selects its instruction set by AMX for integers alone
    return processor_has(feature::bf16) && syscall(SYS_arch_prctl, request, tile_data) == 0;
}

} // namespace

bool has_tiles() {
    static const bool granted = request_tiles();
    return granted;
}

tile_configuration::tile_configuration() : on_(has_tiles()) {
    if (on_) {
        shapes ours  = {};
        ours.palette = 1;
        for (int i = 0; i < 8; ++i) {
            ours.bytes_per_row[i] = 64;
            ours.rows[i]          = 16;
        }
        // by hand: GCC's intrinsics name only a part of the configuration as read
        asm volatile("sttilecfg %0" : "=m"(before_));
        asm volatile("ldtilecfg %0" : : "m"(ours));
    }
}

tile_configuration::~tile_configuration() {
    if (on_) {
        asm volatile("ldtilecfg %0" : : "m"(before_));
    }
}

#else

bool has_tiles() { return false; }

tile_configuration::tile_configuration() : on_(false), before_() {}
tile_configuration::~tile_configuration() = default;

#endif

} // namespace amx
