// Models: load, properties, layers, metadata.
#include "guard.hpp"
#include "handles.hpp"
#include "load-watch.hpp"
#include "model-facts.h"

#include "llama-paged.h"

#include <filesystem>
#include <fstream>
#include <functional>

namespace {

namespace fs = std::filesystem;

// Check a path before upstream opens it.
void check_file(const char * path) {
    velo::check_pointer(path, "path");
    if (!*path) {
        velo::fail(VELO_INVALID, "the path is empty");
    }
    std::error_code       error;
    const fs::path        file   = fs::u8path(path);
    const fs::file_status status = fs::status(file, error);
    if (status.type() == fs::file_type::not_found) {
        velo::fail(VELO_MODEL_ERROR, "there is no file %s", path);
    }
    if (status.type() == fs::file_type::directory) {
        velo::fail(VELO_MODEL_ERROR, "%s is a directory: name the GGUF file in it", path);
    }
    if (status.type() != fs::file_type::regular) {
        velo::fail(VELO_MODEL_ERROR, "%s is not a file that can be read: %s", path,
                   error ? error.message().c_str() : "not a regular file");
    }
    if (!std::ifstream(file, std::ios::binary)) {
        velo::fail(VELO_MODEL_ERROR, "%s cannot be opened for reading", path);
    }
    if (fs::file_size(file, error) == 0 && !error) {
        velo::fail(VELO_MODEL_ERROR, "%s is empty", path);
    }
}

struct progress {
    velo_progress_callback callback;
    void *                 user;
    bool                   cancelled;
};

bool show_progress(float value, void * user) {
    auto & to    = *static_cast<progress *>(user);
    to.cancelled = to.cancelled || to.callback(value, to.user) == 0;
    return !to.cancelled;
}

llama_model_params load_params(const velo_model_params & params) {
    velo::check_range("n_gpu_layers", params.n_gpu_layers, -1, INT32_MAX);
    if (params.n_gpu_layers != 0 && !llama_supports_gpu_offload()) {
        velo::fail(
            VELO_UNSUPPORTED,
            ggml_backend_reg_by_name("CUDA")
                ? "n_gpu_layers is %d, but CUDA finds no GPU here (is there one, with a driver?): use n_gpu_layers 0"
                : "n_gpu_layers is %d, but this build has no GPU backend: use n_gpu_layers 0, or build with "
                  "PYVELO_CUDA",
            params.n_gpu_layers);
    }
    llama_model_params out = llama_model_default_params();
    out.n_gpu_layers       = params.n_gpu_layers;
    out.load_mode          = params.use_mmap ? LLAMA_LOAD_MODE_ON_DEMAND : LLAMA_LOAD_MODE_NONE;
    out.vocab_only         = params.vocab_only != 0;
    out.check_tensors      = params.check_tensors != 0;
    return out;
}

// Asks the CPU backend, for loads by this thread, for layouts of weights whose products do not depend on the batch.
class exact_layouts {
public:
    explicit exact_layouts(bool wanted) : wanted(wanted) { ask(wanted); }
    ~exact_layouts() {
        if (wanted) {
            ask(false);
        }
    }
    exact_layouts(const exact_layouts &)             = delete;
    exact_layouts & operator=(const exact_layouts &) = delete;

private:
    bool wanted;

    static void ask(bool wanted) {
        const auto reg = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
        reinterpret_cast<void (*)(bool)>(ggml_backend_reg_get_proc_address(reg, "velo_want_exact_layouts"))(wanted);
    }
};

// Parameters of a load with their arrays.
struct load_settings {
    llama_model_params              params;
    std::vector<ggml_backend_dev_t> gpus;  // ends with NULL
    std::vector<float>              split; // layers of each GPU

