// What the processor has of AMX: a file may be compiled for more than that.
#pragma once

#include <cpuid.h>
#include <cstdlib>

enum class amx_bit { bf16 = 22, bytes = 25 }; // of edx, leaf 7 of CPUID

// PYVELO_NO_AMX hides all of it.
inline bool velo_has_amx(amx_bit bit) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return !std::getenv("PYVELO_NO_AMX") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> static_cast<int>(bit) & 1);
}
