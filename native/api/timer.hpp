#pragma once

#include <chrono>

namespace velo {

// Adds the lifetime of the object to a total, in seconds.
class timer {
public:
    explicit timer(double & total) : total(total), start(clock::now()) {}
    ~timer() { total += std::chrono::duration<double>(clock::now() - start).count(); }
    timer(const timer &)             = delete;
    timer & operator=(const timer &) = delete;

private:
    using clock = std::chrono::steady_clock;
    double &          total;
    clock::time_point start;
};

} // namespace velo
