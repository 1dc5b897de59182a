// Packing of weights into tiles.
#pragma once

#include "tile-layout.h"

namespace tiles {

// Packs `n_rows` rows of `n` weights in the file's format, a multiple of COLS and of the block.
void pack(ggml_type type, const void * from, int64_t n, int64_t n_rows, char * to);

} // namespace tiles
