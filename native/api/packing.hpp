// Packing of weights into a faster layout of the processor, by the model's first run. Loading reads no weights.
#pragma once

#include "late-weights.h"
#include "mapped-files.hpp"
#include "velo.h"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace velo {

// Return the bytes allocated for unpacked weights of all models. The system still counts them free.
int64_t reserved_memory();

// Unpacked weights of one model, shared by its contexts.
class packing {
public:
    // `progress` (may be NULL) is called with the progress of packing.
    packing(std::vector<llama_late_weight> weights, std::shared_ptr<mapped_files> files,
            velo_progress_callback progress, void * progress_user);
    ~packing();
    packing(const packing &)             = delete;
    packing & operator=(const packing &) = delete;

    // Pack the remaining weights with `n_threads` threads, or wait for another call that packs them. Called before
    // every computation. Throw VELO_CANCELLED if `cancelled` or the callback return so; the next call continues.
    // Throw VELO_MODEL_ERROR if pages of the files are lost.
    void finish(int32_t n_threads, const std::function<bool()> & cancelled);

private:
    void   pack_next(int32_t n_threads);
    size_t end_of_group(int32_t n_threads) const;
    void   report();

    std::vector<llama_late_weight> weights; // in the order of the file
    std::shared_ptr<mapped_files>  files;
    velo_progress_callback         progress;
    void *                         progress_user;

    std::mutex        mutex; // guards the members below
    size_t            n_packed     = 0;
    size_t            n_fetched    = 0; // weights that the system was asked to read
    int64_t           bytes_packed = 0, bytes = 0;
    std::atomic<bool> done{false};
};

} // namespace velo
