// The number of computing threads, driven step by step.
#include "crew.hpp"
#include "lab.h"

struct lab_crew {
    velo::crew crew;
};

lab_crew * lab_crew_new(int32_t most) { return new lab_crew{velo::crew(most)}; }

void lab_crew_free(lab_crew * crew) { delete crew; }

int32_t lab_crew_worked(lab_crew * crew, int64_t time, int64_t wall, int64_t lost, int64_t n_tokens) {
    crew->crew.worked(time, {wall, lost, 1, n_tokens});
    return crew->crew.size();
}
