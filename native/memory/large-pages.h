// Host memory in large pages: rows at random places cost fewer walks through the page tables.
#pragma once

#include "ggml-backend.h"

// For a buffer that was just cleared: it stays zero, and takes memory only as it is used. Does nothing where the buffer
// is not plain host memory or the system has no such pages.
void use_large_pages(ggml_backend_buffer_t buffer);
