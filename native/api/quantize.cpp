// Quantization of a model file.
#include "guard.hpp"
#include "load-watch.hpp"
#include "team.hpp"
#include "threads.hpp"

#include "llama.h"

#include <array>
#include <filesystem>
#include <string>

namespace {

namespace fs = std::filesystem;

struct named_type {
    const char * name;
    llama_ftype  type;
};

// Without types that need an importance matrix: velo.h has no parameter for one.
constexpr std::array<named_type, 26> types = {{
    {"F32", LLAMA_FTYPE_ALL_F32},          {"F16", LLAMA_FTYPE_MOSTLY_F16},       {"BF16", LLAMA_FTYPE_MOSTLY_BF16},
    {"Q8_0", LLAMA_FTYPE_MOSTLY_Q8_0},     {"Q6_K", LLAMA_FTYPE_MOSTLY_Q6_K},     {"Q5_0", LLAMA_FTYPE_MOSTLY_Q5_0},
    {"Q5_1", LLAMA_FTYPE_MOSTLY_Q5_1},     {"Q5_K", LLAMA_FTYPE_MOSTLY_Q5_K_M},   {"Q5_K_M", LLAMA_FTYPE_MOSTLY_Q5_K_M},
    {"Q5_K_S", LLAMA_FTYPE_MOSTLY_Q5_K_S}, {"Q4_0", LLAMA_FTYPE_MOSTLY_Q4_0},     {"Q4_1", LLAMA_FTYPE_MOSTLY_Q4_1},
    {"Q4_K", LLAMA_FTYPE_MOSTLY_Q4_K_M},   {"Q4_K_M", LLAMA_FTYPE_MOSTLY_Q4_K_M}, {"Q4_K_S", LLAMA_FTYPE_MOSTLY_Q4_K_S},
    {"IQ4_NL", LLAMA_FTYPE_MOSTLY_IQ4_NL}, {"IQ4_XS", LLAMA_FTYPE_MOSTLY_IQ4_XS}, {"Q3_K", LLAMA_FTYPE_MOSTLY_Q3_K_M},
    {"Q3_K_L", LLAMA_FTYPE_MOSTLY_Q3_K_L}, {"Q3_K_M", LLAMA_FTYPE_MOSTLY_Q3_K_M}, {"Q3_K_S", LLAMA_FTYPE_MOSTLY_Q3_K_S},
    {"IQ3_S", LLAMA_FTYPE_MOSTLY_IQ3_S},   {"IQ3_M", LLAMA_FTYPE_MOSTLY_IQ3_M},   {"Q2_K", LLAMA_FTYPE_MOSTLY_Q2_K},
    {"TQ1_0", LLAMA_FTYPE_MOSTLY_TQ1_0},   {"TQ2_0", LLAMA_FTYPE_MOSTLY_TQ2_0},
}};

llama_ftype type_of(const char * name) {
    velo::check_pointer(name, "type");
    std::string known;
    for (const named_type & type : types) {
        if (std::string_view(type.name) == name) {
            return type.type;
        }
        known += (known.empty() ? "" : ", ") + std::string(type.name);
    }
    velo::fail(VELO_INVALID, "\"%s\" is not a type to quantize to: use one of %s", name, known.c_str());
}

void check_paths(const char * source, const char * target) {
    velo::check_pointer(source, "source");
    velo::check_pointer(target, "target");
    if (!*source || !*target) {
        velo::fail(VELO_INVALID, "the path of the %s is empty", *source ? "target" : "source");
    }
    std::error_code error;
    const fs::path  from = fs::u8path(source), to = fs::u8path(target);
    if (!fs::is_regular_file(from, error)) {
        velo::fail(VELO_MODEL_ERROR, "there is no file %s", source);
    }
    if (fs::equivalent(from, to, error)) {
        velo::fail(VELO_INVALID, "source and target are the same file, %s", source);
    }
    if (fs::is_directory(to, error)) {
        velo::fail(VELO_INVALID, "the target %s is a directory", target);
    }
    const fs::path folder = to.parent_path();
    if (!folder.empty() && !fs::is_directory(folder, error)) {
        velo::fail(VELO_INVALID, "the folder of the target %s does not exist", target);
    }
}

} // namespace

velo_status velo_model_quantize(const char * source, const char * target, const char * type,
                                int32_t n_threads) noexcept {
    return velo::guarded([&] {
        llama_model_quantize_params params = llama_model_quantize_default_params();
        params.ftype                       = type_of(type);
        params.nthread                     = n_threads;
        check_paths(source, target);

        // write another file and rename it, so that a failure leaves an existing target unchanged
        const std::string partial = std::string(target) + ".partial";
        std::error_code   error;
        velo::check_team(velo::threads_for(std::max(0, n_threads)));
        velo::mapped_files       files(source);
        const velo::load_watch   watch(&files);
        const velo::error_log    log;
        const velo::catch_aborts catching(VELO_MODEL_ERROR);
        if (llama_model_quantize(source, partial.c_str(), &params) != 0 || files.are_lost()) {
            fs::remove(fs::u8path(partial), error);
            files.check();
            velo::fail(VELO_MODEL_ERROR, "%s cannot be quantized to %s: %s", source, type,
                       log.cause("no reason was given").c_str());
        }
        fs::rename(fs::u8path(partial), fs::u8path(target), error);
        if (error) {
            velo::fail(VELO_FAILED, "%s cannot be renamed to %s: %s", partial.c_str(), target, error.message().c_str());
        }
    });
}
