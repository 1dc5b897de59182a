// Paged KV cache for llama.cpp: one pool of blocks for all sequences, addressed by block tables.
//
// A context stores no sequences: a batch consists of arrays, and the caller owns the blocks. Layers that remember alike
// (all tokens, or a window of them) form a group. A block has the K and V of block_size tokens for the layers of one
// group, and a sequence has a block table for each group. The token at position p of a sequence is in slot
// table[p / block_size - first]*block_size + p % block_size of every layer of the group. The group's window has left
// the `first` blocks before the table.
//
// A context is not thread-safe. A function that fails sets llama_paged_error() of the calling thread.
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
    LLAMA_PAGED_UNSUPPORTED = 2, // not possible with this model or setting
    LLAMA_PAGED_NO_MEMORY   = 3,
    LLAMA_PAGED_ABORTED     = 4, // by the abort callback; the same batch may run again
    LLAMA_PAGED_FAILED      = 5, // the computation failed
};

struct llama_paged_params {
    uint32_t n_blocks;      // blocks of the pool
    uint32_t block_size;    // tokens, a multiple of 32
    uint32_t max_rows;      // most sequences of one step
    uint32_t max_seq_len;   // tokens of the longest sequence (rope scaling, width of the table)
    uint32_t n_swap_blocks; // extra blocks in host memory
    // Group of each layer with a cache, by layer; NULL: all layers are in one group. The nth layers of all groups on a
    // device share the memory of a block. Layers of a group have equally long rows, which are the longest rows of the
    // model or whole parts of them: then several layers take the place of one. A group of layers without and with a
    // window is one without.
    const int32_t * layer_groups;
    uint32_t        n_layer_groups; // entries of layer_groups: the layers of the model
    uint32_t        slot_bytes;     // bytes of a slot if no layer has a cache; blocks then hold saved states alone
    bool            deterministic;  // a sequence's logits do not depend on other sequences or on prompt chunks
    bool            fast_attention; // products of many query rows may round to bfloat16, for every type
};

// One step of all sequences. Arrays are read during the call only.
struct llama_paged_batch {
    int32_t         n_tokens;
    const int32_t * tokens;    // [n_tokens] sequence after sequence
    const int32_t * positions; // [n_tokens]
    int32_t         n_groups;  // of the context
    const int32_t * slots;     // [n_groups][token_stride] the slot for K and V of the token
    int32_t         token_stride;
    const int8_t *  outputs; // [n_tokens] non-zero: compute logits

    int32_t         n_seqs;
    const int32_t * seqs;   // [n_seqs][4]: first token, number of tokens, length after this step, 0
    const int32_t * firsts; // [n_groups][seq_stride]: blocks before the table; NULL: 0. Always 0 without a window
    const int32_t * tables; // [n_groups][seq_stride][table_stride]: block ids in position order, -1 past the end
    int32_t         seq_stride;
    int32_t         table_stride;
    const int32_t * states; // [n_seqs] recurrent state of each sequence; NULL if the model has none
};

// K and V tensors that one layer of each group uses.
struct llama_paged_storage {
    int32_t layer;  // the first of these layers
    int32_t type_k; // ggml_type
    int32_t type_v;
    int32_t n_embd_k; // numbers of a row
    int32_t n_embd_v; // 0: V is a view of K
    int64_t row_bytes_k;
    int64_t row_bytes_v;
};

struct llama_paged_info {
    uint32_t n_blocks;
    uint32_t block_size;
    uint32_t n_groups;
    uint32_t n_storages;
    uint32_t n_states;      // recurrent states, 0: attention only
    uint64_t block_bytes;   // one block over all storages, K and V
    uint64_t pool_bytes;    // allocated for all K and V, padding included
    uint64_t state_bytes;   // allocated for the recurrent states
    uint64_t compute_bytes; // allocated for the graphs
    uint64_t output_bytes;  // allocated for logits
};

// Create a context; NULL on failure. This function sets n_ctx, n_seq_max, kv_unified, swa_full and flash_attn_type of
// `cparams`.
LLAMA_API struct llama_context * llama_paged_init(struct llama_model * model, struct llama_context_params cparams,
                                                  struct llama_paged_params params);

// Return the message of the last call that failed on this thread.
LLAMA_API const char * llama_paged_error(void);

// Return NULL if this model can be paged, else the reason.
LLAMA_API const char * llama_paged_refusal(const struct llama_model * model);

// Return the bytes of a saved recurrent state; 0: the model has none, or cannot be paged.
LLAMA_API int64_t llama_paged_state_bytes(const struct llama_model * model);

LLAMA_API enum llama_paged_status llama_paged_get_info(struct llama_context * ctx, struct llama_paged_info * info);
LLAMA_API enum llama_paged_status llama_paged_get_storage(struct llama_context * ctx, uint32_t i,
                                                          struct llama_paged_storage * storage);

LLAMA_API enum llama_paged_status llama_decode_paged(struct llama_context *           ctx,
                                                     const struct llama_paged_batch * batch);

// Drop the logits of the last step, and clear all recurrent states.
LLAMA_API void llama_paged_drop_step(struct llama_context * ctx);

// Set *logits to the n_vocab logits of an output of the last step, after waiting for it. `row` counts the non-zero
// entries of batch.outputs. Valid until the next step.
LLAMA_API enum llama_paged_status llama_paged_logits(struct llama_context * ctx, int32_t row, float ** logits);

// Copy, read or write whole blocks over all storages. A block's bytes are its K rows, then its V rows, of each storage.
LLAMA_API enum llama_paged_status llama_paged_copy(struct llama_context * ctx, const int32_t * src, const int32_t * dst,
                                                   int32_t n);
LLAMA_API enum llama_paged_status llama_paged_read(struct llama_context * ctx, const int32_t * blocks, int32_t n,
                                                   void * data, size_t size);
LLAMA_API enum llama_paged_status llama_paged_write(struct llama_context * ctx, const int32_t * blocks, int32_t n,
                                                    const void * data, size_t size);
// Set every byte of the blocks (0xFF is NaN in every type).
LLAMA_API enum llama_paged_status llama_paged_fill(struct llama_context * ctx, const int32_t * blocks, int32_t n,
                                                   uint8_t byte);

// Copy blocks to host memory and back. Synchronous. swap_blocks: 0 to n_swap_blocks-1, one for each block.
LLAMA_API enum llama_paged_status llama_paged_swap_out(struct llama_context * ctx, const int32_t * blocks,
                                                       const int32_t * swap_blocks, int32_t n);
LLAMA_API enum llama_paged_status llama_paged_swap_in(struct llama_context * ctx, const int32_t * swap_blocks,
                                                      const int32_t * blocks, int32_t n);

// Clear a recurrent state. Call it before a sequence starts in it.
LLAMA_API enum llama_paged_status llama_paged_clear_state(struct llama_context * ctx, int32_t state);
// Copy a recurrent state to another one.
LLAMA_API enum llama_paged_status llama_paged_copy_state(struct llama_context * ctx, int32_t src, int32_t dst);
// Save a recurrent state in blocks, as many as its llama_paged_state_bytes need, or load it from them. The blocks then
// hold no K and V. swapped: they are blocks of host memory. Synchronous.
LLAMA_API enum llama_paged_status llama_paged_save_state(struct llama_context * ctx, int32_t state,
                                                         const int32_t * blocks, int32_t n, bool swapped);
LLAMA_API enum llama_paged_status llama_paged_load_state(struct llama_context * ctx, int32_t state,
                                                         const int32_t * blocks, int32_t n, bool swapped);

#ifdef __cplusplus
}
#endif
