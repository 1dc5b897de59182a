// The operator on any device, without a model: velo-op-bench DEVICE check|decode|prefill|copy ...
// Every line on standard output is one JSON object.
//   check [quick]                     against the CPU's reference, with NaN in every slot that no table names
//   decode TYPE SEQUENCES LENGTH [paged|flash]    a token for each sequence; flash: upstream's, contiguous
//   prefill TYPE LENGTH [paged|flash]             one sequence from its first token
//   copy                              what the device's memory gives, read and written
// or velo-op-bench devices: the devices there are
#include "paged-attn.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using bytes = std::vector<uint8_t>;

constexpr int BLOCK = 32, ROUNDS = 7;

struct shape {
    ggml_type                       type;
    int64_t                         d_k, d_v, heads, heads_kv;
    std::vector<std::array<int, 2>> sequences; // query rows, length
};

const std::vector<std::pair<const char *, ggml_type>> TYPES = {
    {"f32", GGML_TYPE_F32},   {"f16", GGML_TYPE_F16},   {"bf16", GGML_TYPE_BF16},
    {"q8_0", GGML_TYPE_Q8_0}, {"q5_1", GGML_TYPE_Q5_1}, {"q5_0", GGML_TYPE_Q5_0},
    {"q4_1", GGML_TYPE_Q4_1}, {"q4_0", GGML_TYPE_Q4_0}, {"iq4_nl", GGML_TYPE_IQ4_NL},
};

ggml_type type_named(const std::string & name) {
    for (const auto & [known, type] : TYPES) {
        if (name == known) {
            return type;
        }
    }
    throw std::runtime_error("there is no KV type " + name);
}

int blocks_of(int tokens) { return (tokens + BLOCK - 1) / BLOCK; }

bytes rows_of(ggml_type type, int64_t n, std::mt19937 & random) {
    std::vector<float>                    values((size_t) n);
    std::uniform_real_distribution<float> draw(-1, 1);
    for (float & value : values) {
        value = draw(random);
    }
    bytes out(ggml_row_size(type, n));
    ggml_quantize_chunk(type, values.data(), out.data(), 0, 1, n, nullptr);
    return out;
}

// ---- one call of the operator, as bytes ----

struct call {
    shape                s;
    int64_t              n_tokens = 0, n_slots = 0, width = 1, rows = 0;
    bytes                q, k, v;
    std::vector<int32_t> table;

    bool latent() const { return s.d_k > 256; } // V is a view of K
};

void fill(bytes & to, const bytes & pattern, size_t size) {
    to.resize(size);
    for (size_t at = 0; at < size; at += pattern.size()) {
        memcpy(to.data() + at, pattern.data(), std::min(pattern.size(), size - at));
    }
}

// Blocks are shuffled; `poison` leaves NaN wherever no token of a sequence lies.
call make_call(const shape & s, bool poison, bool repeat) {
    std::mt19937 random(1);
    call         c;
    int          n_blocks = 3;
    c.s                   = s;
    for (const auto & [rows, length] : s.sequences) {
        c.n_tokens += rows;
        n_blocks += blocks_of(length);
        c.width = std::max<int64_t>(c.width, blocks_of(length));
    }
    n_blocks += n_blocks % 2;
    c.n_slots           = (int64_t) n_blocks * BLOCK;
    c.rows              = (int64_t) s.sequences.size() + 1; // one of no sequence
    const size_t  row_k = ggml_row_size(s.type, s.d_k * s.heads_kv), row_v = ggml_row_size(s.type, s.d_v * s.heads_kv);
    const int64_t drawn = repeat ? std::min<int64_t>(c.n_slots, 1024) : c.n_slots;
    fill(c.q, rows_of(GGML_TYPE_F32, s.d_k * s.heads * std::min<int64_t>(c.n_tokens, 256), random),
         (size_t) (s.d_k * s.heads * c.n_tokens) * 4);
    fill(c.k, rows_of(s.type, drawn * s.d_k * s.heads_kv, random), row_k * c.n_slots);
    fill(c.v, rows_of(s.type, drawn * s.d_v * s.heads_kv, random), row_v * c.n_slots);

    std::vector<int> order(n_blocks);
    for (int i = 0; i < n_blocks; ++i) {
        order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), random);
    std::vector<bool> named(c.n_slots);
    const int64_t     stride = GGML_PAGED_ATTN_HEADER + c.width;
    c.table.assign(c.rows * stride, -1);
    memset(&c.table[(c.rows - 1) * stride], 0, GGML_PAGED_ATTN_HEADER * sizeof(int32_t));
    int next = 0, q0 = 0;
    for (size_t i = 0; i < s.sequences.size(); ++i) {
        const auto [rows, length]   = s.sequences[i];
        int32_t * row               = &c.table[i * stride];
        row[GGML_PAGED_ATTN_Q0]     = q0;
        row[GGML_PAGED_ATTN_NQ]     = rows;
        row[GGML_PAGED_ATTN_KV]     = length;
        row[GGML_PAGED_ATTN_SHARED] = 0;
        for (int t = 0; t < length; ++t) {
            if (t % BLOCK == 0) {
                row[GGML_PAGED_ATTN_HEADER + t / BLOCK] = order[next++];
            }
            named[(size_t) row[GGML_PAGED_ATTN_HEADER + t / BLOCK] * BLOCK + t % BLOCK] = true;
        }
        q0 += rows;
    }
    for (int64_t slot = 0; poison && slot < c.n_slots; ++slot) {
        if (!named[slot]) {
            memset(&c.k[slot * row_k], 0xff, row_k);
            memset(&c.v[slot * row_v], 0xff, row_v);
        }
    }
    return c;
}

