// Check and measure the operator on any device, without a model.
//   velo-op-bench DEVICE check|decode|prefill|chunk|copy|series ...
// Every line on standard output is one JSON object.
//   check [quick]                     compare with the CPU's reference, with NaN in every slot that is in no table
//   decode TYPE SEQUENCES LENGTH [paged|flash|shared]    one token of each sequence
//   prefill TYPE LENGTH [paged|flash|gathered]           one sequence from its first token
//   chunk TYPE ROWS LENGTH [paged|flash|gathered]        the last rows of one sequence
//   copy [BYTES]                      bandwidth of the device's memory, read and written
//   series LINE...                    several commands, each one argument
//   velo-op-bench devices             list the devices
// Kernels: paged (our operator), flash (upstream's, contiguous), shared (ours, with all blocks but the last shared),
// gathered (copy the blocks to a contiguous buffer, then upstream's).
#include "device_timer.h"
#include "op_call.h"
#include "paged-attn.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int WARM_UP = 3, ROUNDS = 11;

ggml_type type_named(const std::string & name) {
    for (const auto & [known, type] : op_types()) {
        if (name == known) {
            return type;
        }
    }
    throw std::runtime_error("there is no KV type " + name);
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

graph paged_graph(const call & c, ggml_backend_t backend, int n_layers) {
    graph         g     = begin_graph();
    auto *        ctx   = g.ctx.get();
    ggml_tensor * q     = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.s.d_k, c.s.heads, c.n_tokens);
    ggml_tensor * table = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, GGML_PAGED_ATTN_HEADER + c.width, c.rows);
    const ggml_paged_attn_params params = {1.0f / sqrtf((float) c.s.d_k), 0, 0, BLOCK, 0, 0, 0};
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

// Contiguous sequences of one length, with a mask as in llama.cpp: without a mask, upstream's kernels do not share a
// read of K and V among the heads of a group.
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

// One paged sequence, copied for upstream's kernel, to measure the cost and the length from which it is faster. A
// gather kernel of our own would need no floats in between.
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

std::vector<float> result_of(const graph & g, ggml_backend_t backend) {
    if (ggml_backend_graph_compute(backend, g.nodes) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("the device could not compute");
    }
    std::vector<float> out((size_t) ggml_nelements(g.out));
    ggml_backend_tensor_get(g.out, out.data(), 0, out.size() * sizeof(float));
    return out;
}

struct timing {
    double       seconds; // of one operation of the graph, median of the rounds
    const char * clock;
};

timing time_of(const graph & g, ggml_backend_t backend, int n_operations) {
    const auto          timer = make_device_timer(backend);
    std::vector<double> taken;
    for (int i = -WARM_UP; i < ROUNDS; ++i) {
        timer->start();
        if (ggml_backend_graph_compute_async(backend, g.nodes) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("the device could not compute");
        }
        const double seconds = timer->stop();
        if (i >= 0) {
            taken.push_back(seconds / n_operations);
        }
    }
    std::nth_element(taken.begin(), taken.begin() + ROUNDS / 2, taken.end());
    return {taken[ROUNDS / 2], timer->clock()};
}

// ---- commands ----

double nmse(const std::vector<float> & found, const std::vector<float> & expected) {
    double error = 0, size = 0;
    for (size_t i = 0; i < found.size(); ++i) {
        error += std::pow((double) found[i] - expected[i], 2);
        size += std::pow((double) expected[i], 2);
    }
    return error / size; // NaN if an element is NaN
}

// Print the rest of the line. An error of NaN is printed as null.
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
    const std::vector<std::array<int, 2>>     brief  = {{1, 33}, {5, 40}, {20, 20}, {1, 300}};
    const std::vector<std::array<int64_t, 4>> heads =
        quick ? std::vector<std::array<int64_t, 4>>{{64, 64, 4, 2}, {128, 128, 8, 1}}
              : std::vector<std::array<int64_t, 4>>{{64, 64, 8, 8},     {64, 64, 8, 1},   {96, 96, 12, 4},
                                                    {128, 128, 32, 8},  {128, 128, 8, 8}, {128, 128, 14, 2},
                                                    {192, 128, 16, 16}, {256, 256, 8, 4}, {576, 512, 16, 1}};
    ggml_backend_ptr cpu(ggml_backend_cpu_init());
    ggml_backend_cpu_set_use_ref(cpu.get(), true);
    bool right = true;
    for (const auto & [name, type] : op_types()) {
        for (const auto & h : heads) {
            printf("{\"check\": \"%s %lldx%lld %lld/%lld\", ", name, (long long) h[0], (long long) h[1],
                   (long long) h[2], (long long) h[3]);
            right = check_one(backend, cpu.get(), {type, h[0], h[1], h[2], h[3], quick ? brief : ragged}) && right;
            fflush(stdout);
        }
    }
    return right;
}

// Limit a number of operators to half of the device's memory.
int layers_for(ggml_backend_t backend, const call & c, int wanted) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(ggml_backend_get_device(backend), &free, &total);
    const size_t most = free / 2 / (c.k.size() + c.v.size());
    return (int) std::max<size_t>(1, std::min<size_t>(wanted, most));
}

