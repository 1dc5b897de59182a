// Measurement of the processor's arithmetic: products of a prompt's rows with quantized weights.
#include "guard.hpp"
#include "team.hpp"
#include "threads.hpp"

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t WIDTH = 2048, ROWS = 512; // of a matrix of a small model, and of a step with a prompt

ggml_type type_named(const char * name) {
    velo::check_pointer(name, "type");
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = static_cast<ggml_type>(i);
        if (ggml_is_quantized(type) && std::strcmp(ggml_type_name(type), name) == 0) {
            return type;
        }
    }
    velo::fail(VELO_INVALID, "\"%s\" is no quantized type of ggml: \"q4_K\" and \"q8_0\" are two of them", name);
}

template <class T> T found(T pointer) {
    if (!pointer) {
        velo::fail(VELO_OUT_OF_MEMORY, "there is too little memory to measure the speed of products");
    }
    return pointer;
}

ggml_context_ptr new_context() {
    return ggml_context_ptr(found(ggml_init({ggml_tensor_overhead() * 4 + ggml_graph_overhead(), nullptr, true})));
}

// One product, with its weights in the layout that a model's would have.
struct product {
    ggml_backend_dev_t      cpu        = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_ptr        backend    = ggml_backend_ptr(found(ggml_backend_dev_init(cpu, nullptr)));
    ggml_context_ptr        of_weights = new_context(), of_rest = new_context();
    ggml_backend_buffer_ptr weights, rest;
    ggml_cgraph *           graph = nullptr;

    product(ggml_type type, int32_t n_threads) {
        ggml_tensor * w = ggml_new_tensor_2d(of_weights.get(), type, WIDTH, WIDTH);
        ggml_tensor * x = ggml_new_tensor_2d(of_rest.get(), GGML_TYPE_F32, WIDTH, ROWS);
        ggml_tensor * y = ggml_mul_mat(of_rest.get(), w, x);
        graph           = ggml_new_graph(of_rest.get());
        ggml_build_forward_expand(graph, y);
        for (ggml_backend_buffer_type_t layout : layouts()) {
            weights.reset(ggml_backend_alloc_ctx_tensors_from_buft(of_weights.get(), layout));
            if (weights && ggml_backend_dev_supports_op(cpu, y)) {
                break;
            }
            w->buffer = nullptr;
            w->data   = nullptr;
        }
        found(weights.get());
        rest.reset(found(ggml_backend_alloc_ctx_tensors(of_rest.get(), backend.get())));
        const std::vector<char>  codes(ggml_nbytes(w), 0x11); // ordinary numbers, whatever the type
        const std::vector<float> ones(WIDTH * ROWS, 1.0f);
        ggml_backend_tensor_set(w, codes.data(), 0, codes.size());
        ggml_backend_tensor_set(x, ones.data(), 0, ggml_nbytes(x));
        set_threads(n_threads);
    }

    void compute() {
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            velo::fail(VELO_INTERNAL, "a product could not be computed%s", velo::failure().c_str());
        }
    }

private:
    // The packed ones first, as upstream tries them for a model.
    std::vector<ggml_backend_buffer_type_t> layouts() const {
        std::vector<ggml_backend_buffer_type_t> all;
        const auto get = function<ggml_backend_dev_get_extra_bufts_t>("ggml_backend_dev_get_extra_bufts");
        for (ggml_backend_buffer_type_t * layout = get ? get(cpu) : nullptr; layout && *layout; ++layout) {
            all.push_back(*layout);
        }
        all.push_back(ggml_backend_dev_buffer_type(cpu));
        return all;
    }

    void set_threads(int32_t n_threads) {
        const auto set = function<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads");
        if (set) {
            set(backend.get(), n_threads);
        }
    }

    template <class F> F function(const char * name) const {
        return reinterpret_cast<F>(ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), name));
    }
};

} // namespace

velo_status velo_product_rate(const char * type, int32_t n_threads, double seconds, double * rate) noexcept {
    return velo::guarded([&] {
        using clock = std::chrono::steady_clock;
        using span  = std::chrono::duration<double>;
        velo::check_pointer(rate, "rate");
        if (!(seconds >= 0 && seconds <= 60)) {
            velo::fail(VELO_INVALID, "seconds is %g, but must be from 0 to 60", seconds);
        }
        const ggml_type quantized = type_named(type);
        const int32_t   threads   = velo::threads_for(n_threads);
        velo::check_team(threads);
        velo::forget_failure();
        product one(quantized, threads);
        one.compute(); // starts the threads
        std::vector<double> times;
        for (const auto begin = clock::now(); times.size() < 3 || span(clock::now() - begin).count() < seconds;) {
            const auto start = clock::now();
            one.compute();
            times.push_back(span(clock::now() - start).count());
        }
        std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
        *rate = static_cast<double>(WIDTH) * WIDTH * ROWS / times[times.size() / 2];
    });
}
