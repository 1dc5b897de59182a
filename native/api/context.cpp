// Contexts: a pool of blocks and the graphs that use it. Create, run, read logits, copy blocks.
#include "guard.hpp"
#include "handles.hpp"
#include "model-facts.h"
#include "pool-checks.hpp"
#include "row-team.hpp"
#include "team.hpp"
#include "threads.hpp"
#include "timer.hpp"

#include "ggml-backend.h"
#include "ggml.h"
#include "llama-paged.h"
#include "lost-time.h"

#include <algorithm>
#include <chrono>

using velo::check;

namespace {

// Drops the results of a step, unless they are kept.
struct step_results {
    llama_context * llama;
    bool            kept;

    ~step_results() {
        if (!kept) {
            llama_paged_drop_step(llama);
        }
    }
};

// Measures a step for the crew.
class stopwatch {
public:
    void stop(velo::crew & crew, int64_t n_tokens) const {
        const int64_t end = nanoseconds();
        crew.worked(end, {end - begin, velo_lost_time() - lost, 1, n_tokens});
    }

private:
    static int64_t nanoseconds() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now().time_since_epoch()).count();
    }

    using clock         = std::chrono::steady_clock;
    const int64_t begin = nanoseconds(), lost = velo_lost_time();
};

// Throw the error of a step, with the reason why a computing thread failed.
void check_step(llama_paged_status status) {
    if (status == LLAMA_PAGED_NO_MEMORY) {
        velo::fail(VELO_OUT_OF_MEMORY, "%s%s; use a smaller max_batch_tokens or kv_cache_bytes", llama_paged_error(),
                   velo::failure().c_str());
    }
    if (status == LLAMA_PAGED_FAILED) {
        velo::fail(VELO_FAILED, "%s%s", llama_paged_error(), velo::failure().c_str());
    }
    check(status);
}

// ---- running ----

bool is_cancelled(void * context) {
    return static_cast<velo_context *>(context)->phase.load(std::memory_order_relaxed) == velo::RUN_CANCELLED;
}

// Marks the context as running, so that velo_context_cancel has an effect.
struct running {
    explicit running(velo_context & context) : context(context) { context.phase = velo::RUN_RUNNING; }
    ~running() { context.phase = velo::RUN_IDLE; }
    running(const running &)             = delete;
    running & operator=(const running &) = delete;

    velo_context & context;
};

void copy_blocks(velo_context & context, const int32_t (*copies)[2], int32_t n) {
    std::vector<int32_t> sources, targets;
    for (int32_t i = 0; i < n; ++i) {
        sources.push_back(copies[i][0]);
        targets.push_back(copies[i][1]);
    }
    check(llama_paged_copy(context.llama.get(), sources.data(), targets.data(), n));
}

llama_paged_batch paged_batch(const velo_batch & batch) {
    llama_paged_batch out{};
    out.n_tokens     = batch.n_tokens;
    out.tokens       = batch.tokens;
    out.positions    = batch.positions;
    out.n_groups     = batch.n_groups;
    out.slots        = batch.slots;
    out.token_stride = batch.token_stride;
    out.outputs      = batch.outputs;
    out.n_seqs       = batch.n_seqs;
    out.seqs         = batch.seqs;
    out.firsts       = batch.firsts;
    out.tables       = batch.tables;
    out.seq_stride   = batch.seq_stride;
    out.table_stride = batch.table_stride;
    out.states       = batch.states;
    return out;
}

llama_context_params context_params(velo_context & context, const velo_context_params & params) {
    llama_context_params out = llama_context_default_params();
    out.n_batch              = static_cast<uint32_t>(params.max_batch_tokens);
    out.n_ubatch             = out.n_batch; // one graph for a step
    out.n_outputs_max        = static_cast<uint32_t>(context.max_outputs);
    out.n_threads            = velo::threads_for(params.n_threads);
    out.n_threads_batch      = out.n_threads;
    out.type_k               = static_cast<ggml_type>(params.type_k);
    out.type_v               = static_cast<ggml_type>(params.type_v);
    out.op_offload = params.deterministic == 0; // a GPU would compute products of large batches, with other rounding
    out.abort_callback      = is_cancelled;
    out.abort_callback_data = &context;
    return out;
}

} // namespace

velo_context_params velo_context_default_params(void) noexcept {
    velo_context_params params{};
    params.block_size       = 32;
    params.type_k           = GGML_TYPE_F16;
    params.type_v           = GGML_TYPE_F16;
    params.max_batch_tokens = 512;
    params.max_seqs         = 256;
    return params;
}

