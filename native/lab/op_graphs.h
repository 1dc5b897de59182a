// Graphs of velo-op-bench: one call of the operator in several layers, by our kernels or upstream's.
#pragma once

#include "op_call.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

struct graph {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_cgraph *           nodes = nullptr;
    ggml_tensor *           out   = nullptr;
};

// Create a graph without nodes.
graph begin_graph();

// Allocate the tensors of a complete graph. Throw if the device does not support a node, or has too little memory.
void finish_graph(graph & g, ggml_backend_t backend);

// GGML_OP_PAGED_ATTN.
graph paged_graph(const call & c, ggml_backend_t backend, int n_layers);

// Upstream's flash attention over contiguous sequences of one length, with a mask as in llama.cpp: without a mask,
// upstream's kernels do not share a read of K and V among the heads of a group.
graph flash_graph(const call & c, ggml_backend_t backend, int n_layers);

// One paged sequence, copied for upstream's kernel, to measure the cost and the length from which it is faster. A
// gather kernel of our own would need no floats in between.
graph gathered_graph(const call & c, ggml_backend_t backend, int n_layers);
