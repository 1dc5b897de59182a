// The library as a whole: messages, the log, devices.
#include "guard.hpp"
#include "host-memory.hpp"
#include "packing.hpp"
#include "team.hpp"

#include "compute-failure.h"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama.h"

#if !defined(_WIN32)
#    include <dlfcn.h>
#    include <pthread.h>
#elif defined(VELO_LOADS_BACKENDS)
#    include <windows.h>
#endif

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__) && defined(_OPENMP)
#    include <omp.h>
#    define VELO_GCC_OPENMP
#endif

// of ggml-threading.h, which is not installed with the public headers
extern "C" {
GGML_API void ggml_critical_section_start(void);
GGML_API void ggml_critical_section_end(void);
}

namespace {

// a fixed buffer: reporting out of memory must not allocate
thread_local char last_message[2048];

// status of aborts that catch_aborts turns into exceptions; VELO_OK: aborts are not caught
thread_local velo_status       abort_status = VELO_OK;
thread_local velo::error_log * errors       = nullptr;

struct log_sink {
    velo_log_callback callback;
    void *            user;
    int32_t           min_level;
};
std::mutex                      sink_mutex;
std::shared_ptr<const log_sink> sink;              // NULL: no log
int                             n_telling = 0;     // running callbacks; guarded by sink_mutex
thread_local bool               telling   = false; // this thread runs a callback
std::mutex                      info_mutex;        // upstream builds its text in a static string

// Unfinished log line of a thread.
struct log_line {
    int32_t     level = GGML_LOG_LEVEL_INFO;
    std::string text;
};
thread_local log_line line;

// "function: text" -> "text"
std::string_view without_function(std::string_view text) {
    const size_t colon = text.find(": ");
    const bool   is_name =
        colon != std::string_view::npos && colon > 0 &&
        text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:~") >= colon;
    return is_name ? text.substr(colon + 2) : text;
}

void end_line() {
    if (line.level == GGML_LOG_LEVEL_ERROR && errors) {
        errors->add(line.text);
    }
    std::shared_ptr<const log_sink> to;
    {
        const std::lock_guard<std::mutex> lock(sink_mutex);
        to = sink;
        if (!to || line.level < to->min_level || telling) { // log no lines from within a callback
            return;
        }
        n_telling++;
    }
    telling = true;
    to->callback(line.level, line.text.c_str(), to->user);
    telling = false;
    const std::lock_guard<std::mutex> lock(sink_mutex);
    n_telling--;
}

// ggml's levels equal velo.h's, except "none" (plain text) and "continue the line".
void take_log(ggml_log_level level, const char * text, void *) noexcept {
    try {
        if (level != GGML_LOG_LEVEL_CONT) {
            line.level = level == GGML_LOG_LEVEL_NONE ? GGML_LOG_LEVEL_INFO : level;
        }
        for (const char * end; (end = std::strchr(text, '\n')) != nullptr; text = end + 1) {
            line.text.append(text, end);
            if (!line.text.empty()) {
                end_line();
            }
            line.text.clear();
        }
        line.text.append(text);
    } catch (...) { // a log line must not throw
        line.text.clear();
    }
}

int32_t kind_of(enum ggml_backend_dev_type type) {
    switch (type) {
    case GGML_BACKEND_DEVICE_TYPE_GPU:
    case GGML_BACKEND_DEVICE_TYPE_META:
        return VELO_DEVICE_GPU;
    case GGML_BACKEND_DEVICE_TYPE_IGPU:
        return VELO_DEVICE_IGPU;
    case GGML_BACKEND_DEVICE_TYPE_ACCEL:
        return VELO_DEVICE_ACCELERATOR;
    default:
        return VELO_DEVICE_CPU;
    }
}

// "file:line: text" -> "text"
const char * without_place(const char * message) {
    const char * colon = std::strstr(message, ": ");
    return colon && colon > message && colon[-1] >= '0' && colon[-1] <= '9' ? colon + 2 : message;
}

// Upstream asserts that an allocation has succeeded.
bool is_about_memory(const char * text) {
    return std::strstr(text, "!= NULL) failed") || std::strstr(text, "failed to reserve memory");
}

void take_abort(const char * message) {
    const bool computing = velo_computing_here() != nullptr; // an exception here ends the team with a status
    if (!computing && abort_status == VELO_OK) {
        std::fprintf(stderr, "%s\n", message);
        return;
    }
    const char *      text   = without_place(message);
    const std::string logged = errors ? errors->reason_of(text) : ""; // of "CUDA error", say
    if (is_about_memory(text) || velo::tells_of_memory(logged)) {
        throw std::bad_alloc();
    }
    throw velo::error(computing ? VELO_FAILED : abort_status, logged.empty() ? text : logged);
}

#if !defined(_WIN32)
// A child of fork() has only this thread: it must not use the parent's team, or wait for locks of its threads.
void before_fork() {
    velo_threads_release();
    sink_mutex.lock();
    info_mutex.lock();
    ggml_critical_section_start();
}

void after_fork() {
    ggml_critical_section_end();
    info_mutex.unlock();
    sink_mutex.unlock();
}

void after_fork_in_child() {
    n_telling = telling; // callbacks of other threads never end in a child
    after_fork();
}
#endif

} // namespace

