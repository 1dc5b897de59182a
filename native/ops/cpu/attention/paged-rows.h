// Conversion of a row of K or V of any type to floats: scale times code, with ggml's numbers and one rounding.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace paged {

// Reads n elements, whole groups, and no byte after them.
using row_to_float = void (*)(const char * row, float * out, int64_t n);

row_to_float row_converter(ggml_type type);

} // namespace paged
