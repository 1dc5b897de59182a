#include "compute-failure.h"

#include <stdatomic.h>
#include <stdio.h>

enum { EMPTY, BUSY, FULL };

static _Thread_local bool is_computing;
static atomic_int         state = EMPTY; // nobody waits for it, so a fork cannot inherit a wait
static char               kept[512];

bool velo_is_computing(void) { return is_computing; }

void velo_set_computing(bool computing) { is_computing = computing; }

void velo_note_failure(const char * message) {
    int expected = EMPTY;
    if (atomic_compare_exchange_strong(&state, &expected, BUSY)) {
        snprintf(kept, sizeof(kept), "%s", message);
        atomic_store(&state, FULL);
    }
}

bool velo_take_failure(char * message, size_t size) {
    int expected = FULL;
    if (!atomic_compare_exchange_strong(&state, &expected, BUSY)) {
        return false;
    }
    snprintf(message, size, "%s", kept);
    atomic_store(&state, EMPTY);
    return true;
}
