// Reference implementation of the operator, one query row and one token at a time. The fast kernels are tested against
// it.
#pragma once

#include "paged-problem.h"

namespace paged {

size_t reference_work_size(const problem & p); // bytes for each thread

// Computes the rows of thread `ith` of `nth`; `work` is that thread's own.
void reference(const problem & p, int ith, int nth, char * work);

} // namespace paged
