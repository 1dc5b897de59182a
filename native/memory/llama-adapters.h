// LoRA adapters of a context: upstream applies the adapters of a context to all tokens of a graph. A switch to another
// adapter builds the next graph again, but reserves no memory again, as llama_set_adapters_lora does.
#pragma once

#include "llama-paged.h"

#ifdef __cplusplus
extern "C" {
#endif

// Return the bytes that are allocated for an adapter.
LLAMA_API int64_t llama_adapter_bytes(const struct llama_adapter_lora * adapter);

// Return the model that an adapter was loaded for.
LLAMA_API const struct llama_model * llama_adapter_model(const struct llama_adapter_lora * adapter);

// Reserve the largest graphs of a context, paged or not, with an adapter, then apply none. *unused: the first weight to
// which the graph of the model does not apply the adapter, valid until the adapter is freed; NULL if there is none.
LLAMA_API enum llama_paged_status llama_adapter_try(struct llama_context * ctx, struct llama_adapter_lora * adapter,
                                                    const char ** unused);

// Apply an adapter of llama_adapter_try to all tokens from the next graph on; NULL: none.
LLAMA_API void llama_adapter_apply(struct llama_context * ctx, struct llama_adapter_lora * adapter, float scale);

#ifdef __cplusplus
}
#endif
