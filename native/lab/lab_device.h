// Emulated GPU: memory that the host cannot access, delayed copies, and the CPU's arithmetic. Tests offload layers to
// it on machines without a GPU.
#pragma once

#include "lab.h"

#ifdef __cplusplus
extern "C" {
#endif

// Add a device with `bytes` of memory to this process, until the process ends. Return null or an error.
LAB_API const char * lab_device_add(int64_t bytes);

// Computes paged attention; returns null or an error.
typedef const char * (*lab_attention)(const struct lab_paged * op);

// From now on devices compute paged attention with this function, null: with the CPU backend.
LAB_API void lab_device_attend(lab_attention attend);

// From now on graphs (1), or the waits for them (2), fail as on a card with too little memory; 0: nothing fails.
LAB_API void lab_device_exhaust(int32_t where);

// Counts over all devices since the start of the process.
struct lab_device_counts {
    int64_t graphs;  // computed graphs
    int64_t copies;  // copies within a device
    int64_t reads;   // copies to the host, queued or synchronous
    int64_t writes;  // copies from the host
    int64_t streams; // created streams
    int64_t pinned;  // bytes of pinned host memory now
    int64_t shared;  // shared blocks in the tables of paged attention, summed over rows and layers
};
LAB_API struct lab_device_counts lab_device_count(void);

#ifdef __cplusplus
}
#endif