// ---- graphs ----

struct graph {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_cgraph *           nodes = nullptr;
    ggml_tensor *           out   = nullptr;
};

graph begin_graph() {
    ggml_init_params params = {64 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true};
    graph            g{ggml_context_ptr(ggml_init(params)), nullptr};
    g.nodes = ggml_new_graph(g.ctx.get());
    return g;
}

void finish_graph(graph & g, ggml_backend_t backend) {
    if (!ggml_backend_supports_op(backend, g.out)) {
        throw std::runtime_error("the device does not take this operation");
    }
    g.buffer.reset(ggml_backend_alloc_ctx_tensors(g.ctx.get(), backend));
    if (!g.buffer) {
        throw std::runtime_error("the device has no memory for this");
    }
}

void set(ggml_tensor * t, const void * data, size_t size) {
    if (size != ggml_nbytes(t)) {
        throw std::logic_error("a tensor of another size");
    }
    ggml_backend_tensor_set(t, data, 0, size);
}

graph paged_graph(const call & c, ggml_backend_t backend, int repeat) {
    graph         g     = begin_graph();
    auto *        ctx   = g.ctx.get();
    ggml_tensor * q     = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.s.d_k, c.s.heads, c.n_tokens);
    ggml_tensor * k     = ggml_new_tensor_3d(ctx, c.s.type, c.s.d_k, c.s.heads_kv, c.n_slots);
    ggml_tensor * v     = c.latent() ? ggml_view_3d(ctx, k, c.s.d_v, c.s.heads_kv, c.n_slots, k->nb[1], k->nb[2], 0)
                                     : ggml_new_tensor_3d(ctx, c.s.type, c.s.d_v, c.s.heads_kv, c.n_slots);
    ggml_tensor * table = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, GGML_PAGED_ATTN_HEADER + c.width, c.rows);
    const ggml_paged_attn_params params = {1.0f / sqrtf((float) c.s.d_k), 0, 0, BLOCK, 0, 0, 0};
    if (const char * why = ggml_paged_attn_check(q, k, v, table, nullptr, &params)) {
        throw std::runtime_error(why);
    }
    for (int i = 0; i < repeat; ++i) {
        g.out = ggml_paged_attn(ctx, q, k, v, table, nullptr, params);
        ggml_build_forward_expand(g.nodes, g.out);
    }
    finish_graph(g, backend);
    set(q, c.q.data(), c.q.size());
    set(k, c.k.data(), c.k.size());
    if (!c.latent()) {
        set(v, c.v.data(), c.v.size());
    }
    set(table, c.table.data(), c.table.size() * sizeof(int32_t));
    return g;
}

// The same sequences, all of one length, each contiguous; a mask only where rows of a sequence see different tokens.
graph flash_graph(const call & c, ggml_backend_t backend, int repeat) {
    graph         g   = begin_graph();
    auto *        ctx = g.ctx.get();
    const int64_t n = (int64_t) c.s.sequences.size(), rows = c.s.sequences[0][0], length = c.s.sequences[0][1];
    ggml_tensor * q    = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, c.s.d_k, rows, c.s.heads, n);
    ggml_tensor * k    = ggml_new_tensor_4d(ctx, c.s.type, c.s.d_k, length, c.s.heads_kv, n);
    ggml_tensor * v    = ggml_new_tensor_4d(ctx, c.s.type, c.s.d_v, length, c.s.heads_kv, n);
    ggml_tensor * mask = rows > 1 ? ggml_new_tensor_2d(ctx, GGML_TYPE_F16, length, rows) : nullptr;
    for (int i = 0; i < repeat; ++i) {
        g.out = ggml_flash_attn_ext(ctx, q, k, v, mask, 1.0f / sqrtf((float) c.s.d_k), 0, 0);
        ggml_build_forward_expand(g.nodes, g.out);
    }
    finish_graph(g, backend);
    set(q, c.q.data(), c.q.size());
    set(k, c.k.data(), ggml_nbytes(k));
    set(v, c.v.data(), ggml_nbytes(v));
    if (mask) {
        std::vector<ggml_fp16_t> seen((size_t) (length * rows));
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t t = 0; t < length; ++t) {
                seen[r * length + t] = ggml_fp32_to_fp16(t <= length - rows + r ? 0.0f : -INFINITY);
            }
        }
        set(mask, seen.data(), seen.size() * sizeof(ggml_fp16_t));
    }
    return g;
}

std::vector<float> result_of(const graph & g, ggml_backend_t backend) {
    if (ggml_backend_graph_compute(backend, g.nodes) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("the device could not compute");
    }
    std::vector<float> out((size_t) ggml_nelements(g.out));
    ggml_backend_tensor_get(g.out, out.data(), 0, out.size() * sizeof(float));
    return out;
}

// Median seconds of one of the `repeat` operations of a graph.
double seconds_of(const graph & g, ggml_backend_t backend, int repeat) {
    std::vector<double> taken;
    for (int i = -2; i < ROUNDS; ++i) { // the first two warm up
        const auto start = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend, g.nodes) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("the device could not compute");
        }
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
        if (i >= 0) {
            taken.push_back(passed.count() / repeat);
        }
    }
    std::nth_element(taken.begin(), taken.begin() + ROUNDS / 2, taken.end());
    return taken[ROUNDS / 2];
}

// ---- commands ----

double nmse(const std::vector<float> & found, const std::vector<float> & expected) {
    double error = 0, size = 0;
    for (size_t i = 0; i < found.size(); ++i) {
        error += std::pow((double) found[i] - expected[i], 2);
        size += std::pow((double) expected[i], 2);
    }
    return error / size; // NaN where there is one
}

// Writes what is left of the line; an error that is no number shows as null.
bool check_one(ggml_backend_t backend, ggml_backend_t cpu, const shape & s) {
    const call c = make_call(s, true, false);
    try {
        const double error =
            nmse(result_of(paged_graph(c, backend, 1), backend), result_of(paged_graph(c, cpu, 1), cpu));
        printf(std::isfinite(error) ? "\"nmse\": %.3g}\n" : "\"nmse\": null}\n", error);
        return error <= 5e-4;
    } catch (const std::runtime_error & refusal) {
        printf("\"refusal\": \"%s\"}\n", refusal.what());
        return false;
    }
}

bool check(ggml_backend_t backend, bool quick) {
    const std::vector<std::array<int, 2>>     ragged = {{1, 1},  {7, 7},  {1, 133}, {33, 100}, {0, 64},
                                                        {5, 97}, {1, 64}, {1, 700}, {66, 130}, {17, 17}};
    const std::vector<std::array<int, 2>>     brief  = {{1, 33}, {5, 40}, {20, 20}};
    const std::vector<std::array<int64_t, 4>> heads =
        quick ? std::vector<std::array<int64_t, 4>>{{64, 64, 4, 2}, {128, 128, 8, 1}}
              : std::vector<std::array<int64_t, 4>>{{64, 64, 8, 8},     {64, 64, 8, 1},   {96, 96, 12, 4},
                                                    {128, 128, 32, 8},  {128, 128, 8, 8}, {128, 128, 14, 2},
                                                    {192, 128, 16, 16}, {256, 256, 8, 4}, {576, 512, 16, 1}};
    ggml_backend_ptr cpu(ggml_backend_cpu_init());
    ggml_backend_cpu_set_use_ref(cpu.get(), true);
    bool right = true;
    for (const auto & [name, type] : TYPES) {
        for (const auto & h : heads) {
            printf("{\"check\": \"%s %lldx%lld %lld/%lld\", ", name, (long long) h[0], (long long) h[1],
                   (long long) h[2], (long long) h[3]);
            right = check_one(backend, cpu.get(), {type, h[0], h[1], h[2], h[3], quick ? brief : ragged}) && right;
            fflush(stdout);
        }
    }
    return right;
}

void bench(ggml_backend_t backend, const char * what, const std::string & type, int n, int rows, int length,
           bool flash) {
    const call c = make_call(
        {type_named(type), 128, 128, 32, 8, std::vector<std::array<int, 2>>((size_t) n, {rows, length})}, false, true);
    const int    repeat = rows > 1 ? 2 : 8;
    const graph  g      = flash ? flash_graph(c, backend, repeat) : paged_graph(c, backend, repeat);
    const double s      = seconds_of(g, backend, repeat);
    const double read   = 2.0 * (double) ggml_row_size(c.s.type, 128 * 8) * n * length;
    printf("{\"bench\": \"%s\", \"kernel\": \"%s\", \"type\": \"%s\", \"sequences\": %d, \"length\": %d, "
           "\"seconds\": %.9g, \"kv_bytes\": %.0f}\n",
           what, flash ? "flash" : "paged", type.c_str(), n, length, s, read);
}

void copy(ggml_backend_t backend, int64_t size) {
    graph         g    = begin_graph();
    ggml_tensor * from = ggml_new_tensor_1d(g.ctx.get(), GGML_TYPE_F32, size / 4);
    ggml_tensor * to   = ggml_new_tensor_1d(g.ctx.get(), GGML_TYPE_F32, size / 4);
    for (int i = 0; i < 8; ++i) {
        g.out = ggml_cpy(g.ctx.get(), from, to);
        ggml_build_forward_expand(g.nodes, g.out);
    }
    finish_graph(g, backend);
    ggml_backend_buffer_clear(g.buffer.get(), 0);
    printf("{\"bench\": \"copy\", \"bytes\": %lld, \"seconds\": %.9g}\n", (long long) size, seconds_of(g, backend, 8));
}

int list_devices() {
    const char * kinds[] = {"cpu", "gpu", "igpu", "accelerator", "meta"};
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        const ggml_backend_dev_t device = ggml_backend_dev_get(i);
        size_t                   free = 0, total = 0;
        ggml_backend_dev_memory(device, &free, &total);
        printf("{\"name\": \"%s\", \"description\": \"%s\", \"kind\": \"%s\", \"memory_total\": %zu, "
               "\"memory_free\": %zu}\n",
               ggml_backend_dev_name(device), ggml_backend_dev_description(device),
               kinds[ggml_backend_dev_type(device)], total, free);
    }
    return 0;
}

int run(const std::vector<std::string> & args) {
    const auto at = [&](size_t i) { return i < args.size() ? args[i] : std::string(); };
    if (args.size() == 1 && args[0] == "devices") {
        return list_devices();
    }
    if (args.size() < 2) {
        throw std::runtime_error("usage: velo-op-bench DEVICE check|decode|prefill|copy ...");
    }
    ggml_backend_ptr backend(ggml_backend_init_by_name(args[0].c_str(), nullptr));
    if (!backend) {
        throw std::runtime_error("there is no device " + args[0]);
    }
    if (at(1) == "check") {
        return check(backend.get(), at(2) == "quick") ? 0 : 1;
    }
    if (at(1) == "decode") {
        bench(backend.get(), "decode", at(2), std::stoi(at(3)), 1, std::stoi(at(4)), at(5) == "flash");
    } else if (at(1) == "prefill") {
        bench(backend.get(), "prefill", at(2), 1, std::stoi(at(3)), std::stoi(at(3)), at(4) == "flash");
    } else if (at(1) == "copy") {
        copy(backend.get(), at(2).empty() ? 1 << 30 : std::stoll(at(2)));
    } else {
        throw std::runtime_error("there is no command " + at(1));
    }
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    ggml_backend_load_all();
    try {
        return run(std::vector<std::string>(argv + 1, argv + argc));
    } catch (const std::exception & error) {
        fprintf(stderr, "velo-op-bench: %s\n", error.what());
        return 2;
    }
}