namespace velo {

velo_status report(velo_status status, const char * message) noexcept {
    std::snprintf(last_message, sizeof(last_message), "%s", message);
    return status;
}

bool tells_of_memory(std::string_view message) {
    for (const std::string_view word :
         {"alloc", "ALLOC_FAILED", "no memory", "out of memory", "annot allocate memory"}) {
        if (message.find(word) != std::string_view::npos) {
            return true;
        }
    }
    return false;
}

void fail(velo_status status, const char * format, ...) {
    char    message[sizeof(last_message)];
    va_list args;
    va_start(args, format);
    std::vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    throw error(status, message);
}

#if defined(VELO_LOADS_BACKENDS)
// Backends are in this library's folder; upstream would search the folder of the Python executable.
std::string folder_of_this_library() {
#    if defined(_WIN32)
    HMODULE self       = nullptr;
    char    path[4096] = {};
    GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                       (LPCSTR) &folder_of_this_library, &self);
    GetModuleFileNameA(self, path, sizeof(path) - 1);
    const std::string file = path;
#    else
    Dl_info           self = {};
    const std::string file = dladdr((void *) &folder_of_this_library, &self) && self.dli_fname ? self.dli_fname : "";
#    endif
    return file.substr(0, file.find_last_of("/\\"));
}
#endif

// Symbols of a library loaded with RTLD_GLOBAL override symbols of libraries that ours are linked with.
static void check_symbols() {
#if defined(__linux__)
#    if defined(VELO_LOADS_BACKENDS) // backends are linked when they are loaded
    const void * function = dlsym(RTLD_DEFAULT, "ggml_init");
#    else
    const void * function = reinterpret_cast<const void *>(&ggml_init);
#    endif
    Dl_info found = {};
    if (function && dladdr(function, &found) && found.dli_fname && !std::strstr(found.dli_fname, "libvelo-ggml")) {
        velo::fail(VELO_UNSUPPORTED,
                   "%s was loaded with RTLD_GLOBAL, so its ggml overrides PyVelo's: load it with RTLD_LOCAL",
                   found.dli_fname);
    }
#endif
}

void start_library() {
    static std::once_flag once;
    std::call_once(once, [] {
        check_symbols();
#if !defined(_WIN32)
        pthread_atfork(before_fork, after_fork, after_fork_in_child);
#endif
        llama_log_set(take_log, nullptr);
        ggml_set_abort_callback(take_abort);
#if defined(VELO_LOADS_BACKENDS)
        const std::string folder = folder_of_this_library();
        ggml_backend_load_all_from_path(folder.c_str());
        if (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
            velo::fail(VELO_UNSUPPORTED,
                       "no libggml-cpu-*.so in %s runs on this processor: install the package again, or build it here",
                       folder.c_str());
        }
#endif
        llama_backend_init();
    });
}

