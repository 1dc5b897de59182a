// Host memory in large pages, for weights and KV rows: fewer page table walks.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Requests large pages for memory that was just allocated. Does nothing if it is small or the system has no such pages.
void ggml_prefer_large_pages(void * memory, size_t size);

#ifdef __cplusplus
}
#endif
