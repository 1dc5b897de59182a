// Primitives of the kernels: on an NVIDIA GPU, or emulated on the host with a fiber for each thread, for tests.
//
// Fragments of a product of 16x16 by 16x8, as in PTX's mma.m16n8k16, with g = lane / 4 and c = lane % 4:
//   a: rows g and g + 8 at columns 2c, 2c+1 (a[0], a[1]) and 2c+8, 2c+9 (a[2], a[3]), two 16-bit numbers each
//   b: column g at rows 2c, 2c+1 (b[0]) and 2c+8, 2c+9 (b[1])
//   c: rows g (c[0], c[1]) and g + 8 (c[2], c[3]) at columns 2c, 2c+1
#pragma once

#if defined(__CUDACC__)
#    include "gpu-cuda.h"
#else
#    include "gpu-host.h"
#endif
