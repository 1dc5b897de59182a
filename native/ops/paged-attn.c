#include "paged-attn.h"

#include "ggml-impl.h"

#include <math.h>
#include <string.h>

static_assert(sizeof(struct ggml_paged_attn_params) <= GGML_MAX_OP_PARAMS, "the parameters must fit op_params");

static bool is_kv_type(enum ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_Q5_1:
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_Q4_1:
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_IQ4_NL:
        return true;
    default:
        return false;
    }
}

static const char * check_params(const struct ggml_paged_attn_params * params) {
    if (params->block_size <= 0) {
        return "the block size must be a positive number of tokens (32, 64, 128 or 256)";
    }
    if (!isfinite(params->scale)) {
        return "the scale must be a finite number";
    }
    if (!(params->max_bias >= 0.0f) || !isfinite(params->max_bias)) {
        return "the ALiBi bias must be zero or a positive finite number";
    }
    if (!(params->softcap >= 0.0f) || !isfinite(params->softcap)) {
        return "the soft-cap must be zero or a positive finite number";
    }
    if (params->window_type < GGML_PAGED_ATTN_WINDOW_NONE || params->window_type > GGML_PAGED_ATTN_WINDOW_CHUNKED) {
        return "the window type must be none, sliding or chunked";
    }
    if (params->window_type != GGML_PAGED_ATTN_WINDOW_NONE && params->window <= 0) {
        return "a sliding or chunked window must be a positive number of tokens";
    }
    if (params->flags &
        ~(GGML_PAGED_ATTN_DETERMINISTIC | GGML_PAGED_ATTN_FAST | GGML_PAGED_ATTN_SINGLE | GGML_PAGED_ATTN_PREFIXES)) {
        return "there is no such flag: only GGML_PAGED_ATTN_DETERMINISTIC, _FAST, _SINGLE and _PREFIXES are defined";
    }
    return NULL;
}

// ggml's constructors make rows of whole groups, but a view may cut a group
static const char * check_pool(const struct ggml_tensor * k, const struct ggml_tensor * v) {
    if (!is_kv_type(k->type) || !is_kv_type(v->type)) {
        return "K and V must be f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl";
    }
    if (k->ne[0] % ggml_blck_size(k->type) != 0) {
        return "the head size of K is not a whole number of its type's groups of 32: use f32, f16 or bf16 for K";
    }
    if (v->ne[0] % ggml_blck_size(v->type) != 0) {
        return "the head size of V is not a whole number of its type's groups of 32: use f32, f16 or bf16 for V";
    }
    if (k->nb[0] != ggml_type_size(k->type) || v->nb[0] != ggml_type_size(v->type)) {
        return "a head of K and of V must be contiguous";
    }
    if (k->ne[1] != v->ne[1] || k->ne[2] != v->ne[2] || k->ne[3] != 1 || v->ne[3] != 1) {
        return "K and V must have the same number of heads and of slots, and three dimensions";
    }
    return NULL;
}

const char * ggml_paged_attn_check(const struct ggml_tensor * q, const struct ggml_tensor * k,
                                   const struct ggml_tensor * v, const struct ggml_tensor * table,
                                   const struct ggml_tensor * sinks, const struct ggml_paged_attn_params * params) {
    const char * wrong = check_params(params);
    if (wrong == NULL) {
        wrong = check_pool(k, v);
    }
    if (wrong != NULL) {
        return wrong;
    }
    if (q->type != GGML_TYPE_F32 || q->nb[0] != sizeof(float) || q->ne[3] != 1) {
        return "the queries must be f32 with contiguous heads, in three dimensions";
    }
    if (q->ne[0] != k->ne[0]) {
        return "the queries and K must have the same head size";
    }
    if (k->ne[1] <= 0 || q->ne[1] % k->ne[1] != 0) {
        return "the number of query heads must be a multiple of the number of KV heads";
    }
    if (table->type != GGML_TYPE_I32 || table->nb[0] != sizeof(int32_t) || table->ne[2] != 1 || table->ne[3] != 1) {
        return "the block table must be i32 with contiguous rows, in two dimensions";
    }
    if (table->ne[0] <= GGML_PAGED_ATTN_HEADER) {
        return "a row of the block table must hold its header and at least one block id";
    }
    if (sinks != NULL &&
        (sinks->type != GGML_TYPE_F32 || ggml_nelements(sinks) != q->ne[1] || !ggml_is_contiguous(sinks))) {
        return "the sinks must be f32, contiguous, one for each query head";
    }
    return NULL;
}

struct ggml_tensor * ggml_paged_attn(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k,
                                     struct ggml_tensor * v, struct ggml_tensor * table, struct ggml_tensor * sinks,
                                     struct ggml_paged_attn_params params) {
    const char * wrong = ggml_paged_attn_check(q, k, v, table, sinks, &params);
    if (wrong != NULL) {
        GGML_ABORT("paged attention: %s", wrong);
    }

    struct ggml_tensor * out = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, v->ne[0], q->ne[1], q->ne[2]);
    memcpy(out->op_params, &params, sizeof(params));
    out->op     = GGML_OP_PAGED_ATTN;
    out->src[0] = q;
    out->src[1] = k;
    out->src[2] = v;
    out->src[3] = table;
    out->src[4] = sinks;
    return out;
}
