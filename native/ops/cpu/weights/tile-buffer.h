// Memory for weights that are packed into tiles.
#pragma once

#include "ggml-backend.h"

// Returns the type of buffers with such weights; null if the build has no products of tiles.
ggml_backend_buffer_type_t velo_tile_buffer_type(void);

// Returns this type and null, if the calling thread asked for layouts alone whose products do not depend on the batch;
// otherwise null.
ggml_backend_buffer_type_t * velo_exact_layouts(void);
void                         velo_want_exact_layouts(bool wanted);
