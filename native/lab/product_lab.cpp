// One matrix product, with weights in the layout of a file or packed by the CPU backend.
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "lab.h"

#include <cstring>
#include <memory>

namespace {

struct context_deleter {
    void operator()(ggml_context * context) const { ggml_free(context); }
};
struct buffer_deleter {
    void operator()(ggml_backend_buffer * buffer) const { ggml_backend_buffer_free(buffer); }
};
struct backend_deleter {
    void operator()(ggml_backend * backend) const { ggml_backend_free(backend); }
};
using context_ptr = std::unique_ptr<ggml_context, context_deleter>;
using buffer_ptr  = std::unique_ptr<ggml_backend_buffer, buffer_deleter>;
using backend_ptr = std::unique_ptr<ggml_backend, backend_deleter>;

context_ptr new_context() {
    return context_ptr(ggml_init({ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true}));
}

// Null-terminated.
ggml_backend_buffer_type_t * packed_layouts() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto               get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    static ggml_backend_buffer_type_t none[] = {nullptr};
    return get ? get(cpu) : none;
}

const char * compute(const lab_product & p, ggml_backend_buffer_type_t layout, bool & supported) {
    const backend_ptr backend(ggml_backend_cpu_init());
    const context_ptr weights = new_context(), rest = new_context();
    const bool        with_experts = p.n_experts > 0;
    ggml_tensor *     w            = ggml_new_tensor_3d(weights.get(), static_cast<ggml_type>(p.type), p.n_in, p.n_out,
                                                        with_experts ? p.n_experts : 1);
    ggml_tensor *     ids = ggml_new_tensor_2d(rest.get(), GGML_TYPE_I32, with_experts ? p.n_used : 1, p.n_rows);
    ggml_tensor * x = with_experts
                          ? ggml_new_tensor_3d(rest.get(), GGML_TYPE_F32, p.n_in, p.own_rows ? p.n_used : 1, p.n_rows)
                          : ggml_new_tensor_2d(rest.get(), GGML_TYPE_F32, p.n_in, p.n_rows);
    ggml_tensor * y = with_experts ? ggml_mul_mat_id(rest.get(), w, x, ids) : ggml_mul_mat(rest.get(), w, x);
    const buffer_ptr weights_buffer(ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), layout));
    const buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(rest.get(), backend.get()));
    supported = weights_buffer && ggml_backend_supports_op(backend.get(), y);
    if (!supported) {
        return "no such product";
    }
    ggml_backend_cpu_set_n_threads(backend.get(), p.n_threads);
    ggml_backend_tensor_set(w, p.weights, 0, ggml_nbytes(w));
    ggml_backend_tensor_set(x, p.x, 0, ggml_nbytes(x));
    if (with_experts) {
        ggml_backend_tensor_set(ids, p.experts, 0, ggml_nbytes(ids));
    }
    ggml_cgraph * graph = ggml_new_graph_custom(rest.get(), 4, false);
    ggml_build_forward_expand(graph, y);
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
        return "the product failed";
    }
    ggml_backend_tensor_get(y, p.out, 0, ggml_nbytes(y));
    return nullptr;
}

} // namespace

const char * lab_product_run(lab_product * p) {
    bool                       supported = false;
    ggml_backend_buffer_type_t plain[]   = {ggml_backend_cpu_buffer_type(), nullptr};
    for (ggml_backend_buffer_type_t * layout = p->packed ? packed_layouts() : plain; *layout; ++layout) {
        if (p->layout && std::strcmp(p->layout, ggml_backend_buft_name(*layout)) != 0) {
            continue;
        }
        const char * message = compute(*p, *layout, supported);
        if (supported) {
            p->layout = ggml_backend_buft_name(*layout);
            return message;
        }
    }
    return "nothing here packs such weights";
}
