// Files with mapped weights. If a file became shorter, reading a lost page raises SIGBUS. If the page is in a mapping
// of the loader, our signal handler replaces the mapping by zeros, so that the computation ends, and marks its result
// as invalid. Other mappings of the same file are not handled.
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

// Files of one model: the file at `path`, and the other parts if its name has part numbers. They are watched until the
// object is destroyed, which must happen before the files are unmapped.
class mapped_files {
public:
    explicit mapped_files(const char * path);
    ~mapped_files();
    mapped_files(const mapped_files &)             = delete;
    mapped_files & operator=(const mapped_files &) = delete;

    // Add a mapping. Called by the load before the mapping is read.
    void add_mapping(const void * data, size_t size);
    // Replace each mapping by used(mapping, page size). Called after the load, when the loader has unmapped the rest.
    void keep_used(const std::function<address_range(address_range, size_t)> & used);

    // Return whether any model read a lost page of these files.
    bool are_lost() const noexcept { return lost.load(std::memory_order_acquire); }
    // Throw VELO_MODEL_ERROR if a page was lost.
    void check() const;

    // device and inode of a file in the kernel's list of mappings
    struct identity {
        uint64_t device = 0, inode = 0;
    };

    // For the handler: return the mapping with `address`, or NULL.
    const address_range * mapping_at(uintptr_t address) const noexcept;
    // Return whether `file` is one of these.
    bool has(const identity & file) const noexcept;
    // Mark a page as lost.
    void lose() noexcept { lost.store(true, std::memory_order_release); }

    mapped_files * next = nullptr; // in the list of all watched files

private:
    void change_mappings(const std::function<void(std::vector<address_range> &)> & change);

    std::string                path;
    std::vector<identity>      files;
    std::vector<address_range> mappings;
    std::atomic<bool>          lost{false};
};

// Throw if a page of these files was lost. Called before and after weights are read. NULL: no file is mapped.
inline void check_files(const std::shared_ptr<mapped_files> & files) {
    if (files) {
        files->check();
    }
}

} // namespace velo
