#include "mapped-files.hpp"

#include "guard.hpp"

#if !defined(__linux__)

velo::mapped_files::mapped_files(const char * path) : path(path) {}
velo::mapped_files::~mapped_files() = default;
void velo::mapped_files::add_mapping(const void *, size_t) {}
void velo::mapped_files::keep_used(const std::function<address_range(address_range, size_t)> &) {}

#else

#    include "llama.h"

#    include <algorithm>
#    include <cerrno>
#    include <csignal>
#    include <cstdio>
#    include <fcntl.h>
#    include <mutex>
#    include <pthread.h>
#    include <string_view>
#    include <sys/mman.h>
#    include <unistd.h>

namespace {

using velo::address_range;
using velo::mapped_files;

// ---- the kernel's list of mappings, read with functions that a signal handler may call ----

struct mapping {
    address_range          at;
    mapped_files::identity file;
};

// Parser of a line "first-last perms offset major:minor inode path".
class line_reader {
public:
    // Parse one character. Return true at the end of the line.
    bool take(char c) noexcept {
        if (c == '\n') {
            return true;
        }
        const bool ends = c == ' ' || c == '-' || c == ':';
        if (field >= 7 || (ends && blank)) {
            return false;
        }
        blank = ends;
        if (ends) {
            const bool inside = field == 2 && c != ' '; // the permissions may have dashes
            field += inside ? 0 : 1;
            return false;
        }
        const unsigned digit = c <= '9' ? static_cast<unsigned>(c - '0') : static_cast<unsigned>(c - 'a' + 10);
        const unsigned base  = field == 6 ? 10 : 16;
        numbers[field]       = numbers[field] * base + digit;
        return false;
    }

    mapping found() const noexcept {
        return {{static_cast<uintptr_t>(numbers[0]), static_cast<uintptr_t>(numbers[1])},
                {numbers[4] << 32 | numbers[5], numbers[6]}};
    }

private:
    uint64_t numbers[7] = {};
    size_t   field      = 0;
    bool     blank      = false;
};

// Return the mapping with `address`, or an empty one.
mapping mapping_of(uintptr_t address) noexcept {
    const int list = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (list < 0) {
        return {};
    }
    char        text[1024];
    line_reader line;
    mapping     found;
    for (ssize_t n; found.at.last == 0 && (n = read(list, text, sizeof(text))) > 0;) {
        for (ssize_t i = 0; i < n && found.at.last == 0; ++i) {
            if (line.take(text[i])) {
                const mapping one = line.found();
                if (one.at.holds(address)) {
                    found = one;
                }
                line = {};
            }
        }
    }
    close(list);
    return found;
}

// ---- watched files ----

// Spin lock, held briefly by threads that read no mapped page. Unlike a mutex, a signal handler may take it.
std::atomic_flag watch_busy = ATOMIC_FLAG_INIT;

void lock_watched() noexcept {
    while (watch_busy.test_and_set(std::memory_order_acquire)) {
    }
}

void unlock_watched() noexcept { watch_busy.clear(std::memory_order_release); }

struct watch_lock {
    watch_lock() noexcept { lock_watched(); }
    ~watch_lock() { unlock_watched(); }
    watch_lock(const watch_lock &)             = delete;
    watch_lock & operator=(const watch_lock &) = delete;
};

mapped_files *   watched = nullptr; // under the lock
struct sigaction before;            // the handler before ours

// Return whether `address` is in a mapping of a model. If its page was lost, map zeros there. Needs the lock.
bool replace(uintptr_t address) noexcept {
    mapped_files *        reader = watched;
    const address_range * ours   = nullptr;
    while (reader && (ours = reader->mapping_at(address)) == nullptr) {
        reader = reader->next;
    }
    if (!ours) {
        return false;
    }
    const mapping found = mapping_of(address);
    if (found.file.inode == 0 && reader->are_lost()) { // another thread has replaced the mapping
        return true;
    }
    if (!reader->has(found.file)) {
        return false;
    }
    // replace the whole mapping: the results are discarded, and single pages would be slow
    const uintptr_t first = std::max(ours->first, found.at.first), last = std::min(ours->last, found.at.last);
    constexpr int   flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (mmap(reinterpret_cast<void *>(first), last - first, PROT_READ, flags, -1, 0) == MAP_FAILED) {
        return false;
    }
    for (mapped_files * files = watched; files; files = files->next) { // several models may share a file
        if (files->has(found.file)) {
            files->lose();
        }
    }
    return true;
}

// End the process as the kernel does for a fault without a handler, even if the signal is ignored.
void pass_on(int signal, siginfo_t * info, void * context) {
    const bool sent = info->si_code <= 0; // sent by a process: returning does not repeat it
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(signal, info, context);
    } else if (before.sa_handler == SIG_IGN && sent) {
        return;
    } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
        struct sigaction end{};
        end.sa_handler = SIG_DFL;
        sigaction(signal, &end, nullptr);
        if (sent) {
            raise(signal);
        }
    } else {
        before.sa_handler(signal);
    }
}

