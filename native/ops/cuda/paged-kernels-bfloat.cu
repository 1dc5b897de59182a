// Kernels for K of bf16.
#include "paged-launcher.cuh"

namespace paged {

template <> bool cuda_launcher::attend_with<bfloat_numbers>(const params & p, int shared_bytes) {
    return launch_by_v<bfloat_numbers>(p, shared_bytes, *this);
}

} // namespace paged
