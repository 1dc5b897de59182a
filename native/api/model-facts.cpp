// Facts from the model's hyperparameters, which are private to libllama. Compiled as a part of it.
#include "model-facts.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-model.h"
#include "llama-vocab.h"
#include "paged-state.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace {

// Return whether llama_model::create_memory gives this layer a cache.
bool has_cache(const llama_model & model, uint32_t il) {
    const auto & hparams = model.hparams;
    if (!hparams.has_kv(il) || hparams.n_embd_k_gqa(il) == 0) {
        return false;
    }
    // layers of multi-token prediction have no cache here, unless one is its router
    const bool ahead = il >= hparams.n_layer();
    if (!llm_arch_is_hybrid(model.arch)) {
        return !ahead || hparams.n_layer() == 0 || hparams.router_layer >= 0;
    }
    switch (model.arch) {
    case LLM_ARCH_FALCON_H1: // both halves in every layer
        return true;
    case LLM_ARCH_NEMOTRON_H:
    case LLM_ARCH_NEMOTRON_H_MOE: // a layer is attention, recurrent or a feed-forward network
        return !hparams.is_recr(il) && hparams.n_ff(il) == 0;
    case LLM_ARCH_QWEN3NEXT:
    case LLM_ARCH_QWEN35:
    case LLM_ARCH_QWEN35MOE:
    case LLM_ARCH_MINIMAX_01:
        return !ahead && !hparams.is_recr(il);
    default:
        return !hparams.is_recr(il);
    }
}

int32_t window_type(llama_swa_type type) {
    switch (type) {
    case LLAMA_SWA_TYPE_STANDARD:
        return 1;
    case LLAMA_SWA_TYPE_CHUNKED:
        return 2;
    default:
        return 0; // symmetric: not causal
    }
}

} // namespace

int32_t llama_device_number(ggml_backend_dev_t device) {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_get(i) == device) {
            return static_cast<int32_t>(i);
        }
    }
    return -1;
}

int32_t llama_context_memory(const llama_context * context, velo_device_memory * memory, int32_t capacity) {
    std::map<int32_t, velo_device_memory> found;
    const auto cpu = llama_device_number(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    for (const auto & [buft, part] : context->memory_breakdown()) {
        const int32_t device =
            ggml_backend_buft_is_host(buft) ? cpu : llama_device_number(ggml_backend_buft_get_device(buft));
        velo_device_memory & m = found[device];
        m.device               = device;
        m.weight_bytes += static_cast<int64_t>(part.model);
        m.pool_bytes += static_cast<int64_t>(part.context);
        m.compute_bytes += static_cast<int64_t>(part.compute);
    }
    int32_t n = 0;
    for (const auto & [device, m] : found) {
        if (n < capacity) {
            memory[n] = m;
        }
        ++n;
    }
    return n;
}

int32_t llama_model_cached_layers(const llama_model * model, velo_layer * layers, int32_t capacity) {
    const auto & hparams = model->hparams;
    if (llm_arch_is_recurrent(model->arch)) {
        return 0;
    }
    int32_t n = 0;
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        if (!has_cache(*model, il)) {
            continue;
        }
        if (n < capacity) {
            const int32_t window = hparams.is_swa(il) ? window_type(hparams.swa_type) : 0;
            velo_layer &  layer  = layers[n];
            layer.layer          = static_cast<int32_t>(il);
            layer.n_head         = static_cast<int32_t>(hparams.n_head(il));
            layer.n_head_kv      = static_cast<int32_t>(hparams.n_head_kv(il));
            layer.head_dim_k     = static_cast<int32_t>(hparams.n_embd_head_k(il));
            layer.head_dim_v     = hparams.is_mla() ? 0 : static_cast<int32_t>(hparams.n_embd_head_v(il));
            layer.window         = window ? static_cast<int32_t>(hparams.n_swa) : 0;
            layer.window_type    = window;
            layer.device         = llama_device_number(model->dev_layer(static_cast<int>(il)));
        }
        ++n;
    }
    return n;
}

const ggml_tensor * llama_context_vectors(const llama_context * context) {
    const llm_graph_result * graph = llama_paged_access::graph(*context);
    return graph ? graph->get_embd() : nullptr;
}

const char * llama_model_defect(const llama_model * model) {
    const auto & hparams = model->hparams;
    for (const float eps : {hparams.f_norm_eps, hparams.f_norm_rms_eps, hparams.f_norm_group_eps}) {
        if (!std::isfinite(eps) || eps < 0.0f) {
            return "the epsilon of its normalization is negative or not a number";
        }
    }
    const auto & sections = hparams.rope_sections;
    const bool   mrope    = hparams.rope_type == LLAMA_ROPE_TYPE_MROPE || hparams.rope_type == LLAMA_ROPE_TYPE_IMROPE;
    if (mrope && sections[0] <= 0 && sections[1] <= 0 && sections[2] <= 0) {
        return "its positions have several parts, but all are empty";
    }
    if (model->arch == LLM_ARCH_T5ENCODER && !model->layers[0].attn_rel_b_enc) {
        return "its first layer has no relative position bias, which all of them use";
    }
    const bool mamba = model->arch == LLM_ARCH_GRANITE_HYBRID || model->arch == LLM_ARCH_FALCON_H1 ||
                       model->arch == LLM_ARCH_NEMOTRON_H || model->arch == LLM_ARCH_NEMOTRON_H_MOE;
    for (const llama_layer & layer : model->layers) { // the loader does not require it, the graph does
        if (mamba && layer.ssm_conv1d && !layer.ssm_conv1d_b) {
            return "a convolution of its recurrent layers has no bias";
        }
    }
    for (uint32_t il = 0; il < hparams.n_layer_all; ++il) {
        const uint32_t n_rot   = hparams.n_rot(il);
        const bool     rotates = hparams.rope_type != LLAMA_ROPE_TYPE_NONE && has_cache(*model, il);
        // may have no rotary positions although its rope type is not none
        const bool may_be_empty = model->arch == LLM_ARCH_GRANITE_HYBRID && !hparams.rope_pattern[il];
        const bool empty        = n_rot == 0 && !may_be_empty;
        if (rotates && (empty || n_rot % 2 != 0 || n_rot > hparams.n_embd_head_k(il))) {
            return "its rotary positions do not fit its heads";
        }
    }
    return nullptr;
}

bool llama_model_is_encoder(const llama_model * model) {
    if (llama_model_is_diffusion(model) || model->arch == LLM_ARCH_WAVTOKENIZER_DEC) {
        return false;
    }
    if (llama_model_has_encoder(model)) {
        return !llama_model_has_decoder(model);
    }
    if (!model->hparams.causal_attn) {
        return true;
    }
    return !paged_small_memory(*model);
}

int32_t llama_model_pooling(const llama_model * model) { return std::max<int32_t>(0, model->hparams.pooling_type); }

bool llama_vocab_adds_space(const llama_vocab * vocab) { return vocab->get_add_space_prefix(); }
