// Target of libFuzzer: load the bytes as a model file and run the model for a token. As in use, the file passes the
// scan in Python first; VELO_FUZZ_RAW in the environment skips the scan.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "velo.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

namespace {

struct freed {
    void operator()(velo_model * model) const { velo_model_free(model); }
    void operator()(velo_context * context) const { velo_context_free(context); }
    void operator()(velo_sampler * sampler) const { velo_sampler_free(sampler); }
    void operator()(PyObject * object) const { Py_DECREF(object); }
};
template <class T> using owned = std::unique_ptr<T, freed>;

PyObject * scan   = nullptr; // scripts/fuzz/_velo_fuzz.py
PyObject * mutate = nullptr;
bool       raw    = false;

[[noreturn]] void die(const char * what) {
    if (PyErr_Occurred()) {
        PyErr_Print();
    }
    std::fprintf(stderr, "velo-fuzz: %s\n", what);
    std::exit(2);
}

// File in memory with a name.
class memory_file {
public:
    memory_file(const uint8_t * data, size_t size) : file(memfd_create("velo-fuzz", MFD_CLOEXEC)) {
        if (file < 0 || write(file, data, size) != static_cast<ssize_t>(size)) {
            die("a file in memory cannot be made");
        }
        std::snprintf(name, sizeof(name), "/proc/self/fd/%d", file);
    }
    ~memory_file() { close(file); }
    memory_file(const memory_file &)             = delete;
    memory_file & operator=(const memory_file &) = delete;

