// Errors at the C interface: every function of velo.h runs its body inside guarded(), which turns exceptions (of
// PyVelo, upstream and the standard library) into a status and a message.
#pragma once

#include "velo.h"

#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

#if defined(__GNUC__)
#    define VELO_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#    define VELO_PRINTF(text, first)
#endif

namespace velo {

struct error : std::exception {
    velo_status status;
    std::string message;

    error(velo_status status, std::string message) : status(status), message(std::move(message)) {}
    const char * what() const noexcept override { return message.c_str(); }
};

// Set velo_message() of this thread and return `status`.
velo_status report(velo_status status, const char * message) noexcept;

constexpr const char * memory_ran_out =
    "out of memory: use a smaller model, n_ctx, kv_cache_bytes or max_batch_tokens, or more memory";
constexpr const char * no_thread =
    "a thread cannot be started: use a smaller n_threads, or raise the limits of memory and threads";

// Return whether an error message of upstream is about too little memory.
bool tells_of_memory(std::string_view message);

[[noreturn]] void fail(velo_status status, const char * format, ...) VELO_PRINTF(2, 3);

// Set up upstream's libraries and their log, once.
void start_library();

template <class Body> velo_status guarded(Body && body) noexcept {
    try {
        start_library();
        body();
        return VELO_OK;
    } catch (const error & e) {
        return report(e.status, e.what());
    } catch (const std::bad_alloc &) {
        return report(VELO_OUT_OF_MEMORY, memory_ran_out);
    } catch (const std::system_error & e) { // mostly a thread that cannot start
        const bool limits = e.code() == std::errc::resource_unavailable_try_again;
        return report(limits ? VELO_OUT_OF_MEMORY : VELO_INTERNAL, limits ? no_thread : e.what());
    } catch (const std::exception & e) { // upstream throws a runtime_error for a cache that cannot be allocated
        const bool memory = tells_of_memory(e.what());
        return report(memory ? VELO_OUT_OF_MEMORY : VELO_INTERNAL, memory ? memory_ran_out : e.what());
    } catch (...) {
        return report(VELO_INTERNAL, "an unknown exception");
    }
}

// While an object exists, an abort of upstream on this thread is thrown as a velo::error, with the line that upstream
// logged before, or as a bad_alloc. For work on files, texts and GPUs: upstream asserts properties of them that cannot
// be checked before. Computing threads always throw, which ends the computation (ops/cpu/team-run.cpp).
class catch_aborts {
public:
    explicit catch_aborts(velo_status status) noexcept;
    ~catch_aborts();
    catch_aborts(const catch_aborts &)             = delete;
    catch_aborts & operator=(const catch_aborts &) = delete;

private:
    velo_status outer;
};

// Return ": " and the reason why a computing thread failed since forget_failure(), or an empty string.
std::string failure();
void        forget_failure();

// Collects the errors that upstream logs on this thread while the object exists.
class error_log {
public:
    error_log() noexcept;
    ~error_log();
    error_log(const error_log &)             = delete;
    error_log & operator=(const error_log &) = delete;

    // Return the first line, which is the cause, or `otherwise` if no line was logged.
    std::string cause(const char * otherwise) const;
    // Return the last line "<abort>: ...", which tells why upstream aborts with this text, or an empty string.
    std::string reason_of(const char * abort) const;
    void        add(std::string_view line);

private:
    error_log * outer;
    std::string first, last_error;
};

inline void check_pointer(const void * pointer, const char * name) {
    if (!pointer) {
        fail(VELO_INVALID, "%s is NULL", name);
    }
}

// Check an array. It may be NULL if it is empty.
inline void check_array(const void * data, int64_t size, const char * name) {
    if (size < 0) {
        fail(VELO_INVALID, "the size of %s is %lld, but cannot be negative", name, static_cast<long long>(size));
    }
    if (size > 0) {
        check_pointer(data, name);
    }
}

inline void check_range(const char * name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        fail(VELO_INVALID, "%s is %lld, but must be from %lld to %lld", name, static_cast<long long>(value),
             static_cast<long long>(low), static_cast<long long>(high));
    }
}

// Copy text to the caller's buffer, without a terminating zero.
inline void put_text(std::string_view text, char * target, size_t capacity, size_t * len) {
    check_pointer(len, "len");
    *len = text.size();
    if (text.size() > capacity) {
        fail(VELO_BUFFER_TOO_SMALL, "the buffer has %zu bytes, but %zu are needed", capacity, text.size());
    }
    if (!text.empty()) {
        check_pointer(target, "the buffer");
        std::memcpy(target, text.data(), text.size());
    }
}

// Copy an array to the caller's buffer.
template <class T> void put_array(const T * items, int32_t n, T * target, int32_t capacity, int32_t * count) {
    check_pointer(count, "count");
    *count = n;
    if (n > capacity) {
        fail(VELO_BUFFER_TOO_SMALL, "the buffer has room for %d, but %d are needed", capacity, n);
    }
    if (n > 0) {
        check_pointer(target, "the buffer");
        std::memcpy(target, items, sizeof(T) * static_cast<size_t>(n));
    }
}

// Copy text to a fixed array: truncated to fit, always terminated.
template <size_t N> void put_name(char (&target)[N], std::string_view text) {
    const size_t n = text.size() < N ? text.size() : N - 1;
    std::memcpy(target, text.data(), n);
    target[n] = '\0';
}

} // namespace velo
