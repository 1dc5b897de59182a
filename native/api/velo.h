// velo.h: the one C interface that Python sees.
//
// Every function that can fail returns a velo_status and leaves one sentence for the calling thread in
// velo_message(). Nothing throws, nothing aborts on an argument. Handles are opaque; buffers belong to the
// caller. Text is UTF-8 with an explicit length; where a function writes text or an array it takes the buffer's
// capacity and reports the length it needs: VELO_BUFFER_TOO_SMALL means that *len is set and nothing was written.
// A model may be used from many threads. A context serves one call at a time: calls of other threads wait, but for
// velo_context_cancel. A sampler belongs to one thread at a time.
#ifndef VELO_H
#define VELO_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    define VELO_API __declspec(dllexport)
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
    VELO_UNSUPPORTED      = 3, // this architecture, type or device cannot do what was asked
    VELO_OUT_OF_MEMORY    = 4,
    VELO_CANCELLED        = 5, // a callback or velo_context_cancel said so
    VELO_FAILED           = 6, // the computation failed
    VELO_BUFFER_TOO_SMALL = 7,
    VELO_INTERNAL         = 8 // a defect of this library
} velo_status;

typedef struct velo_model    velo_model;
typedef struct velo_context  velo_context;
typedef struct velo_sampler  velo_sampler;
typedef struct velo_embedder velo_embedder;

// ---- library ----

VELO_API int32_t velo_abi_version(void) VELO_NOEXCEPT;
// the sentence of the last call that failed on this thread; valid until the next failing call there
VELO_API const char * velo_message(void) VELO_NOEXCEPT;
VELO_API const char * velo_status_name(int32_t status) VELO_NOEXCEPT;

// level: 1 debug, 2 info, 3 warning, 4 error. May be called from any thread that runs the library.
typedef void (*velo_log_callback)(int32_t level, const char * text, void * user);
// A NULL callback is quiet, and that is the default. Process-wide, thread-safe. A line is given whole, without its
// end. NULL waits up to a second for callbacks in other threads, unless it is given within a callback. Another callback
// does not: a line that another thread had begun may still go to the one before.
VELO_API velo_status velo_log_set(velo_log_callback callback, void * user, int32_t min_level) VELO_NOEXCEPT;

typedef enum velo_device_kind {
    VELO_DEVICE_CPU         = 0,
    VELO_DEVICE_GPU         = 1, // with memory of its own
    VELO_DEVICE_IGPU        = 2, // in host memory
    VELO_DEVICE_ACCELERATOR = 3  // beside the CPU, for some operations
} velo_device_kind;

typedef struct velo_device {
    char    name[64];
    char    description[128];
    int32_t kind;         // a velo_device_kind
    int64_t memory_total; // bytes
    int64_t memory_free;  // of the CPU: what can be taken without pushing others out
} velo_device;

VELO_API velo_status velo_devices(velo_device * devices, int32_t capacity, int32_t * count) VELO_NOEXCEPT;
// Bytes that models allocated for weights that their first run packs: free by the system's count, but spoken for.
VELO_API int64_t velo_promised_memory(void) VELO_NOEXCEPT;
// "AVX512 = 1 | ..." as the library was built
VELO_API velo_status velo_system_info(char * text, size_t capacity, size_t * len) VELO_NOEXCEPT;

// Ends the worker threads that OpenMP keeps for the calling thread; its next run starts them anew. While more of them
// live than there are cores, GCC's OpenMP lets the threads of every run sleep at each barrier.
VELO_API void velo_threads_release(void) VELO_NOEXCEPT;

// ---- model ----

// 0..1; return 0 to cancel
typedef int32_t (*velo_progress_callback)(float progress, void * user);

typedef struct velo_model_params {
    int32_t n_gpu_layers; // 0: everything on the CPU; -1: all layers
    // The GPUs that get layers, as numbers in velo_devices, and how many each gets: [n_gpus], in the order of layers,
    // n_gpu_layers in all. n_gpus == 0: all GPUs share the layers by their free memory.
    const int32_t * gpus;
    const int32_t * gpu_layers;
    int32_t         n_gpus;
    // Map the file: what a step uses of it is read then. Weights that this processor has a faster layout for are packed
    // by the first run of the model, whichever context's, in memory that is allocated by the load.
    int32_t use_mmap;
    int32_t vocab_only;    // metadata and tokenizer: no weights, no layers, and only n_vocab of the sizes
    int32_t check_tensors; // look for NaN and Inf while loading
    int32_t deterministic; // keep weights in the layout whose products do not depend on the batch
    // Told of the load, from 0 to 1, in the thread that loads; and, where weights are left to be packed, of that from 0
    // to 1 again, in the thread that runs, which must call nothing of the model or its contexts from there. It must be
    // valid until they are freed.
    velo_progress_callback progress;
    void *                 progress_user;
} velo_model_params;

