// Files that weights are mapped from. A page that is read after its file became shorter ends the process by SIGBUS. If
// the page lies in a mapping that the loader made, a handler puts zeros in the place of that mapping, lets the
// computation end, and remembers that its result is void. Mappings that others made of the same file are theirs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace velo {

struct address_range {
    uintptr_t first = 0, last = 0;

    bool holds(uintptr_t address) const noexcept { return first <= address && address < last; }
};

// The files of one model: the one at `path`, and the other parts beside it where its name says that there are any.
// They are watched while it lives, which must end before the file is unmapped.
class mapped_files {
public:
    explicit mapped_files(const char * path);
    ~mapped_files();
    mapped_files(const mapped_files &)             = delete;
    mapped_files & operator=(const mapped_files &) = delete;

    // While the model is loaded: a mapping of one of them, before it is read.
    void add_mapping(const void * data, size_t size);
    // After the load: replaces each mapping by used(mapping, page size), as the loader unmaps the rest.
    void keep_used(const std::function<address_range(address_range, size_t)> & used);

    // Whether a page of them was not there when it was read, by whichever model.
    bool are_lost() const noexcept { return lost.load(std::memory_order_acquire); }
    // Throws VELO_MODEL_ERROR where that is so.
    void check() const;

    // how the kernel names a file in its list of mappings
    struct identity {
        uint64_t device = 0, inode = 0;
    };

    // For the handler. The mapping that holds `address`, or NULL.
    const address_range * mapping_at(uintptr_t address) const noexcept;
    // Whether `file` is one of these.
    bool has(const identity & file) const noexcept;
    // Notes that a page is lost.
    void lose() noexcept { lost.store(true, std::memory_order_release); }

    mapped_files * next = nullptr; // of all that are watched

private:
    void change_mappings(const std::function<void(std::vector<address_range> &)> & change);

    std::string                path;
    std::vector<identity>      files;
    std::vector<address_range> mappings;
    std::atomic<bool>          lost{false};
};

// Before and after whatever reads weights; NULL: none are mapped.
inline void check_files(const std::shared_ptr<mapped_files> & files) {
    if (files) {
        files->check();
    }
}

} // namespace velo
