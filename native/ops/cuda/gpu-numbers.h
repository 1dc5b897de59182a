// 16-bit numbers on the host, without the slow conversions of the compiler's library.
#pragma once

#include <cstdint>
#include <cstring>

namespace gpu {

inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

inline float    bf16_to_float(uint16_t x) { return float_of((uint32_t) x << 16); }
inline uint16_t float_to_bf16(float x) { // to the nearest, ties to even
    const uint32_t wide = bits_of(x);
    return x != x ? 0x7fc0 : (uint16_t) ((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

inline float f16_to_float(uint16_t x) {
    const uint32_t number  = (uint32_t) (x & 0x7fff) << 13;
    const uint32_t finite  = bits_of(float_of(number) * 0x1p112f);                   // the exponent of f16 is 112 less
    const uint32_t special = number > 0x0f800000 ? number | 0x7fc00000 : 0x7f800000; // NaN is quiet
    return float_of((uint32_t) (x & 0x8000) << 16 | (number < 0x0f800000 ? finite : special));
}
inline uint16_t to_f16(double x) { // to the nearest, ties to even
    uint64_t wide;
    memcpy(&wide, &x, sizeof(wide));
    const uint16_t sign = (uint16_t) (wide >> 48 & 0x8000);
    wide &= INT64_MAX;
    if (wide < 0x3f10000000000000) { // below 2^-14: a multiple of 2^-24, which the sum rounds to
        const double sum = (x < 0 ? -x : x) + 0x1p28;
        memcpy(&wide, &sum, sizeof(wide));
        return (uint16_t) (sign | (uint16_t) wide);
    }
    if (wide > 0x7ff0000000000000) {
        return (uint16_t) (sign | 0x7e00 | (wide >> 42 & 0x3ff));
    }
    wide = (wide + 0x1ffffffffff + (wide >> 42 & 1)) >> 42;
    return (uint16_t) (sign | (wide < (1023 + 16) << 10 ? wide - ((1023 - 15) << 10) : 0x7c00));
}
inline uint16_t float_to_f16(float x) { return to_f16(x); }

} // namespace gpu