VELO_API velo_model_params velo_model_default_params(void) VELO_NOEXCEPT;
// The file is trusted as far as upstream trusts it: scan one from elsewhere before (pyvelo/models/gguf_scan.py). On
// Linux, where a file that is mapped becomes shorter, the run that sees it and all after it end with
// VELO_MODEL_ERROR; a handler of SIGBUS, set with the first such load, sees to that and passes on what is not its own.
VELO_API velo_status velo_model_load(const char * path, const velo_model_params * params,
                                     velo_model ** model) VELO_NOEXCEPT;
// Contexts and samplers made from the model stay valid: its memory goes with the last of them.
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
    int32_t has_recurrent; // some layers keep a state instead of a cache
    int32_t can_page;      // 0: velo_context_create refuses it, with the reason
    int32_t n_embd_out;    // numbers of an embedding
    int32_t pooling;       // how the file says that embeddings are pooled, a velo_pooling
    int32_t is_encoder;    // it embeds texts, and generates none
} velo_model_info;

VELO_API velo_status velo_model_get_info(const velo_model * model, velo_model_info * info) VELO_NOEXCEPT;
// why can_page is 0; empty where it is 1
VELO_API velo_status velo_model_refusal(const velo_model * model, char * text, size_t capacity,
                                        size_t * len) VELO_NOEXCEPT;

// What one layer keeps for each token; layers without a cache of their own are left out.
typedef struct velo_layer {
    int32_t layer;
    int32_t n_head;
    int32_t n_head_kv;
    int32_t head_dim_k;
    int32_t head_dim_v;  // 0: V is a view of K
    int32_t window;      // tokens, 0: attends everything
    int32_t window_type; // 0 none, 1 sliding, 2 chunked
    int32_t device;      // where its weights and its cache are: a number in velo_devices, -1: in none
} velo_layer;

VELO_API velo_status velo_model_layers(const velo_model * model, velo_layer * layers, int32_t capacity,
                                       int32_t * count) VELO_NOEXCEPT;

VELO_API velo_status velo_model_meta_count(const velo_model * model, int32_t * count) VELO_NOEXCEPT;
VELO_API velo_status velo_model_meta_key(const velo_model * model, int32_t index, char * text, size_t capacity,
                                         size_t * len) VELO_NOEXCEPT;
// the value as text; arrays are not among them
VELO_API velo_status velo_model_meta_value(const velo_model * model, const char * key, char * text, size_t capacity,
                                           size_t * len) VELO_NOEXCEPT;

// Writes `source` quantized as `type` ("Q4_K_M", "Q8_0", ...) to `target`. n_threads <= 0: all cores.
VELO_API velo_status velo_model_quantize(const char * source, const char * target, const char * type,
                                         int32_t n_threads) VELO_NOEXCEPT;

// ---- vocabulary ----

