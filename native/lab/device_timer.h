// Seconds that a device takes for what is queued between two points of its stream.
#pragma once

#include "ggml-backend.h"

#include <memory>

struct device_timer {
    virtual ~device_timer() = default;

    virtual const char * clock() const = 0; // what measures
    virtual void         start()       = 0;
    virtual double       stop()        = 0; // waits for the device; seconds since start
};

// CUDA's events where the backend is CUDA's, else this machine's clock.
std::unique_ptr<device_timer> make_device_timer(ggml_backend_t backend);
