// The structs behind the opaque handles of velo.h.
#pragma once

#include "crew.hpp"
#include "draw.hpp"
#include "guard.hpp"
#include "mapped-files.hpp"
#include "packing.hpp"
#include "velo.h"

#include "llama-paged.h"
#include "llama.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

// Contexts and samplers share ownership of the model, so the order in which handles are freed does not matter.
struct velo_model {
    std::shared_ptr<llama_model>        llama;
    std::shared_ptr<velo::mapped_files> files; // NULL if no file is mapped
    std::shared_ptr<velo::packing>      packing;
    const llama_vocab *                 vocab         = nullptr;
    int32_t                             n_vocab       = 0;
    bool                                vocab_only    = false;
    bool                                deterministic = false;
    bool                                offloads      = false; // some layers are on a GPU
    bool                                is_encoder    = false; // without a cache: for embeddings
    int64_t                             state_bytes   = 0;     // of a saved recurrent state
    std::string                         refusal;               // why the model cannot be paged; empty if it can
};

// The adapter of a file. Contexts that apply it share its ownership, and it shares the model's.
struct velo_adapter {
    std::shared_ptr<llama_adapter_lora> llama;
    // contexts whose graphs were built with it: of the last velo_context, and of the last velo_embedder
    std::atomic<const llama_context *> context{nullptr};
    std::atomic<const llama_context *> embedder{nullptr};
};

namespace velo {

struct llama_context_deleter {
    void operator()(llama_context * context) const {
        llama_synchronize(context); // devices must be idle before their memory is freed
        llama_free(context);
    }
};

// idle -> running -> idle, or running -> cancelled -> idle. A cancel between two runs has no effect.
enum run_phase : int { RUN_IDLE, RUN_RUNNING, RUN_CANCELLED };

// Threads that belong to one, which starts their work.
struct team {
    std::thread::id of;
    int32_t         size = 1;
};

// What work on one row of logits needs, reused for the next.
struct row_buffers {
    std::vector<float>     logits;
    std::vector<candidate> best;
    velo::drawer           drawer;
};

} // namespace velo

struct velo_context {
    std::shared_ptr<llama_model>                                model;
    std::shared_ptr<velo::mapped_files>                         files;   // of the model
    std::shared_ptr<velo::packing>                              packing; // of the model
    std::shared_ptr<llama_adapter_lora>                         adapter; // that `llama` applies; NULL if none
    velo::crew                                                  crew;    // how many threads compute
    velo::team                                                  team;    // that computed the last step
    std::unique_ptr<llama_context, velo::llama_context_deleter> llama;
    float                                                       adapter_scale    = 1.0f;
    int32_t                                                     n_vocab          = 0;
    int32_t                                                     max_batch_tokens = 0;
    int32_t                                                     max_outputs      = 0;

    std::atomic<int> phase{velo::RUN_IDLE};
    std::mutex       mutex; // calls from several threads wait for one another

    velo_timings timings{};

    std::vector<velo::row_buffers> rows; // of velo_sample and velo_logprobs, one for each thread
};

struct velo_embedder {
    std::shared_ptr<llama_model>                                model;
    std::shared_ptr<velo::mapped_files>                         files;   // of the model
    std::shared_ptr<velo::packing>                              packing; // of the model
    std::shared_ptr<llama_adapter_lora>                         adapter; // that `llama` applies; NULL if none
    std::unique_ptr<llama_context, velo::llama_context_deleter> llama;
    float                                                       adapter_scale = 1.0f;
    int32_t                                                     n_vocab       = 0;
    int32_t                                                     n_embd        = 0;     // numbers of an embedding
    int32_t                                                     max_tokens    = 0;     // of a text
    int32_t                                                     max_batch     = 0;     // tokens of a batch
    int32_t                                                     max_texts     = 0;     // of a batch
    bool                                                        whole         = false; // a text must fit into one batch
    bool                                                        has_encoder   = false;

    std::atomic<int> phase{velo::RUN_IDLE};
    std::mutex       mutex;
};

struct velo_sampler {
    std::shared_ptr<llama_model>  model;    // to detect a context of another model
    velo_sampler_params           params{}; // its arrays are in `bias`
    std::vector<llama_logit_bias> bias;
    bool                          greedy = false;
    std::mt19937_64               random;

    // tokens seen, with their counts in the output; stored only if a penalty needs them
    std::unordered_map<int32_t, int32_t> seen;
    bool                                 counts = false;

    std::vector<uint8_t> mask; // one bit for each token, 1: may be drawn; empty: all tokens may be drawn
};

namespace velo {

inline velo_status status_of(llama_paged_status status) {
    switch (status) {
    case LLAMA_PAGED_OK:
        return VELO_OK;
    case LLAMA_PAGED_INVALID:
        return VELO_INVALID;
    case LLAMA_PAGED_UNSUPPORTED:
        return VELO_UNSUPPORTED;
    case LLAMA_PAGED_NO_MEMORY:
        return VELO_OUT_OF_MEMORY;
    case LLAMA_PAGED_ABORTED:
        return VELO_CANCELLED;
    case LLAMA_PAGED_FAILED:
        return VELO_FAILED;
    }
    return VELO_INTERNAL;
}

// Throw unless a call of llama-paged.h has succeeded.
inline void check(llama_paged_status status) {
    if (status != LLAMA_PAGED_OK) {
        fail(status_of(status), "%s", llama_paged_error());
    }
}

// Delete a context or an embedder, unless its GPU has failed: to free what that has would end the process.
template <class Runner> void free_runner(Runner * runner) noexcept {
    const auto wait = [&] {
        const error_log    log;
        const catch_aborts catching(VELO_FAILED);
        llama_synchronize(runner->llama.get());
    };
    if (runner && guarded(wait) == VELO_OK) {
        delete runner;
    }
}

// A call's hold of a context or an embedder. No other call uses it, and an abort of upstream is an exception: a GPU
// that has too little memory, or fails, ends the call.
struct held_context {
    explicit held_context(std::mutex & mutex) : lock(mutex) {}

    std::unique_lock<std::mutex> lock;
    error_log                    log; // has the GPU's reason
    catch_aborts                 catching{VELO_FAILED};
};

inline held_context hold(velo_context * context) {
    check_pointer(context, "context");
    return held_context(context->mutex);
}

} // namespace velo
