// Facts about a model that libllama's public interface does not have.
#pragma once

#include "velo.h"

#include "llama.h"

#ifdef __cplusplus
extern "C" {
#endif

// Write the caches of up to `capacity` layers, in the order of the model. Return the number of layers with a cache.
LLAMA_API int32_t llama_model_cached_layers(const struct llama_model * model, velo_layer * layers, int32_t capacity);

// Return the index of a device among all devices, or -1.
LLAMA_API int32_t llama_device_number(ggml_backend_dev_t device);

// Write the memory on up to `capacity` devices. Return the number of devices with memory.
LLAMA_API int32_t llama_context_memory(const struct llama_context * context, velo_device_memory * memory,
                                       int32_t capacity);

// Return the tensor with the tokens' vectors in the graph that a context runs, or NULL.
LLAMA_API const struct ggml_tensor * llama_context_vectors(const struct llama_context * context);

// Return what is wrong with hyperparameters that loading accepts but computing would abort on, or NULL.
LLAMA_API const char * llama_model_defect(const struct llama_model * model);

// Return whether the model is an encoder only: for embeddings, without generation.
LLAMA_API bool llama_model_is_encoder(const struct llama_model * model);

// Return the pooling of embeddings named in the file, a llama_pooling_type; 0 if it names none.
LLAMA_API int32_t llama_model_pooling(const struct llama_model * model);

// Return whether the tokenizer adds a space in front of a text.
LLAMA_API bool llama_vocab_adds_space(const struct llama_vocab * vocab);

#ifdef __cplusplus
}
#endif
