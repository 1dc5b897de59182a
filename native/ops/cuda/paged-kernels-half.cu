// Kernels for K of f16 and all quantized types.
#include "paged-launcher.cuh"

namespace paged {

template <> bool cuda_launcher::attend_with<half_numbers>(const params & p, int shared_bytes) {
    return launch_by_v<half_numbers>(p, shared_bytes, *this);
}

} // namespace paged
