// What the C interface needs from the system: velo-lab-host MODEL checks free memory, cores, a pool that takes memory
// as it fills, and a text that needs a big stack. Exits with 1 if one is wrong.
#include "velo_program.h"

#include <string.h>

#if defined(_WIN32)
#    include <windows.h>

#    include <psapi.h>
#elif defined(__APPLE__)
#    include <mach/mach.h>
#else
#    include <unistd.h>
#endif

enum { BLOCK = 32, N_BLOCKS = 1 << 15, TEXT = 1 << 20 };

static int n_wrong = 0;

static void check(int holds, const char * what) {
    printf("%s: %s\n", what, holds ? "yes" : "NO");
    n_wrong += !holds;
}

// Returns the bytes of memory that the process occupies.
static int64_t resident(void) {
#if defined(_WIN32)
    PROCESS_MEMORY_COUNTERS counters;
    return GetProcessMemoryInfo(GetCurrentProcess(), &counters, sizeof(counters)) ? (int64_t) counters.WorkingSetSize
                                                                                  : -1;
#elif defined(__APPLE__)
    struct mach_task_basic_info info;
    mach_msg_type_number_t      count = MACH_TASK_BASIC_INFO_COUNT;
    const kern_return_t         found = task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t) &info, &count);
    return found == KERN_SUCCESS ? (int64_t) info.resident_size : -1;
#else
    long   all = 0, pages = -1;
    FILE * file = fopen("/proc/self/statm", "r");
    if (file) {
        pages = fscanf(file, "%ld %ld", &all, &pages) == 2 ? pages : -1;
        fclose(file);
    }
    return pages < 0 ? -1 : (int64_t) pages * sysconf(_SC_PAGESIZE);
#endif
}

static void check_devices(void) {
    velo_device devices[16];
    int32_t     n = 0, physical = -1, performance = -1;
    need(velo_devices(devices, 16, &n));
    for (int32_t i = 0; i < n; ++i) {
        if (devices[i].kind == VELO_DEVICE_CPU) {
            printf("free: %lld MiB of %lld\n", (long long) (devices[i].memory_free >> 20),
                   (long long) (devices[i].memory_total >> 20));
            check(devices[i].memory_free > 0 && devices[i].memory_free < devices[i].memory_total, "free memory");
        }
    }
    need(velo_cores(&physical, &performance));
    printf("cores: %d, for performance: %d\n", (int) physical, (int) performance);
#if defined(_WIN32) || defined(__APPLE__)
    check(physical >= 1 && performance >= 1 && performance <= physical, "cores");
#else
    check(physical == 0 && performance == 0, "cores that only files tell");
#endif
}

static void check_pool(velo_model * model) {
    velo_context_info info;
    const int64_t     before  = resident();
    velo_context *    context = new_context(model, N_BLOCKS, BLOCK, BLOCK);
    const int64_t     taken   = resident() - before;
    need(velo_context_get_info(context, &info));
    printf("pool: %lld MiB; taken: %lld MiB\n", (long long) (info.pool_bytes >> 20), (long long) (taken >> 20));
    check(before > 0 && taken < info.pool_bytes / 4, "a pool takes memory as it fills");
    velo_context_free(context);
}

static void check_stack(velo_model * model) {
    char *    text   = malloc(TEXT);
    int32_t * tokens = malloc(TEXT * sizeof(int32_t));
    int32_t   n      = 0;
    if (text && tokens) {
        memset(text, 'a', TEXT);
        need(velo_tokenize(model, text, TEXT, 0, 0, tokens, TEXT, &n));
    }
    check(n > 0, "a word of a million characters");
    free(tokens);
    free(text);
}

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "velo-lab-host MODEL\n");
        return 2;
    }
    velo_model * model = load(argv[1]);
    check_devices();
    check_pool(model);
    check_stack(model);
    velo_model_free(model);
    return n_wrong != 0;
}
