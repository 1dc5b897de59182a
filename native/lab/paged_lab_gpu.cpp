// The GPU kernels on the host, with fibers as threads.
#include "lab_gpu.h"

#include "paged-launch.h"

#include <atomic>
#include <cmath>
#include <vector>

namespace {

struct host_launcher {
    int n_blocks;

    template <paged::division BY, int M_TILES, int V_TILES, class KNumbers, class VNumbers>
    void attend(const paged::params & p, paged::row_range of, int tokens, int bytes) {
        std::vector<char> memory(bytes + 16);
        char *            aligned = memory.data() + (16 - (uintptr_t) memory.data() % 16) % 16;
        gpu::launch(n_blocks, paged::N_THREADS, aligned, (size_t) bytes,
                    [&] { paged::attend_block<BY, M_TILES, V_TILES, KNumbers, VNumbers>(p, of, tokens, aligned); });
    }
    void merge(const paged::params & p, int bytes) {
        std::vector<char> memory(bytes);
        gpu::launch(n_blocks, paged::N_THREADS, memory.data(), memory.size(),
                    [&] { paged::merge_block(p, memory.data()); });
    }
    int multiprocessors() const { return n_blocks; }

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
        to[n++] = {of.min, of.max, BY, rows, 16 * V_TILES * (BY == paged::BY_COLUMNS ? 4 : 1), tokens, bytes};
    }
    void merge(const paged::params &, int bytes) { to[n++] = {0, 0, 0, 0, 0, 0, bytes}; }
    int  multiprocessors() const { return 1; }

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
    p.group = p.n_head / p.n_head_kv, p.n_tokens = op->n_tokens, p.n_rows = op->n_rows;
    p.window = op->window, p.window_type = op->window_type;
    p.scale = op->scale, p.softcap = op->softcap;
    // GGML_PAGED_ATTN_FAST, _SINGLE, _PREFIXES
    p.fast = (op->flags & 2) != 0, p.single = (op->flags & 4) != 0, p.prefixes = (op->flags & 8) != 0;
    paged::set_block_size(p, op->block_size);
    paged::set_bias(p, op->max_bias);
    return p;
}

} // namespace

const char * lab_paged_attn_gpu(const lab_paged * op, int32_t n_blocks, int32_t shared_bytes, int64_t workspace_bytes,
                                bool tensor_cores, int32_t order) {
    paged::params p = params_of(op);
    if (const char * why = paged::refusal(p, shared_bytes)) {
        return why;
    }
    const paged::workspace work = paged::workspace_of(p, op->width, workspace_bytes);
    std::vector<float>     partial(work.bytes / sizeof(float), NAN);
    p.partial              = partial.data();
    gpu::tensor_cores      = tensor_cores;
    gpu::order             = order;
    host_launcher launcher = {n_blocks};
    try {
        paged::launch(p, work.rows, shared_bytes, launcher);
    } catch (const std::logic_error &) {
        return "a thread waits at a barrier that other threads never reach";
    }
    return nullptr;
}

const char * lab_paged_attn_emulated(const lab_paged * op) {
    static std::atomic<int32_t> n_calls{0};
    return lab_paged_attn_gpu(op, 264, 227 << 10, paged::WORKSPACE_BYTES, true, ++n_calls);
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
    const paged::params     p    = params_of(op);
    paged::attend_plan      plan = {p, {kernel->min_rows, kernel->max_rows}, kernel->tile_rows, false};
    int                     ints[paged::START_INTS];
    const paged::row_starts starts = paged::starts_in(p, ints);
    gpu::launch(1, paged::N_THREADS, ints, sizeof(ints), [&] {
        paged::attend_plan own = plan; // each thread has its own
        paged::plan_items(own, n_blocks, starts);
        gpu::sync_block();
        plan.share_prefixes = own.share_prefixes;
    });
    const int n = starts.items[starts.n];
    for (int i = 0; i < n && i < capacity; ++i) {
        const paged::work_item item = paged::item_of(p, plan, starts, i);
        to[i]                       = {item.row,     item.tile,     item.head_kv,      item.split,     item.n_splits,
                                       item.members, item.partials, item.tokens.begin, item.tokens.end};
    }
    return n;
}
