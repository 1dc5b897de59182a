#include "lost-time.h"

#include <stdatomic.h>

static atomic_llong total;

void velo_add_lost_time(long long nanoseconds) { atomic_fetch_add_explicit(&total, nanoseconds, memory_order_relaxed); }

long long velo_lost_time(void) { return atomic_load_explicit(&total, memory_order_relaxed); }
