// Paged KV cache for llama.cpp: one pool of blocks for all sequences, addressed by block tables.
//
// The library keeps no notion of a sequence: a batch is arrays, and whoever calls owns the blocks. The token
// at position p of a sequence lies in slot table[p / block_size]*block_size + p % block_size of every layer.
// A context is not thread-safe; the functions that fail leave a sentence in llama_paged_error() of the thread.
#pragma once

#include "llama.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum llama_paged_status {
    LLAMA_PAGED_OK          = 0,
    LLAMA_PAGED_INVALID     = 1, // an argument is wrong; nothing was computed or changed
    LLAMA_PAGED_UNSUPPORTED = 2, // this model or setting cannot be paged
    LLAMA_PAGED_NO_MEMORY   = 3,
    LLAMA_PAGED_ABORTED     = 4, // the abort callback said so; run the same batch again
    LLAMA_PAGED_FAILED      = 5, // the computation failed
};

struct llama_paged_params {
    uint32_t n_blocks;       // blocks of the pool
    uint32_t block_size;     // tokens, a multiple of 32
    uint32_t max_rows;       // sequences of one step in the worst case
    uint32_t max_seq_len;    // tokens of the longest sequence (rope scaling, width of the table)
    uint32_t n_swap_blocks;  // blocks in host memory beside the pool
    bool     deterministic;  // a sequence's logits do not depend on what runs beside it, nor on how it was cut
    bool     fast_attention; // products of many query rows may be rounded to bfloat16, whatever the types
};

// One step of all sequences. Arrays are read during the call only.
struct llama_paged_batch {
    int32_t         n_tokens;
    const int32_t * tokens;    // [n_tokens] sequence after sequence
    const int32_t * positions; // [n_tokens]
    const int32_t * slots;     // [n_tokens] where K and V of the token are written
    const int8_t *  outputs;   // [n_tokens] non-zero: logits wanted

    int32_t         n_seqs;
    const int32_t * seqs;   // [n_seqs][4]: first token, number of tokens, length after this step, 0
    const int32_t * tables; // [n_seqs][table_stride]: block ids in position order, -1 past the end
    int32_t         table_stride;
    const int32_t * states; // [n_seqs] recurrent state of each sequence; NULL where the model has none
};

// A storage: what one layer, or several that share it, keeps for each token.
struct llama_paged_storage {
    int32_t layer;  // first model layer that uses it
    int32_t type_k; // ggml_type
    int32_t type_v;
    int32_t n_embd_k; // elements of a row
    int32_t n_embd_v; // 0: V is a view of K
    int64_t row_bytes_k;
    int64_t row_bytes_v;
};

struct llama_paged_info {
    uint32_t n_blocks;
    uint32_t block_size;
    uint32_t n_storages;
    uint32_t n_states;      // recurrent states, 0: attention only
    uint64_t block_bytes;   // of one block over all storages: K and V
    uint64_t pool_bytes;    // allocated for all K and V, padding included
    uint64_t state_bytes;   // allocated for the recurrent states
    uint64_t compute_bytes; // allocated for the graphs
    uint64_t output_bytes;  // allocated for logits
};

// NULL on failure. n_ctx, n_seq_max (but for recurrent states), kv_unified, swa_full and flash_attn_type of
// `cparams` are set by this function.
LLAMA_API struct llama_context * llama_paged_init(struct llama_model * model, struct llama_context_params cparams,
                                                  struct llama_paged_params params);

LLAMA_API const char * llama_paged_error(void);

// NULL if this model can be paged, else the reason.
LLAMA_API const char * llama_paged_refusal(const struct llama_model * model);

LLAMA_API enum llama_paged_status llama_paged_get_info(struct llama_context * ctx, struct llama_paged_info * info);
LLAMA_API enum llama_paged_status llama_paged_get_storage(struct llama_context * ctx, uint32_t i,
                                                          struct llama_paged_storage * storage);

LLAMA_API enum llama_paged_status llama_decode_paged(struct llama_context *           ctx,
                                                     const struct llama_paged_batch * batch);

// Logits of the row-th wanted output of the last step, n_vocab floats; NULL if there is none. Valid until the next
// step.
LLAMA_API const float * llama_paged_logits(struct llama_context * ctx, int32_t row);

// Whole blocks, over all storages. A block's bytes: for each storage its K rows, then its V rows.
LLAMA_API enum llama_paged_status llama_paged_copy(struct llama_context * ctx, const int32_t * src, const int32_t * dst,
                                                   int32_t n);
LLAMA_API enum llama_paged_status llama_paged_read(struct llama_context * ctx, const int32_t * blocks, int32_t n,
                                                   void * data, size_t size);
LLAMA_API enum llama_paged_status llama_paged_write(struct llama_context * ctx, const int32_t * blocks, int32_t n,
                                                    const void * data, size_t size);
// every byte of the blocks set to `byte` (0xFF is NaN in every type)
LLAMA_API enum llama_paged_status llama_paged_fill(struct llama_context * ctx, const int32_t * blocks, int32_t n,
                                                   uint8_t byte);

// To host memory and back, each block to a place 0 .. n_swap_blocks-1; done when the call returns.
LLAMA_API enum llama_paged_status llama_paged_swap_out(struct llama_context * ctx, const int32_t * blocks,
                                                       const int32_t * places, int32_t n);
LLAMA_API enum llama_paged_status llama_paged_swap_in(struct llama_context * ctx, const int32_t * places,
                                                      const int32_t * blocks, int32_t n);

// Forget what a recurrent state holds: call it before a sequence starts in it.
LLAMA_API enum llama_paged_status llama_paged_clear_state(struct llama_context * ctx, int32_t state);

#ifdef __cplusplus
}
#endif
