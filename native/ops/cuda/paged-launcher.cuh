// Launcher of paged-launch.h for CUDA devices. Independent of ggml, so that scripts/build/cuda_report.py can compile
// it.
#pragma once

#include "paged-kernels.cuh"
#include "paged-launch.h"

#include <cuda_runtime.h>
#include <mutex>

namespace paged {

constexpr int MAX_DEVICES = 64;

// What a kernel does on a device with so many bytes of shared memory for each thread block.
struct residence {
    int  bytes = -1, blocks = 0; // blocks that run at once on the whole device
    bool waits = false;          // its machine code can wait for the kernel before it, so that it may begin earlier
};

template <auto * kernel> cudaError_t measure(int device, int threads, int bytes, residence & it) {
    int                n_sm = 0, most = 0, each = 0;
    cudaFuncAttributes attributes = {};
    cudaError_t        status     = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status == cudaSuccess) { // the maximum, because all launches share the attribute
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    }
    if (status == cudaSuccess) { // shared memory decides how many blocks a multiprocessor holds
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      cudaSharedmemCarveoutMaxShared);
    }
    if (status == cudaSuccess) {
        status = cudaFuncGetAttributes(&attributes, kernel);
    }
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, device);
    }
    if (status == cudaSuccess) {
        status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, bytes);
    }
    if (status == cudaSuccess) {
        const int version =
            attributes.ptxVersion < attributes.binaryVersion ? attributes.ptxVersion : attributes.binaryVersion;
        it = {bytes, n_sm * each, version >= 90 && CUDART_VERSION >= 12030}; // captured since 12.3
    }
    return status;
}

// Set *to for the current device. Queries the device when `bytes` changes. A captured CUDA graph contains none of these
// calls.
template <auto * kernel> cudaError_t residence_of(int device, int threads, int bytes, residence * to) {
    if (device < 0 || device >= MAX_DEVICES) {
        return cudaErrorInvalidDevice;
    }
    static std::mutex           guard;
    static residence            known[MAX_DEVICES];
    std::lock_guard<std::mutex> lock(guard);
    residence &                 it = known[device];
    if (it.bytes != bytes) {
        const cudaError_t status = measure<kernel>(device, threads, bytes, it);
        if (status != cudaSuccess) {
            return status;
        }
    }
    *to = it;
    return it.blocks ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

// Return whether a device runs machine code for 8.0 or newer. In older code some kernels are empty: without
// asynchronous copies or much shared memory they would not be faster, or not fit.
inline bool has_all_kernels(int device) {
    static std::mutex           guard;
    static int                  versions[MAX_DEVICES];
    std::lock_guard<std::mutex> lock(guard);
    if (device < 0 || device >= MAX_DEVICES) {
        return false;
    }
    if (versions[device] == 0) {
        cudaFuncAttributes attributes = {};
        const cudaError_t  status     = cudaFuncGetAttributes(&attributes, merge_kernel);
        versions[device]              = status == cudaSuccess ? attributes.ptxVersion : -1;
    }
    return versions[device] >= 80;
}

struct cuda_launcher {
    int          device;
    int          n_multiprocessors;
    cudaStream_t stream;
    bool         begin_early;
    cudaError_t  status = cudaSuccess; // the first error

    // Launch as many thread blocks as run at once, at most `most`. They read the table and divide the work. If its
    // machine code can, the kernel begins early, and waits for the one before it where it needs its results.
    template <auto * kernel, class... Arguments>
    void run(int most, int threads, int bytes, const Arguments &... arguments) {
        residence on;
        if (status == cudaSuccess) {
            status = residence_of<kernel>(device, threads, bytes, &on);
        }
        if (status != cudaSuccess) {
            return;
        }
        const dim3          blocks(on.blocks < most ? on.blocks : most);
        cudaLaunchAttribute attribute = {};
        cudaLaunchConfig_t  config    = {blocks, dim3(threads), (size_t) bytes, stream, &attribute, 0};
        attribute.id                  = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs                                      = begin_early && on.waits;
        status                                               = cudaLaunchKernelEx(&config, kernel, arguments...);
    }
    template <division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
    void attend(const params & p, row_range of, int tokens, int bytes) {
        constexpr int threads = kernel_threads<BY, M_TILES, V_TILES, KNumbers, VNumbers>;
        run<attend_kernel<BY, M_TILES, V_TILES, KNumbers, VNumbers>>(INT32_MAX, threads, bytes, p, of, tokens);
    }
    int  multiprocessors() const { return n_multiprocessors; }
    bool has_all_kernels() const { return paged::has_all_kernels(device); }
    void merge(const params & p) { // a warp for each piece of an output row
        const int pieces = p.n_tokens * p.n_head * merged_pieces(p);
        run<merge_kernel>(ceil_div(pieces, MERGE_WARPS), 32 * MERGE_WARPS, 0, p);
    }

    template <class Which> bool attend_with(const params & p, int shared_bytes); // in paged-kernels-*.cu
};

} // namespace paged
