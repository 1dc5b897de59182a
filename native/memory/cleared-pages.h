// Memory that reads as zero and takes none until it is used.
#pragma once

#include "ggml-backend.h"

// Makes a buffer zero without touching its pages: they are given back, and come anew when they are used. False where
// that cannot be done: the buffer is not plain host memory, or the system knows no such thing.
bool clear_untouched(ggml_backend_buffer_t buffer);
