#include "device_timer.h"

#include <chrono>

#ifdef VELO_LAB_CUDA
#    include "ggml-backend-impl.h"

#    include <array>
#    include <cuda_runtime_api.h>
#    include <stdexcept>
#    include <string>
#endif

namespace {

struct host_timer : device_timer {
    explicit host_timer(ggml_backend_t backend) : backend(backend) {}

    const char * clock() const override { return "host"; }
    void         start() override {
        ggml_backend_synchronize(backend);
        begin = std::chrono::steady_clock::now();
    }
    double stop() override {
        ggml_backend_synchronize(backend);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }

    ggml_backend_t                        backend;
    std::chrono::steady_clock::time_point begin;
};

#ifdef VELO_LAB_CUDA
void check(cudaError_t status) {
    if (status != cudaSuccess) {
        throw std::runtime_error(cudaGetErrorString(status));
    }
}

// Timer with CUDA events. The backend's own events do not measure time, but it records any event of this struct.
struct event_timer : device_timer {
    // The current device of this thread is the backend's: tensors were just written to it.
    explicit event_timer(ggml_backend_t backend) : backend(backend) {
        for (ggml_backend_event & event : events) {
            cudaEvent_t own = nullptr;
            check(cudaEventCreate(&own));
            event = {backend->device, own};
        }
    }
    ~event_timer() override {
        for (const ggml_backend_event & event : events) {
            cudaEventDestroy(static_cast<cudaEvent_t>(event.context));
        }
    }

    const char * clock() const override { return "cuda events"; }
    void         start() override { ggml_backend_event_record(&events[0], backend); }
    double       stop() override {
        float milliseconds = 0;
        ggml_backend_event_record(&events[1], backend);
        check(cudaEventSynchronize(static_cast<cudaEvent_t>(events[1].context)));
        check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(events[0].context),
                                   static_cast<cudaEvent_t>(events[1].context)));
        return milliseconds * 1e-3;
    }

    ggml_backend_t                    backend;
    std::array<ggml_backend_event, 2> events = {};
};
#endif

} // namespace

std::unique_ptr<device_timer> make_device_timer(ggml_backend_t backend) {
#ifdef VELO_LAB_CUDA
    const ggml_backend_dev_t device = ggml_backend_get_device(backend);
    if (device && std::string(ggml_backend_reg_name(ggml_backend_dev_backend_reg(device))) == "CUDA") {
        return std::make_unique<event_timer>(backend);
    }
#endif
    return std::make_unique<host_timer>(backend);
}
