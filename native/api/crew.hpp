#pragma once

#include <cstdint>

namespace velo {

// Number of threads that compute. If another process takes the core of one, the others wait for it at each barrier,
// and without it they are faster. So a crew that loses much time goes on with fewer threads if that is faster, and
// later tries whether the core is free again. All times are in nanoseconds.
class crew {
public:
    struct steps {
        int64_t wall, lost; // time they took, and the sum of what threads lost
        int64_t n, n_tokens;
    };

    explicit crew(int32_t most = 1) : most(most), now(most) {}

    int32_t size() const { return now; }
    // Record steps that ended at `time`.
    void worked(int64_t time, const steps & done);

private:
    enum class trial { NONE, FEWER, MORE };

    bool is_slow() const;
    void judge(int64_t time);
    void end_trial(int64_t time);

    int32_t most, now;
    steps   recent{}; // since the last judgement
    trial   running     = trial::NONE;
    int32_t size_before = 0; // the trial
    steps   before{};        // a trial with fewer threads
    int64_t pause = 0;       // after a trial
    int64_t next  = 0;       // time of the next one
};

} // namespace velo
