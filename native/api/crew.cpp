#include "crew.hpp"

#include <algorithm>

namespace {

constexpr int64_t MS = 1000000;

// A process that takes turns with a thread has the core for some milliseconds at a time, so steps are judged together.
constexpr int64_t LONG_ENOUGH = 20 * MS;
// Steps that decode and steps that read prompts are judged apart.
constexpr int64_t MANY_TOKENS = 64;

constexpr int64_t FIRST_PAUSE = 250 * MS, LONGEST_PAUSE = 8000 * MS;
constexpr int64_t PAUSE_PER_TRIAL = 20; // times its own length, at least

// A thread that has half of a core makes the others lose a third of their time, or more; on a quiet machine they lose
// some hundredths.
constexpr double MUCH   = 0.2;
constexpr double FASTER = 0.95, MUCH_SLOWER = 1.4; // time over the time before

// A step of one token takes about as long as reading the weights, and as several more tokens.
constexpr int64_t TOKENS_PER_STEP = 8;
constexpr int     MOST_OTHERS     = 4; // judgements of steps that a trial does not compare, until it ends

double work_of(const velo::crew::steps & done) { return static_cast<double>(done.n_tokens + TOKENS_PER_STEP * done.n); }

double size_of(const velo::crew::steps & done) { return work_of(done) / static_cast<double>(done.n); }

bool are_alike(const velo::crew::steps & a, const velo::crew::steps & b) {
    return size_of(a) < 2 * size_of(b) && size_of(b) < 2 * size_of(a);
}

// Return the time for as much work over the time before.
double ratio(const velo::crew::steps & recent, const velo::crew::steps & before) {
    const double now  = static_cast<double>(recent.wall) / work_of(recent);
    const double then = static_cast<double>(before.wall) / work_of(before);
    return now / then;
}

} // namespace

void velo::crew::worked(int64_t time, const steps & done) {
    const int kind = done.n_tokens < MANY_TOKENS * done.n ? 0 : 1;
    steps &   sum  = recent[kind];
    sum.wall += done.wall;
    sum.lost += done.lost;
    sum.n += done.n;
    sum.n_tokens += done.n_tokens;
    if (sum.wall >= LONG_ENOUGH) {
        const steps of = sum;
        sum            = {};
        judge(time, of, kind);
    }
}

bool velo::crew::is_slow(const steps & of) const {
    return now > 1 && static_cast<double>(of.lost) > MUCH * static_cast<double>(of.wall * (now - 1));
}

void velo::crew::judge(int64_t time, const steps & of, int kind) {
    if (running == trial::NONE) {
        const bool may_grow = now < most;
        if (time >= next && is_slow(of) && !(may_grow && was_enough)) {
            begin_trial(trial::FEWER, of, kind);
        } else if (time >= next && may_grow) {
            begin_trial(trial::MORE, of, kind);
        }
        return;
    }
    spent += of.wall;
    if (kind != judged || !are_alike(of, before)) {
        if (++n_others == MOST_OTHERS) {
            end_trial(time, running == trial::FEWER || is_slow(of));
        }
        return;
    }
    const double time_ratio = ratio(of, before);
    if (running == trial::MORE) {
        end_trial(time, is_slow(of) && time_ratio > 1);
    } else if (is_slow(of) && time_ratio > FASTER && time_ratio < MUCH_SLOWER) { // several cores may be taken
        --now;
    } else {
        end_trial(time, time_ratio > FASTER);
    }
}

void velo::crew::begin_trial(trial kind, const steps & of, int kind_of_steps) {
    running     = kind;
    judged      = kind_of_steps;
    before      = of;
    spent       = 0;
    n_others    = 0;
    size_before = now;
    now += kind == trial::MORE ? 1 : -1;
    recent[0] = recent[1] = {};
}

void velo::crew::end_trial(int64_t time, bool in_vain) {
    if (in_vain) {
        now = size_before;
    }
    was_enough = running == trial::FEWER ? in_vain : was_enough && !in_vain;
    pause      = in_vain ? std::clamp(2 * pause, FIRST_PAUSE, LONGEST_PAUSE) : FIRST_PAUSE;
    next       = in_vain || running == trial::FEWER ? time + std::max(pause, PAUSE_PER_TRIAL * spent) : time;
    running    = trial::NONE;
    recent[0] = recent[1] = {};
}
