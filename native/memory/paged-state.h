// State and errors of a paged context. Private to this folder.
#pragma once

#include "llama-paged.h"
#include "pool-ahead.h"
#include "swap-memory.h"

#include "llama-context.h"
#include "llama-kv-cache.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include "ggml-cpp.h"
#include "paged-attn.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// Exception that becomes a status of the C interface.
struct paged_error : std::runtime_error {
    llama_paged_status status;
    paged_error(llama_paged_status status, const std::string & what) : std::runtime_error(what), status(status) {}
};

// Throw a paged_error. Its message also stays in llama_paged_error() if upstream catches the exception.
[[noreturn]] void paged_fail(llama_paged_status status, const std::string & what);
void              paged_clear_error();

// Run f and return the status of its exception. Its message is set for llama_paged_error().
llama_paged_status                       paged_status_of(const std::exception & e);
template <typename F> llama_paged_status paged_guard(F && f) noexcept {
    try {
        f();
        return LLAMA_PAGED_OK;
    } catch (const std::exception & e) {
        return paged_status_of(e);
    }
}

// The part of the batch that is in the current ubatch.
struct paged_step {
    const int32_t * slots = nullptr; // [n_groups][token_stride]; null outside a step: the largest graph is reserved
    int32_t         token_stride = 0;
    int32_t         n_tokens     = 0;
    int32_t         n_rows       = 0; // sequences, rounded up so that more steps reuse a graph
    int32_t         flags        = 0; // ggml_paged_attn_flags that follow from the tables
};

// An input of the graph with several parts.
struct paged_input {
    ggml_tensor *              whole = nullptr;
    std::vector<ggml_tensor *> parts;     // views
    int32_t                    flags = 0; // as the step's
};

// Arrays of a llama_ubatch, reused by every step.
struct paged_ubatch_buffers {
    std::vector<int32_t>        n_seq_id;
    std::vector<llama_seq_id>   seq_data;
    std::vector<llama_seq_id *> seq_ptr;
    std::vector<llama_seq_id>   seq_unq;
    std::vector<int32_t>        seq_idx;
};

struct llama_paged;

// Layers with the same slots and table: of one group and share, with the same attention.
struct paged_part {
    int32_t group, share;
    int32_t n_queries; // query heads of a KV head
    bool    has_window;

    bool operator==(const paged_part & b) const {
        return group == b.group && share == b.share && n_queries == b.n_queries && has_window == b.has_window;
    }
};

// Paged mode of one of upstream's caches: of the layers without a window, or of the layers with one.
//
// If the rows of its layers are n_shares times as short as the longest rows of the model, that many layers of a group
// share a block, each a part of it: share i of block b is block b * n_shares + i of the layer's own tensors.
struct llama_paged_cache {
    llama_paged *            paged       = nullptr;
    llama_kv_cache *         cache       = nullptr;
    bool                     is_windowed = false;
    std::vector<int32_t>     groups;       // of its layers, in rising order
    int32_t                  n_shares = 1; // layers that share a block
    std::vector<paged_part>  parts;        // of the inputs of a graph
    std::vector<int32_t>     part_of;      // of each of the cache's own layers: index in `parts`
    int32_t                  width = 0;    // of the current tables: blocks, rounded up so that more steps reuse a graph
    std::vector<int32_t>     tables;       // [parts][n_rows][header + width]
    std::vector<paged_input> inputs;       // of the graph that was built last: tables, slots of K, slots of V

    // A cache without layers has inputs that nothing uses.
    int64_t n_parts() const { return parts.empty() ? 1 : (int64_t) parts.size(); }
};

// K and V tensors of the pool that one layer of each group uses.
struct paged_storage {
    int32_t       layer; // the first of these layers
    ggml_tensor * k;
    ggml_tensor * v; // null: V is a view of K
};

// Paged mode of one context.
struct llama_paged {
    llama_paged_params             params;
    uint32_t                       max_width = 0; // blocks of the longest sequence
    int32_t                        n_groups  = 0;
    std::vector<llama_paged_cache> caches;
    std::vector<paged_storage>     storages;
    ggml_context_ptr               slots; // of the storage of a model without caches
    ggml_backend_buffer_ptr        slots_memory;
    std::vector<ggml_context_ptr>  views; // of storages, by layers with shorter rows
    llama_memory_recurrent *       states = nullptr;
    llama_memory_context_ptr       memory; // serves every step of an attention-only model
    paged_step                     step;
    bool                           computing = false;   // a step's results may still be on their way
    float *                        logits    = nullptr; // of the last step, here or in its graph
    int32_t                        n_logits  = 0;       // rows of them; 0 if the step failed
    paged_ubatch_buffers           buffers;
    pool_ahead                     ahead;
    std::unique_ptr<paged_swap>    swap; // null if n_swap_blocks is 0

