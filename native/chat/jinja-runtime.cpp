// Upstream's template interpreter with limits: its debug macro, which each operation runs, checks them.
#include "jinja/runtime.h"

#include "budget.hpp"

#undef JJ_DEBUG
#define JJ_DEBUG(...) velo::chat_tick()

#include "jinja/runtime.cpp"
