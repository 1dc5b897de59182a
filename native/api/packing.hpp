// Weights that the processor has a faster layout for are packed when the model first runs: loading reads nothing.
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

// Memory that is allocated for such weights of all models, and not touched yet: systems call it free.
int64_t promised_memory();

// The weights of one model that are to be packed; shared by all who run it.
class packing {
public:
    // `progress` is told of it, where there is one.
    packing(std::vector<llama_late_weight> weights, std::shared_ptr<mapped_files> files,
            velo_progress_callback progress, void * progress_user);
    ~packing();
    packing(const packing &)             = delete;
    packing & operator=(const packing &) = delete;

    // Before whatever computes with the model: packs what is not packed yet with `n_threads` threads, or waits while
    // another call does. Throws VELO_CANCELLED where `cancelled` or the callback say so; the next call goes on. Throws
    // VELO_MODEL_ERROR where the files are lost.
    void finish(int32_t n_threads, const std::function<bool()> & cancelled);

private:
    void   pack_next(int32_t n_threads);
    size_t end_of_group(int32_t n_threads) const;
    void   report();

    std::vector<llama_late_weight> weights; // in the order of the file
    std::shared_ptr<mapped_files>  files;
    velo_progress_callback         progress;
    void *                         progress_user;

    std::mutex        mutex; // of what follows
    size_t            n_packed     = 0;
    size_t            n_fetched    = 0; // the system was asked to read them
    int64_t           bytes_packed = 0, bytes = 0;
    std::atomic<bool> done{false};
};

} // namespace velo