    explicit load_settings(const velo_model_params & chosen) : params(load_params(chosen)) {
        velo::check_range("n_gpus", chosen.n_gpus, 0, static_cast<int32_t>(llama_max_devices()));
        if (chosen.n_gpus == 0) {
            return;
        }
        velo::check_pointer(chosen.gpus, "gpus");
        velo::check_pointer(chosen.gpu_layers, "gpu_layers");
        split.resize(llama_max_devices());
        int64_t total = 0;
        for (int32_t i = 0; i < chosen.n_gpus; ++i) {
            gpus.push_back(device(chosen.gpus[i]));
            velo::check_range("gpu_layers", chosen.gpu_layers[i], 1, INT32_MAX);
            split[static_cast<size_t>(i)] = static_cast<float>(chosen.gpu_layers[i]);
            total += chosen.gpu_layers[i];
        }
        if (total != chosen.n_gpu_layers) {
            velo::fail(VELO_INVALID, "the GPUs get %lld layers, but n_gpu_layers is %d", static_cast<long long>(total),
                       chosen.n_gpu_layers);
        }
        gpus.push_back(nullptr);
        params.devices      = gpus.data();
        params.tensor_split = split.data();
    }

private:
    static ggml_backend_dev_t device(int32_t number) {
        velo::check_range("gpus", number, 0, static_cast<int32_t>(ggml_backend_dev_count()) - 1);
        ggml_backend_dev_t found = ggml_backend_dev_get(static_cast<size_t>(number));
        const auto         type  = ggml_backend_dev_type(found);
        if (type != GGML_BACKEND_DEVICE_TYPE_GPU && type != GGML_BACKEND_DEVICE_TYPE_IGPU) {
            velo::fail(VELO_INVALID, "device %d (%s) is no GPU", number, ggml_backend_dev_name(found));
        }
        return found;
    }
};

// Return the text of an upstream function that returns its length.
std::string read_text(const std::function<int32_t(char *, size_t)> & read) {
    std::string text(static_cast<size_t>(std::max(0, read(nullptr, 0))), '\0');
    read(text.data(), text.size() + 1);
    return text;
}

std::string meta_value(const llama_model * model, const char * key) {
    return read_text([&](char * text, size_t size) { return llama_model_meta_val_str(model, key, text, size); });
}

std::vector<velo_layer> cached_layers(const velo_model & model) {
    if (model.vocab_only) { // upstream has not read the hyperparameters
        return {};
    }
    const llama_model *     llama = model.llama.get();
    std::vector<velo_layer> layers(static_cast<size_t>(llama_model_cached_layers(llama, nullptr, 0)));
    llama_model_cached_layers(llama, layers.data(), static_cast<int32_t>(layers.size()));
    return layers;
}

} // namespace

velo_model_params velo_model_default_params(void) noexcept {
    velo_model_params params{};
    params.use_mmap = 1;
    return params;
}

// Return upstream's reason why a model cannot be paged. Throw if the reason is too little memory.
static void check_for_memory(const char * path, const char * said) {
    if (velo::tells_of_memory(said)) {
        velo::fail(VELO_OUT_OF_MEMORY,
                   "there is too little memory to load %s (%s): use a smaller model or quantization", path, said);
    }
}

// Return whether a model without paging is for embeddings. Upstream knows this after it has created its memory.
static bool embeds_alone(const llama_model & model, const char * path) {
    try {
        return llama_model_is_encoder(&model);
    } catch (const std::runtime_error & e) {
        check_for_memory(path, e.what());
        velo::fail(VELO_MODEL_ERROR, "%s is damaged: %s", path, e.what());
    }
}

velo_status velo_model_load(const char * path, const velo_model_params * params, velo_model ** model) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(model, "model");
        *model = nullptr;
        check_file(path);
        const velo_model_params chosen = params ? *params : velo_model_default_params();
        load_settings           settings(chosen);
        llama_model_params &    llama_params = settings.params;
        progress                to{chosen.progress, chosen.progress_user, false};
        if (chosen.progress) {
            llama_params.progress_callback           = show_progress;
            llama_params.progress_callback_user_data = &to;
        }

        auto made = std::make_unique<velo_model>();
        if (chosen.use_mmap) {
            made->files = std::make_shared<velo::mapped_files>(path);
        }
        const velo::error_log    log;
        const velo::catch_aborts catching(VELO_MODEL_ERROR);

        const exact_layouts layouts(chosen.deterministic != 0);
        velo::load_watch    watch(made->files.get());
        made->llama.reset(llama_model_load_from_file(path, llama_params), llama_model_free);
        if (to.cancelled) {
            velo::fail(VELO_CANCELLED, "the load of %s was cancelled", path);
        }
        velo::check_files(made->files);
        if (!made->llama) {
            const std::string cause = log.cause("no reason was given"), prefix = "error loading model: ";
            const size_t      start = cause.compare(0, prefix.size(), prefix) == 0 ? prefix.size() : 0;
            check_for_memory(path, cause.c_str() + start);
            velo::fail(VELO_MODEL_ERROR, "%s cannot be loaded: %s", path, cause.c_str() + start);
        }
        if (made->files) {
            made->files->keep_used([&](velo::address_range mapping, size_t page) {
                const auto part =
                    llama_part_in_use(made->llama.get(), watch.weights, {mapping.first, mapping.last}, page);
                return velo::address_range{part.first, part.last};
            });
        }
        const char * defect = llama_params.vocab_only ? nullptr : llama_model_defect(made->llama.get());
        if (defect) {
            velo::fail(VELO_MODEL_ERROR, "%s is damaged: %s", path, defect);
        }
        made->packing       = std::make_shared<velo::packing>(std::move(watch.weights), made->files, chosen.progress,
                                                              chosen.progress_user);
        made->vocab         = llama_model_get_vocab(made->llama.get());
        made->n_vocab       = llama_vocab_n_tokens(made->vocab);
        made->vocab_only    = llama_params.vocab_only;
        made->deterministic = chosen.deterministic != 0;
        made->offloads      = chosen.n_gpu_layers != 0;
        if (made->vocab_only) {
            made->refusal = "the model was loaded with vocab_only: it has no weights to run";
        } else if (const char * reason = llama_paged_refusal(made->llama.get())) {
            check_for_memory(path, reason);
            made->refusal    = reason;
            made->is_encoder = embeds_alone(*made->llama, path);
        }
        const bool has_states = llama_model_is_recurrent(made->llama.get()) || llama_model_is_hybrid(made->llama.get());
        if (!made->vocab_only && has_states) { // it creates a small memory of the model
            made->state_bytes = llama_paged_state_bytes(made->llama.get());
        }
        *model = made.release();
    });
}

