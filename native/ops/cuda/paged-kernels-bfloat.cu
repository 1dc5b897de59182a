// The kernels for K of bfloat16.
#include "paged-machine.cuh"

namespace paged {

template <> bool cuda_machine::attend_with<bfloat_numbers>(const view & p, int shared_bytes) {
    return launch_by_v<bfloat_numbers>(p, shared_bytes, *this);
}

} // namespace paged
