// Upstream's strings and values with limits: each search in a string, each cut and each replacement checks them. Their
// cost grows with the string, and one function of a template makes many of them.
#include "jinja/runtime.h"
#include "json.h"
#include "unicode.h"

#include "budget.hpp"

#define find(first, ...) find(velo::counted(first), ##__VA_ARGS__)
#define rfind(first, ...) rfind(velo::counted(first), ##__VA_ARGS__)
#define erase(first, ...) erase(velo::counted(first), ##__VA_ARGS__)
#define replace(first, ...) replace(velo::counted(first), ##__VA_ARGS__)

#include "jinja/string.cpp"
#include "jinja/value.cpp"

#undef find
#undef rfind
#undef erase
#undef replace