void handle(int signal, siginfo_t * info, void * context) {
    const int saved = errno;
    bool      ours  = false;
    if (info->si_code == BUS_ADRERR) { // other codes: sent by a process, or a hardware error
        const watch_lock lock;
        ours = replace(reinterpret_cast<uintptr_t>(info->si_addr));
    }
    errno = saved;
    if (!ours) {
        pass_on(signal, info, context);
    }
}

// Install the handler once. A handler that is installed later, such as a debugger's, is called first.
void start_watching() {
    static std::once_flag once;
    std::call_once(once, [] {
        pthread_atfork(lock_watched, unlock_watched,
                       unlock_watched); // a child must not inherit a lock held by another thread
        struct sigaction action{};
        action.sa_sigaction = handle;
        action.sa_flags     = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        sigaction(SIGBUS, nullptr, &before);
        sigaction(SIGBUS, &action, nullptr);
    });
}

// Return the device and inode of a file in the kernel's list of mappings, by mapping a page of it: stat() may return
// another device.
mapped_files::identity identify(const char * path) {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    void *    page = file < 0 ? MAP_FAILED : mmap(nullptr, 1, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) {
        close(file);
    }
    if (page == MAP_FAILED) {
        return {};
    }
    const mapped_files::identity found = mapping_of(reinterpret_cast<uintptr_t>(page)).file;
    munmap(page, 1);
    return found;
}

// Return the files of a model, by upstream's naming. `path` is the first file.
std::vector<std::string> parts_of(const std::string & path) {
    constexpr std::string_view ending = "-00001-of-00002.gguf";
    int                        parts  = 0;
    if (path.size() < ending.size() ||
        std::sscanf(path.c_str() + path.size() - ending.size(), "-00001-of-%5d.gguf", &parts) != 1 || parts < 2) {
        return {path};
    }
    std::vector<std::string> paths;
    const std::string        prefix = path.substr(0, path.size() - ending.size());
    for (int part = 0; part < parts; ++part) {
        std::string name(path.size() + 1, '\0');
        name.resize(static_cast<size_t>(llama_split_path(name.data(), name.size(), prefix.c_str(), part, parts)));
        paths.push_back(std::move(name));
    }
    return paths;
}

} // namespace

velo::mapped_files::mapped_files(const char * path) : path(path) {
    for (const std::string & part : parts_of(this->path)) {
        const identity file = identify(part.c_str());
        if (file.inode == 0) {
            break; // upstream reports the missing file
        }
        files.push_back(file);
    }
    start_watching();
    const watch_lock lock;
    next    = watched;
    watched = this;
}

velo::mapped_files::~mapped_files() {
    const watch_lock lock;
    mapped_files **  link = &watched;
    while (*link != this) {
        link = &(*link)->next;
    }
    *link = next;
}

void velo::mapped_files::add_mapping(const void * data, size_t size) {
    const auto first = reinterpret_cast<uintptr_t>(data);
    change_mappings([&](std::vector<address_range> & all) { all.push_back({first, first + size}); });
}

void velo::mapped_files::keep_used(const std::function<address_range(address_range, size_t)> & used) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    change_mappings([&](std::vector<address_range> & all) {
        for (address_range & one : all) {
            one = used(one, page);
        }
    });
}

// The handler sees the old list or the new one. No allocation under the lock.
void velo::mapped_files::change_mappings(const std::function<void(std::vector<address_range> &)> & change) {
    std::vector<address_range> next_mappings = mappings;
    change(next_mappings);
    const watch_lock lock;
    mappings.swap(next_mappings);
}

const address_range * velo::mapped_files::mapping_at(uintptr_t address) const noexcept {
    const auto found =
        std::find_if(mappings.begin(), mappings.end(), [=](const address_range & one) { return one.holds(address); });
    return found == mappings.end() ? nullptr : &*found;
}

bool velo::mapped_files::has(const identity & file) const noexcept {
    return std::any_of(files.begin(), files.end(),
                       [&](const identity & one) { return one.device == file.device && one.inode == file.inode; });
}

#endif

void velo::mapped_files::check() const {
    if (are_lost()) {
        fail(VELO_MODEL_ERROR,
             "%s became shorter while it was in use, or cannot be read any more: load the model again", path.c_str());
    }
}