velo_status velo_context_create(velo_model * model, const velo_context_params * params,
                                velo_context ** context) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(context, "context");
        *context = nullptr;
        velo::check_pointer(model, "model");
        velo::check_pointer(params, "params");
        if (model->vocab_only) {
            velo::fail(VELO_INVALID, "%s", model->refusal.c_str());
        }
        if (!model->refusal.empty()) {
            velo::fail(VELO_UNSUPPORTED, "%s", model->refusal.c_str());
        }
        if (params->deterministic && !model->deterministic) {
            velo::fail(VELO_INVALID, "a deterministic context needs a model that was loaded with deterministic");
        }
        velo::check_pool(*model, *params);

        auto made              = std::make_unique<velo_context>();
        made->model            = model->llama;
        made->files            = model->files;
        made->packing          = model->packing;
        made->n_vocab          = model->n_vocab;
        made->max_batch_tokens = params->max_batch_tokens;
        made->max_outputs =
            params->max_outputs ? params->max_outputs : std::min(params->max_seqs, params->max_batch_tokens);

        llama_paged_params paged{};
        paged.n_blocks       = static_cast<uint32_t>(params->n_blocks);
        paged.block_size     = static_cast<uint32_t>(params->block_size);
        paged.max_rows       = static_cast<uint32_t>(params->max_seqs);
        paged.max_seq_len    = static_cast<uint32_t>(params->max_seq_len);
        paged.n_swap_blocks  = static_cast<uint32_t>(params->n_swap_blocks);
        paged.deterministic  = params->deterministic != 0;
        paged.fast_attention = params->fast_attention != 0;
        paged.layer_groups   = params->layer_groups;
        paged.n_layer_groups = static_cast<uint32_t>(params->n_layer_groups);
        paged.slot_bytes     = static_cast<uint32_t>(params->slot_bytes);

        const velo::error_log    log;
        const velo::catch_aborts catching(VELO_UNSUPPORTED);
        made->crew = velo::crew(velo::threads_for(params->n_threads));
        made->llama.reset(llama_paged_init(model->llama.get(), context_params(*made, *params), paged));
        if (!made->llama) {
            const std::string cause  = log.cause(llama_paged_error());
            const bool        memory = velo::tells_of_memory(cause);
            // upstream cannot multiply every weight that it repacks
            const char * hint = memory ? "; use a smaller n_ctx, kv_cache_bytes or max_batch_tokens"
                                : model->deterministic
                                    ? ""
                                    : "; it may work with a model that was loaded with deterministic";
            velo::fail(memory ? VELO_OUT_OF_MEMORY : VELO_UNSUPPORTED, "the context cannot be created: %s%s",
                       cause.c_str(), hint);
        }
        *context = made.release();
    });
}

void velo_context_free(velo_context * context) noexcept { velo::free_runner(context); }

velo_status velo_context_get_info(velo_context * context, velo_context_info * info) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        velo::check_pointer(info, "info");
        llama_paged_info paged{};
        check(llama_paged_get_info(context->llama.get(), &paged));
        info->n_blocks         = static_cast<int32_t>(paged.n_blocks);
        info->block_size       = static_cast<int32_t>(paged.block_size);
        info->n_groups         = static_cast<int32_t>(paged.n_groups);
        info->n_states         = static_cast<int32_t>(paged.n_states);
        info->max_batch_tokens = context->max_batch_tokens;
        info->block_bytes      = static_cast<int64_t>(paged.block_bytes);
        info->pool_bytes       = static_cast<int64_t>(paged.pool_bytes);
        info->state_bytes      = static_cast<int64_t>(paged.state_bytes);
        info->compute_bytes    = static_cast<int64_t>(paged.compute_bytes);
        info->output_bytes     = static_cast<int64_t>(paged.output_bytes);
    });
}

velo_status velo_context_memory(velo_context * context, velo_device_memory * memory, int32_t capacity,
                                int32_t * count) noexcept {
    return velo::guarded([&] {
        const auto                      held  = velo::hold(context);
        const llama_context *           llama = context->llama.get();
        std::vector<velo_device_memory> found(static_cast<size_t>(llama_context_memory(llama, nullptr, 0)));
        llama_context_memory(llama, found.data(), static_cast<int32_t>(found.size()));
        velo::put_array(found.data(), static_cast<int32_t>(found.size()), memory, capacity, count);
    });
}

