// A GPU without one: memory that the host cannot touch, copies that come late, and the CPU's arithmetic. What offloads
// layers is tested with it where there is no card.
#pragma once

#include "lab.h"

#ifdef __cplusplus
extern "C" {
#endif

// Adds a device of that many bytes to this process; null, or why not. It stays until the process ends.
LAB_API const char * lab_device_add(int64_t bytes);

// What was done on all devices so far.
struct lab_device_counts {
    int64_t graphs;  // computed
    int64_t copies;  // within a device
    int64_t reads;   // to the host, queued or at once
    int64_t writes;  // from the host
    int64_t streams; // made
    int64_t pinned;  // bytes of pinned host memory now
    int64_t shared;  // blocks that paged attention was told two sequences have in common, layer by layer
};
LAB_API struct lab_device_counts lab_device_count(void);

#ifdef __cplusplus
}
#endif
