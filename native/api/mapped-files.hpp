// Files that weights are mapped from. A page that is read after its file became shorter ends the process by SIGBUS; in
// a thread of OpenMP nothing can be thrown from there. So where the file is one of ours, a handler puts zeros in the
// place of the mapping, lets the computation end, and remembers that nothing it gave is worth anything.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace velo {

// The files of one model: the one at `path`, and the other parts beside it where its name says that there are any.
// They are watched while it lives, which must end before the file is unmapped.
class mapped_files {
public:
    explicit mapped_files(const char * path);
    ~mapped_files();
    mapped_files(const mapped_files &)             = delete;
    mapped_files & operator=(const mapped_files &) = delete;

    // Whether a page of them was not there when it was read, by whichever model.
    bool are_lost() const noexcept { return lost.load(std::memory_order_acquire); }
    // Throws VELO_MODEL_ERROR where that is so.
    void check() const;

    // how the kernel names a file in its list of mappings
    struct identity {
        uint64_t device = 0, inode = 0;
    };

    // For the handler: notes that `file` has lost a page; whether it is one of these.
    bool           lose(const identity & file) noexcept;
    mapped_files * next = nullptr; // of all that are watched

private:
    std::string           path;
    std::vector<identity> files;
    std::atomic<bool>     lost{false};
};

// Before and after whatever reads weights; NULL: none are mapped.
inline void check_files(const std::shared_ptr<mapped_files> & files) {
    if (files) {
        files->check();
    }
}

} // namespace velo
