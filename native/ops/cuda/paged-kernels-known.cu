// Kernels for f16, q8_0 and q4_0 of the usual head sizes.
#include "paged-launcher.cuh"

namespace paged {

template <> bool cuda_launcher::attend_with<known_types>(const params & p, int shared_bytes) {
    return launch_known_type(p, shared_bytes, *this);
}

} // namespace paged
