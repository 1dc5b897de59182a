// Work of an operator for the threads of its team: a fixed share each, or chunks as threads become free, so that a
// slower core, or one that another process uses too, takes less of it.
#pragma once

#include "ggml-cpu-impl.h"

#include <algorithm>
#include <cstdint>
#include <utility>

// Hands out the numbers [0, n). No two threads get the same one; a chunk's bounds follow from n, the bounds of its size
// and the number of threads alone. Every thread of the team makes one with the same arguments and calls next() until it
// returns false.
class hand_out {
public:
    // A fixed share for each thread.
    hand_out(const ggml_compute_params * params, int64_t n)
        : params_(params), n_(n), begin_(n * params->ith / params->nth), end_(n * (params->ith + 1) / params->nth) {}

    // Chunks of `least` to `most` numbers, smaller towards the end. The threads must meet at a barrier before the first
    // next(), and start() must come before that barrier.
    hand_out(const ggml_compute_params * params, int64_t n, int64_t least, int64_t most)
        : params_(params), n_(n), least_(least), most_(std::max(least, most)), end_(chunk_at(0)) {}

    void start() const {
        if (is_dynamic()) {
            reset(params_);
        }
    }

    // The same if the numbers are not known yet before the barrier.
    static void reset(const ggml_compute_params * params) {
        if (params->ith == 0) {
            ggml_threadpool_chunk_set(params->threadpool, params->nth);
        }
    }

    // Moves to the next chunk of this thread.
    bool next() {
        if (!is_dynamic()) {
            return !std::exchange(started_, true) && begin_ < end_;
        }
        claim();
        const int wanted = std::exchange(claimed_, NONE);
        started_         = true;
        for (; number_ < wanted && end_ < n_; ++number_) {
            begin_ = end_;
            end_   = begin_ + chunk_at(begin_);
        }
        return number_ == wanted && begin_ < end_;
    }

    // Returns where the chunk begins to which next() will move, or n. It is this thread's from now on.
    int64_t following() {
        if (is_dynamic()) {
            claim();
        }
        hand_out later = *this;
        return later.next() ? later.begin_ : n_;
    }

    int64_t begin() const { return begin_; }
    int64_t end() const { return end_; }
    bool    is_dynamic() const { return least_ > 0; }

private:
    const ggml_compute_params * params_;
    int64_t                     n_, least_ = 0, most_ = 0;
    int64_t                     begin_  = 0, end_; // of the chunk `number_`
    int                         number_ = 0, claimed_ = NONE;
    bool                        started_ = false;

    static constexpr int NONE = -1;

    void claim() {
        if (claimed_ == NONE) {
            claimed_ = started_ ? ggml_threadpool_chunk_add(params_->threadpool, 1) : params_->ith;
        }
    }

    int64_t chunk_at(int64_t begin) const { // half of a thread's share of what is left
        const int64_t left = n_ - begin;
        return std::min(left, std::clamp(left / (2 * params_->nth), least_, most_));
    }
};

// Returns fixed shares of the tiles of weights for few rows of small matrices: memory limits them, and chunks would
// cost more than they save. Returns chunks of at least `least` tiles for others.
inline hand_out hand_out_tiles(const ggml_compute_params * params, int64_t n_rows, int64_t n_tiles, int64_t tile_bytes,
                               int64_t least) {
    constexpr int64_t DYNAMIC_ROWS = 8;       // from which on memory is not the only limit
    constexpr int64_t LARGE        = 4 << 20; // bytes for each thread, which take it some tenths of a millisecond
    if (n_rows < DYNAMIC_ROWS && n_tiles * tile_bytes < LARGE * params->nth) {
        return {params, n_tiles};
    }
    return {params, n_tiles, std::max<int64_t>(1, least), n_tiles};
}
