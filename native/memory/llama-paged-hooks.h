// Functions that the patched files of llama.cpp call. Nothing else includes this header.
#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_backend_buffer;
struct ggml_context;
struct ggml_tensor;
struct llama_context;
struct llama_model_loader;
struct llama_paged_cache;
struct llm_graph_context;

// Return whether the first step will pack this mapped weight (late-weights.h). If not, the loader packs it now.
bool llama_late_weight_left(llama_model_loader & loader, size_t file, ggml_tensor * tensor, const void * data);

// Report the files' mappings to the watch of this thread (late-weights.h), before the loader reads any of them.
void llama_paged_mapped(const llama_model_loader & loader);

// Zero a pool, as upstream zeroes a contiguous cache, without taking its memory.
void llama_paged_clear(ggml_backend_buffer * buffer);

// Page the context's memory. Called after the memory is created and before the first graph is reserved. Throws if the
// model cannot be paged.
void llama_paged_attach(llama_context & ctx);

// Return the slots of the pool, as the size of a contiguous cache.
uint32_t llama_paged_size(const llama_paged_cache & cache);

// The block tables of a cache's parts are the graph's input in place of a contiguous cache's mask. Their type tells
// them apart.
ggml_tensor * llama_paged_build_tables(ggml_context * ctx, llama_paged_cache & cache);
bool          llama_paged_can_reuse(const ggml_tensor * tables, const llama_paged_cache & cache);
bool          llama_paged_is_table(const ggml_tensor * mask);

// The slots of the parts are the graph's input in place of a contiguous cache's indices.
ggml_tensor * llama_paged_build_slots(ggml_context * ctx, llama_paged_cache & cache, int64_t n_tokens);
ggml_tensor * llama_paged_slots_of_layer(const llama_paged_cache & cache, ggml_tensor * slots, int il);

void llama_paged_set_slots(ggml_tensor * dst, const llama_paged_cache & cache);
void llama_paged_set_tables(ggml_tensor * dst, const llama_paged_cache & cache);

ggml_tensor * llama_paged_build_attn(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                                     ggml_tensor * kq_b, ggml_tensor * tables, ggml_tensor * sinks, ggml_tensor * v_mla,
                                     float kq_scale, int il);
