// A row of K or V of any type as floats: scale and code as ggml dequantizes them, in one rounding.
#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace paged {

// reads n elements (whole groups) and nothing past them
using row_to_float = void (*)(const char * row, float * out, int64_t n);

row_to_float row_converter(ggml_type type);

} // namespace paged
