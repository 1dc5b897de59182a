// Graph of a paged context: the block table as an input, and paged attention.

#include "llama-paged-hooks.h"
#include "paged-attn.h"
#include "paged-state.h"

#include "llama-graph.h"

#include <cstring>

ggml_tensor * llama_paged_build_table(ggml_context * ctx, const llama_paged & paged) {
    const bool    running = paged.step.slots != nullptr;
    const int64_t width   = running ? paged.step.width : paged.max_width;
    const int64_t rows    = running ? paged.step.n_rows : paged.params.max_rows;

    ggml_tensor * table = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, GGML_PAGED_ATTN_HEADER + width, rows);
    ggml_set_input(table);
    ggml_set_name(table, "attn_inp_block_table");
    // build_attn gets this tensor alone, so it carries the parameters
    table->op_params[0] = (int32_t) paged.params.block_size;
    table->op_params[1] = (paged.params.deterministic ? GGML_PAGED_ATTN_DETERMINISTIC : 0) |
                          (paged.params.fast_attention ? GGML_PAGED_ATTN_FAST : 0);
    return table;
}

bool llama_paged_can_reuse(const ggml_tensor * table, const llama_paged & paged) {
    return table->ne[0] == GGML_PAGED_ATTN_HEADER + paged.step.width && table->ne[1] == paged.step.n_rows;
}

bool llama_paged_is_table(const ggml_tensor * mask) { return mask && mask->type == GGML_TYPE_I32; }

void llama_paged_set_slots(ggml_tensor * dst, const llama_paged & paged) {
    auto * data = static_cast<int64_t *>(dst->data);
    for (int32_t i = 0; i < paged.step.n_tokens; ++i) {
        data[i] = paged.step.slots[i];
    }
}

void llama_paged_set_table(ggml_tensor * dst, const llama_paged & paged) {
    memcpy(dst->data, paged.step.table.data(), ggml_nbytes(dst));
}

static ggml_paged_attn_params params_of_layer(const llm_graph_context & graph, const ggml_tensor * table,
                                              float kq_scale, int il) {
    const auto &           hparams = graph.hparams;
    ggml_paged_attn_params params  = {};

    params.scale      = kq_scale;
    params.max_bias   = hparams.f_max_alibi_bias;
    params.softcap    = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;
    params.block_size = table->op_params[0];
    params.flags      = table->op_params[1];
    if (graph.arch == LLM_ARCH_GROK) { // upstream always caps, and scales after it
        if (kq_scale != 1.0f) {
            paged_fail(LLAMA_PAGED_UNSUPPORTED,
                       "the attention scale of grok must be 1, got " + std::to_string(kq_scale));
        }
        params.scale   = hparams.f_attn_out_scale;
        params.softcap = hparams.f_attn_logit_softcapping;
    }
    if (hparams.swa_type != LLAMA_SWA_TYPE_NONE && hparams.is_swa(il)) {
        params.window      = (int32_t) hparams.n_swa;
        params.window_type = hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED ? GGML_PAGED_ATTN_WINDOW_CHUNKED
                                                                        : GGML_PAGED_ATTN_WINDOW_SLIDING;
    }
    return params;
}

ggml_tensor * llama_paged_build_attn(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                                     ggml_tensor * kq_b, ggml_tensor * table, ggml_tensor * sinks, ggml_tensor * v_mla,
                                     float kq_scale, int il) {
    const std::string layer = "layer " + std::to_string(il) + ": ";
    if (kq_b) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, layer + "paged attention does not support a bias on its scores");
    }
    const auto params = params_of_layer(graph, table, kq_scale, il);
    if (const char * why = ggml_paged_attn_check(q, k, v, table, sinks, &params)) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, layer + why);
    }

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
