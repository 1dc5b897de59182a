#include "pool-checks.hpp"

#include "guard.hpp"
#include "host-memory.hpp"
#include "model-facts.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <array>
#include <map>

namespace {

void check_type(const char * name, int32_t type) {
    constexpr std::array<ggml_type, 9> types = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,
                                                GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                                                GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};
    if (std::find(types.begin(), types.end(), type) == types.end()) {
        velo::fail(VELO_UNSUPPORTED,
                   "%s is ggml type %d, but K and V can be f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl",
                   name, type);
    }
}

void check_sizes(const velo_context_params & params) {
    velo::check_range("n_blocks", params.n_blocks, 1, INT32_MAX);
    constexpr std::array<int32_t, 4> sizes = {32, 64, 128, 256};
    if (std::find(sizes.begin(), sizes.end(), params.block_size) == sizes.end()) {
        velo::fail(VELO_INVALID, "block_size is %d tokens, but must be 32, 64, 128 or 256", params.block_size);
    }
    const int64_t slots = static_cast<int64_t>(params.n_blocks) * params.block_size;
    if (slots > INT32_MAX) {
        velo::fail(VELO_INVALID, "%d blocks of %d tokens are more than a pool can have, which is %d", params.n_blocks,
                   params.block_size, INT32_MAX / params.block_size);
    }
    if (slots % 256 != 0) {
        const int32_t step = 256 / params.block_size;
        velo::fail(VELO_INVALID, "n_blocks is %d, but with blocks of %d tokens it must be a multiple of %d, as %d is",
                   params.n_blocks, params.block_size, step, (params.n_blocks + step - 1) / step * step);
    }
    velo::check_range("max_batch_tokens", params.max_batch_tokens, 1, INT32_MAX);
    velo::check_range("max_seqs", params.max_seqs, 1, INT32_MAX);
    velo::check_range("max_seq_len", params.max_seq_len, 1, INT32_MAX);
    velo::check_range("max_outputs", params.max_outputs, 0, params.max_batch_tokens);
    velo::check_range("n_swap_blocks", params.n_swap_blocks, 0, INT32_MAX);
    velo::check_range("slot_bytes", params.slot_bytes, 0, INT32_MAX);
    velo::check_array(params.layer_groups, params.n_layer_groups, "layer_groups");
}

void check_row(const velo_layer & layer, const char * which, int32_t head_dim, int32_t type) {
    const int64_t group = ggml_blck_size(static_cast<ggml_type>(type));
    if (head_dim % group != 0) {
        velo::fail(VELO_UNSUPPORTED,
                   "layer %d has %s heads of %d elements, which type %s cannot hold: it takes groups of %lld; use f16",
                   layer.layer, which, head_dim, ggml_type_name(static_cast<ggml_type>(type)),
                   static_cast<long long>(group));
    }
}

int32_t group_of(const velo_layer & layer, const velo_context_params & params) {
    const bool known = params.layer_groups != nullptr && layer.layer < params.n_layer_groups;
    return known ? params.layer_groups[layer.layer] : 0;
}

// Return the index of the host among the devices, -1 if it has none.
int32_t host_number() {
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_type(ggml_backend_dev_get(i)) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            return static_cast<int32_t>(i);
        }
    }
    return -1;
}

// Return the bytes of the pool on each device: the nth layers of all groups share memory. Throw if a type does not fit
// the heads.
std::map<int32_t, double> pool_bytes(const llama_model * model, const velo_context_params & params) {
    std::vector<velo_layer> layers(static_cast<size_t>(llama_model_cached_layers(model, nullptr, 0)));
    llama_model_cached_layers(model, layers.data(), static_cast<int32_t>(layers.size()));
    std::map<int32_t, double>                     bytes; // double: an integer might overflow
    std::map<std::pair<int32_t, int32_t>, double> rows;  // of a slot, by device and group
    if (layers.empty()) {
        return {{host_number(), static_cast<double>(params.slot_bytes) * params.n_blocks * params.block_size}};
    }
    for (const velo_layer & layer : layers) {
        check_row(layer, "K", layer.head_dim_k, params.type_k);
        check_row(layer, "V", layer.head_dim_v, params.type_v);
        if (layer.head_dim_v == 0 && params.type_k != params.type_v) {
            velo::fail(VELO_UNSUPPORTED, "V is a view of K in this model: use one type for both");
        }
        const size_t row =
            ggml_row_size(static_cast<ggml_type>(params.type_k), int64_t{layer.head_dim_k} * layer.n_head_kv) +
            ggml_row_size(static_cast<ggml_type>(params.type_v), int64_t{layer.head_dim_v} * layer.n_head_kv);
        double & group = rows[{layer.device, group_of(layer, params)}];
        group += static_cast<double>(row);
        bytes[layer.device] = std::max(bytes[layer.device], group * params.n_blocks * params.block_size);
    }
    return bytes;
}

// Check that the swapped blocks fit into host memory.
void check_swap(const std::map<int32_t, double> & pool, const velo_context_params & params) {
    double block = 0;
    for (const auto & [number, bytes] : pool) {
        block += bytes / params.n_blocks;
    }
    const double needed = block * params.n_swap_blocks, free = static_cast<double>(velo::free_host_memory());
    if (needed > free) {
        constexpr double mib = 1024.0 * 1024.0;
        velo::fail(VELO_OUT_OF_MEMORY,
                   "%d swapped blocks need %.1f MiB of host memory, but %.1f MiB are free: use a smaller swap_bytes",
                   params.n_swap_blocks, needed / mib, free / mib);
    }
}

// Check that the pool fits into free memory: a system that overcommits memory would kill the process later.
void check_memory(const velo_model & model, const velo_context_params & params) {
    const std::map<int32_t, double> pool = pool_bytes(model.llama.get(), params);
    check_swap(pool, params);
    for (const auto & [number, needed] : pool) {
        if (number < 0) { // a device without an index
            continue;
        }
        const ggml_backend_dev_t device = ggml_backend_dev_get(static_cast<size_t>(number));
        const bool               host   = ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
        size_t                   free = 0, total = 0;
        ggml_backend_dev_memory(device, &free, &total);
        free = host ? static_cast<size_t>(velo::free_host_memory()) : free;
        if (needed > static_cast<double>(free) && (host || total > 0)) { // some devices do not report it
            constexpr double  mib   = 1024.0 * 1024.0;
            const std::string where = host ? "memory" : ggml_backend_dev_name(device);
            velo::fail(VELO_OUT_OF_MEMORY,
                       "%d blocks need %.1f MiB, but %.1f MiB of %s are free: use fewer blocks or a smaller type",
                       params.n_blocks, needed / mib, static_cast<double>(free) / mib, where.c_str());
        }
    }
}

} // namespace

void velo::check_pool(const velo_model & model, const velo_context_params & params) {
    check_type("type_k", params.type_k);
    check_type("type_v", params.type_v);
    check_sizes(params);
    check_memory(model, params);
}