void velo_model_free(velo_model * model) noexcept { delete model; }

velo_status velo_model_get_info(const velo_model * model, velo_model_info * info) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(model, "model");
        velo::check_pointer(info, "info");
        const llama_model * llama = model->llama.get();
        *info                     = velo_model_info{};
        velo::put_name(info->arch, meta_value(llama, "general.architecture"));
        velo::put_name(info->description,
                       read_text([&](char * text, size_t size) { return llama_model_desc(llama, text, size); }));
        info->n_vocab       = model->n_vocab;
        info->n_params      = static_cast<int64_t>(llama_model_n_params(llama));
        info->size_bytes    = static_cast<int64_t>(llama_model_size(llama));
        info->has_recurrent = llama_model_is_recurrent(llama) || llama_model_is_hybrid(llama);
        info->state_bytes   = model->state_bytes;
        info->can_page      = model->refusal.empty();
        if (!model->vocab_only) {
            const std::vector<velo_layer> layers = cached_layers(*model);
            info->n_layer                        = llama_model_n_layer(llama);
            info->n_embd                         = llama_model_n_embd(llama);
            info->n_head                         = layers.empty() ? llama_model_n_head(llama) : layers[0].n_head;
            info->n_head_kv                      = layers.empty() ? llama_model_n_head_kv(llama) : layers[0].n_head_kv;
            info->n_ctx_train                    = llama_model_n_ctx_train(llama);
            info->n_embd_out                     = llama_model_n_embd_out(llama);
            info->pooling                        = llama_model_pooling(llama);
            info->is_encoder                     = model->is_encoder;
        }
    });
}

velo_status velo_model_refusal(const velo_model * model, char * text, size_t capacity, size_t * len) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(model, "model");
        velo::put_text(model->refusal, text, capacity, len);
    });
}

velo_status velo_model_layers(const velo_model * model, velo_layer * layers, int32_t capacity,
                              int32_t * count) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(model, "model");
        const std::vector<velo_layer> found = cached_layers(*model);
        velo::put_array(found.data(), static_cast<int32_t>(found.size()), layers, capacity, count);
    });
}

velo_status velo_model_meta_count(const velo_model * model, int32_t * count) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(model, "model");
        velo::check_pointer(count, "count");
        *count = llama_model_meta_count(model->llama.get());
    });
}

velo_status velo_model_meta_key(const velo_model * model, int32_t index, char * text, size_t capacity,
                                size_t * len) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(model, "model");
        const llama_model * llama = model->llama.get();
        velo::check_range("index", index, 0, llama_model_meta_count(llama) - 1);
        const std::string key =
            read_text([&](char * to, size_t size) { return llama_model_meta_key_by_index(llama, index, to, size); });
        velo::put_text(key, text, capacity, len);
    });
}

velo_status velo_model_meta_value(const velo_model * model, const char * key, char * text, size_t capacity,
                                  size_t * len) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(model, "model");
        velo::check_pointer(key, "key");
        const llama_model * llama = model->llama.get();
        if (llama_model_meta_val_str(llama, key, nullptr, 0) < 0) {
            velo::fail(VELO_INVALID, "the model has no metadata under \"%s\"", key);
        }
        velo::put_text(meta_value(llama, key), text, capacity, len);
    });
}
