// The kernels for K of float32.
#include "paged-machine.cuh"

namespace paged {

template <> bool cuda_machine::attend_with<float_numbers>(const view & p, int shared_bytes) {
    return launch_by_v<float_numbers>(p, shared_bytes, *this);
}

} // namespace paged
