#include "paged-state.h"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

#include <algorithm>
#include <new>
#include <typeinfo>

static thread_local std::string last_error;

const char * llama_paged_error(void) { return last_error.c_str(); }

void paged_clear_error() { last_error.clear(); }

void paged_fail(llama_paged_status status, const std::string & what) {
    last_error = what;
    throw paged_error(status, what);
}

llama_paged_status paged_status_of(const std::exception & e) {
    if (dynamic_cast<const std::bad_alloc *>(&e)) {
        last_error = "out of memory"; // fits std::string without an allocation
        return LLAMA_PAGED_NO_MEMORY;
    }
    last_error = e.what();
    if (const auto * known = dynamic_cast<const paged_error *>(&e)) {
        return known->status;
    }
    return LLAMA_PAGED_FAILED;
}

size_t llama_paged_access::compute_bytes(llama_context & c) {
    size_t total = 0;
    for (const auto & backend : c.backends) {
        total += ggml_backend_sched_get_buffer_size(c.sched.get(), backend.get());
    }
    return total;
}

size_t llama_paged_access::bytes(const llama_kv_cache & cache) {
    size_t total = 0;
    for (const auto & [ctx, buffer] : cache.ctxs_bufs) {
        total += ggml_backend_buffer_get_size(buffer.get());
    }
    return total;
}

void llama_paged_access::reserve(llama_context & c) {
    if (c.paged && c.paged->n_logits > 0 && c.paged->logits != c.logits.data) {
        c.synchronize();
        std::copy_n(c.paged->logits, (size_t) c.paged->n_logits * c.model.vocab.n_tokens(), c.logits.data);
        c.paged->logits = c.logits.data;
    }
    c.sched_need_reserve = true;
    c.sched_reserve();
}

void llama_paged_access::begin(llama_context & c, int32_t n_tokens, int32_t n_outputs) {
    c.embd_seq.clear();
    c.output_swaps.clear();
    c.sched_reserve();
    if (c.output_reserve(n_outputs) < (uint32_t) n_outputs) {
        paged_fail(LLAMA_PAGED_NO_MEMORY, "no memory for the logits of " + std::to_string(n_outputs) + " outputs");
    }
    if (c.t_compute_start_us == 0) {
        c.t_compute_start_us = ggml_time_us();
    }
    c.n_queued_tokens += n_tokens;
}

// Cast to exactly this class: a subclass may store more.
template <typename T> static T * exactly(llama_memory_i * memory) {
    return typeid(*memory) == typeid(T) ? static_cast<T *>(memory) : nullptr;
}

[[noreturn]] static void refuse(const llama_model & model, const std::string & why) {
    paged_fail(LLAMA_PAGED_UNSUPPORTED, "the architecture '" + model.arch_name() + "' cannot be paged: " + why);
}

static void refuse_architectures(const llama_model & model) {
    const auto & hparams = model.hparams;
    if (!hparams.causal_attn) {
        refuse(model, "its attention is not causal");
    }
    if (hparams.n_rel_attn_bkts > 0 || llama_model_has_encoder(&model)) {
        refuse(model, "it has an encoder or a relative position bias");
    }
    if (hparams.ple_n_heads > 0) {
        refuse(model, "its n-gram embeddings read the tokens of the cache");
    }
    if (hparams.swa_type == LLAMA_SWA_TYPE_SYMMETRIC) {
        refuse(model, "its window is symmetric");
    }
    if (model.arch == LLM_ARCH_PLAMO2) {
        refuse(model, "upstream mixes its recurrent states when several sequences run");
    }
}

paged_caches paged_caches_of(llama_memory_i * memory, const llama_model & model) {
    if (!memory) {
        refuse(model, "it has no cache");
    }
    refuse_architectures(model);

    paged_caches parts;
    if (auto * plain = exactly<llama_kv_cache>(memory)) {
        parts.caches = {plain};
    } else if (auto * iswa = exactly<llama_kv_cache_iswa>(memory)) {
        parts.caches = {iswa->get_base(), iswa->get_swa()};
    } else if (auto * hybrid = exactly<llama_memory_hybrid>(memory)) {
        parts.caches = {hybrid->get_mem_attn()};
        parts.states = hybrid->get_mem_recr();
    } else if (auto * both = exactly<llama_memory_hybrid_iswa>(memory)) {
        parts.caches = {both->get_mem_attn()->get_base(), both->get_mem_attn()->get_swa()};
        parts.states = both->get_mem_recr();
    } else if (auto * recurrent = exactly<llama_memory_recurrent>(memory)) {
        parts.states = recurrent;
    } else {
        refuse(model, "its kind of cache is not supported (sparse attention)");
    }
    return parts;
}

llama_paged & paged_of(llama_context * ctx) {
    if (!ctx) {
        paged_fail(LLAMA_PAGED_INVALID, "the context is null");
    }
    if (const auto & paged = llama_paged_access::paged(*ctx)) {
        return *paged;
    }
    paged_fail(LLAMA_PAGED_INVALID, "the context is not paged: create it with llama_paged_init");
}

ggml_backend_t paged_backend_of(ggml_backend_sched_t sched, const ggml_tensor * pool) {
    const ggml_tensor * base = pool->view_src ? pool->view_src : pool;
    if (!base->buffer) {
        return nullptr;
    }
    const auto buft = ggml_backend_buffer_get_type(base->buffer);
    for (int i = ggml_backend_sched_get_n_backends(sched) - 1; i >= 0; --i) { // the CPU is last and gets host memory
        ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_supports_buft(backend, buft)) {
            return backend;
        }
    }
    return nullptr;
}
