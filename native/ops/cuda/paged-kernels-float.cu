// Kernels for K of f32.
#include "paged-launcher.cuh"

namespace paged {

template <> bool cuda_launcher::attend_with<float_numbers>(const params & p, int shared_bytes) {
    return launch_by_v<float_numbers>(p, shared_bytes, *this);
}

} // namespace paged
