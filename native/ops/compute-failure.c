#include "compute-failure.h"

#include <stdatomic.h>
#include <stdio.h>

enum { EMPTY, BUSY, FULL };

static atomic_int state = EMPTY; // no thread waits for it, so a fork cannot inherit a wait
static char       kept[512];

#if defined(_WIN32)

static _Thread_local struct velo_computing * here;

struct velo_computing * velo_computing_here(void) { return here; }

bool velo_set_computing(struct velo_computing * thread) {
    here = thread;
    return true;
}

#else

#    include <pthread.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t  key;
static int            error; // of making the key

static void make_key(void) { error = pthread_key_create(&key, NULL); }

static bool have_key(void) { return pthread_once(&once, make_key) == 0 && error == 0; }

struct velo_computing * velo_computing_here(void) { return have_key() ? pthread_getspecific(key) : NULL; }

bool velo_set_computing(struct velo_computing * thread) { return have_key() && pthread_setspecific(key, thread) == 0; }

#endif

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
