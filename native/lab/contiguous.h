// Stock llama.cpp with its contiguous cache, through its public interface alone. The file is compiled against the
// patched tree and the unpatched one, so that tests can compare both.
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
    int32_t repack;     // 0: use weights in the layout of the file
};

// Return null on failure.
LAB_API struct contiguous * contiguous_open(const char * model, const struct contiguous_params * params);
LAB_API void                contiguous_close(struct contiguous * c);
LAB_API int32_t             contiguous_n_vocab(const struct contiguous * c);

// Call llama_decode with n tokens of one sequence at positions first, first + 1, ...
LAB_API int32_t contiguous_decode(struct contiguous * c, const int32_t * tokens, int32_t n, int32_t first, int32_t seq);
// Remove all but the first n tokens of a sequence, or all of them if its memory cannot be cut there.
// Return the number of tokens that remain.
LAB_API int32_t contiguous_keep(struct contiguous * c, int32_t n, int32_t seq);
// Return the n_vocab logits of the last token of the last decode.
LAB_API int32_t contiguous_logits(struct contiguous * c, float * logits);
// Write the saved state of a sequence in upstream's format, if it fits. Return its size.
LAB_API int64_t contiguous_state(struct contiguous * c, int32_t seq, uint8_t * bytes, int64_t capacity);

// Write the embedding of a text, pooled by upstream, to `out` (n_embd_out floats). The context has n_tokens_max tokens.
// Return 0, or a negative number on failure. Compiled for the patched tree only.
LAB_API int32_t stock_embed(const char * path, int32_t pooling, int32_t n_tokens_max, const int32_t * tokens,
                            int32_t n_tokens, float * out);

// Load a vocabulary for stock_grammar_masks; null on failure. These three are compiled for the patched tree only.
LAB_API void * stock_vocab_open(const char * path);
LAB_API void   stock_vocab_close(void * vocab);
// Write the tokens that upstream's own grammar allows at the start and after each token: a row of n_vocab bytes for
// each. Stop at the first token that it does not allow, or that ends the text. Return the number of rows, or -1 if
// upstream refuses the grammar.
LAB_API int32_t stock_grammar_masks(void * vocab, const char * grammar, const int32_t * tokens, int32_t n_tokens,
                                    uint8_t * allowed);

#ifdef __cplusplus
}
#endif
