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

// What is wrong with hyperparameters that loading accepts, but on which computing would abort; NULL: nothing.
LLAMA_API const char * llama_model_defect(const struct llama_model * model);

#ifdef __cplusplus
}
#endif
