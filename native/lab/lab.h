// Operators on raw buffers, for tests and benchmarks. No buffer is copied: the caller or a sanitizer notices reads and
// writes outside the buffers.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#    define LAB_API __declspec(dllexport)
#else
#    define LAB_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Options of a run of one operator, or of a graph with several operators in a row, as a model's layers.
struct lab_run {
    int32_t  n_threads;
    int32_t  use_ref;  // the CPU backend's reference mode
    int32_t  n_layers; // operators in the graph, 1 or more; layer i reads K and V at i*layer_stride bytes
    int32_t  repeat;   // graph runs, 1 or more
    int64_t  layer_stride;
    double * seconds; // [repeat], of each graph run; may be null
};

// GGML_OP_PAGED_ATTN; a stride of 0 means contiguous. Strides are in bytes.
struct lab_paged {
    int32_t type_k, type_v; // ggml_type
    int64_t d_k, d_v, n_head, n_head_kv, n_tokens, n_slots;
    int64_t n_rows, width; // of the table: n_rows x (GGML_PAGED_ATTN_HEADER + width)

    int64_t q_head_stride, q_token_stride;
    int64_t k_head_stride, k_slot_stride;
    int64_t v_head_stride, v_slot_stride;

    float   scale, max_bias, softcap;
    int32_t block_size, window, window_type, flags;

    const float *   q;
    const void *    k;
    const void *    v; // null: a view of K's first d_v
    const int32_t * table;
    const float *   sinks; // null: none
    float *         out;   // [n_tokens][n_head][d_v]
};

// Compute; return null, or the error of ggml_paged_attn_check.
LAB_API const char * lab_paged_attn(const struct lab_paged * op, const struct lab_run * run);

// Write to each row of a table the number of leading blocks that it shares with the row before.
LAB_API void lab_find_shared(int32_t * table, int64_t n_rows, int64_t width, int32_t block_size);

// Stock GGML_OP_FLASH_ATTN_EXT as llama.cpp builds it: K and V token-major, one stream for each sequence.
struct lab_flash {
    int32_t          type_k, type_v;
    int64_t          d_k, d_v, n_head, n_head_kv, n_q, n_kv, n_seqs;
    float            scale, max_bias, softcap;
    const float *    q;     // [n_seqs][n_q][n_head][d_k]
    const void *     k;     // [n_seqs][n_kv][n_head_kv][row of d_k]
    const void *     v;     // [n_seqs][n_kv][n_head_kv][row of d_v]; null: a view of K's first d_v
    const uint16_t * mask;  // f16 [n_seqs][n_q][n_kv]
    const float *    sinks; // null: none
    float *          out;   // [n_seqs][n_q][n_head][d_v]
};
LAB_API const char * lab_flash_attn(const struct lab_flash * op, const struct lab_run * run);

// Product y = weights * x for rows x; or products with the experts that each row names.
struct lab_product {
    int32_t         type; // ggml_type
    int32_t         n_threads;
    int32_t         packed; // 0: weights as in a file; 1: in the first layout of the CPU backend that supports them
    int64_t         n_out, n_in, n_rows;
    int64_t         n_experts, n_used; // 0 without experts
    int32_t         own_rows;          // whether each expert of a row has its own x
    const int32_t * experts;           // [n_rows, n_used]
    const void *    weights;           // [n_experts, n_out] rows of n_in
    const float *   x;                 // [n_rows, n_used if own_rows, n_in]
    float *         out;               // [n_rows, n_used, n_out]
    const char *    layout; // ggml's name of the layout: the wanted one, or null for any; result: the one that was used
};
LAB_API const char * lab_product_run(struct lab_product * p);

// Quantize or dequantize rows of a KV type; n is a multiple of the type's group. Return null or an error.
LAB_API const char * lab_quantize(int32_t type, const float * from, void * to, int64_t n_rows, int64_t n);
LAB_API const char * lab_dequantize(int32_t type, const void * from, float * to, int64_t n_rows, int64_t n);
LAB_API int64_t      lab_row_size(int32_t type, int64_t n); // bytes
LAB_API const char * lab_type_name(int32_t type);

// Make threads wait at the CPU backend's barrier. Return null or an error.
LAB_API const char * lab_team_barrier(int32_t n_threads, int32_t n_rounds);

// How many of `most` threads compute, step by step. lab_crew_worked() records a step of `wall` nanoseconds that ended
// at `time`, in which the threads lost `lost`, all together; returns the number for the next step.
struct lab_crew;
LAB_API struct lab_crew * lab_crew_new(int32_t most);
LAB_API void              lab_crew_free(struct lab_crew * crew);
LAB_API int32_t lab_crew_worked(struct lab_crew * crew, int64_t time, int64_t wall, int64_t lost, int64_t n_tokens);

// Return the bytes per second that threads read from memory, each line by line from n_streams ranges in turn.
LAB_API double lab_read_rate(const void * data, int64_t bytes, int32_t n_threads, int32_t n_streams);

#ifdef __cplusplus
}
#endif
