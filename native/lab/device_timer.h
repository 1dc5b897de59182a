// Timer of the work that is queued on a device's stream between two calls.
#pragma once

#include "ggml-backend.h"

#include <memory>

struct device_timer {
    virtual ~device_timer() = default;

    virtual const char * clock() const = 0; // name of the clock
    virtual void         start()       = 0;
    virtual double       stop()        = 0; // waits for the device; seconds since start
};

// Create a timer: CUDA events for a CUDA backend, else the host's clock.
std::unique_ptr<device_timer> make_device_timer(ggml_backend_t backend);