typedef struct velo_vocab_info {
    int32_t n_tokens;
    int32_t bos; // -1 where there is none, as for all of these
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
// The bytes that a token stands for; a character may be spread over several tokens. special: show control tokens too.
VELO_API velo_status velo_token_to_bytes(const velo_model * model, int32_t token, int32_t special, char * bytes,
                                         size_t capacity, size_t * len) VELO_NOEXCEPT;
// The inverse of velo_tokenize: the bytes of all tokens, without what the tokenizer had put in front.
VELO_API velo_status velo_detokenize(const velo_model * model, const int32_t * tokens, int32_t n_tokens,
                                     int32_t special, char * bytes, size_t capacity, size_t * len) VELO_NOEXCEPT;
// 1 where the model ends its answer with this token
VELO_API velo_status velo_token_is_end(const velo_model * model, int32_t token, int32_t * is_end) VELO_NOEXCEPT;

// ---- context: a pool of blocks and the graphs that use it ----

typedef struct velo_context_params {
    int32_t n_blocks;   // blocks of the pool; n_blocks*block_size must be a multiple of 256
    int32_t block_size; // tokens: 32, 64, 128 or 256
    int32_t type_k;     // ggml type of K and V rows
    int32_t type_v;
    int32_t max_batch_tokens; // tokens of one step
    int32_t max_seqs;         // sequences of one step; recurrent states where the model has them
    int32_t max_seq_len;      // tokens of one sequence
    int32_t max_outputs;      // rows of logits of one step; 0: one for each sequence
    int32_t n_threads;        // 0: the cores there are
    int32_t deterministic;    // bit-identical logits alone, batched and recomputed; the model must be loaded so too
    int32_t fast_attention;   // products of many query rows may be rounded to bfloat16, whatever the types
    int32_t n_swap_blocks;    // blocks in host memory beside the pool, for velo_blocks_swap_out
} velo_context_params;

// n_blocks and max_seq_len have no default
VELO_API velo_context_params velo_context_default_params(void) VELO_NOEXCEPT;
VELO_API velo_status         velo_context_create(velo_model * model, const velo_context_params * params,
                                                 velo_context ** context) VELO_NOEXCEPT;
VELO_API void                velo_context_free(velo_context * context) VELO_NOEXCEPT;

typedef struct velo_context_info {
    int32_t n_blocks;
    int32_t block_size;
    int32_t n_states; // recurrent states; 0: none needed
    int32_t max_batch_tokens;
    int64_t block_bytes; // one block over all layers, K and V
    int64_t pool_bytes;  // allocated
    int64_t state_bytes;
    int64_t compute_bytes;
    int64_t output_bytes;
} velo_context_info;

VELO_API velo_status velo_context_get_info(velo_context * context, velo_context_info * info) VELO_NOEXCEPT;

// What lies on one device.
typedef struct velo_device_memory {
    int32_t device; // a number in velo_devices
    int64_t weight_bytes;
    int64_t pool_bytes; // K, V and recurrent states
    int64_t compute_bytes;
} velo_device_memory;

// Devices that hold anything; memory that the host and a device share counts as the CPU's.
VELO_API velo_status velo_context_memory(velo_context * context, velo_device_memory * memory, int32_t capacity,
                                         int32_t * count) VELO_NOEXCEPT;

// One step of all sequences: copies first, then the forward pass. Arrays are read during the call only.
typedef struct velo_batch {
    int32_t         n_tokens;
    const int32_t * tokens;    // [n_tokens], sequence after sequence
    const int32_t * positions; // [n_tokens]
    const int32_t * slots;     // [n_tokens] block*block_size + offset where K and V of the token go
    const int8_t *  outputs;   // [n_tokens] non-zero: logits wanted
    int32_t         n_seqs;
    const int32_t * seqs;   // [n_seqs][4]: first token, number of tokens, length after this step, 0
    const int32_t * tables; // [n_seqs][table_stride]: block ids in position order, -1 past the end
    int32_t         table_stride;
    const int32_t * states; // [n_seqs], or NULL where the model has no recurrent layers
    int32_t         n_copies;
    const int32_t * copies; // [n_copies][2]: source block, target block
} velo_batch;

// Synchronous. After VELO_CANCELLED or VELO_FAILED the same batch may be run again: lengths live with the caller. But
// recurrent states that were half updated are lost: their sequences start again.
VELO_API velo_status velo_context_run(velo_context * context, const velo_batch * batch) VELO_NOEXCEPT;
// Makes a run in progress return VELO_CANCELLED soon; a later run is not affected. Thread-safe.
VELO_API velo_status velo_context_cancel(velo_context * context) VELO_NOEXCEPT;
// Copies n_vocab floats of the row-th wanted output of the last run.
VELO_API velo_status velo_context_logits(velo_context * context, int32_t row, float * logits,
                                         int32_t capacity) VELO_NOEXCEPT;
VELO_API velo_status velo_context_set_threads(velo_context * context, int32_t n_threads) VELO_NOEXCEPT;

// Whole blocks over all layers; a block's bytes are, layer by layer, its K rows and then its V rows.
VELO_API velo_status velo_blocks_copy(velo_context * context, const int32_t * sources, const int32_t * targets,
                                      int32_t n) VELO_NOEXCEPT;
VELO_API velo_status velo_blocks_read(velo_context * context, const int32_t * blocks, int32_t n, void * bytes,
                                      size_t size) VELO_NOEXCEPT;
VELO_API velo_status velo_blocks_write(velo_context * context, const int32_t * blocks, int32_t n, const void * bytes,
                                       size_t size) VELO_NOEXCEPT;
// To host memory and back: each block to a place 0 .. n_swap_blocks-1. A pool on a device is copied by the device, on a
// stream of its own; pinned memory is used where there is any.
VELO_API velo_status velo_blocks_swap_out(velo_context * context, const int32_t * blocks, const int32_t * places,
                                          int32_t n) VELO_NOEXCEPT;
VELO_API velo_status velo_blocks_swap_in(velo_context * context, const int32_t * places, const int32_t * blocks,
                                         int32_t n) VELO_NOEXCEPT;
// 0xFF is NaN in every type: what must not be read can be made visible.
VELO_API velo_status velo_blocks_fill(velo_context * context, const int32_t * blocks, int32_t n,
                                      uint8_t byte) VELO_NOEXCEPT;
// Forgets what a recurrent state holds; call before a sequence starts in it. A no-op where there are none.
VELO_API velo_status velo_state_clear(velo_context * context, int32_t state) VELO_NOEXCEPT;

typedef struct velo_timings {
    int64_t n_runs;
    int64_t n_tokens;
    int64_t n_graphs_reused; // runs whose graph was that of the run before
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
// order: mask, bias, penalties, temperature, top-k, top-p, min-p, draw
VELO_API velo_status velo_sampler_create(const velo_model * model, const velo_sampler_params * params,
                                         velo_sampler ** sampler) VELO_NOEXCEPT;
VELO_API void        velo_sampler_free(velo_sampler * sampler) VELO_NOEXCEPT;
// Shows the sampler tokens that it did not draw (the prompt), for the repetition penalty.
VELO_API velo_status velo_sampler_prompt(velo_sampler * sampler, const int32_t * tokens,
                                         int32_t n_tokens) VELO_NOEXCEPT;
// What the sampler may draw until the next call: bit t % 8 of byte t / 8 says whether token t. size 0: every token.
VELO_API velo_status velo_sampler_mask(velo_sampler * sampler, const uint8_t * bits, size_t size) VELO_NOEXCEPT;
// Draws one token for each of n wanted outputs of the last run, each with its own sampler, which remembers the
// token. statuses[i] tells how the i-th went; one that fails (a NaN, an infinity, or nothing left to choose from)
// leaves the others alone, and its token is -1.
VELO_API velo_status velo_sample(velo_context * context, const int32_t * rows, velo_sampler * const * samplers,
                                 int32_t n, int32_t * tokens, int32_t * statuses) VELO_NOEXCEPT;
// For each of n wanted outputs of the last run, by the model's own distribution (before bias, penalties, temperature):
// ln of the probability of tokens[i], and the k most likely tokens with theirs, the most likely first.
VELO_API velo_status velo_logprobs(velo_context * context, const int32_t * rows, const int32_t * tokens, int32_t n,
                                   int32_t k, float * logprobs, int32_t * top_tokens,
                                   float * top_logprobs) VELO_NOEXCEPT;

// ---- embeddings ----

// Which tokens' vectors make that of a text.
typedef enum velo_pooling {
    VELO_POOLING_NONE = 0, // the file does not say
    VELO_POOLING_MEAN = 1, // all of them
    VELO_POOLING_CLS  = 2, // the first
    VELO_POOLING_LAST = 3,
    VELO_POOLING_RANK = 4 // a head gives a score instead
} velo_pooling;

typedef struct velo_embedder_params {
    int32_t max_tokens; // of one text, at most what the model was trained on; no default
    int32_t n_threads;  // 0: the cores there are
} velo_embedder_params;

// A context of its own beside those that generate.
VELO_API velo_status velo_embedder_create(velo_model * model, const velo_embedder_params * params,
                                          velo_embedder ** embedder) VELO_NOEXCEPT;
VELO_API void        velo_embedder_free(velo_embedder * embedder) VELO_NOEXCEPT;
// Writes n_embd_out numbers for each text. `tokens` are those of all texts, one after the other; pooling is mean, cls
// or last. Synchronous; calls from several threads wait for one another. After a failure make another embedder.
VELO_API velo_status velo_embed(velo_embedder * embedder, const int32_t * tokens, const int32_t * lengths,
                                int32_t n_texts, int32_t pooling, float * out, size_t capacity) VELO_NOEXCEPT;
// Makes a call in progress return VELO_CANCELLED soon; a later one is not affected. Thread-safe.
VELO_API velo_status velo_embedder_cancel(velo_embedder * embedder) VELO_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif
