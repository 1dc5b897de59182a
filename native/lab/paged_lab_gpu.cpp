// The kernels for GPUs on the host: what the laboratory runs on the CPU's operator, computed by fibers.
#include "lab_gpu.h"

#include "paged-launch.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

struct host_machine {
    int n_blocks;

    template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers>
    void attend(const paged::view & p, paged::row_class of, int tokens, int bytes) {
        std::vector<char> memory(bytes + 16, (char) 0xff); // NaN, whatever type it is read as
        char *            aligned = memory.data() + (16 - (uintptr_t) memory.data() % 16) % 16;
        gpu::launch(n_blocks, paged::N_THREADS,
                    [&] { paged::attend_block<M_TILES, V_PAIRS, KNumbers, VNumbers>(p, of, tokens, aligned); });
    }
    void merge(const paged::view & p, int bytes) {
        std::vector<char> memory(bytes);
        gpu::launch(n_blocks, paged::N_THREADS, [&] { paged::merge_block(p, {1, INT32_MAX}, memory.data()); });
    }
};

int row_bytes(int type, int64_t d) { return (int) (d / 32.0 * paged::group_bytes(type)); }

paged::view view_of(const lab_paged * op) {
    const int   k_row = row_bytes(op->type_k, op->d_k), v_row = row_bytes(op->type_v, op->d_v);
    paged::view p    = {};
    p.q              = (const char *) op->q;
    p.q_head_stride  = op->q_head_stride ? op->q_head_stride : op->d_k * 4;
    p.q_token_stride = op->q_token_stride ? op->q_token_stride : op->n_head * op->d_k * 4;
    p.k              = {(const char *) op->k, op->k_head_stride ? op->k_head_stride : k_row,
                        op->k_slot_stride ? op->k_slot_stride : k_row * op->n_head_kv, op->type_k, k_row};
    p.v_is_k         = op->v == nullptr;
    p.v              = {(const char *) op->v, op->v_head_stride ? op->v_head_stride : v_row,
                        op->v_slot_stride ? op->v_slot_stride : v_row * op->n_head_kv, op->type_v, v_row};
    if (p.v_is_k) {
        p.v           = p.k;
        p.v.row_bytes = v_row;
    }
    p.table        = op->table;
    p.table_stride = 4 + op->width;
    p.sinks        = op->sinks;
    p.out          = op->out;
    p.d_k = op->d_k, p.d_v = op->d_v, p.n_head = op->n_head, p.n_head_kv = op->n_head_kv;
    p.group = p.n_head / p.n_head_kv, p.n_rows = op->n_rows;
    p.block_size = op->block_size, p.window = op->window, p.window_type = op->window_type;
    p.scale = op->scale, p.softcap = op->softcap;
    if (op->max_bias > 0) {
        p.n_slopes        = 1 << (int) floor(log2((double) p.n_head));
        p.slope_base      = powf(2.0f, -op->max_bias / p.n_slopes);
        p.slope_base_rest = powf(2.0f, -op->max_bias / 2.0f / p.n_slopes);
    }
    return p;
}

} // namespace

const char * lab_paged_attn_gpu(const lab_paged * op, int32_t n_blocks, int32_t shared_bytes) {
    paged::view        p    = view_of(op);
    const int64_t      rows = paged::most_partials(op->n_tokens, op->n_rows, op->n_head, op->width * op->block_size);
    std::vector<float> partial(rows * paged::partial_floats(p), NAN);
    p.partial = partial.data();
    std::fill_n(op->out, op->n_tokens * op->n_head * op->d_v, 0.0f);
    host_machine machine = {n_blocks};
    return paged::launch(p, op->n_tokens, shared_bytes, machine) ? nullptr : "no kernel has room for such heads";
}
