// What libllama knows of a model and does not tell.
#pragma once

#include "velo.h"

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// What each layer keeps for a token. Fills up to `capacity` layers, in the order of the model, and returns how many
// there are.
LLAMA_API int32_t llama_model_cached_layers(const struct llama_model * model, velo_layer * layers, int32_t capacity);

// Its place among all devices, -1 where it is none of them.
LLAMA_API int32_t llama_device_number(ggml_backend_dev_t device);

// What lies on each device, as many as fit in `capacity`; returns how many there are.
LLAMA_API int32_t llama_context_memory(const struct llama_context * context, velo_device_memory * memory,
                                       int32_t capacity);

// What is wrong with hyperparameters that loading accepts, but on which computing would abort; NULL: nothing.
LLAMA_API const char * llama_model_defect(const struct llama_model * model);

// Whether all that the model does is to read a text as a whole: it has embeddings, and writes nothing.
LLAMA_API bool llama_model_is_encoder(const struct llama_model * model);

// How the file says that embeddings are pooled: a llama_pooling_type, 0 where it says nothing.
LLAMA_API int32_t llama_model_pooling(const struct llama_model * model);

// Whether the tokenizer puts a space in front of a text.
LLAMA_API bool llama_vocab_adds_space(const struct llama_vocab * vocab);

#ifdef __cplusplus
}
#endif
