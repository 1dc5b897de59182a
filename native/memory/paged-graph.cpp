// Graph of a paged context: the block table as an input, and paged attention.

#include "llama-paged-hooks.h"
#include "paged-attn.h"
#include "paged-state.h"

#include "llama-graph.h"

#include <algorithm>
#include <cstring>

uint32_t llama_paged_size(const llama_paged_cache & cache) { return cache.paged->n_slots() * cache.n_shares; }

// Return the flags that follow from the step's tables; none for the largest graph, which is reserved outside a step.
static int32_t step_flags(const llama_paged & paged) { return paged.step.slots ? paged.step.flags : 0; }

// Create an input of n_rows rows for each part, and a view of each part's rows. The views are made once: a scheduler
// copies each of them to a device once in a step, however many layers use it.
static ggml_tensor * build_input(ggml_context * ctx, llama_paged_cache & cache, ggml_type type, int64_t n,
                                 int64_t n_rows, const char * name) {
    const int64_t n_parts = cache.n_parts();
    paged_input   input;
    input.flags = step_flags(*cache.paged);
    input.whole = ggml_new_tensor_2d(ctx, type, n, n_rows * n_parts);
    ggml_set_input(input.whole);
    ggml_set_name(input.whole, name);
    for (int64_t i = 0; i < n_parts; ++i) {
        const size_t at = i * n_rows * input.whole->nb[1];
        input.parts.push_back(n_parts == 1 ? input.whole
                                           : ggml_view_2d(ctx, input.whole, n, n_rows, input.whole->nb[1], at));
    }
    constexpr size_t most = 3; // inputs of one graph
    if (cache.inputs.size() == most) {
        cache.inputs.erase(cache.inputs.begin());
    }
    cache.inputs.push_back(input);
    return input.whole;
}

// Return an input; the newest first, since an older graph may have had one at the same address. Null if there is none.
static const paged_input * input_of(const llama_paged_cache & cache, const ggml_tensor * whole) {
    const auto input = std::find_if(cache.inputs.rbegin(), cache.inputs.rend(),
                                    [&](const paged_input & each) { return each.whole == whole; });
    return input == cache.inputs.rend() ? nullptr : &*input;
}

// Return the part of an input for a layer.
static ggml_tensor * part_of_layer(const llama_paged_cache & cache, const ggml_tensor * whole, int il) {
    if (const paged_input * input = input_of(cache, whole)) {
        return input->parts[cache.part_of[llama_paged_access::own_layer(*cache.cache, il)]];
    }
    paged_fail(LLAMA_PAGED_FAILED, "layer " + std::to_string(il) + ": its graph uses an input of another graph");
}

ggml_tensor * llama_paged_build_slots(ggml_context * ctx, llama_paged_cache & cache, int64_t n_tokens) {
    return build_input(ctx, cache, GGML_TYPE_I64, n_tokens, 1, "attn_inp_slots");
}

ggml_tensor * llama_paged_slots_of_layer(const llama_paged_cache & cache, ggml_tensor * slots, int il) {
    return part_of_layer(cache, slots, il);
}

ggml_tensor * llama_paged_build_tables(ggml_context * ctx, llama_paged_cache & cache) {
    const llama_paged & paged   = *cache.paged;
    const bool          running = paged.step.slots != nullptr;
    const int64_t       width   = running ? cache.width : paged.max_width;
    const int64_t       rows    = running ? paged.step.n_rows : paged.params.max_rows;

    ggml_tensor * tables =
        build_input(ctx, cache, GGML_TYPE_I32, GGML_PAGED_ATTN_HEADER + width, rows, "attn_inp_block_tables");
    tables->extra = &cache; // build_attn gets this tensor alone
    return tables;
}

bool llama_paged_can_reuse(const ggml_tensor * tables, const llama_paged_cache & cache) {
    const paged_input * input = input_of(cache, tables);
    return tables->ne[0] == GGML_PAGED_ATTN_HEADER + cache.width &&
           tables->ne[1] == cache.paged->step.n_rows * cache.n_parts() && input &&
           input->flags == step_flags(*cache.paged);
}

bool llama_paged_is_table(const ggml_tensor * mask) { return mask && mask->type == GGML_TYPE_I32; }

void llama_paged_set_slots(ggml_tensor * dst, const llama_paged_cache & cache) {
    const paged_step & step = cache.paged->step;
    const int32_t      bs   = cache.paged->params.block_size;
    auto *             data = static_cast<int64_t *>(dst->data);
    for (const paged_part & part : cache.parts) {
        const int32_t * slots = step.slots + (size_t) part.group * step.token_stride;
        data = std::transform(slots, slots + step.n_tokens, data,
                              [&](int64_t slot) { return (slot / bs * cache.n_shares + part.share) * bs + slot % bs; });
    }
}

