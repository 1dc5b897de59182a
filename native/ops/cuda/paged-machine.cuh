// The machine of paged-launch.h that is a CUDA device. Free of ggml, so that a compiler's report on the kernels needs
// nothing else.
#pragma once

#include "paged-call.h"
#include "paged-kernels.cuh"

#include <cuda_runtime.h>
#include <mutex>

namespace paged {

constexpr int MOST_DEVICES = 64;

// Blocks of a kernel that the current device holds at once, with so much shared memory each. A device is asked when
// that changes: nothing of it is a call that a captured graph would have to repeat.
template <auto * kernel> cudaError_t resident_blocks(int device, int bytes, int * blocks) {
    struct answer {
        int bytes = 0, blocks = 0;
    };
    if (device < 0 || device >= MOST_DEVICES) {
        return cudaErrorInvalidDevice;
    }
    static std::mutex           guard;
    static answer               known[MOST_DEVICES];
    std::lock_guard<std::mutex> lock(guard);
    answer &                    it = known[device];
    if (it.bytes != bytes) {
        int         n_sm = 0, most = 0, each = 0;
        cudaError_t status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        if (status == cudaSuccess) { // all that there is, so that nobody takes another's away
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

struct cuda_machine {
    int          device;
    cudaStream_t stream;
    cudaError_t  status = cudaSuccess; // of what went wrong first

    // As many blocks as are resident at once: which of them has work follows from the table, which only they read.
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
    void attend(const view & p, row_class of, int tokens, int bytes) {
        run<attend_kernel<M_TILES, V_PAIRS, KNumbers, VNumbers>>(bytes, p, of, tokens);
    }
    void merge(const view & p, int bytes) { run<merge_kernel>(bytes, p); }

    template <class KNumbers> bool attend_with(const view & p, int shared_bytes); // in paged-kernels-*.cu
};

} // namespace paged
