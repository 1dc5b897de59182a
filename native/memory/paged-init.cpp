// Creation of a paged context: checks of parameters, model and devices, and settings of the upstream context.

#include "cleared-pages.h"
#include "llama-paged-hooks.h"
#include "paged-attn.h"
#include "paged-state.h"

#include "llama-cpp.h"
#include "llama-graph.h"

#include <algorithm>

// llama_init_from_model takes no parameters of ours: these are set while it runs on this thread
static thread_local const llama_paged_params * pending = nullptr;

[[noreturn]] static void invalid(const std::string & what) { paged_fail(LLAMA_PAGED_INVALID, what); }

// Store V as stock does under flash attention. If stock turns flash attention off, only padded rows differ.
static void untranspose(llama_kv_cache & cache, const llama_model & model) {
    bool & transposed = llama_paged_access::v_trans(cache);
    if (!transposed) {
        return;
    }
    for (const auto & layer : llama_paged_access::layers(cache)) {
        if (layer.v && layer.v->ne[0] != (int64_t) model.hparams.n_embd_v_gqa(layer.il)) {
            paged_fail(LLAMA_PAGED_UNSUPPORTED, "the model's V rows differ in size between layers, and its flash "
                                                "attention is off");
        }
    }
    transposed = false;
}

void llama_paged_clear(ggml_backend_buffer * buffer) {
    if (!pending || !clear_untouched(buffer)) {
        ggml_backend_buffer_clear(buffer, 0);
    }
}

void llama_paged_attach(llama_context & ctx) {
    if (!pending) {
        return;
    }
    const llama_model & model = llama_paged_access::model(ctx);
    llama_cparams &     cp    = llama_paged_access::cparams(ctx);

    const paged_caches parts =
        paged_caches_of(llama_paged_access::has_memory(ctx) ? &llama_paged_access::memory(ctx) : nullptr, model);

    auto paged             = std::make_shared<llama_paged>();
    paged->params          = *pending;
    paged->params.max_rows = std::min(pending->max_rows, cp.n_ubatch); // a row of a ubatch has a token in it
    paged->max_width       = (pending->max_seq_len + pending->block_size - 1) / pending->block_size;
    paged->states          = parts.states;
    for (llama_kv_cache * cache : parts.caches) {
        if (cache->get_n_stream() != 1) {
            paged_fail(LLAMA_PAGED_FAILED,
                       "a cache has " + std::to_string(cache->get_n_stream()) + " streams; expected one");
        }
        untranspose(*cache, model);
        paged->caches.push_back({});
        paged->caches.back().paged       = paged.get();
        paged->caches.back().cache       = cache;
        paged->caches.back().is_windowed = parts.caches.size() > 1 && cache == parts.caches.back();
    }
    if (paged->caches.empty()) {
        paged_make_slots(*paged);
    } else {
        paged_make_pool(*paged);
    }
    for (llama_paged_cache & cache : paged->caches) {
        llama_paged_access::paged(*cache.cache) = {paged, &cache}; // shares the ownership of all
    }
    cp.n_ctx_seq = pending->max_seq_len; // chooses rope factors

    llama_paged_access::paged(ctx) = paged;
}

// Results of products with most repacked weights depend on the number of columns.
static void require_exact_layouts(const llama_model & model) {
    for (const auto & [name, tensor] : model.tensors_by_name) {
        const auto buft     = ggml_backend_buffer_get_type(tensor->buffer);
        const auto device   = ggml_backend_buft_get_device(buft);
        const bool on_cpu   = !device || ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
        const bool is_exact = ggml_backend_buft_is_host(buft) || std::string(ggml_backend_buft_name(buft)) == "TILES";
        if (!on_cpu || !is_exact) {
            paged_fail(LLAMA_PAGED_UNSUPPORTED, "deterministic mode needs weights on the CPU in exact layouts, but '" +
                                                    name + "' is in a buffer of type " + ggml_backend_buft_name(buft) +
                                                    ": load the model with deterministic");
        }
    }
}

static void make_deterministic(llama_context & ctx) {
    require_exact_layouts(llama_paged_access::model(ctx));
    const ggml_backend_t backend = llama_paged_access::backend_cpu(ctx);
    const auto           reg     = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    const auto           set     = reinterpret_cast<decltype(&ggml_backend_cpu_set_use_ref)>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_cpu_set_use_ref"));
    if (!set) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, "this CPU backend has no deterministic mode");
    }
    set(backend, true);
}

// Check that every attention layer runs on the device of its pool. Needs the reserved graph.
static void check_devices(llama_context & ctx) {
    int n_layers = 0;
    for (const auto & node : ctx.get_gf_res_reserve()->get_fused_nodes()) {
        if (node.tensor->op != GGML_OP_PAGED_ATTN) {
            continue;
        }
        const auto backend = paged_backend_of(llama_paged_access::sched(ctx), node.tensor->src[1]);
        if (!backend || !ggml_backend_supports_op(backend, node.tensor)) {
            paged_fail(LLAMA_PAGED_UNSUPPORTED,
                       "layer " + std::to_string(node.il) + ": the device of its cache cannot run paged attention");
        }
        ++n_layers;
    }
    if (n_layers == 0) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, "the model has no attention layer to page");
    }
}

