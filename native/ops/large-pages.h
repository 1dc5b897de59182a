// Host memory in large pages: weights and KV rows are many, and cost fewer walks through the page tables.
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// For memory that was just allocated. Nothing happens where it is small or the system has no such pages.
void ggml_prefer_large_pages(void * memory, size_t size);

#ifdef __cplusplus
}
#endif
