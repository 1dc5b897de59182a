#include "lab.h"

#include "ggml-cpu.h"
#include "ggml.h"
#include "paged-attn.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace {

struct context_free {
    void operator()(ggml_context * ctx) const { ggml_free(ctx); }
};
using context_ptr = std::unique_ptr<ggml_context, context_free>;

context_ptr make_context(int32_t n_layers) {
    const size_t bytes = (12 * n_layers + 16) * ggml_tensor_overhead() + ggml_graph_overhead();
    return context_ptr(ggml_init({bytes, nullptr, true}));
}

// Create a tensor over the caller's bytes.
ggml_tensor * wrap(ggml_context * ctx, ggml_type type, std::vector<int64_t> ne, const void * data) {
    ggml_tensor * t = ggml_new_tensor(ctx, type, ne.size(), ne.data());
    t->data         = const_cast<void *>(data);
    return t;
}

void set_strides(ggml_tensor * t, int64_t nb1, int64_t nb2) {
    t->nb[1] = nb1 ? nb1 : t->nb[1];
    t->nb[2] = nb2 ? nb2 : t->nb[1] * t->ne[1];
    t->nb[3] = t->nb[2] * t->ne[2];
}

const void * layer_of(const void * data, const lab_run & run, int32_t layer) {
    return (const char *) data + layer * run.layer_stride;
}

void compute(ggml_cgraph * graph, const lab_run & run) {
    ggml_cplan plan = ggml_graph_plan(graph, run.n_threads, nullptr);
    auto       work = std::make_unique<uint8_t[]>(plan.work_size);
    plan.work_data  = work.get();
    plan.use_ref    = run.use_ref != 0;
    for (int32_t i = 0; i < run.repeat; ++i) {
        const auto start = std::chrono::steady_clock::now();
        ggml_graph_compute(graph, &plan);
        if (run.seconds) {
            run.seconds[i] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        }
    }
}

const char * check_run(const lab_run & run) {
    return run.n_threads > 0 && run.n_layers > 0 && run.n_layers <= 128 && run.repeat > 0
               ? nullptr
               : "threads, layers (at most 128) and repetitions must be positive";
}

bool is_type(int32_t type) { return type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size((ggml_type) type) > 0; }

} // namespace

const char * lab_paged_attn(const lab_paged * op, const lab_run * run) {
    if (const char * wrong = check_run(*run)) {
        return wrong;
    }
    context_ptr   ctx   = make_context(run->n_layers);
    ggml_cgraph * graph = ggml_new_graph(ctx.get());

    ggml_tensor * q = wrap(ctx.get(), GGML_TYPE_F32, {op->d_k, op->n_head, op->n_tokens}, op->q);
    set_strides(q, op->q_head_stride, op->q_token_stride);
    ggml_tensor * table = wrap(ctx.get(), GGML_TYPE_I32, {GGML_PAGED_ATTN_HEADER + op->width, op->n_rows}, op->table);
    ggml_tensor * sinks = op->sinks ? wrap(ctx.get(), GGML_TYPE_F32, {op->n_head}, op->sinks) : nullptr;

    const ggml_paged_attn_params params = {op->scale,  op->max_bias,    op->softcap, op->block_size,
                                           op->window, op->window_type, op->flags};
    for (int32_t layer = 0; layer < run->n_layers; ++layer) {
        ggml_tensor * k = wrap(ctx.get(), (ggml_type) op->type_k, {op->d_k, op->n_head_kv, op->n_slots},
                               layer_of(op->k, *run, layer));
        set_strides(k, op->k_head_stride, op->k_slot_stride);
        ggml_tensor * v = op->v
                              ? wrap(ctx.get(), (ggml_type) op->type_v, {op->d_v, op->n_head_kv, op->n_slots},
                                     layer_of(op->v, *run, layer))
                              : ggml_view_3d(ctx.get(), k, op->d_v, op->n_head_kv, op->n_slots, k->nb[1], k->nb[2], 0);
        if (op->v) {
            set_strides(v, op->v_head_stride, op->v_slot_stride);
        }
        if (const char * wrong = ggml_paged_attn_check(q, k, v, table, sinks, &params)) {
            return wrong;
        }
        ggml_tensor * out = ggml_paged_attn(ctx.get(), q, k, v, table, sinks, params);
        out->data         = op->out;
        ggml_build_forward_expand(graph, out);
    }
    compute(graph, *run);
    return nullptr;
}

