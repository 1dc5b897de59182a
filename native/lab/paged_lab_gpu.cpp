// The GPU kernels on the host, with fibers as threads.
#include "lab_gpu.h"

#include "paged-attn.h"
#include "paged-launch.h"

#include <atomic>
#include <cmath>
#include <string>
#include <vector>

namespace {

struct host_launcher {
    int                            n_blocks;
    std::vector<gpu::memory_range> inputs; // results of the kernels before
    gpu::memory_range              partial;

    template <paged::division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
    void attend(const paged::params & p, paged::row_range of, int tokens, int bytes) {
        std::vector<char> memory(bytes + 16);
        char *            aligned = memory.data() + (16 - (uintptr_t) memory.data() % 16) % 16;
        gpu::launch(n_blocks, paged::kernel_threads<BY, M_TILES, V_TILES, KNumbers, VNumbers>, aligned, (size_t) bytes,
                    inputs,
                    [&] { paged::attend_block<BY, M_TILES, V_TILES, KNumbers, VNumbers>(p, of, tokens, aligned); });
    }
    void merge(const paged::params & p) {
        gpu::launch(n_blocks, 32 * paged::MERGE_WARPS, nullptr, 0, {partial}, [&] { paged::merge_block(p); });
    }
    int  multiprocessors() const { return n_blocks; }
    bool has_all_kernels() const { return true; }

    template <class Which> bool attend_with(const paged::params & p, int shared_bytes) {
        return paged::launch_which<Which>(p, shared_bytes, *this);
    }
};

// Records the launches.
struct listing_launcher {
    lab_gpu_launch * to;
    int              n = 0;

    template <paged::division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
    void attend(const paged::params &, paged::row_range of, int tokens, int bytes) {
        constexpr int rows = paged::kernel_of<BY, M_TILES, V_TILES, KNumbers, VNumbers>::work::ROWS;
        to[n++] = {of.min, of.max, BY, rows, 16 * V_TILES * (BY == paged::BY_COLUMNS ? paged::n_warps(BY, rows) : 1),
                   tokens, bytes};
    }
    void merge(const paged::params &) {}
    int  multiprocessors() const { return 1; }
    bool has_all_kernels() const { return true; }