static void check_params(const llama_model * model, const llama_context_params & cp, const llama_paged_params & p) {
    if (!model) {
        invalid("the model is null");
    }
    if (p.block_size == 0 || p.block_size % 32 != 0) {
        invalid("block_size is " + std::to_string(p.block_size) + "; it must be a multiple of 32");
    }
    const uint64_t slots = (uint64_t) p.n_blocks * p.block_size;
    if (slots == 0 || slots % 256 != 0 || slots > INT32_MAX) {
        invalid("the pool has " + std::to_string(slots) + " slots; it must have a multiple of 256, below 2^31");
    }
    if (p.max_rows == 0 || p.max_seq_len == 0) {
        invalid("max_rows and max_seq_len must be at least 1");
    }
    if (cp.n_batch == 0) {
        invalid("n_batch must be at least 1");
    }
    if (cp.embeddings ||
        (cp.pooling_type != LLAMA_POOLING_TYPE_UNSPECIFIED && cp.pooling_type != LLAMA_POOLING_TYPE_NONE)) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, "a paged context computes logits, not embeddings");
    }
    if (cp.n_samplers > 0 || cp.ctx_other || cp.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, "a paged context supports neither backend samplers nor a second context");
    }
    if (model->split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, "tensor split mode cannot be paged: use layer split");
    }
}

static llama_context * init(llama_model * model, llama_context_params cp, const llama_paged_params & p) {
    check_params(model, cp, p);
    if (const char * why = llama_paged_refusal(model)) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, why);
    }
    const bool has_states = llama_model_is_recurrent(model) || llama_model_is_hybrid(model);

    cp.n_batch  = std::min(cp.n_batch, p.n_blocks * p.block_size);
    cp.n_ctx    = (cp.n_batch + 255) / 256 * 256; // of upstream's caches, which paged_make_pool replaces
    cp.n_ubatch = cp.n_ubatch == 0 ? cp.n_batch : std::min(cp.n_ubatch, cp.n_batch);
    cp.n_seq_max =
        has_states ? std::min<uint32_t>({p.max_rows, cp.n_batch, (uint32_t) llama_max_parallel_sequences()}) : 1;
    cp.kv_unified      = true;
    cp.swa_full        = true;
    cp.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    cp.pooling_type    = LLAMA_POOLING_TYPE_NONE;
    cp.n_outputs_max   = cp.n_outputs_max == 0 ? cp.n_batch : std::max(cp.n_outputs_max, cp.n_seq_max);

    paged_clear_error();
    pending = &p;
    llama_context_ptr ctx(llama_init_from_model(model, cp));
    pending = nullptr;
    if (!ctx) { // upstream catches and logs exceptions; the message of ours is still set
        const std::string why = llama_paged_error();
        if (why.empty()) {
            paged_fail(LLAMA_PAGED_NO_MEMORY, "the context could not be created; the log has the reason");
        }
        paged_fail(LLAMA_PAGED_UNSUPPORTED, why);
    }
    if (!paged_of(ctx.get()).caches.empty()) {
        check_devices(*ctx);
    }
    if (p.deterministic) {
        make_deterministic(*ctx);
    }
    llama_paged & paged = paged_of(ctx.get());
    for_each_pool(paged, [&](const ggml_tensor * pool) { paged.ahead.add(pool); });
    paged_open_swap(paged);
    if (!paged.states) {
        paged.memory = llama_paged_access::memory(*ctx).init_full();
    }
    return ctx.release();
}

llama_context * llama_paged_init(llama_model * model, llama_context_params cparams, llama_paged_params params) {
    llama_context * ctx = nullptr;
    paged_guard([&] { ctx = init(model, cparams, params); });
    pending = nullptr;
    return ctx;
}

llama_memory_ptr paged_small_memory(const llama_model & model) {
    llama_cparams cp = {};
    cp.n_ctx         = 256;
    cp.n_ctx_seq     = 256;
    cp.n_seq_max     = 1;
    cp.n_ubatch      = 32;
    cp.n_batch       = 32;
    cp.flash_attn    = true;
    cp.kv_unified    = true;
    cp.causal_attn   = true;

    llama_memory_params mp = {};
    mp.type_k              = GGML_TYPE_F16;
    mp.type_v              = GGML_TYPE_F16;
    mp.swa_full            = true;
    return llama_memory_ptr(model.create_memory(mp, cp));
}

const char * llama_paged_refusal(const llama_model * model) {
    const llama_paged_status status = paged_guard([&] {
        if (!model) {
            invalid("the model is null");
        }
        const llama_memory_ptr memory = paged_small_memory(*model);
        paged_caches_of(memory.get(), *model);
    });
    return status == LLAMA_PAGED_OK ? nullptr : llama_paged_error();
}
