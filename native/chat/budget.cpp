#include "budget.hpp"

namespace {

thread_local velo::chat_budget * current = nullptr;

constexpr const char * deep   = "it is nested too deep";
constexpr const char * memory = "it takes too much memory";
constexpr size_t       large  = 16 << 20;
constexpr size_t       needle = 1024; // bytes

} // namespace

velo::chat_budget::chat_budget(const chat_limits & limits) noexcept
    : limits(limits), end(std::chrono::steady_clock::now() + limits.time), top(reinterpret_cast<const char *>(this)) {
    current = this;
}

velo::chat_budget::~chat_budget() { current = nullptr; }

void velo::chat_budget::tick() {
    check_stack();
    ++n_operations;
    if (reached) {
        check();
    } else if (n_operations > limits.operations) {
        reached = "it takes too many operations";
    } else if (n_operations % 64 == 0 && std::chrono::steady_clock::now() > end) {
        reached = "it takes too long";
    }
    check();
}

void velo::chat_budget::check_stack() {
    const char here = 0;
    const auto used = static_cast<size_t>(top > &here ? top - &here : &here - top);
    if (used > limits.stack) {
        reached = deep;
        throw over_budget(deep);
    }
}

void velo::chat_budget::search(size_t size) {
    if (size > needle) {
        reached = "it searches for too long a text";
        check();
    }
}

void velo::chat_budget::allocate(size_t size) {
    check_stack();
    n_bytes += size;
    if (n_bytes > limits.bytes && !reached) {
        reached = memory;
    }
    if (size > large && n_bytes > limits.bytes) {
        n_bytes -= size;
        throw over_budget(memory);
    }
}

void velo::chat_budget::check() const {
    if (reached) {
        throw over_budget(reached);
    }
}

void velo::chat_tick() {
    if (current) {
        current->tick();
    }
}

void velo::chat_search(size_t size) {
    if (current) {
        current->search(size);
    }
}

#if defined(VELO_COUNTS_ALLOCATIONS)

// The linker directs every operator new and sized delete of this library here (its option --wrap).
extern "C" {
void * __real__Znwm(size_t size); // NOLINT(bugprone-reserved-identifier)

__attribute__((visibility("hidden"))) void * __wrap__Znwm(size_t size) { // NOLINT(bugprone-reserved-identifier)
    if (current) {
        current->allocate(size);
    }
    return __real__Znwm(size);
}

void __real__ZdlPvm(void * data, size_t size) noexcept; // NOLINT(bugprone-reserved-identifier)

__attribute__((visibility("hidden"))) void
__wrap__ZdlPvm(void * data, size_t size) noexcept { // NOLINT(bugprone-reserved-identifier)
    if (current && data) {
        current->release(size);
    }
    __real__ZdlPvm(data, size);
}
}

#endif