    template <class Which> bool attend_with(const paged::params & p, int shared_bytes) {
        return paged::launch_which<Which>(p, shared_bytes, *this);
    }
};

int row_bytes(int type, int64_t d) { return (int) (d / 32.0 * paged::group_bytes(type)); }

paged::params params_of(const lab_paged * op) {
    const int     k_row = row_bytes(op->type_k, op->d_k), v_row = row_bytes(op->type_v, op->d_v);
    paged::params p  = {};
    p.q              = (const char *) op->q;
    p.q_head_stride  = op->q_head_stride ? op->q_head_stride : op->d_k * 4;
    p.q_token_stride = op->q_token_stride ? op->q_token_stride : op->n_head * op->d_k * 4;
    p.k      = paged::make_pages(op->k, op->k_head_stride ? op->k_head_stride : k_row,
                                 op->k_slot_stride ? op->k_slot_stride : k_row * op->n_head_kv, op->type_k, k_row);
    p.v_is_k = op->v == nullptr;
    p.v     = p.v_is_k
                  ? p.k
                  : paged::make_pages(op->v, op->v_head_stride ? op->v_head_stride : v_row,
                                      op->v_slot_stride ? op->v_slot_stride : v_row * op->n_head_kv, op->type_v, v_row);
    p.table = op->table;
    p.table_stride = paged::ROW_HEADER + op->width;
    p.sinks        = op->sinks;
    p.out          = op->out;
    p.d_k = op->d_k, p.d_v = op->d_v, p.n_head = op->n_head, p.n_head_kv = op->n_head_kv;
    p.group = p.n_head / p.n_head_kv, p.n_tokens = op->n_tokens;
    p.n_rows = p.end_row = op->n_rows;
    p.window = op->window, p.window_type = op->window_type;
    p.scale = op->scale, p.softcap = op->softcap;
    // GGML_PAGED_ATTN_FAST, _SINGLE, _PREFIXES
    p.fast = (op->flags & 2) != 0, p.single = (op->flags & 4) != 0, p.prefixes = (op->flags & 8) != 0;
    paged::set_block_size(p, op->block_size);
    paged::set_bias(p, op->max_bias);
    return p;
}

// Return the table of a call with the plan for its heads and parameters.
std::vector<int32_t> planned_table(const lab_paged * op) {
    const int64_t                stride = paged::ROW_HEADER + op->width;
    const ggml_paged_attn_params params = {op->scale,  op->max_bias,    op->softcap, op->block_size,
                                           op->window, op->window_type, op->flags};
    std::vector<int32_t>         table(op->table, op->table + op->n_rows * stride);
    ggml_paged_attn_plan(table.data(), op->n_rows, stride, op->n_head / op->n_head_kv, &params);
    return table;
}

constexpr int64_t MOST_HIDDEN = 1 << 20; // bytes of K or V: copies of large ones would take longer than kernels

// Return the memory of queries, K and V.
std::vector<gpu::memory_range> inputs_of(const lab_paged * op, const paged::params & p) {
    const auto bytes_of = [&](const paged::pages & x) {
        return (op->n_slots - 1) * x.slot_stride + (p.n_head_kv - 1) * x.head_stride + x.row_bytes;
    };
    const int64_t q_bytes = (p.n_tokens - 1) * p.q_token_stride + (p.n_head - 1) * p.q_head_stride + p.d_k * 4;
    std::vector<gpu::memory_range> found = {{const_cast<char *>(p.q), q_bytes}};
    for (const paged::pages * x : {&p.k, &p.v}) {
        if (bytes_of(*x) <= MOST_HIDDEN && !(p.v_is_k && x == &p.v)) {
            found.push_back({const_cast<char *>(x->data), bytes_of(*x)});
        }
    }
    return found;
}

// Compute a call with the plan that its table has. Return null or an error.
const char * run(const lab_paged * op, paged::params p, int n_blocks, int shared_bytes, int64_t workspace_bytes) {
    if (const char * why = paged::refusal(p, shared_bytes)) {
        return why;
    }
    static thread_local std::string error;
    const paged::workspace          work = paged::workspace_of(p, op->width, workspace_bytes);
    std::vector<float>              partial(work.bytes / sizeof(float), NAN);
    host_launcher                   launcher = {n_blocks, inputs_of(op, p), {partial.data(), work.bytes}};
    p.partial                                = partial.data();
    try {
        paged::launch(p, work.rows, shared_bytes, launcher);
    } catch (const std::logic_error & e) {
        gpu::reveal();
        error = e.what();
        return error.c_str();
    }
    return nullptr;
}

// Write the items of a kernel whose tiles have so many rows. Return the number of all.
template <int TILE_ROWS>
int32_t list_items(const paged::params & p, paged::row_range of, int n_blocks, lab_gpu_item * to, int32_t capacity) {
    const paged::attend_plan<TILE_ROWS> plan(p, of, n_blocks);
    for (int row = 0; row < p.n_rows; ++row) {
        const int begin = plan.items_before(row), end = plan.items_before(row + 1);
        for (int i = begin; i < end && i < capacity; ++i) {
            const paged::work_item item = paged::item_of(plan, row, i - begin);
            to[i]                       = {item.row,
                                           item.tile,
                                           item.head_kv,
                                           item.split,
                                           item.n_splits,
                                           item.members,
                                           (int) paged::partials_before(p, row),
                                           item.tokens.begin,
                                           item.tokens.end};
        }
    }
    return plan.items_before(p.n_rows);
}

} // namespace

const char * lab_paged_attn_gpu(const lab_paged * op, int32_t n_blocks, int32_t shared_bytes, int64_t workspace_bytes,
                                bool tensor_cores, int32_t order) {
    const std::vector<int32_t> table = planned_table(op);
    paged::params              p     = params_of(op);
    p.table                          = table.data();
    gpu::tensor_cores                = tensor_cores;
    gpu::order                       = order;
    return run(op, p, n_blocks, shared_bytes, workspace_bytes);
}

const char * lab_paged_attn_emulated(const lab_paged * op) {
    static std::atomic<int32_t> n_calls{0};
    gpu::tensor_cores = true;
    gpu::order        = ++n_calls;
    return run(op, params_of(op), 264, 227 << 10, paged::WORKSPACE_BYTES);
}

const char * lab_gpu_refusal(const lab_paged * op, int32_t shared_bytes) {
    return paged::refusal(params_of(op), shared_bytes);
}

int32_t lab_gpu_launches(const lab_paged * op, int32_t shared_bytes, lab_gpu_launch * to) {
    listing_launcher launcher = {to};
    paged::launch_part(params_of(op), shared_bytes, launcher);
    return launcher.n;
}

int64_t lab_gpu_max_partials(const lab_paged * op) {
    return paged::max_partials(op->n_tokens, op->n_rows, op->n_head, op->width * op->block_size);
}

int32_t lab_gpu_items(const lab_paged * op, const lab_gpu_launch * kernel, int32_t n_blocks, lab_gpu_item * to,
                      int32_t capacity) {
    const std::vector<int32_t> table = planned_table(op);
    const paged::row_range     of    = {kernel->min_rows, kernel->max_rows};
    paged::params              p     = params_of(op);
    p.table                          = table.data();
    switch (kernel->tile_rows) {
    case 8:
        return list_items<8>(p, of, n_blocks, to, capacity);
    case 16:
        return list_items<16>(p, of, n_blocks, to, capacity);
    case 64:
        return list_items<64>(p, of, n_blocks, to, capacity);
    default:
        return list_items<128>(p, of, n_blocks, to, capacity);
    }
}
