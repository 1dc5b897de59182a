#include "packing.hpp"

#include "guard.hpp"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <exception>
#include <string_view>
#include <thread>

#if !defined(_WIN32)
#    include <sys/mman.h>
#    include <unistd.h>
#endif
#if defined(_OPENMP)
#    include <omp.h>
#endif

namespace {

std::atomic<int64_t> reserved{0};

int64_t packed_bytes(const ggml_tensor * tensor) {
    return static_cast<int64_t>(ggml_backend_buft_get_alloc_size(ggml_backend_buffer_get_type(tensor->buffer), tensor));
}

// Return whether a weight of this layout is packed by one thread. Several such weights are packed at once. For
// other layouts upstream uses a team itself.
bool packs_alone(const llama_late_weight & weight) {
    const std::string_view layout = ggml_backend_buft_name(ggml_backend_buffer_get_type(weight.tensor->buffer));
    return layout == "CPU_REPACK" || layout == "TILES";
}

void pack(const llama_late_weight & weight) {
    const velo::catch_aborts catching(VELO_MODEL_ERROR);
    ggml_backend_tensor_set(weight.tensor, weight.data, 0, ggml_nbytes(weight.tensor));
}

void pack_together(const llama_late_weight * weights, size_t n, int32_t n_threads) {
    std::atomic<size_t> next{0};
    std::exception_ptr  failure;
    std::mutex          failing;

    const auto pack_some = [&] {
        try {
            for (size_t i; (i = next++) < n;) {
                pack(weights[i]);
            }
        } catch (...) { // an exception must not leave a thread
            const std::lock_guard<std::mutex> lock(failing);
            failure = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    try {
        while (others.size() + 1 < std::min(n, static_cast<size_t>(n_threads))) {
            others.emplace_back(pack_some);
        }
    } catch (const std::exception &) { // fewer threads do it, too
    }
    pack_some();
    for (std::thread & other : others) {
        other.join();
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

// Set the size of teams of the calling thread, including upstream's.
class team_size {
public:
#if defined(_OPENMP)
    explicit team_size(int32_t n_threads) : outer(omp_get_max_threads()) { omp_set_num_threads(n_threads); }
    ~team_size() { omp_set_num_threads(outer); }
#else
    explicit team_size(int32_t) {}
#endif
    team_size(const team_size &)             = delete;
    team_size & operator=(const team_size &) = delete;

private:
#if defined(_OPENMP)
    int outer;
#endif
};

#if !defined(_WIN32)
// Hints to the system; they change no result.
void advise(const llama_late_weight & weight, int advice, bool shared_pages) {
    const auto page  = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<uintptr_t>(weight.data);
    const auto end   = begin + ggml_nbytes(weight.tensor);
    // the first and last page may have bytes of other weights
    const uintptr_t first = (shared_pages ? begin : begin + page - 1) / page * page;
    const uintptr_t last  = (shared_pages ? end + page - 1 : end) / page * page;
    if (first < last) {
        madvise(reinterpret_cast<void *>(first), last - first, advice);
    }
}
void fetch(const llama_late_weight & weight) { advise(weight, MADV_WILLNEED, true); }
void give_back(const llama_late_weight & weight) { advise(weight, MADV_DONTNEED, false); }
#else
void fetch(const llama_late_weight &) {}
void give_back(const llama_late_weight &) {}
#endif

} // namespace

int64_t velo::reserved_memory() { return reserved.load(std::memory_order_relaxed); }

velo::packing::packing(std::vector<llama_late_weight> weights, std::shared_ptr<mapped_files> files,
                       velo_progress_callback progress, void * progress_user)
    : weights(std::move(weights)), files(std::move(files)), progress(progress), progress_user(progress_user) {
    std::sort(this->weights.begin(), this->weights.end(),
              [](const auto & a, const auto & b) { return a.data < b.data; });
    for (const llama_late_weight & weight : this->weights) {
        bytes += packed_bytes(weight.tensor);
    }
    reserved += bytes;
    done = this->weights.empty();
}

velo::packing::~packing() { reserved -= bytes - bytes_packed; }

void velo::packing::finish(int32_t n_threads, const std::function<bool()> & cancelled) {
    if (done.load(std::memory_order_acquire)) {
        return;
    }
    const team_size                   team(n_threads);
    const std::lock_guard<std::mutex> lock(mutex);
    while (n_packed < weights.size()) {
        report();
        if (cancelled()) {
            fail(VELO_CANCELLED, "the run was cancelled while weights were packed");
        }
        pack_next(n_threads);
    }
    if (!done) {
        done.store(true, std::memory_order_release);
        report();
    }
}

// Pack the next n weights. If this throws, the next call packs them again.
void velo::packing::pack_next(int32_t n_threads) {
    const size_t end = end_of_group(n_threads), n = end - n_packed;
    while (n_fetched < std::min(end + n, weights.size())) { // the disk reads n weights ahead of the packing
        fetch(weights[n_fetched++]);
    }
    if (n == 1) { // in our team, upstream's team would be nested and create its threads each time
        pack(weights[n_packed]);
    } else {
        pack_together(&weights[n_packed], n, n_threads);
    }
    check_files(files); // fail before weights packed from lost pages (zeros) count
    for (; n_packed < end; ++n_packed) {
        give_back(weights[n_packed]);
        const int64_t size = packed_bytes(weights[n_packed].tensor);
        bytes_packed += size;
        reserved -= size;
    }
}

size_t velo::packing::end_of_group(int32_t n_threads) const {
    const size_t most = n_packed + 2 * static_cast<size_t>(n_threads); // two for each thread, as sizes differ
    size_t       end  = n_packed;
    while (end < std::min(most, weights.size()) && packs_alone(weights[end])) {
        ++end;
    }
    return std::max(end, n_packed + 1);
}

void velo::packing::report() {
    const float share = static_cast<float>(static_cast<double>(bytes_packed) / static_cast<double>(bytes));
    if (progress && progress(share, progress_user) == 0) {
        fail(VELO_CANCELLED, "the run was cancelled by the progress callback while weights were packed");
    }
}
