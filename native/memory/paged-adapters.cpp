#include "llama-adapters.h"
#include "paged-state.h"

#include "llama-adapter.h"
#include "llama-graph.h"

int64_t llama_adapter_bytes(const llama_adapter_lora * adapter) {
    size_t bytes = 0;
    for (const auto & buffer : adapter->bufs) {
        bytes += ggml_backend_buffer_get_size(buffer.get());
    }
    return (int64_t) bytes;
}

const llama_model * llama_adapter_model(const llama_adapter_lora * adapter) { return adapter->model; }

// Return the name of a weight whose A or B is in no node of the reserved graph; null if all are.
static const char * find_unused(llama_context & ctx, const llama_adapter_lora & adapter) {
    ggml_cgraph * graph = ctx.get_gf_res_reserve()->get_gf();
    for (const auto & [name, weight] : adapter.ab_map) {
        if (!ggml_graph_get_tensor(graph, weight.a->name) || !ggml_graph_get_tensor(graph, weight.b->name)) {
            return name.c_str();
        }
    }
    return nullptr;
}

llama_paged_status llama_adapter_try(llama_context * ctx, llama_adapter_lora * adapter, const char ** unused) {
    *unused                         = nullptr;
    const llama_paged_status status = paged_guard([&] {
        llama_adapter_apply(ctx, adapter, 1.0f);
        llama_paged_access::reserve(*ctx); // upstream checks the shapes of all products here
        *unused = find_unused(*ctx, *adapter);
    });
    llama_adapter_apply(ctx, nullptr, 0.0f);
    if (status != LLAMA_PAGED_OK) {
        const std::string why = llama_paged_error();
        paged_guard([&] { llama_paged_access::reserve(*ctx); });
        return paged_guard([&] { paged_fail(status, why); });
    }
    return status;
}

void llama_adapter_apply(llama_context * ctx, llama_adapter_lora * adapter, float scale) {
    llama_adapter_loras & loras = llama_paged_access::loras(*ctx);
    loras.clear();
    if (adapter) {
        loras.emplace(adapter, scale);
    }
    llama_paged_access::forget_graph(*ctx); // upstream compares the address of the set, which stays
}