    uint32_t n_slots() const { return params.n_blocks * params.block_size; }
};

// Access to private members of upstream's classes, as their one friend.
struct llama_paged_access {
    using layer = llama_kv_cache::kv_layer;

    static llama_memory_i &       memory(llama_context & c) { return *c.memory; }
    static bool                   has_memory(const llama_context & c) { return c.memory != nullptr; }
    static llama_cparams &        cparams(llama_context & c) { return c.cparams; }
    static const llama_model &    model(const llama_context & c) { return c.model; }
    static ggml_backend_sched_t   sched(llama_context & c) { return c.sched.get(); }
    static ggml_backend_t         backend_cpu(llama_context & c) { return c.backend_cpu; }
    static uint32_t &             n_outputs(llama_context & c) { return c.n_outputs; }
    static std::vector<int32_t> & output_ids(llama_context & c) { return c.output_ids; }
    static float *                logits(llama_context & c) { return c.logits.data; }
    static size_t                 output_bytes(const llama_context & c) {
        return c.buf_output ? ggml_backend_buffer_get_size(c.buf_output.get()) : 0;
    }
    static size_t compute_bytes(llama_context & c);

    static std::shared_ptr<llama_paged> & paged(llama_context & c) { return c.paged; }

    static llama_adapter_loras & loras(llama_context & c) { return *c.loras; }
    static void                  forget_graph(llama_context & c) { c.gf_res_prev_active = nullptr; }
    static llm_graph_result *    graph(const llama_context & c) { return c.gf_res_prev_active; }
    static void                  reserve(llama_context & c); // moves graphs: keeps the logits of the last one

    // start a step as llama_decode does
    static void begin(llama_context & c, int32_t n_tokens, int32_t n_outputs);

    static const llama_hparams & hparams(const llama_kv_cache & cache) { return cache.hparams; }

    static std::vector<layer> & layers(llama_kv_cache & cache) { return cache.layers; }
    static auto &               buffers(llama_kv_cache & cache) { return cache.ctxs_bufs; }
    static bool &               v_trans(llama_kv_cache & cache) { return cache.v_trans; }
    static size_t               bytes(const llama_kv_cache & cache);

    static std::shared_ptr<llama_paged_cache> & paged(llama_kv_cache & cache) { return cache.paged; }

    // index in layers() of the layer whose K and V this layer reads
    static int32_t own_layer(const llama_kv_cache & cache, int32_t il) { return cache.map_layer_ids.at(il); }
};

// Call f(tensor) for every K and V tensor of the pool, in the order of a block's bytes.
template <typename F> void for_each_pool(const llama_paged & paged, F && f) {
    for (const paged_storage & storage : paged.storages) {
        for (ggml_tensor * pool : {storage.k, storage.v}) {
            if (pool) {
                f(pool);
            }
        }
    }
}

// Divide the caches' layers into groups and give them memory: the nth layer of each group on a device uses the same
// tensors. Throw if the groups do not fit the model.
void paged_make_pool(llama_paged & paged);

// Give a model without caches memory for snapshots of its states: slot_bytes for each slot.
void paged_make_slots(llama_paged & paged);

// Create a small memory of the model, to see its class. Null if the model has none.
llama_memory_ptr paged_small_memory(const llama_model & model);

// Caches and recurrent states of a memory.
struct paged_caches {
    std::vector<llama_kv_cache *> caches;
    llama_memory_recurrent *      states = nullptr;
};

// Return the caches and states of a memory. Throw if it cannot be paged, with the reason.
paged_caches paged_caches_of(llama_memory_i * memory, const llama_model & model);

// Return whether a layer attends a window.
bool paged_has_window(const llama_hparams & hparams, int32_t il);

// Return the operator's parameters that the layers of a part have in common.
ggml_paged_attn_params paged_params_of(const llama_paged & paged, const llama_hparams & hparams, bool has_window);

// Return the paged mode of a context. Throw if it has none.
llama_paged & paged_of(llama_context * ctx);

// Allocate host memory for the n_swap_blocks swapped blocks.
void paged_open_swap(llama_paged & paged);

// Return the scheduler's backend that has the pool of this tensor in its memory; null if none has.
ggml_backend_t paged_backend_of(ggml_backend_sched_t sched, const ggml_tensor * pool);