void llama_paged_set_tables(ggml_tensor * dst, const llama_paged_cache & cache) {
    memcpy(dst->data, cache.tables.data(), ggml_nbytes(dst));
}

bool paged_has_window(const llama_hparams & hparams, int32_t il) {
    return hparams.swa_type != LLAMA_SWA_TYPE_NONE && hparams.is_swa(il);
}

ggml_paged_attn_params paged_params_of(const llama_paged & paged, const llama_hparams & hparams, bool has_window) {
    ggml_paged_attn_params params = {};
    params.block_size             = (int32_t) paged.params.block_size;
    if (has_window) {
        params.window      = (int32_t) hparams.n_swa;
        params.window_type = hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED ? GGML_PAGED_ATTN_WINDOW_CHUNKED
                                                                        : GGML_PAGED_ATTN_WINDOW_SLIDING;
    }
    return params;
}

static ggml_paged_attn_params params_of_layer(const llm_graph_context & graph, const llama_paged & state,
                                              float kq_scale, int il) {
    const auto &               hparams = graph.hparams;
    const llama_paged_params & paged   = state.params;
    ggml_paged_attn_params     params  = paged_params_of(state, hparams, paged_has_window(hparams, il));

    params.scale    = kq_scale;
    params.max_bias = hparams.f_max_alibi_bias;
    params.softcap  = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;
    params.flags    = (paged.deterministic ? GGML_PAGED_ATTN_DETERMINISTIC : 0) |
                      (paged.fast_attention ? GGML_PAGED_ATTN_FAST : 0) | step_flags(state);
    if (graph.arch == LLM_ARCH_GROK) { // upstream always caps, and scales after it
        if (kq_scale != 1.0f) {
            paged_fail(LLAMA_PAGED_UNSUPPORTED,
                       "the attention scale of grok must be 1, got " + std::to_string(kq_scale));
        }
        params.scale   = hparams.f_attn_out_scale;
        params.softcap = hparams.f_attn_logit_softcapping;
    }
    return params;
}

// Throw if the table of a layer is planned for other attention.
static void check_plan(const llama_paged_cache & cache, const ggml_tensor * q, const ggml_tensor * k, bool has_window,
                       int il) {
    const paged_part & part = cache.parts[cache.part_of[llama_paged_access::own_layer(*cache.cache, il)]];
    if (q->ne[1] != part.n_queries * k->ne[1] || has_window != part.has_window) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED,
                   "layer " + std::to_string(il) + " has other query heads or another window than its cache");
    }
}

ggml_tensor * llama_paged_build_attn(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                                     ggml_tensor * kq_b, ggml_tensor * tables, ggml_tensor * sinks, ggml_tensor * v_mla,
                                     float kq_scale, int il) {
    const std::string layer = "layer " + std::to_string(il) + ": ";
    if (kq_b) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, layer + "paged attention does not support a bias on its scores");
    }
    const auto &  cache  = *static_cast<const llama_paged_cache *>(tables->extra);
    ggml_tensor * table  = part_of_layer(cache, tables, il);
    const auto    params = params_of_layer(graph, *cache.paged, kq_scale, il);
    if (const char * why = ggml_paged_attn_check(q, k, v, table, sinks, &params)) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, layer + why);
    }
    check_plan(cache, q, k, params.window_type != GGML_PAGED_ATTN_WINDOW_NONE, il);

    ggml_context * ctx = graph.ctx0;
    ggml_tensor *  cur = ggml_paged_attn(ctx, q, k, v, table, sinks, params);
    graph.res->add_fused_node({LLM_FUSED_OP_FLASH_ATTN, cur, il});
    // compute on the pool's device; otherwise the scheduler might copy a whole pool to the device of the operands
    if (ggml_backend_t backend = paged_backend_of(graph.sched, k)) {
        ggml_backend_sched_set_tensor_backend(graph.sched, cur, backend);
    }
    graph.cb(cur, "paged_attn", il);

    if (v_mla) { // from latent space to heads: one matrix per head, tokens as columns
        cur = ggml_mul_mat(ctx, v_mla, ggml_permute(ctx, cur, 0, 2, 1, 3));
        cur = ggml_cont(ctx, ggml_permute(ctx, cur, 0, 2, 1, 3));
    }
    cur = ggml_reshape_2d(ctx, cur, cur->ne[0] * cur->ne[1], cur->ne[2]);
    ggml_build_forward_expand(graph.gf, cur);
    return cur;
}
