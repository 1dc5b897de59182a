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
#include "op_graphs.h"

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

// ---- runs ----

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

// Measure `start_operations`, which starts so many operations.
template <typename F> timing time_of(ggml_backend_t backend, int n_operations, F start_operations) {
    const auto          timer = make_device_timer(backend);
    std::vector<double> taken;
    for (int i = -WARM_UP; i < ROUNDS; ++i) {
        timer->start();
        start_operations();
        const double seconds = timer->stop();
        if (i >= 0) {
            taken.push_back(seconds / n_operations);
        }
    }
    std::nth_element(taken.begin(), taken.begin() + ROUNDS / 2, taken.end());
    return {taken[ROUNDS / 2], timer->clock()};
}

timing time_of(const graph & g, ggml_backend_t backend, int n_operations) {
    return time_of(backend, n_operations, [&] {
        if (ggml_backend_graph_compute_async(backend, g.nodes) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error("the device could not compute");
        }
    });
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
    finish_graph(g, backend);
    ggml_backend_buffer_clear(g.buffer.get(), 0);
    const timing t = time_of(backend, 8, [&] { // no graph: a captured copy is slower
        for (int i = 0; i < 8; ++i) {
            ggml_backend_tensor_copy_async(backend, backend, from, to);
        }
    });
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
