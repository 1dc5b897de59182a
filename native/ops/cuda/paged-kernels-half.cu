// The kernels for K of float16, and all quantized types.
#include "paged-machine.cuh"

namespace paged {

template <> bool cuda_machine::attend_with<half_numbers>(const view & p, int shared_bytes) {
    return launch_by_v<half_numbers>(p, shared_bytes, *this);
}

} // namespace paged