catch_aborts::catch_aborts(velo_status status) noexcept : outer(abort_status) { abort_status = status; }
catch_aborts::~catch_aborts() { abort_status = outer; }

std::string failure() {
    char message[512] = ": ";
    return velo_take_failure(message + 2, sizeof(message) - 2) ? message : "";
}

void forget_failure() { failure(); }

error_log::error_log() noexcept : outer(errors) { errors = this; }
error_log::~error_log() { errors = outer; }

void error_log::add(std::string_view text) {
    if (first.empty()) {
        first = without_function(text);
    }
    if (text.find(" error: ") != std::string_view::npos) {
        last_error = text;
    }
}

std::string error_log::reason_of(const char * abort) const {
    return last_error.compare(0, std::strlen(abort), abort) == 0 ? last_error : "";
}

std::string error_log::cause(const char * otherwise) const { return first.empty() ? otherwise : first; }

} // namespace velo

int32_t velo_abi_version(void) noexcept { return VELO_ABI_VERSION; }

const char * velo_message(void) noexcept { return last_message; }

const char * velo_status_name(int32_t status) noexcept {
    switch (status) {
    case VELO_OK:
        return "ok";
    case VELO_INVALID:
        return "invalid argument";
    case VELO_MODEL_ERROR:
        return "model error";
    case VELO_UNSUPPORTED:
        return "unsupported";
    case VELO_OUT_OF_MEMORY:
        return "out of memory";
    case VELO_CANCELLED:
        return "cancelled";
    case VELO_FAILED:
        return "failed";
    case VELO_BUFFER_TOO_SMALL:
        return "buffer too small";
    case VELO_INTERNAL:
        return "internal error";
    default:
        return "unknown status";
    }
}

velo_status velo_log_set(velo_log_callback callback, void * user, int32_t min_level) noexcept {
    return velo::guarded([&] {
        velo::check_range("min_level", min_level, GGML_LOG_LEVEL_DEBUG, GGML_LOG_LEVEL_ERROR);
        auto next = callback ? std::make_shared<const log_sink>(log_sink{callback, user, min_level}) : nullptr;
        std::unique_lock<std::mutex> lock(sink_mutex);
        sink = std::move(next);
        // not a condition variable, because a child of fork() cannot use one with waiters of the parent
        for (int i = 0; i < 1000 && !sink && !telling && n_telling > 0; ++i) {
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            lock.lock();
        }
    });
}

velo_status velo_devices(velo_device * devices, int32_t capacity, int32_t * count) noexcept {
    return velo::guarded([&] {
        std::vector<velo_device> found(ggml_backend_dev_count());
        for (size_t i = 0; i < found.size(); ++i) {
            ggml_backend_dev_t device = ggml_backend_dev_get(i);
            const auto         type   = ggml_backend_dev_type(device);
            size_t             free = 0, total = 0;
            ggml_backend_dev_memory(device, &free, &total);
            if (type == GGML_BACKEND_DEVICE_TYPE_CPU) { // the backend reports all memory as free
                free = static_cast<size_t>(velo::free_host_memory());
            }
            velo::put_name(found[i].name, ggml_backend_dev_name(device));
            velo::put_name(found[i].description, ggml_backend_dev_description(device));
            found[i].kind         = kind_of(type);
            found[i].memory_total = static_cast<int64_t>(total);
            found[i].memory_free  = static_cast<int64_t>(free);
        }
        velo::put_array(found.data(), static_cast<int32_t>(found.size()), devices, capacity, count);
    });
}

int64_t velo_reserved_memory(void) noexcept { return velo::reserved_memory(); }

velo_status velo_system_info(char * text, size_t capacity, size_t * len) noexcept {
    return velo::guarded([&] {
        const std::lock_guard<std::mutex> lock(info_mutex);
        velo::put_text(llama_print_system_info(), text, capacity, len);
    });
}

void velo_threads_release(void) noexcept {
#if defined(VELO_GCC_OPENMP)
    velo::forget_team();
    omp_pause_resource_all(omp_pause_soft); // fails only inside a parallel region
#endif
}