struct task {
    std::string what, type;
    int         sequences, rows, length;
    std::string kernel;
};

void bench(ggml_backend_t backend, const task & of) {
    const bool   flash = of.kernel == "flash", gathered = of.kernel == "gathered", shared = of.kernel == "shared";
    const char * only = of.what == "decode" ? "shared" : "gathered";
    if (of.kernel != "paged" && !flash && of.kernel != only) {
        throw std::runtime_error("'" + of.kernel + "' is not paged, flash or " + only);
    }
    if (of.rows > of.length) {
        throw std::runtime_error("there are more rows than tokens");
    }
    const std::vector<std::array<int, 2>> sequences((size_t) of.sequences, {of.rows, of.length});
    const int                             common = shared ? (of.length - 1) / BLOCK : 0;
    const call   c        = make_call({type_named(of.type), 128, 128, 32, 8, sequences, common}, false, true);
    const int    n_layers = layers_for(backend, c, of.rows > 1 ? 2 : 8);
    const graph  g        = flash      ? flash_graph(c, backend, n_layers)
                            : gathered ? gathered_graph(c, backend, n_layers)
                                       : paged_graph(c, backend, n_layers);
    const timing t        = time_of(g, backend, n_layers);
    const double read     = 2.0 * (double) ggml_row_size(c.s.type, 128 * 8) * of.sequences * of.length;
    printf("{\"bench\": \"%s\", \"kernel\": \"%s\", \"type\": \"%s\", \"sequences\": %d, \"rows\": %d, "
           "\"length\": %d, \"seconds\": %.9g, \"clock\": \"%s\", \"kv_bytes\": %.0f",
           of.what.c_str(), of.kernel.c_str(), of.type.c_str(), of.sequences, of.rows, of.length, t.seconds, t.clock,
           read);
    if (gathered) { // check that both compute the same
        printf(", \"nmse\": %.3g", nmse(result_of(g, backend), result_of(paged_graph(c, backend, 1), backend)));
    }
    printf("}\n");
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
    const timing t = time_of(g, backend, 8);
    printf("{\"bench\": \"copy\", \"bytes\": %lld, \"seconds\": %.9g, \"clock\": \"%s\"}\n", (long long) size,
           t.seconds, t.clock);
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

using strings = std::vector<std::string>;

int64_t number_of(const std::string & text, int64_t most) {
    char *        end   = nullptr;
    const int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end || value < 1 || value > most) {
        throw std::runtime_error("'" + text + "' is no number from 1 to " + std::to_string(most));
    }
    return value;
}

bool obey(ggml_backend_t backend, const strings & words) {
    const auto at = [&](size_t i) { return i < words.size() ? words[i] : std::string(); };
    if (at(0) == "check") {
        return check(backend, at(1) == "quick");
    }
    const auto count  = [&](size_t i, int most) { return (int) number_of(at(i), most); };
    const auto kernel = [&](size_t i) { return i < words.size() ? words[i] : std::string("paged"); };
    if (at(0) == "decode") {
        bench(backend, {at(0), at(1), count(2, 1 << 16), 1, count(3, 1 << 20), kernel(4)});
    } else if (at(0) == "prefill") {
        bench(backend, {at(0), at(1), 1, count(2, 1 << 16), count(2, 1 << 16), kernel(3)});
    } else if (at(0) == "chunk") {
        bench(backend, {at(0), at(1), 1, count(2, 1 << 16), count(3, 1 << 20), kernel(4)});
    } else if (at(0) == "copy") {
        copy(backend, at(1).empty() ? int64_t(1) << 30 : number_of(at(1), int64_t(1) << 40));
    } else {
        throw std::runtime_error("there is no command " + at(0));
    }
    fflush(stdout);
    return true;
}

// Run several commands. Report an error and continue with the next.
bool obey_all(ggml_backend_t backend, const strings & lines) {
    bool done = true;
    for (const std::string & line : lines) {
        std::istringstream in(line);
        const strings      words{std::istream_iterator<std::string>(in), std::istream_iterator<std::string>()};
        try {
            done = obey(backend, words) && done;
        } catch (const std::exception & error) {
            printf("{\"failed\": \"%s\", \"why\": \"%s\"}\n", line.c_str(), error.what());
            fflush(stdout);
            done = false;
        }
    }
    return done;
}

int run(const strings & args) {
    if (args.size() == 1 && args[0] == "devices") {
        return list_devices();
    }
    if (args.size() < 2) {
        throw std::runtime_error("usage: velo-op-bench DEVICE check|decode|prefill|chunk|copy|series ...");
    }
    ggml_backend_ptr backend(ggml_backend_init_by_name(args[0].c_str(), nullptr));
    if (!backend) {
        throw std::runtime_error("there is no device " + args[0]);
    }
    const strings rest(args.begin() + 1, args.end());
    const bool    done = rest[0] == "series" ? obey_all(backend.get(), strings(rest.begin() + 1, rest.end()))
                                             : obey(backend.get(), rest);
    return done ? 0 : 1;
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
