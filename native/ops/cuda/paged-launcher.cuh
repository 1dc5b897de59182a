// Launcher of paged-launch.h for CUDA devices. Independent of ggml, so that scripts/build/cuda_report.py can compile
// it.
#pragma once

#include "paged-kernels.cuh"
#include "paged-launch.h"

#include <cuda_runtime.h>
#include <mutex>

namespace paged {

constexpr int MAX_DEVICES = 64;

// Set *blocks to the number of thread blocks of a kernel that the current device runs at once with `bytes` of shared
// memory each. Queries the device when `bytes` changes. A captured CUDA graph contains none of these calls.
template <auto * kernel> cudaError_t resident_blocks(int device, int bytes, int * blocks) {
    struct answer {
        int bytes = 0, blocks = 0;
    };
    if (device < 0 || device >= MAX_DEVICES) {
        return cudaErrorInvalidDevice;
    }
    static std::mutex           guard;
    static answer               known[MAX_DEVICES];
    std::lock_guard<std::mutex> lock(guard);
    answer &                    it = known[device];
    if (it.bytes != bytes) {
        int         n_sm = 0, most = 0, each = 0;
        cudaError_t status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        if (status == cudaSuccess) { // the maximum, because all launches share the attribute
            status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
        }
        if (status == cudaSuccess) {
            status = cudaDeviceGetAttribute(&n_sm, cudaDevAttrMultiProcessorCount, device);
        }
        if (status == cudaSuccess) {
            status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, N_THREADS, bytes);
        }
        if (status != cudaSuccess) {
            return status;
        }
        it = {bytes, n_sm * each};
    }
    *blocks = it.blocks;
    return *blocks ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

struct cuda_launcher {
    int          device;
    cudaStream_t stream;
    cudaError_t  status = cudaSuccess; // the first error

    // Launch as many thread blocks as run at once. They read the table and divide the work.
    template <auto * kernel, class... Arguments> void run(int bytes, const Arguments &... arguments) {
        int blocks = 0;
        if (status == cudaSuccess) {
            status = resident_blocks<kernel>(device, bytes, &blocks);
        }
        if (status == cudaSuccess) {
            kernel<<<blocks, N_THREADS, bytes, stream>>>(arguments...);
            status = cudaGetLastError();
        }
    }
    template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers>
    void attend(const params & p, row_range of, int tokens, int bytes) {
        run<attend_kernel<M_TILES, V_PAIRS, KNumbers, VNumbers>>(bytes, p, of, tokens);
    }
    void merge(const params & p, int bytes) { run<merge_kernel>(bytes, p); }

    template <class KNumbers> bool attend_with(const params & p, int shared_bytes); // in paged-kernels-*.cu
};

} // namespace paged