const char * lab_flash_attn(const lab_flash * op, const lab_run * run) {
    if (const char * wrong = check_run(*run)) {
        return wrong;
    }
    context_ptr    owner = make_context(run->n_layers);
    ggml_context * ctx   = owner.get();
    ggml_cgraph *  graph = ggml_new_graph(ctx);

    ggml_tensor * q    = wrap(ctx, GGML_TYPE_F32, {op->d_k, op->n_head, op->n_q, op->n_seqs}, op->q);
    ggml_tensor * mask = wrap(ctx, GGML_TYPE_F16, {op->n_kv, op->n_q, 1, op->n_seqs}, op->mask);
    q                  = ggml_permute(ctx, q, 0, 2, 1, 3);
    for (int32_t layer = 0; layer < run->n_layers; ++layer) {
        ggml_tensor * k = wrap(ctx, (ggml_type) op->type_k, {op->d_k, op->n_head_kv, op->n_kv, op->n_seqs},
                               layer_of(op->k, *run, layer));
        ggml_tensor * v =
            op->v ? wrap(ctx, (ggml_type) op->type_v, {op->d_v, op->n_head_kv, op->n_kv, op->n_seqs},
                         layer_of(op->v, *run, layer))
                  : ggml_view_4d(ctx, k, op->d_v, op->n_head_kv, op->n_kv, op->n_seqs, k->nb[1], k->nb[2], k->nb[3], 0);
        ggml_tensor * out =
            ggml_flash_attn_ext(ctx, q, ggml_permute(ctx, k, 0, 2, 1, 3), ggml_permute(ctx, v, 0, 2, 1, 3), mask,
                                op->scale, op->max_bias, op->softcap);
        ggml_prec_set_acc(out, GGML_PREC_F32);
        if (op->sinks) {
            ggml_flash_attn_ext_add_sinks(out, wrap(ctx, GGML_TYPE_F32, {op->n_head}, op->sinks));
        }
        out->data = op->out;
        ggml_build_forward_expand(graph, out);
    }
    compute(graph, *run);
    return nullptr;
}

void lab_find_shared(int32_t * table, int64_t n_rows, int64_t width, int32_t block_size) {
    ggml_paged_attn_find_shared(table, n_rows, GGML_PAGED_ATTN_HEADER + width, block_size);
}

const char * lab_quantize(int32_t type, const float * from, void * to, int64_t n_rows, int64_t n) {
    if (!is_type(type) || n % ggml_blck_size((ggml_type) type) != 0) {
        return "no such type, or a row is not a whole number of its groups";
    }
    ggml_quantize_chunk((ggml_type) type, from, to, 0, n_rows, n, nullptr);
    return nullptr;
}

const char * lab_dequantize(int32_t type, const void * from, float * to, int64_t n_rows, int64_t n) {
    if (!is_type(type) || n % ggml_blck_size((ggml_type) type) != 0) {
        return "no such type, or a row is not a whole number of its groups";
    }
    if (type == GGML_TYPE_F32) {
        memcpy(to, from, n_rows * n * sizeof(float));
    } else {
        ggml_get_type_traits((ggml_type) type)->to_float(from, to, n_rows * n);
    }
    return nullptr;
}

int64_t lab_row_size(int32_t type, int64_t n) {
    return is_type(type) && n % ggml_blck_size((ggml_type) type) == 0 ? (int64_t) ggml_row_size((ggml_type) type, n)
                                                                      : -1;
}

const char * lab_type_name(int32_t type) { return is_type(type) ? ggml_type_name((ggml_type) type) : nullptr; }

double lab_read_rate(const void * data, int64_t bytes, int32_t n_threads, int32_t n_streams) {
    constexpr int64_t        line = 8;
    std::vector<std::thread> threads;
    std::vector<uint64_t>    sums(n_threads * line);
    const int64_t words = bytes / (int64_t) sizeof(uint64_t) / n_threads / n_streams / line * line; // of one range
    const auto    start = std::chrono::steady_clock::now();
    for (int32_t i = 0; i < n_threads; ++i) {
        threads.emplace_back([=, &sums] {
            const uint64_t * first     = (const uint64_t *) data + i * words * n_streams;
            uint64_t         sum[line] = {};
            for (int64_t w = 0; w < words; w += line) {
                for (int32_t stream = 0; stream < n_streams; ++stream) {
                    for (int64_t l = 0; l < line; ++l) {
                        sum[l] += first[stream * words + w + l];
                    }
                }
            }
            for (uint64_t s : sum) {
                sums[i * line] += s;
            }
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
    const double      seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    volatile uint64_t keep    = sums[0]; // using the sums keeps the compiler from dropping them
    (void) keep;
    return words * n_streams * n_threads * sizeof(uint64_t) / seconds;
}
