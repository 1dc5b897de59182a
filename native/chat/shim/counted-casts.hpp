// Included in front of upstream's template engine: a dynamic cast counts as an operation (native/chat/budget.hpp). All
// its functions that recurse through nested values ask for their types, so a value in itself ends as too deep.
#pragma once

#include <cstddef> // defines the macro in libstdc++

#ifdef _GLIBCXX_EXTERN_TEMPLATE // instantiate strings here, so that their allocations count
#    undef _GLIBCXX_EXTERN_TEMPLATE
#    define _GLIBCXX_EXTERN_TEMPLATE -1
#endif

#include "budget.hpp"

#include <algorithm>
#include <functional>
#include <iomanip>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace velo {

template <class To, class From> To counted_cast(From * from) {
    chat_tick();
    return dynamic_cast<To>(from);
}

} // namespace velo

#define dynamic_cast velo::counted_cast
