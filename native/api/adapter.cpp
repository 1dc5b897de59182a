// LoRA adapters: load a file, and apply it in a context or an embedder.
#include "guard.hpp"
#include "handles.hpp"

#include "llama-adapters.h"

#include <cmath>

namespace {

std::string without_prefix(const std::string & text, const std::string & prefix) {
    return text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : text;
}

// Build the graphs of `context` with the adapter.
void try_adapter(llama_context * context, const velo_adapter & adapter) {
    const velo::catch_aborts catching(VELO_UNSUPPORTED);
    const char *             unused = nullptr;
    if (llama_adapter_try(context, adapter.llama.get(), &unused) != LLAMA_PAGED_OK) {
        const std::string why    = llama_paged_error();
        const bool        memory = velo::tells_of_memory(why);
        velo::fail(memory ? VELO_OUT_OF_MEMORY : VELO_UNSUPPORTED, "%s%s",
                   memory ? "no memory for the graphs with the adapter: " : "the model's graph does not take it: ",
                   why.c_str());
    }
    if (unused) {
        velo::fail(VELO_UNSUPPORTED, "the graph of this architecture applies no adapter to %s", unused);
    }
}

// Apply the adapter in a context or an embedder, or none (NULL). The same adapter again changes nothing, so that the
// next run may use the graph of the last one. `built`: the context whose graphs were built with the adapter.
template <class Runner>
void adapt(Runner & runner, velo_adapter * adapter, float scale, std::atomic<const llama_context *> * built) {
    llama_context * context = runner.llama.get();
    if (adapter && llama_get_model(context) != llama_adapter_model(adapter->llama.get())) {
        velo::fail(VELO_INVALID, "the adapter was loaded for another model");
    }
    if (adapter && !std::isfinite(scale)) {
        velo::fail(VELO_INVALID, "the scale of an adapter must be finite");
    }
    if (adapter && built->load() != context) {
        runner.adapter = nullptr;
        try_adapter(context, *adapter);
        built->store(context);
    }
    const std::shared_ptr<llama_adapter_lora> wanted = adapter ? adapter->llama : nullptr;
    if (runner.adapter == wanted && (!wanted || runner.adapter_scale == scale)) {
        return;
    }
    llama_adapter_apply(context, wanted.get(), scale);
    runner.adapter       = wanted;
    runner.adapter_scale = scale;
}

} // namespace

velo_status velo_adapter_load(velo_model * model, const char * path, velo_adapter ** adapter,
                              int64_t * bytes) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(adapter, "adapter");
        *adapter = nullptr;
        velo::check_pointer(model, "model");
        velo::check_pointer(path, "path");
        velo::check_pointer(bytes, "bytes");
        if (model->vocab_only) {
            velo::fail(VELO_INVALID, "%s", model->refusal.c_str());
        }
        auto                                 made  = std::make_unique<velo_adapter>();
        const std::shared_ptr<llama_model> & llama = model->llama;
        const velo::error_log                log;
        const velo::catch_aborts             catching(VELO_MODEL_ERROR);
        made->llama.reset(llama_adapter_lora_init(llama.get(), path),
                          [llama](llama_adapter_lora * owned) { llama_adapter_lora_free(owned); });
        if (!made->llama) {
            const std::string cause =
                without_prefix(log.cause("no reason was given"), "failed to apply lora adapter: ");
            velo::fail(velo::tells_of_memory(cause) ? VELO_OUT_OF_MEMORY : VELO_MODEL_ERROR, "%s cannot be loaded: %s",
                       path, cause.c_str());
        }
        *bytes   = llama_adapter_bytes(made->llama.get());
        *adapter = made.release();
    });
}

void velo_adapter_free(velo_adapter * adapter) noexcept { delete adapter; }

velo_status velo_context_adapt(velo_context * context, velo_adapter * adapter, float scale) noexcept {
    return velo::guarded([&] {
        const auto held = velo::hold(context);
        adapt(*context, adapter, scale, adapter ? &adapter->context : nullptr);
    });
}

velo_status velo_embedder_adapt(velo_embedder * embedder, velo_adapter * adapter, float scale) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(embedder, "embedder");
        const velo::held_context held(embedder->mutex);
        adapt(*embedder, adapter, scale, adapter ? &adapter->embedder : nullptr);
    });
}
