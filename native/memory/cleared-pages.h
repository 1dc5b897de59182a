// Memory that was cleared and not used yet.
#pragma once

#include "ggml-backend.h"

// For a buffer that was just cleared: it stays zero, and takes memory only as it is used. Does nothing where the buffer
// is not plain host memory.
void give_back_cleared_pages(ggml_backend_buffer_t buffer);
