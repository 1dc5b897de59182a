#pragma once

#include <cstdint>

namespace velo {

// Number of threads that compute. If another process takes the core of one, the others wait for it at each barrier,
// and without it they are faster. So a crew that loses much time goes on with fewer threads if that is faster, and
// tries from time to time whether a core is free again. All times are in nanoseconds.
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

    void begin_trial(trial kind, const steps & recent, int kind_of_steps);
    void end_trial(int64_t time, bool in_vain);
    void judge(int64_t time, const steps & recent, int kind_of_steps);
    bool is_slow(const steps & recent) const;

    int32_t most, now;
    steps   recent[2]   = {}; // since the last judgement: steps of few tokens, and of many
    trial   running     = trial::NONE;
    int     judged      = 0; // the kind of steps that the trial compares
    int32_t size_before = 0; // the trial
    steps   before      = {};
    bool    was_enough  = false; // whether fewer threads were slower, and more not yet in vain
    int     n_others    = 0;     // judgements of other steps since the trial began
    int64_t spent       = 0;     // in the trial
    int64_t pause       = 0;     // after a trial
    int64_t next        = 0;     // time of the next one
};

} // namespace velo
