// Stock llama.cpp over its contiguous cache, through the public interface alone: this one file is compiled
// against the patched tree and against the untouched one, so that the same question can be put to both.
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

struct contiguous; // a model and a context

struct contiguous_params {
    int32_t type_k, type_v; // ggml_type
    int32_t n_ctx;          // cells, shared by all sequences
    int32_t n_batch;
    int32_t n_seqs;
    int32_t n_threads;
    int32_t flash_attn; // 0 or 1
    int32_t repack;     // 0: weights stay in the layout of the file
};

// null on failure
LAB_API struct contiguous * contiguous_open(const char * model, const struct contiguous_params * params);
LAB_API void                contiguous_close(struct contiguous * c);
LAB_API int32_t             contiguous_n_vocab(const struct contiguous * c);

// llama_decode of n tokens of one sequence at positions first, first + 1, ...
LAB_API int32_t contiguous_decode(struct contiguous * c, const int32_t * tokens, int32_t n, int32_t first, int32_t seq);
// of the last token of the last decode: n_vocab floats
LAB_API int32_t contiguous_logits(struct contiguous * c, float * logits);
// The saved state of a sequence, in upstream's format. Returns its size; nothing is written where it does not fit.
LAB_API int64_t contiguous_state(struct contiguous * c, int32_t seq, uint8_t * bytes, int64_t capacity);

// The embedding of a text, pooled by upstream, in a context of n_tokens_max tokens. `out`: n_embd_out floats. In a file
// of its own, which only the patched tree has. Returns 0, or less on failure.
LAB_API int32_t stock_embed(const char * path, int32_t pooling, int32_t n_tokens_max, const int32_t * tokens,
                            int32_t n_tokens, float * out);

// A vocabulary for stock_grammar_masks; null on failure. Only the patched tree has these three.
LAB_API void * stock_vocab_open(const char * path);
LAB_API void   stock_vocab_close(void * vocab);
// Which tokens upstream's own grammar allows at first, and after each token: a row of n_vocab bytes for each. Stops at
// the first token that it does not allow, or that ends. Returns the number of rows, or -1 where it refuses the grammar.
LAB_API int32_t stock_grammar_masks(void * vocab, const char * grammar, const int32_t * tokens, int32_t n_tokens,
                                    uint8_t * allowed);

#ifdef __cplusplus
}
#endif
