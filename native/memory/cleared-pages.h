// Zeroed memory that the system provides on first use.
#pragma once

#include "ggml-backend.h"

// Zero a buffer by returning its pages to the system, which provides zeroed ones on first use. Return false if this is
// not possible: the buffer is not plain host memory, or the system refuses. Throws std::bad_alloc.
bool clear_untouched(ggml_backend_buffer_t buffer);
