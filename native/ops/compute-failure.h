// Failures of threads that compute. An abort or an exception in one of them ends the computation, not the process: the
// thread leaves its team (cpu/team-run.cpp), the others follow at the next barrier, and the caller gets a status.
#pragma once

#include "ggml.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

// Whether this thread computes, where an exception is caught.
GGML_API bool velo_is_computing(void);
GGML_API void velo_set_computing(bool computing);

// Keeps a message until it is taken; one that nobody took yet stays.
GGML_API void velo_note_failure(const char * message);
// Copies the message and forgets it. False if there is none.
GGML_API bool velo_take_failure(char * message, size_t size);

#ifdef __cplusplus
}
#endif
