// Primitives of gpu.h on an NVIDIA GPU.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define GPU_FN __device__ __forceinline__
#define GPU_BOTH __host__ __device__ __forceinline__ // also called by the host
// Registers cannot be indexed: a loop over an array of registers must be unrolled.
#define GPU_UNROLL _Pragma("unroll")
#define GPU_UNROLL_2 _Pragma("unroll 2")
#define GPU_UNROLL_4 _Pragma("unroll 4")
#define GPU_SELDOM(x) __builtin_expect((x), 0)
#define GPU_ROLLED _Pragma("unroll 1")

namespace gpu {

GPU_FN int thread() { return threadIdx.x; }
GPU_FN int lane() { return threadIdx.x % 32; }
GPU_FN int warp() { return threadIdx.x / 32; }
GPU_FN int n_threads() { return blockDim.x; }
GPU_FN int block() { return blockIdx.x; }
GPU_FN int n_blocks() { return gridDim.x; }

GPU_FN void sync_warp() { __syncwarp(); }
GPU_FN void sync_block() { __syncthreads(); }

template <class T> GPU_FN T shuffle(T value, int from) { return __shfl_sync(0xffffffff, value, from); }
template <class T> GPU_FN T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffff, value, mask); }
GPU_FN bool                 any(bool x) { return __any_sync(0xffffffff, x); }
// Return the first lane with a true x, if any has.
GPU_FN int first_lane(bool x) { return __ffs((int) __ballot_sync(0xffffffff, x)) - 1; }

// The backend is compiled with fast math: exp2 is exact to 2 units in the last place, but its tanh not to 11 bits.
GPU_FN float exp2(float x) { return exp2f(x); }
GPU_FN float tanh(float x) { return 1.0f - 2.0f / (1.0f + exp2f(x * 2.8853900817779268f)); } // from exp(2x)

GPU_FN uint32_t bits(__half2 x) { return *(const uint32_t *) &x; }
GPU_FN uint32_t bits(__nv_bfloat162 x) { return *(const uint32_t *) &x; }
GPU_FN uint32_t pack_f16(float low, float high) { return bits(__floats2half2_rn(low, high)); }
GPU_FN uint32_t pack_bf16(float low, float high) { return bits(__floats2bfloat162_rn(low, high)); }
GPU_FN float    f16_to_float(uint16_t x) { return __half2float(__ushort_as_half(x)); }
GPU_FN float    bf16_to_float(uint16_t x) { return __uint_as_float((uint32_t) x << 16); }

// funnel: the low word of two, shifted right. permute: four bytes of eight, each selected by a digit.
GPU_FN uint32_t funnel(uint32_t low, uint32_t high, int shift) { return __funnelshift_r(low, high, shift); }
GPU_FN uint32_t permute(uint32_t a, uint32_t b, uint32_t digits) { return __byte_perm(a, b, digits); }

// Pairs of float16.
GPU_FN __half2  halves(uint32_t x) { return *(const __half2 *) &x; }
GPU_FN uint32_t add_f16(uint32_t a, uint32_t b) { return bits(__hadd2(halves(a), halves(b))); }
GPU_FN uint32_t mul_f16(uint32_t a, uint32_t b) { return bits(__hmul2(halves(a), halves(b))); }
GPU_FN uint32_t fma_f16(uint32_t a, uint32_t b, uint32_t c) { return bits(__hfma2(halves(a), halves(b), halves(c))); }

// Addresses in shared memory.
GPU_FN uint32_t         shared_address(const void * x) { return (uint32_t) __cvta_generic_to_shared(x); }
GPU_FN const uint32_t * words_at(uint32_t address) { return (const uint32_t *) __cvta_shared_to_generic(address); }

// ---- asynchronous copies from global to shared memory ----

// LINES: the warp copies whole lines of 128 bytes, which are better fetched as such.
template <int bytes, bool LINES = false> GPU_FN void copy_async_if(bool wanted, void * to, const void * from) {
    static_assert(bytes == 16, "cp.async.cg copies 16 bytes");
#if __CUDA_ARCH__ >= 800
#    define GPU_COPY_ASYNC(hint)                                                                                       \
        asm volatile("{\n"                                                                                             \
                     ".reg .pred p;\n"                                                                                 \
                     "setp.ne.b32 p, %2, 0;\n"                                                                         \
                     "@p cp.async.cg.shared.global" hint " [%0], [%1], 16;\n"                                          \
                     "}" ::"r"(shared_address(to)),                                                                    \
                     "l"(from), "r"((int) wanted))
    if (LINES) {
        GPU_COPY_ASYNC(".L2::128B");
    } else {
        GPU_COPY_ASYNC("");
    }
#    undef GPU_COPY_ASYNC
#else
    for (int i = 0; i < bytes / 4 && wanted; ++i) {
        ((uint32_t *) to)[i] = ((const uint32_t *) from)[i];
    }
#endif
}
GPU_FN void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;");
#endif
}
template <int pending> GPU_FN void copy_wait() { // for all groups except the newest `pending`
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(pending));
#endif
}

// A kernel that is launched to begin while the one before it runs waits for that one's end before it reads its results.
GPU_FN void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
GPU_FN void wait_for_last_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- fragments ----

} // namespace gpu

#include "gpu-fallback.h"

namespace gpu {

// Load four 8x8 matrices of 16-bit numbers; lane i has the address of row i % 8 of matrix i / 8.
GPU_FN void load_matrices(uint32_t (&to)[4], const void * row) {
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
#else
    fallback::load<false>(to, row);
#endif
}
GPU_FN void load_matrices_transposed(uint32_t (&to)[4], const void * row) {
#if __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row)));
#else
    fallback::load<true>(to, row);
#endif
}

GPU_FN uint32_t transpose(uint32_t x) {
#if __CUDA_ARCH__ >= 750
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
#else
    return fallback::transpose(x);
#endif
}

GPU_FN void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= 750
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#else
    fallback::mma<f16_to_float>(c, a, b0, b1);
#endif
}

GPU_FN void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    fallback::mma<bf16_to_float>(c, a, b0, b1);
#endif
}

} // namespace gpu
