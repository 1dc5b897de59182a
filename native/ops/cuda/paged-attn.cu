// GGML_OP_PAGED_ATTN in ggml's CUDA backend: tensors to parameters, stream and workspace.
#include "paged-attn.cuh"

#include "paged-attn.h"
#include "paged-launcher.cuh"

namespace paged {

template <> bool cuda_launcher::attend_with<float_numbers>(const params & p, int shared_bytes);
template <> bool cuda_launcher::attend_with<bfloat_numbers>(const params & p, int shared_bytes);
template <> bool cuda_launcher::attend_with<known_types>(const params & p, int shared_bytes);
template <> bool cuda_launcher::attend_with<half_numbers>(const params & p, int shared_bytes);

} // namespace paged

using namespace paged;

static_assert((int) PAGE_F32 == (int) GGML_TYPE_F32 && (int) PAGE_F16 == (int) GGML_TYPE_F16 &&
                  (int) PAGE_BF16 == (int) GGML_TYPE_BF16 && (int) PAGE_Q8_0 == (int) GGML_TYPE_Q8_0 &&
                  (int) PAGE_Q5_1 == (int) GGML_TYPE_Q5_1 && (int) PAGE_Q5_0 == (int) GGML_TYPE_Q5_0 &&
                  (int) PAGE_Q4_1 == (int) GGML_TYPE_Q4_1 && (int) PAGE_Q4_0 == (int) GGML_TYPE_Q4_0 &&
                  (int) PAGE_IQ4_NL == (int) GGML_TYPE_IQ4_NL,
              "types must have ggml's numbers");
static_assert((int) WINDOW_SLIDING == (int) GGML_PAGED_ATTN_WINDOW_SLIDING &&
                  (int) WINDOW_CHUNKED == (int) GGML_PAGED_ATTN_WINDOW_CHUNKED,
              "windows must have the operator's numbers");
static_assert(
    (int) ROW_Q0 == (int) GGML_PAGED_ATTN_Q0 && (int) ROW_NQ == (int) GGML_PAGED_ATTN_NQ &&
        (int) ROW_LENGTH == (int) GGML_PAGED_ATTN_KV && (int) ROW_FIRST == (int) GGML_PAGED_ATTN_FIRST &&
        (int) ROW_BEGIN == (int) GGML_PAGED_ATTN_BEGIN && (int) ROW_SHIFT == (int) GGML_PAGED_ATTN_SHIFT &&
        (int) ROW_COMMON == (int) GGML_PAGED_ATTN_COMMON && (int) ROW_VERY_FEW == (int) GGML_PAGED_ATTN_VERY_FEW &&
        (int) ROW_FEW == (int) GGML_PAGED_ATTN_FEW && (int) ROW_TILES_16 == (int) GGML_PAGED_ATTN_TILES_16 &&
        (int) ROW_TILES_64 == (int) GGML_PAGED_ATTN_TILES_64 &&
        (int) ROW_TILES_128 == (int) GGML_PAGED_ATTN_TILES_128 && (int) ROW_SAVED_8 == (int) GGML_PAGED_ATTN_SAVED_8 &&
        (int) ROW_SAVED_16 == (int) GGML_PAGED_ATTN_SAVED_16 && (int) ROW_SAVED_64 == (int) GGML_PAGED_ATTN_SAVED_64 &&
        (int) ROW_SAVED_128 == (int) GGML_PAGED_ATTN_SAVED_128 && (int) ROW_MERGED == (int) GGML_PAGED_ATTN_MERGED &&
        (int) ROW_PARTIALS == (int) GGML_PAGED_ATTN_PARTIALS && (int) ROW_QUERIES == (int) GGML_PAGED_ATTN_QUERIES &&
        (int) ROW_HEADER == (int) GGML_PAGED_ATTN_HEADER,
    "rows of the table must have the operator's layout");

