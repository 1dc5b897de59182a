// Limits of upstream's template engine, which has none: operations, memory, depth and time of one call.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace velo {

// Thrown when a limit is reached.
struct over_budget : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct chat_limits {
    uint64_t                  operations;
    size_t                    bytes; // allocated and not freed
    size_t                    stack; // below the place where the budget is
    std::chrono::milliseconds time;
};

// Limits the work of this thread while the object exists.
class chat_budget {
public:
    explicit chat_budget(const chat_limits & limits) noexcept;
    ~chat_budget();
    chat_budget(const chat_budget &)             = delete;
    chat_budget & operator=(const chat_budget &) = delete;

    // Count one operation of the template engine, and throw if a limit was reached.
    void tick();
    // Throw if a template searches for a text of so many bytes: a search may compare all of them at each place.
    void search(size_t size);
    // Count an allocation. Only a large one or one deep in the stack throws, because others are made in destructors
    // too: they make the next tick throw.
    void allocate(size_t size);
    // Throw if a limit was reached: the engine swallows some exceptions.
    void check() const;
    // Count a freed allocation, perhaps one from before this object.
    void release(size_t size) noexcept { n_bytes -= std::min(size, n_bytes); }
    // Return the limit that was reached, as a sentence about the template; nullptr: none.
    const char * limit_reached() const noexcept { return reached; }

    uint64_t operations() const noexcept { return n_operations; }
    size_t   bytes() const noexcept { return n_bytes; }

private:
    void check_stack();

    const chat_limits                     limits;
    std::chrono::steady_clock::time_point end;
    const char *                          top;
    uint64_t                              n_operations = 0;
    size_t                                n_bytes      = 0;
    const char *                          reached      = nullptr;
};

// Count one operation of this thread, if it has a budget.
void chat_tick();
// Check the length of a text that this thread searches for, if it has a budget.
void chat_search(size_t size);

// Count one operation on a string; return its first argument, a place or a text to search for.
template <class T> T && counted(T && first) {
    chat_tick();
    if constexpr (std::is_same_v<std::decay_t<T>, std::string>) {
        chat_search(first.size());
    }
    return std::forward<T>(first);
}

} // namespace velo