    const char * path() const { return name; }

private:
    int  file;
    char name[64];
};

// Return whether the scan accepts the file. An unexpected exception of the scan ends the process.
bool passes(const char * path) {
    const owned<PyObject> answer(PyObject_CallFunction(scan, "s", path));
    if (!answer) {
        PyErr_Print();
        std::abort();
    }
    return answer.get() == Py_True;
}

// Run the first step of one sequence, in the first blocks of the pool.
velo_status run_prompt(velo_context * context, const std::vector<int32_t> & tokens, int32_t block_size) {
    const auto           n = static_cast<int32_t>(tokens.size());
    std::vector<int32_t> positions(tokens.size()), table;
    std::vector<int8_t>  outputs(tokens.size());
    for (int32_t i = 0; i < n; ++i) {
        positions[static_cast<size_t>(i)] = i;
    }
    for (int32_t block = 0; block * block_size < n; ++block) {
        table.push_back(block);
    }
    outputs.back()         = 1;
    const int32_t seqs[4]  = {0, n, n, 0};
    const int32_t states[] = {0};
    velo_batch    batch{};
    batch.n_tokens     = n;
    batch.tokens       = tokens.data();
    batch.positions    = positions.data();
    batch.n_groups     = 1;
    batch.token_stride = n;
    batch.seq_stride   = 1;
    batch.slots        = positions.data(); // block i of the sequence is block i of the pool
    batch.outputs      = outputs.data();
    batch.n_seqs       = 1;
    batch.seqs         = seqs;
    batch.tables       = table.data();
    batch.table_stride = static_cast<int32_t>(table.size());
    velo_context_info info{};
    velo_context_get_info(context, &info);
    if (info.n_states > 0) {
        velo_state_clear(context, 0);
        batch.states = states;
    }
    return velo_context_run(context, &batch);
}

void run_model(velo_model * model, bool deterministic) {
    velo_context_params params = velo_context_default_params();
    params.n_blocks            = 8;
    params.max_batch_tokens    = 64;
    params.max_seqs            = 1;
    params.max_seq_len         = 256;
    params.n_threads           = 1;
    params.deterministic       = deterministic;
    velo_context * made        = nullptr;
    if (velo_context_create(model, &params, &made) != VELO_OK) {
        return;
    }
    const owned<velo_context> context(made);
    std::vector<int32_t>      tokens(64);
    int32_t                   n      = 0;
    const char                text[] = "Once upon a time, 1234 f\xc3\xbc\n\n  \xe4\xbd\xa0 <|x|> it's";
    if (velo_tokenize(model, text, sizeof(text) - 1, 1, 1, tokens.data(), 64, &n) != VELO_OK || n == 0) {
        tokens[0] = 0;
        n         = 1;
    }
    tokens.resize(static_cast<size_t>(n));
    if (run_prompt(context.get(), tokens, params.block_size) != VELO_OK) {
        return;
    }
    velo_sampler_params greedy  = velo_sampler_default_params();
    velo_sampler *      sampler = nullptr;
    greedy.temperature          = 0;
    if (velo_sampler_create(model, &greedy, &sampler) != VELO_OK) {
        return;
    }
    const owned<velo_sampler> owner(sampler);
    const int32_t             row   = 0;
    int32_t                   token = -1, status = 0;
    if (velo_sample(context.get(), &row, &sampler, 1, &token, &status) == VELO_OK && status == VELO_OK) {
        char   bytes[256];
        size_t len = 0;
        velo_token_to_bytes(model, token, 1, bytes, sizeof(bytes), &len);
        tokens.push_back(token);
        velo_detokenize(model, tokens.data(), static_cast<int32_t>(tokens.size()), 0, bytes, sizeof(bytes), &len);
    }
}

void ask_all(velo_model * model) {
    velo_model_info info{};
    velo_model_get_info(model, &info);
    velo_vocab_info vocab{};
    velo_vocab_get_info(model, &vocab);
    int32_t n = 0;
    velo_model_meta_count(model, &n);
    for (int32_t i = 0; i < n; ++i) {
        char   text[256];
        size_t len = 0;
        if (velo_model_meta_key(model, i, text, sizeof(text) - 1, &len) == VELO_OK) {
            text[len] = '\0';
            const std::string key(text);
            velo_model_meta_value(model, key.c_str(), text, sizeof(text), &len);
        }
    }
}

} // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    raw = std::getenv("VELO_FUZZ_RAW") != nullptr;
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;
    const char * program           = std::getenv("VELO_FUZZ_PYTHON"); // for modules of its virtual environment
    if (program && PyStatus_Exception(PyConfig_SetBytesString(&config, &config.program_name, program))) {
        die("VELO_FUZZ_PYTHON is no path");
    }
    if (PyStatus_Exception(Py_InitializeFromConfig(&config))) {
        die("Python does not start");
    }
    PyConfig_Clear(&config);
    PyObject * module = PyImport_ImportModule("scripts.fuzz._velo_fuzz");
    scan              = module ? PyObject_GetAttrString(module, "passes") : nullptr;
    mutate            = module ? PyObject_GetAttrString(module, "mutate") : nullptr;
    if (!scan || !mutate) {
        die("scripts/fuzz/_velo_fuzz.py cannot be imported: start scripts/fuzz/native.py");
    }
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    const memory_file file(data, size);
    if (!raw && !passes(file.path())) {
        return 0;
    }
    velo_model_params params = velo_model_default_params();
    params.use_mmap          = 0; // the sanitizer knows the end of an allocation, not of a mapping
    params.deterministic     = size ? data[size - 1] & 1 : 0;
    velo_model * model       = nullptr;
    if (velo_model_load(file.path(), &params, &model) == VELO_OK) {
        const owned<velo_model> owner(model);
        ask_all(model);
        run_model(model, params.deterministic != 0);
    }
    return 0;
}

// Change the bytes of half of the mutants. For the other half, change the parsed document and write it as a valid file.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned int seed) {
    if (seed % 2) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    const owned<PyObject> bytes(PyObject_CallFunction(mutate, "y#II", reinterpret_cast<const char *>(data),
                                                      static_cast<Py_ssize_t>(size), seed,
                                                      static_cast<unsigned int>(max_size)));
    if (!bytes) {
        die("the mutator failed");
    }
    const auto length = static_cast<size_t>(PyBytes_Size(bytes.get()));
    if (length == 0) { // not a document
        return LLVMFuzzerMutate(data, size, max_size);
    }
    std::memcpy(data, PyBytes_AsString(bytes.get()), std::min(length, max_size));
    return std::min(length, max_size);
}
