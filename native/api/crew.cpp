#include "crew.hpp"

#include <algorithm>
#include <cmath>

namespace {

constexpr int64_t MS = 1000000;

// A process that takes turns with a thread has the core for some milliseconds at a time, so steps are judged together.
constexpr int64_t LONG_ENOUGH = 20 * MS;
constexpr int64_t FIRST_PAUSE = 250 * MS, LONGEST_PAUSE = 8000 * MS;

// A thread that has half of a core makes the others lose a third of their time, or more; on a quiet machine they lose
// some hundredths.
constexpr double MUCH = 0.2;

double tokens_of(const velo::crew::steps & done) {
    return static_cast<double>(done.n_tokens) / static_cast<double>(done.n);
}

double seconds_of(const velo::crew::steps & done) {
    return static_cast<double>(done.wall) / static_cast<double>(done.n);
}

} // namespace

void velo::crew::worked(int64_t time, const steps & done) {
    recent.wall += done.wall;
    recent.lost += done.lost;
    recent.n += done.n;
    recent.n_tokens += done.n_tokens;
    if (recent.wall >= LONG_ENOUGH) {
        judge(time);
        recent = {};
    }
}

bool velo::crew::is_slow() const {
    return now > 1 && static_cast<double>(recent.lost) > MUCH * static_cast<double>(recent.wall * (now - 1));
}

void velo::crew::judge(int64_t time) {
    if (running == trial::FEWER && is_slow()) { // several cores are taken
        --now;
    } else if (running != trial::NONE) {
        end_trial(time);
    } else if (time >= next && is_slow()) {
        running     = trial::FEWER;
        before      = recent;
        size_before = now--;
    } else if (time >= next && now < most) {
        running     = trial::MORE;
        size_before = now++;
    }
}

void velo::crew::end_trial(int64_t time) {
    const bool alike   = std::abs(tokens_of(recent) - tokens_of(before)) <= 0.1 * tokens_of(before);
    const bool faster  = alike && seconds_of(recent) < seconds_of(before);
    const bool in_vain = running == trial::MORE ? is_slow() : !faster;
    if (in_vain) {
        now = size_before;
    }
    pause   = in_vain ? std::clamp(2 * pause, FIRST_PAUSE, LONGEST_PAUSE) : FIRST_PAUSE;
    next    = in_vain || running == trial::FEWER ? time + pause : time;
    running = trial::NONE;
}
