// Kernels for f16, q8_0 and q4_0 of the usual head sizes.
#include "paged-launcher.cuh"

namespace paged {

// Return whether the kernels are in the machine code: before 8.0, without asynchronous copies, they are not faster, and
// empty.
static bool has_known_kernels(int device) {
    static std::mutex           guard;
    static int                  versions[MAX_DEVICES];
    std::lock_guard<std::mutex> lock(guard);
    if (device < 0 || device >= MAX_DEVICES) {
        return false;
    }
    if (versions[device] == 0) {
        using numbers                 = known_numbers<PAGE_F16, 128>;
        cudaFuncAttributes attributes = {};
        const cudaError_t status = cudaFuncGetAttributes(&attributes, attend_kernel<BY_TOKENS, 1, 8, numbers, numbers>);
        versions[device]         = status == cudaSuccess ? attributes.ptxVersion : -1;
    }
    return versions[device] >= 80;
}

template <> bool cuda_launcher::attend_with<known_types>(const params & p, int shared_bytes) {
    return has_known_kernels(device) && launch_known_type(p, shared_bytes, *this);
}

} // namespace paged
