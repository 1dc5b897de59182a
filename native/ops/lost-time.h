// Time that computing threads waited for a thread that did not run, because another process had its core.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

GGML_API void      velo_add_lost_time(long long nanoseconds);
GGML_API long long velo_lost_time(void); // since the start, of all threads

#ifdef __cplusplus
}
#endif
