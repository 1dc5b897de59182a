// Arithmetic on lines of tiles, if this processor's kind has it.
#pragma once

#if defined(__GNUC__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define VELO_TILES
#    include "tile-simd-x86.h"
#elif defined(__GNUC__) && defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#    define VELO_TILES
#    include "tile-simd-neon.h"
#endif
