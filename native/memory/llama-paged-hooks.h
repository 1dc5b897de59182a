// What the patched files of llama.cpp call. Nothing else includes this.
#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_backend_buffer;
struct ggml_context;
struct ggml_tensor;
struct llama_context;
struct llama_model_loader;
struct llama_paged;
struct llm_graph_context;

// whether a mapped weight is left to be packed with the first step (late-weights.h); if not, it is packed now
bool llama_late_weight_left(llama_model_loader & loader, size_t file, ggml_tensor * tensor, const void * data);

// names the files' mappings to whoever loads (late-weights.h), before anything in them is read
void llama_paged_mapped(const llama_model_loader & loader);

// a pool is zero as a contiguous cache is, but takes memory only as it fills
void llama_paged_clear(ggml_backend_buffer * buffer);

// after the memory is made and before the first graph is reserved; throws what it refuses
void llama_paged_attach(llama_context & ctx);

// the table travels where a contiguous cache has its mask; its type tells them apart
ggml_tensor * llama_paged_build_table(ggml_context * ctx, const llama_paged & paged);
bool          llama_paged_can_reuse(const ggml_tensor * table, const llama_paged & paged);
bool          llama_paged_is_table(const ggml_tensor * mask);

void llama_paged_set_slots(ggml_tensor * dst, const llama_paged & paged);
void llama_paged_set_table(ggml_tensor * dst, const llama_paged & paged);

ggml_tensor * llama_paged_build_attn(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                                     ggml_tensor * kq_b, ggml_tensor * table, ggml_tensor * sinks, ggml_tensor * v_mla,
                                     float kq_scale, int il);
