#include "tile-buffer.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "tile-layout.h"
#include "tile-simd.h"

#if defined(VELO_TILES)

#    include "tile-pack.h"
#    include "tile-products.h"
#    include "traits.h"

namespace {

bool has_tiles(const ggml_tensor * weights) {
    return tiles::with_layout(weights->type, false, [&](auto layout) {
        return ggml_is_contiguous(weights) && weights->ne[0] % decltype(layout)::K == 0 &&
               weights->ne[1] % tiles::COLS == 0;
    });
}

bool is_product(const ggml_tensor * op) { return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID; }

bool are_packed(const ggml_tensor * weights) {
    return weights->buffer && weights->buffer->buft == velo_tile_buffer_type();
}

class tile_products : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor * op, size_t & size) override {
        size = tiles::work_size(op);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        tiles::multiply(params, op);
        return true;
    }
};

class tile_buffer_type : public ggml::cpu::extra_buffer_type {
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        const ggml_tensor * w = op->src[0];
        const ggml_tensor * x = op->src[1];
        return is_product(op) && are_packed(w) && has_tiles(w) && x->type == GGML_TYPE_F32 &&
               ggml_n_dims(w) <= (op->op == GGML_OP_MUL_MAT ? 2 : 3) && x->nb[0] == sizeof(float) &&
               (!x->buffer || ggml_backend_buft_is_host(x->buffer->buft));
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        static tile_products products;
        return is_product(op) && are_packed(op->src[0]) ? &products : nullptr;
    }
};

size_t packed_size(ggml_backend_buffer_type_t, const ggml_tensor * weights) {
    if (!has_tiles(weights)) {
        return ggml_nbytes(weights);
    }
    return tiles::with_layout(weights->type, size_t{0}, [&](auto layout) {
        using type = decltype(layout);
        return static_cast<size_t>(ggml_nelements(weights) / (type::K * tiles::COLS)) * type::BYTES;
    });
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor * weights, const void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(weights) && has_tiles(weights));
    tiles::pack(weights->type, data, weights->ne[0], ggml_nrows(weights), static_cast<char *>(weights->data));
}

ggml_backend_buffer_t new_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer) {
        buffer->buft             = type;
        buffer->iface.set_tensor = set_tensor;
        buffer->iface.get_tensor = nullptr;
        buffer->iface.cpy_tensor = nullptr;
    }
    return buffer;
}

const char * name(ggml_backend_buffer_type_t) { return "TILES"; }
size_t       alignment(ggml_backend_buffer_type_t) { return 64; }

} // namespace

ggml_backend_buffer_type_t velo_tile_buffer_type() {
    static tile_buffer_type         context;
    static ggml_backend_buffer_type type = {
        {name, new_buffer, alignment, nullptr, packed_size, nullptr},
        ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0),
        &context,
    };
    return &type;
}

#else

ggml_backend_buffer_type_t velo_tile_buffer_type() { return nullptr; }

#endif

static thread_local bool wants_exact_layouts = false;

ggml_backend_buffer_type_t * velo_exact_layouts() {
    static ggml_backend_buffer_type_t exact[] = {velo_tile_buffer_type(), nullptr};
    return wants_exact_layouts ? exact : nullptr;
}

void velo_want_exact_layouts(bool wanted) { wants_exact_layouts = wanted; }
