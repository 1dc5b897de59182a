// GGML_OP_PAGED_ATTN: attention that reads K and V in place, through a block table.
//
//   q      F32 [d_k, n_head,    n_tokens]   queries of all sequences, sequence after sequence
//   k      any [d_k, n_head_kv, n_slots]    the pool of one layer; head and slot may be strided
//   v      any [d_v, n_head_kv, n_slots]    may be a view of k (multi-head latent attention)
//   table  I32 [header + width, n_rows]     one row per sequence, see ggml_paged_attn_row; devices need its plan
//   sinks  F32 [n_head]                     optional
//   out    F32 [d_v, n_head, n_tokens]      rows of no sequence are zero
//
// Query j of a sequence with kv_len L and n_q Q has position p = L - Q + j and attends the positions
// max(0, p's window start) .. p. A row names the sequence's blocks from block `first` on. The window of the
// first query starts in that block or later. The token at position t is in slot block[t / block_size -
// first]*block_size + t % block_size. Nothing else is read, so stale bytes of other slots cannot reach an output.
#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

// The integers before the block ids of a table row. ggml_paged_attn_plan writes the ones from BEGIN on, which devices
// need: what a thread block would else compute for each layer. A sequence's packed rows are its query rows times the
// query heads of a KV head.
enum ggml_paged_attn_row {
    GGML_PAGED_ATTN_Q0     = 0, // first query row of the sequence
    GGML_PAGED_ATTN_NQ     = 1, // number of its query rows; 0: the row is skipped
    GGML_PAGED_ATTN_KV     = 2, // its length in tokens after this step
    GGML_PAGED_ATTN_SHARED = 3, // leading blocks shared with the row before; fewer, such as 0, are correct too
    GGML_PAGED_ATTN_FIRST  = 4, // blocks of the sequence before the first one of the row; 0 without a window

    GGML_PAGED_ATTN_BEGIN  = 5, // where its first KV split begins: a token at or before the first attended one
    GGML_PAGED_ATTN_SHIFT  = 6, // base-2 logarithm of the tokens of its splits
    GGML_PAGED_ATTN_COMMON = 7, // leading splits that are also the row before's
    // sums over this row and all rows before it
    GGML_PAGED_ATTN_VERY_FEW  = 8,  // splits of sequences with 1 to 8 packed rows
    GGML_PAGED_ATTN_FEW       = 9,  // splits of sequences with 9 to 16 packed rows
    GGML_PAGED_ATTN_TILES_16  = 10, // tiles of 16 packed rows times splits, of sequences with more than 16
    GGML_PAGED_ATTN_TILES_64  = 11, // tiles of 64
    GGML_PAGED_ATTN_TILES_128 = 12, // tiles of 128
    GGML_PAGED_ATTN_SAVED_8   = 13, // splits that need not be computed if tiles of 8 packed rows have several sequences
    GGML_PAGED_ATTN_SAVED_16  = 14, // if tiles of 16 have
    GGML_PAGED_ATTN_SAVED_64  = 15, // if tiles of 64 have, of sequences with more than 16 packed rows
    GGML_PAGED_ATTN_SAVED_128 = 16, // if tiles of 128 have
    GGML_PAGED_ATTN_MERGED    = 17, // query rows of sequences with two splits or more
    GGML_PAGED_ATTN_PARTIALS  = 18, // the splits of these query rows
    GGML_PAGED_ATTN_QUERIES   = 19, // query rows

    GGML_PAGED_ATTN_HEADER = 20, // block ids in position order follow, -1 past the end
};

enum ggml_paged_attn_window {
    GGML_PAGED_ATTN_WINDOW_NONE    = 0,
    GGML_PAGED_ATTN_WINDOW_SLIDING = 1, // the last `window` positions, its own included
    GGML_PAGED_ATTN_WINDOW_CHUNKED = 2, // from the last multiple of `window`
};

enum ggml_paged_attn_flags {
    // a row's result does not depend on the number of query rows of its sequence in the step
    GGML_PAGED_ATTN_DETERMINISTIC = 1,
    // products of many rows may be rounded to bfloat16 for any type of K and V; devices count packed rows
    GGML_PAGED_ATTN_FAST = 2,
    // no row of the table has more than one query row, as in a step of decode; devices may need fewer kernels
    GGML_PAGED_ATTN_SINGLE = 4,
    // many rows of the table share blocks with the row before; devices may have kernels that read these less often
    GGML_PAGED_ATTN_PREFIXES = 8,
};

struct ggml_paged_attn_params {
    float   scale;
    float   max_bias;    // ALiBi, 0: none
    float   softcap;     // cap*tanh(score/cap), 0: none
    int32_t block_size;  // tokens
    int32_t window;      // tokens
    int32_t window_type; // ggml_paged_attn_window
    int32_t flags;       // ggml_paged_attn_flags
};

// Sets GGML_PAGED_ATTN_SHARED of each row of a table from its other numbers. A row has `stride` integers.
GGML_API void ggml_paged_attn_find_shared(int32_t * table, int64_t n_rows, int64_t stride, int32_t block_size);

// Sets what devices need of each row of a table, whose other numbers are set: GGML_PAGED_ATTN_BEGIN and the following.
// `group`: query heads of a KV head of the layers that use the table, at least 1. It reads their block size and
// window, which ggml_paged_attn_check must have accepted.
GGML_API void ggml_paged_attn_plan(int32_t * table, int64_t n_rows, int64_t stride, int32_t group,
                                   const struct ggml_paged_attn_params * params);

// Returns NULL if the operator supports these tensors, else one sentence with the reason.
GGML_API const char * ggml_paged_attn_check(const struct ggml_tensor * q, const struct ggml_tensor * k,
                                            const struct ggml_tensor * v, const struct ggml_tensor * table,
                                            const struct ggml_tensor *            sinks,
                                            const struct ggml_paged_attn_params * params);

// Aborts if ggml_paged_attn_check refuses the tensors: check first what a user chose.
GGML_API struct ggml_tensor * ggml_paged_attn(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k,
                                              struct ggml_tensor * v, struct ggml_tensor * table,
                                              struct ggml_tensor * sinks, struct ggml_paged_attn_params params);

#ifdef __cplusplus
}
#endif