// Return the address of a tensor; before memory is allocated, its offset. Buffers begin at multiples of 128.
static const char * address(const ggml_tensor * x) {
    return x->data ? (const char *) x->data : (const char *) x->view_offs;
}

static bool is_beginning(const ggml_tensor * v, const ggml_tensor * k) {
    const ggml_tensor *of_v = v->view_src ? v->view_src : v, *of_k = k->view_src ? k->view_src : k;
    return of_v == of_k && v->view_offs == k->view_offs && v->type == k->type && v->ne[0] <= k->ne[0] &&
           v->nb[1] == k->nb[1] && v->nb[2] == k->nb[2];
}

static pages pages_of(const ggml_tensor * x) {
    return make_pages(address(x), x->nb[1], x->nb[2], x->type, (int) ggml_row_size(x->type, x->ne[0]));
}

static params params_of(const ggml_tensor * dst) {
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *table = dst->src[3], *sinks = dst->src[4];
    ggml_paged_attn_params op;
    memcpy(&op, dst->op_params, sizeof(op));

    params p         = {};
    p.q              = (const char *) q->data;
    p.q_head_stride  = q->nb[1];
    p.q_token_stride = q->nb[2];
    p.k              = pages_of(k);
    p.v              = pages_of(v);
    p.v_is_k         = is_beginning(v, k);
    p.table          = (const int32_t *) table->data;
    p.table_stride   = table->nb[1] / sizeof(int32_t);
    p.sinks          = sinks ? (const float *) sinks->data : nullptr;
    p.out            = (float *) dst->data;
    p.d_k            = (int) k->ne[0];
    p.d_v            = (int) v->ne[0];
    p.n_head         = (int) q->ne[1];
    p.n_head_kv      = (int) k->ne[1];
    p.group          = p.n_head / p.n_head_kv;
    p.n_tokens       = (int) q->ne[2];
    p.n_rows         = (int) table->ne[1];
    p.window         = op.window;
    p.window_type    = op.window_type;
    p.scale          = op.scale;
    p.softcap        = op.softcap;
    p.fast           = (op.flags & GGML_PAGED_ATTN_FAST) != 0;
    p.single         = (op.flags & GGML_PAGED_ATTN_SINGLE) != 0;
    p.prefixes       = (op.flags & GGML_PAGED_ATTN_PREFIXES) != 0;
    set_block_size(p, op.block_size);
    set_bias(p, op.max_bias);
    return p;
}

// Whether kernels may begin before the one before them has ended, as upstream's do.
static bool begins_early() {
    const char * chosen = getenv("GGML_CUDA_PDL");
    return chosen == nullptr || atoi(chosen) != 0;
}

void ggml_cuda_paged_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    params p = params_of(dst);
    if (p.n_tokens == 0) {
        return;
    }
    const int64_t               width = dst->src[3]->ne[0] - GGML_PAGED_ATTN_HEADER;
    const workspace             work  = workspace_of(p, width, WORKSPACE_BYTES);
    ggml_cuda_pool_alloc<float> partial(ctx.pool(), work.bytes / sizeof(float));
    p.partial = partial.get();

    static const bool early    = begins_early();
    const auto &      info     = ggml_cuda_info().devices[ctx.device];
    cuda_launcher     launcher = {info.physical_device, info.nsm, ctx.stream(), early};
    const bool        done     = launch(p, work.rows, (int) info.smpbo, launcher);
    CUDA_CHECK(launcher.status);
    GGML_ASSERT(done); // checked by ggml_cuda_paged_attn_supported
}

bool ggml_cuda_paged_attn_supported(int device, const ggml_tensor * dst) {
    const auto & info = ggml_cuda_info().devices[device];
    // older GPUs are not compiled for (native/cmake/Cuda.cmake)
    return GGML_CUDA_CC_IS_NVIDIA(info.cc) && info.cc >= GGML_CUDA_CC_VOLTA &&
           refusal(params_of(dst), (int) info.smpbo) == nullptr;
}