velo_status velo_context_run(velo_context * context, const velo_batch * batch) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        velo::check_pointer(batch, "batch");
        velo::check_array(batch->copies, batch->n_copies, "copies");
        const running     run(*context);
        const velo::timer timer(context->timings.run_seconds);
        if (batch->n_copies > 0) {
            copy_blocks(*context, reinterpret_cast<const int32_t (*)[2]>(batch->copies), batch->n_copies);
        }
        velo::check_files(context->files);
        velo::check_team(context->crew.size());
        context->team = {std::this_thread::get_id(), context->crew.size()};
        llama_set_n_threads(context->llama.get(), context->team.size, context->team.size);
        context->packing->finish(llama_n_threads(context->llama.get()), [&] { return is_cancelled(context); });
        velo::forget_failure();
        const llama_paged_batch  paged = paged_batch(*batch);
        const stopwatch          watch;
        const llama_paged_status status = llama_decode_paged(context->llama.get(), &paged);
        step_results             results{context->llama.get(), status != LLAMA_PAGED_OK}; // a step that failed has none
        velo::check_files(context->files); // fail before results of lost pages (read as zeros) are used
        check_step(status);
        watch.stop(context->crew, batch->n_tokens);
        if (is_cancelled(context)) { // a GPU does not check during a run
            velo::fail(VELO_CANCELLED, "the step was cancelled");
        }
        results.kept = true;
        ++context->timings.n_runs;
        context->timings.n_tokens += batch->n_tokens;
    });
}

velo_status velo_context_cancel(velo_context * context) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(context, "context");
        int expected = velo::RUN_RUNNING;
        context->phase.compare_exchange_strong(expected, velo::RUN_CANCELLED);
    });
}

velo_status velo_context_logits(velo_context * context, int32_t row, float * logits, int32_t capacity) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        velo::check_pointer(logits, "logits");
        if (capacity < context->n_vocab) {
            velo::fail(VELO_INVALID, "the buffer has room for %d logits, but a row has %d", capacity, context->n_vocab);
        }
        std::copy_n(velo::logits_of(*context, row), context->n_vocab, logits);
    });
}

velo_status velo_context_set_threads(velo_context * context, int32_t n_threads) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        context->crew   = velo::crew(velo::threads_for(n_threads));
    });
}

velo_status velo_blocks_copy(velo_context * context, const int32_t * sources, const int32_t * targets,
                             int32_t n) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_copy(context->llama.get(), sources, targets, n));
    });
}

velo_status velo_blocks_read(velo_context * context, const int32_t * blocks, int32_t n, void * bytes,
                             size_t size) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_read(context->llama.get(), blocks, n, bytes, size));
    });
}

velo_status velo_blocks_write(velo_context * context, const int32_t * blocks, int32_t n, const void * bytes,
                              size_t size) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_write(context->llama.get(), blocks, n, bytes, size));
    });
}

velo_status velo_blocks_swap_out(velo_context * context, const int32_t * blocks, const int32_t * swap_blocks,
                                 int32_t n) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_swap_out(context->llama.get(), blocks, swap_blocks, n));
    });
}

velo_status velo_blocks_swap_in(velo_context * context, const int32_t * swap_blocks, const int32_t * blocks,
                                int32_t n) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_swap_in(context->llama.get(), swap_blocks, blocks, n));
    });
}

velo_status velo_blocks_fill(velo_context * context, const int32_t * blocks, int32_t n, uint8_t byte) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_fill(context->llama.get(), blocks, n, byte));
    });
}

velo_status velo_state_clear(velo_context * context, int32_t state) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_clear_state(context->llama.get(), state));
    });
}

velo_status velo_state_copy(velo_context * context, int32_t source, int32_t target) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_copy_state(context->llama.get(), source, target));
    });
}

velo_status velo_state_save(velo_context * context, int32_t state, const int32_t * blocks, int32_t n,
                            int32_t swapped) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_save_state(context->llama.get(), state, blocks, n, swapped != 0));
    });
}

velo_status velo_state_load(velo_context * context, int32_t state, const int32_t * blocks, int32_t n,
                            int32_t swapped) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        check(llama_paged_load_state(context->llama.get(), state, blocks, n, swapped != 0));
    });
}

velo_status velo_context_timings(velo_context * context, velo_timings * timings) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        velo::check_pointer(timings, "timings");
        *timings                 = context->timings;
        timings->n_graphs_reused = llama_perf_context(context->llama.get()).n_reused;
    });
}
