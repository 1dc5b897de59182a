// velo.h: the C interface that the Python package calls.
//
// Errors: a function that can fail returns a velo_status and sets velo_message() of the calling thread to one sentence.
// No function throws, and no argument aborts the process.
// Memory: handles are opaque. The caller owns all buffers.
// Text: UTF-8 with an explicit length. A function that writes text or an array takes the buffer's capacity and sets
// *len (or *count) to the required length. If the buffer is too small, it writes nothing else and returns
// VELO_BUFFER_TOO_SMALL.
// Threads: many threads may use a model at once. A context runs one call at a time, and calls of other threads wait,
// except velo_context_cancel. One thread at a time may use a sampler.
#ifndef VELO_H
#define VELO_H

#include <stddef.h>
#include <stdint.h>

#if defined(velo_EXPORTS) && defined(_WIN32) // CMake defines it for the sources of the library
#    define VELO_API __declspec(dllexport)
#elif defined(_WIN32)
#    define VELO_API __declspec(dllimport)
#else
#    define VELO_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
#    define VELO_NOEXCEPT noexcept
extern "C" {
#else
#    define VELO_NOEXCEPT
#endif

#define VELO_ABI_VERSION 1

typedef enum velo_status {
    VELO_OK               = 0,
    VELO_INVALID          = 1, // an argument is wrong
    VELO_MODEL_ERROR      = 2, // the model file cannot be read or is damaged
    VELO_UNSUPPORTED      = 3, // not possible with this architecture, type or device
    VELO_OUT_OF_MEMORY    = 4,
    VELO_CANCELLED        = 5, // by a callback or by velo_context_cancel
    VELO_FAILED           = 6, // the computation failed
    VELO_BUFFER_TOO_SMALL = 7,
    VELO_INTERNAL         = 8 // a bug in this library
} velo_status;

typedef struct velo_model    velo_model;
typedef struct velo_context  velo_context;
typedef struct velo_sampler  velo_sampler;
typedef struct velo_embedder velo_embedder;
typedef struct velo_adapter  velo_adapter;

// ---- library ----

VELO_API int32_t velo_abi_version(void) VELO_NOEXCEPT;
// Return the message of the last call that failed on this thread. It is valid until the next failing call there.
VELO_API const char * velo_message(void) VELO_NOEXCEPT;
VELO_API const char * velo_status_name(int32_t status) VELO_NOEXCEPT;

// level: 1 debug, 2 info, 3 warning, 4 error. Any thread that runs the library may call it.
typedef void (*velo_log_callback)(int32_t level, const char * text, void * user);
// Set the log callback of the process; NULL (the default) logs nothing. Thread-safe. `text` is a whole line without its
// newline. NULL waits up to a second for running callbacks of other threads, unless a callback sets it. Another
// callback does not wait: a line that another thread has begun may still reach the old one.
VELO_API velo_status velo_log_set(velo_log_callback callback, void * user, int32_t min_level) VELO_NOEXCEPT;

typedef enum velo_device_kind {
    VELO_DEVICE_CPU         = 0,
    VELO_DEVICE_GPU         = 1, // with memory of its own
    VELO_DEVICE_IGPU        = 2, // in host memory
    VELO_DEVICE_ACCELERATOR = 3  // computes some operations of the CPU backend
} velo_device_kind;

typedef struct velo_device {
    char    name[64];
    char    description[128];
    int32_t kind;         // a velo_device_kind
    int64_t memory_total; // bytes
    int64_t memory_free;  // bytes; for the CPU, as much as can be allocated without swapping
} velo_device;

VELO_API velo_status velo_devices(velo_device * devices, int32_t capacity, int32_t * count) VELO_NOEXCEPT;
// Return the bytes that models allocated for weights that their first run will pack. The system still counts them free.
VELO_API int64_t velo_reserved_memory(void) VELO_NOEXCEPT;
// Write the CPU features of the build: "AVX512 = 1 | ...".
VELO_API velo_status velo_system_info(char * text, size_t capacity, size_t * len) VELO_NOEXCEPT;

// Write the numbers of physical cores and of performance cores among them; 0: the system does not tell. Linux does, in
// files: there both are 0.
VELO_API velo_status velo_cores(int32_t * physical, int32_t * performance) VELO_NOEXCEPT;

// Multiply 512 rows with a matrix of 2048 x 2048 weights of a quantized type of ggml ("q4_K", ...), packed as a
// model's, at least three times and for `seconds` (0 to 60). Write the products of a weight and an activation in a
// second, by the median. n_threads = 0: all logical cores.
VELO_API velo_status velo_product_rate(const char * type, int32_t n_threads, double seconds,
                                       double * rate) VELO_NOEXCEPT;

// End the OpenMP worker threads of the calling thread. Its next run starts new ones. While a process has more workers
// than cores, GCC's OpenMP makes every thread sleep at each barrier.
VELO_API void velo_threads_release(void) VELO_NOEXCEPT;

// ---- model ----

// progress: 0 to 1. Return 0 to cancel.
typedef int32_t (*velo_progress_callback)(float progress, void * user);

typedef struct velo_model_params {
    int32_t n_gpu_layers; // 0: everything on the CPU; -1: all layers
    // GPUs with layers: indices in velo_devices, and the number of layers of each. [n_gpus], in the order of layers, in
    // sum n_gpu_layers. n_gpus == 0: all GPUs share the layers by their free memory.
    const int32_t * gpus;
    const int32_t * gpu_layers;
    int32_t         n_gpus;
    // Map the file: a page of it is read when a step first uses it. The load allocates memory for the weights that have
    // a faster layout on this processor, and the model's first run, in any context, packs them.
    int32_t use_mmap;
    int32_t vocab_only;    // metadata and tokenizer: no weights, no layers, and only n_vocab of the sizes
    int32_t check_tensors; // look for NaN and Inf while loading
    int32_t deterministic; // pack weights into layouts alone whose products do not depend on the batch
    // Called with the progress of the load, from 0 to 1, in the thread that loads. If the first run packs weights, it
    // is called again from 0 to 1 in the thread that runs, and must not use the model or its contexts there. The
    // callback must stay valid until the model and its contexts are freed.
    velo_progress_callback progress;
    void *                 progress_user;
} velo_model_params;

VELO_API velo_model_params velo_model_default_params(void) VELO_NOEXCEPT;
// Load a GGUF file. This function trusts the file as upstream does: scan an untrusted file first
// (pyvelo/models/gguf_scan.py). On Linux, if a mapped file becomes shorter, the run that notices it and all later runs
// return VELO_MODEL_ERROR. A SIGBUS handler, installed by the first load of a mapped file, detects this and passes
// other signals on.
VELO_API velo_status velo_model_load(const char * path, const velo_model_params * params,
                                     velo_model ** model) VELO_NOEXCEPT;
// Free the model. Its contexts and samplers stay valid: the memory is freed with the last of them.
VELO_API void velo_model_free(velo_model * model) VELO_NOEXCEPT;

typedef struct velo_model_info {
    char    arch[64];
    char    description[128]; // architecture, size, quantization
    int32_t n_layer;
    int32_t n_embd;
    int32_t n_head; // of the first attention layer
    int32_t n_head_kv;
    int32_t n_vocab;
    int32_t n_ctx_train;
    int64_t n_params;
    int64_t size_bytes;    // of the weights
    int32_t has_recurrent; // some layers have a state instead of a cache
    int64_t state_bytes;   // of a saved state; 0: the model has none, or cannot be paged
    int32_t can_page;      // 0: velo_context_create refuses the model, see velo_model_refusal
    int32_t n_embd_out;    // numbers of an embedding
    int32_t pooling;       // pooling of embeddings named in the file, a velo_pooling
    int32_t is_encoder;    // the model embeds texts and cannot generate
} velo_model_info;

VELO_API velo_status velo_model_get_info(const velo_model * model, velo_model_info * info) VELO_NOEXCEPT;
// Write the reason why can_page is 0. It is empty if can_page is 1.
VELO_API velo_status velo_model_refusal(const velo_model * model, char * text, size_t capacity,
                                        size_t * len) VELO_NOEXCEPT;

// The cache of one layer. Layers without their own cache are not listed.
typedef struct velo_layer {
    int32_t layer;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t head_dim_k;
    int32_t head_dim_v;  // 0: V is a view of K
    int32_t window;      // tokens, 0: no window
    int32_t window_type; // 0 none, 1 sliding, 2 chunked
    int32_t device;      // index in velo_devices of the device with its weights and cache, -1: none
} velo_layer;

VELO_API velo_status velo_model_layers(const velo_model * model, velo_layer * layers, int32_t capacity,
                                       int32_t * count) VELO_NOEXCEPT;

VELO_API velo_status velo_model_meta_count(const velo_model * model, int32_t * count) VELO_NOEXCEPT;
VELO_API velo_status velo_model_meta_key(const velo_model * model, int32_t index, char * text, size_t capacity,
                                         size_t * len) VELO_NOEXCEPT;
// Write the value as text. Arrays are not supported.
VELO_API velo_status velo_model_meta_value(const velo_model * model, const char * key, char * text, size_t capacity,
                                           size_t * len) VELO_NOEXCEPT;

// Quantize the file `source` to `type` ("Q4_K_M", "Q8_0", ...) and write it to `target`. n_threads <= 0: all cores.
VELO_API velo_status velo_model_quantize(const char * source, const char * target, const char * type,
                                         int32_t n_threads) VELO_NOEXCEPT;

// ---- vocabulary ----

typedef struct velo_vocab_info {
    int32_t n_tokens;
    int32_t bos; // this and the next three: -1 if the vocabulary has none
    int32_t eos;
    int32_t eot;
    int32_t pad;
    int32_t add_bos;
    int32_t add_eos;
} velo_vocab_info;

VELO_API velo_status velo_vocab_get_info(const velo_model * model, velo_vocab_info * info) VELO_NOEXCEPT;
VELO_API velo_status velo_tokenize(const velo_model * model, const char * text, size_t text_len, int32_t add_special,
                                   int32_t parse_special, int32_t * tokens, int32_t capacity,
                                   int32_t * count) VELO_NOEXCEPT;
// Write the bytes of one token. A character may consist of several tokens. special: write control tokens too.
VELO_API velo_status velo_token_to_bytes(const velo_model * model, int32_t token, int32_t special, char * bytes,
                                         size_t capacity, size_t * len) VELO_NOEXCEPT;
// Invert velo_tokenize: write the bytes of all tokens, without what the tokenizer added around the text (a space, BOS,
// EOS). special: write BOS, EOS and control tokens too.
VELO_API velo_status velo_detokenize(const velo_model * model, const int32_t * tokens, int32_t n_tokens,
                                     int32_t special, char * bytes, size_t capacity, size_t * len) VELO_NOEXCEPT;
// Set *is_end to 1 if the model ends its answer with this token.
VELO_API velo_status velo_token_is_end(const velo_model * model, int32_t token, int32_t * is_end) VELO_NOEXCEPT;

// ---- context: a pool of blocks and the graphs that use it ----

typedef struct velo_context_params {
    int32_t n_blocks;   // blocks of the pool; n_blocks*block_size must be a multiple of 256
    int32_t block_size; // tokens: 32, 64, 128 or 256
    int32_t type_k;     // ggml type of K and V rows
    int32_t type_v;
    int32_t max_batch_tokens; // tokens of one step
    int32_t max_seqs;         // sequences of one step; also the number of recurrent states, if the model has any
    int32_t max_seq_len;      // tokens of one sequence
    int32_t max_outputs;      // rows of logits of one step; 0: one for each sequence
    int32_t n_threads;        // 0: all logical cores
    int32_t deterministic;    // bit-identical logits alone, batched and recomputed; needs a deterministic model
    int32_t fast_attention;   // products of many rows may round to bfloat16, for every type
    int32_t n_swap_blocks;    // extra blocks in host memory, for velo_blocks_swap_out
    // Group of each layer, from 0 on; entries of layers without a cache are not read. NULL: all layers are in one
    // group. Layers of a group have the same window. A block holds block_size tokens for the layers of one group: the
    // nth layers of all groups on a device share its memory. Layers of a group have equally long rows, which are the
    // longest rows of the model or whole parts of them: then several layers take the place of one.
    const int32_t * layer_groups;
    int32_t         n_layer_groups; // entries of layer_groups
    int32_t         slot_bytes;     // bytes of a slot if no layer has a cache; blocks then hold saved states alone
} velo_context_params;

// Return the defaults. n_blocks and max_seq_len have none.
VELO_API velo_context_params velo_context_default_params(void) VELO_NOEXCEPT;
VELO_API velo_status         velo_context_create(velo_model * model, const velo_context_params * params,
                                                 velo_context ** context) VELO_NOEXCEPT;
VELO_API void                velo_context_free(velo_context * context) VELO_NOEXCEPT;

typedef struct velo_context_info {
    int32_t n_blocks;
    int32_t block_size;
    int32_t n_groups; // of layers, with a block table each
    int32_t n_states; // recurrent states; 0: the model needs none
    int32_t max_batch_tokens;
    int64_t block_bytes; // one block over all layers of a group, K and V
    int64_t pool_bytes;  // allocated
    int64_t state_bytes;
    int64_t compute_bytes;
    int64_t output_bytes;
} velo_context_info;

VELO_API velo_status velo_context_get_info(velo_context * context, velo_context_info * info) VELO_NOEXCEPT;

// Memory on one device, in bytes.
typedef struct velo_device_memory {
    int32_t device; // index in velo_devices
    int64_t weight_bytes;
    int64_t pool_bytes; // K, V and recurrent states
    int64_t compute_bytes;
} velo_device_memory;

// List the devices that hold memory of the context. Memory shared by host and device counts as the CPU's.
VELO_API velo_status velo_context_memory(velo_context * context, velo_device_memory * memory, int32_t capacity,
                                         int32_t * count) VELO_NOEXCEPT;

// One step of all sequences: copies first, then the forward pass. Arrays are read during the call only.
typedef struct velo_batch {
    int32_t         n_tokens;
    const int32_t * tokens;    // [n_tokens], sequence after sequence
    const int32_t * positions; // [n_tokens]
    int32_t         n_groups;  // of the context
    const int32_t * slots;     // [n_groups][token_stride] block*block_size + offset: the slot for K and V of the token
    int32_t         token_stride;
    const int8_t *  outputs; // [n_tokens] non-zero: compute logits
    int32_t         n_seqs;
    const int32_t * seqs;   // [n_seqs][4]: first token, number of tokens, length after this step, 0
    const int32_t * firsts; // [n_groups][seq_stride]: blocks of the sequence before its table; NULL: 0
    const int32_t * tables; // [n_groups][seq_stride][table_stride]: block ids in position order, -1 past the end
    int32_t         seq_stride;
    int32_t         table_stride;
    const int32_t * states; // [n_seqs], or NULL if the model has no recurrent layers
    int32_t         n_copies;
    const int32_t * copies; // [n_copies][2]: source block, target block
} velo_batch;

// Run one step. Synchronous. After VELO_CANCELLED or VELO_FAILED the caller may run the same batch again, because the
// context stores no lengths. But all recurrent states are cleared: their sequences must start again.
VELO_API velo_status velo_context_run(velo_context * context, const velo_batch * batch) VELO_NOEXCEPT;
// Make a run in progress return VELO_CANCELLED soon. A later run is not affected. Thread-safe.
VELO_API velo_status velo_context_cancel(velo_context * context) VELO_NOEXCEPT;
// Copy the n_vocab logits of an output of the last run. `row` counts the non-zero entries of batch.outputs.
VELO_API velo_status velo_context_logits(velo_context * context, int32_t row, float * logits,
                                         int32_t capacity) VELO_NOEXCEPT;
VELO_API velo_status velo_context_set_threads(velo_context * context, int32_t n_threads) VELO_NOEXCEPT;

// Copy, read or write whole blocks over all layers. A block's bytes are, layer by layer, its K rows and then its V
// rows.
VELO_API velo_status velo_blocks_copy(velo_context * context, const int32_t * sources, const int32_t * targets,
                                      int32_t n) VELO_NOEXCEPT;
VELO_API velo_status velo_blocks_read(velo_context * context, const int32_t * blocks, int32_t n, void * bytes,
                                      size_t size) VELO_NOEXCEPT;
VELO_API velo_status velo_blocks_write(velo_context * context, const int32_t * blocks, int32_t n, const void * bytes,
                                       size_t size) VELO_NOEXCEPT;
// Copy blocks to host memory and back. swap_blocks: 0 to n_swap_blocks-1, one for each block. A device copies its own
// blocks on a separate stream, to and from pinned memory if it has any.
VELO_API velo_status velo_blocks_swap_out(velo_context * context, const int32_t * blocks, const int32_t * swap_blocks,
                                          int32_t n) VELO_NOEXCEPT;
VELO_API velo_status velo_blocks_swap_in(velo_context * context, const int32_t * swap_blocks, const int32_t * blocks,
                                         int32_t n) VELO_NOEXCEPT;
// Set every byte of the blocks. 0xFF is NaN in every type and makes reads of freed blocks visible.
VELO_API velo_status velo_blocks_fill(velo_context * context, const int32_t * blocks, int32_t n,
                                      uint8_t byte) VELO_NOEXCEPT;
// Clear a recurrent state before a sequence starts in it, if the model has states; copy it to another one.
VELO_API velo_status velo_state_clear(velo_context * context, int32_t state) VELO_NOEXCEPT;
VELO_API velo_status velo_state_copy(velo_context * context, int32_t source, int32_t target) VELO_NOEXCEPT;
// Save a recurrent state in blocks, or load it from them; n: as many blocks as state_bytes of the model need. swapped:
// the blocks are swap_blocks. Load only what was saved: other bytes give an error, or a state without meaning.
VELO_API velo_status velo_state_save(velo_context * context, int32_t state, const int32_t * blocks, int32_t n,
                                     int32_t swapped) VELO_NOEXCEPT;
VELO_API velo_status velo_state_load(velo_context * context, int32_t state, const int32_t * blocks, int32_t n,
                                     int32_t swapped) VELO_NOEXCEPT;

typedef struct velo_timings {
    int64_t n_runs;
    int64_t n_tokens;
    int64_t n_graphs_reused; // runs that used the graph of the run before
    double  run_seconds;     // total inside velo_context_run
    double  sample_seconds;  // total inside velo_sample and velo_logprobs
} velo_timings;

VELO_API velo_status velo_context_timings(velo_context * context, velo_timings * timings) VELO_NOEXCEPT;

// ---- sampling ----

typedef struct velo_sampler_params {
    float           temperature;        // 0: greedy
    int32_t         top_k;              // 0: off
    float           top_p;              // 1: off
    float           min_p;              // 0: off
    float           repetition_penalty; // 1: off; over prompt and output
    float           presence_penalty;   // 0: off; over the output
    float           frequency_penalty;  // 0: off; over the output
    uint64_t        seed;
    int32_t         n_bias;
    const int32_t * bias_tokens; // [n_bias]
    const float *   bias_values; // [n_bias] added to the logits; -INFINITY bans a token
} velo_sampler_params;

VELO_API velo_sampler_params velo_sampler_default_params(void) VELO_NOEXCEPT;
// Create a sampler. It applies mask, bias, penalties, temperature, top-k, top-p and min-p in this order, then draws.
VELO_API velo_status velo_sampler_create(const velo_model * model, const velo_sampler_params * params,
                                         velo_sampler ** sampler) VELO_NOEXCEPT;
VELO_API void        velo_sampler_free(velo_sampler * sampler) VELO_NOEXCEPT;
// Append tokens that the sampler did not draw (the prompt), for the repetition penalty.
VELO_API velo_status velo_sampler_prompt(velo_sampler * sampler, const int32_t * tokens,
                                         int32_t n_tokens) VELO_NOEXCEPT;
// Set the tokens that the sampler may draw until the next call: token t if bit t % 8 of byte t / 8 is set. size 0:
// every token.
VELO_API velo_status velo_sampler_mask(velo_sampler * sampler, const uint8_t * bits, size_t size) VELO_NOEXCEPT;
// Draw one token for each of n outputs of the last run, each with its own sampler, which appends the token.
// statuses[i] is the status of the i-th draw. A draw that fails (a NaN, an infinity, or no token allowed) does not
// affect the others, and its token is -1.
VELO_API velo_status velo_sample(velo_context * context, const int32_t * rows, velo_sampler * const * samplers,
                                 int32_t n, int32_t * tokens, int32_t * statuses) VELO_NOEXCEPT;
// For each of n outputs of the last run, write the natural logarithm of the probability of tokens[i], and the k most
// likely tokens with theirs, the most likely first. Probabilities are the model's, before bias, penalties and
// temperature.
VELO_API velo_status velo_logprobs(velo_context * context, const int32_t * rows, const int32_t * tokens, int32_t n,
                                   int32_t k, float * logprobs, int32_t * top_tokens,
                                   float * top_logprobs) VELO_NOEXCEPT;

// ---- embeddings ----

// The tokens whose vectors make a text's vector.
typedef enum velo_pooling {
    VELO_POOLING_NONE = 0, // the file names none
    VELO_POOLING_MEAN = 1, // all tokens
    VELO_POOLING_CLS  = 2, // the first token
    VELO_POOLING_LAST = 3, // the last token
    VELO_POOLING_RANK = 4  // no vector: a head computes a score
} velo_pooling;

typedef struct velo_embedder_params {
    int32_t max_tokens; // of one text, at most the model's training context; no default
    int32_t n_threads;  // 0: all logical cores
} velo_embedder_params;

// Create an embedder: a context of its own, independent of the model's velo_contexts.
VELO_API velo_status velo_embedder_create(velo_model * model, const velo_embedder_params * params,
                                          velo_embedder ** embedder) VELO_NOEXCEPT;
VELO_API void        velo_embedder_free(velo_embedder * embedder) VELO_NOEXCEPT;
// Write n_embd_out numbers for each text. `tokens` has the tokens of all texts, one text after the other; pooling is
// mean, cls or last. Synchronous; calls from several threads wait for one another. After a failure create another
// embedder.
VELO_API velo_status velo_embed(velo_embedder * embedder, const int32_t * tokens, const int32_t * lengths,
                                int32_t n_texts, int32_t pooling, float * out, size_t capacity) VELO_NOEXCEPT;
// Make a call in progress return VELO_CANCELLED soon. A later call is not affected. Thread-safe.
VELO_API velo_status velo_embedder_cancel(velo_embedder * embedder) VELO_NOEXCEPT;

// ---- adapters ----

// Load the LoRA adapter of a GGUF file for a model; *bytes: the memory of its tensors. This function trusts the file as
// upstream does: check an untrusted file first (pyvelo/models/lora.py). Load and free adapters while no context and no
// embedder of the model runs or is created.
VELO_API velo_status velo_adapter_load(velo_model * model, const char * path, velo_adapter ** adapter,
                                       int64_t * bytes) VELO_NOEXCEPT;
// Free the adapter. A context or an embedder that applies it keeps its memory until it applies another one, or none.
VELO_API void velo_adapter_free(velo_adapter * adapter) VELO_NOEXCEPT;
// Add the products of an adapter, times `scale`, for all tokens of the next runs; NULL: apply none. The first call with
// an adapter builds the largest graphs and reserves their memory. VELO_UNSUPPORTED: the graph of the model cannot apply
// the adapter to one of its weights; then none is applied.
VELO_API velo_status velo_context_adapt(velo_context * context, velo_adapter * adapter, float scale) VELO_NOEXCEPT;
// The same for an embedder.
VELO_API velo_status velo_embedder_adapt(velo_embedder * embedder, velo_adapter * adapter, float scale) VELO_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif
