#include "op_graphs.h"

#include "paged-attn.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

namespace {

void set(ggml_tensor * t, const void * data, size_t size) {
    if (size != ggml_nbytes(t)) {
        throw std::logic_error("a tensor of another size");
    }
    ggml_backend_tensor_set(t, data, 0, size);
}

// Every layer has its own K and V, so that they are not in a processor's cache.
struct layers {
    std::vector<ggml_tensor *> k, v;

    void fill(const bytes & of_k, const bytes & of_v) const {
        set(k[0], of_k.data(), ggml_nbytes(k[0]));
        if (!v[0]->view_src) {
            set(v[0], of_v.data(), ggml_nbytes(v[0]));
        }
        for (size_t i = 1; i < k.size(); ++i) {
            ggml_backend_tensor_copy(k[0], k[i]);
            if (!v[i]->view_src) {
                ggml_backend_tensor_copy(v[0], v[i]);
            }
        }
    }
};

// Causal mask of the last rows of a sequence.
void set_causal(ggml_tensor * mask) {
    const int64_t            length = mask->ne[0], rows = mask->ne[1];
    std::vector<ggml_fp16_t> seen((size_t) (length * rows));
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t t = 0; t < length; ++t) {
            seen[r * length + t] = ggml_fp32_to_fp16(t <= length - rows + r ? 0.0f : -INFINITY);
        }
    }
    set(mask, seen.data(), seen.size() * sizeof(ggml_fp16_t));
}

} // namespace

graph begin_graph() {
    ggml_init_params params = {64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true};
    graph            g{ggml_context_ptr(ggml_init(params)), nullptr};
    g.nodes = ggml_new_graph(g.ctx.get());
    return g;
}

void finish_graph(graph & g, ggml_backend_t backend) {
    for (int i = 0; i < ggml_graph_n_nodes(g.nodes); ++i) {
        if (!ggml_backend_supports_op(backend, ggml_graph_node(g.nodes, i))) {
            throw std::runtime_error("the device does not take this operation");
        }
    }
    g.buffer.reset(ggml_backend_alloc_ctx_tensors(g.ctx.get(), backend));
    if (!g.buffer) {
        throw std::runtime_error("the device has no memory for this");
    }
}

graph paged_graph(const call & c, ggml_backend_t backend, int n_layers) {
    graph         g      = begin_graph();
    auto *        ctx    = g.ctx.get();
    ggml_tensor * q      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.s.d_k, c.s.heads, c.n_tokens);
    ggml_tensor * table  = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, GGML_PAGED_ATTN_HEADER + c.width, c.rows);
    const bool    single = std::all_of(c.s.sequences.begin(), c.s.sequences.end(), [](auto & s) { return s[0] <= 1; });
    const int32_t flags =
        (single ? GGML_PAGED_ATTN_SINGLE : 0) | (c.s.common_blocks > 0 ? GGML_PAGED_ATTN_PREFIXES : 0);
    const ggml_paged_attn_params params = {1.0f / sqrtf((float) c.s.d_k), 0, 0, BLOCK, 0, 0, flags};
    layers                       all;
    for (int i = 0; i < n_layers; ++i) {
        ggml_tensor * k = ggml_new_tensor_3d(ctx, c.s.type, c.s.d_k, c.s.heads_kv, c.n_slots);
        ggml_tensor * v = c.latent() ? ggml_view_3d(ctx, k, c.s.d_v, c.s.heads_kv, c.n_slots, k->nb[1], k->nb[2], 0)
                                     : ggml_new_tensor_3d(ctx, c.s.type, c.s.d_v, c.s.heads_kv, c.n_slots);
        if (const char * why = ggml_paged_attn_check(q, k, v, table, nullptr, &params)) {
            throw std::runtime_error(why);
        }
        all.k.push_back(k);
        all.v.push_back(v);
        g.out = ggml_paged_attn(ctx, q, k, v, table, nullptr, params);
        ggml_build_forward_expand(g.nodes, g.out);
    }
    finish_graph(g, backend);
    set(q, c.q.data(), c.q.size());
    set(table, c.table.data(), c.table.size() * sizeof(int32_t));
    all.fill(c.k, c.v);
    return g;
}

graph flash_graph(const call & c, ggml_backend_t backend, int n_layers) {
    graph         g   = begin_graph();
    auto *        ctx = g.ctx.get();
    const int64_t n = (int64_t) c.s.sequences.size(), rows = c.s.sequences[0][0], length = c.s.sequences[0][1];
    ggml_tensor * q    = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, c.s.d_k, rows, c.s.heads, n);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, length, rows);
    layers        all;
    for (int i = 0; i < n_layers; ++i) {
        all.k.push_back(ggml_new_tensor_4d(ctx, c.s.type, c.s.d_k, length, c.s.heads_kv, n));
        all.v.push_back(ggml_new_tensor_4d(ctx, c.s.type, c.s.d_v, length, c.s.heads_kv, n));
        g.out = ggml_flash_attn_ext(ctx, q, all.k[i], all.v[i], mask, 1.0f / sqrtf((float) c.s.d_k), 0, 0);
        ggml_build_forward_expand(g.nodes, g.out);
    }
    finish_graph(g, backend);
    set(q, c.q.data(), c.q.size());
    all.fill(c.k, c.v);
    set_causal(mask);
    return g;
}

graph gathered_graph(const call & c, ggml_backend_t backend, int n_layers) {
    graph         g    = begin_graph();
    auto *        ctx  = g.ctx.get();
    const int64_t rows = c.s.sequences[0][0], length = c.s.sequences[0][1];
    ggml_tensor * q      = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.s.d_k, c.s.heads, rows);
    ggml_tensor * mask   = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, length, rows);
    ggml_tensor * slots  = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, length);
    const auto    gather = [&](ggml_tensor * x) { // [d][heads][slots] to [d][length][heads], in float16
        ggml_tensor * flat = ggml_reshape_2d(ctx, x, x->ne[0] * x->ne[1], x->ne[2]);
        ggml_tensor * own  = ggml_cast(ctx, ggml_get_rows(ctx, flat, slots), GGML_TYPE_F16);
        return ggml_permute(ctx, ggml_reshape_3d(ctx, own, x->ne[0], x->ne[1], length), 0, 2, 1, 3);
    };
    layers all;
    for (int i = 0; i < n_layers; ++i) {
        all.k.push_back(ggml_new_tensor_3d(ctx, c.s.type, c.s.d_k, c.s.heads_kv, c.n_slots));
        all.v.push_back(ggml_new_tensor_3d(ctx, c.s.type, c.s.d_v, c.s.heads_kv, c.n_slots));
        g.out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), gather(all.k[i]), gather(all.v[i]), mask,
                                    1.0f / sqrtf((float) c.s.d_k), 0, 0);
        ggml_build_forward_expand(g.nodes, g.out);
    }
    finish_graph(g, backend);
    set(q, c.q.data(), c.q.size());
    all.fill(c.k, c.v);
    set_causal(mask);
    std::vector<int32_t> of_tokens((size_t) length);
    for (int64_t t = 0; t < length; ++t) {
        of_tokens[t] = c.table[GGML_PAGED_ATTN_HEADER + t / BLOCK] * BLOCK + (int32_t) (t % BLOCK);
    }
    set(slots, of_tokens.data(), of_tokens.size() * sizeof(int32_t));
    return g;
}
