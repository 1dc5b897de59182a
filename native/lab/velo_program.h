// What small C programs over velo.h share: a failure ends them with its message.
#pragma once

#include "velo.h"

#include <stdio.h>
#include <stdlib.h>

static void need(velo_status status) {
    if (status != VELO_OK) {
        fprintf(stderr, "%s: %s\n", velo_status_name(status), velo_message());
        exit(1);
    }
}

static velo_model * load(const char * path) {
    const velo_model_params params = velo_model_default_params();
    velo_model *            model  = NULL;
    need(velo_model_load(path, &params, &model));
    return model;
}

// Returns a context for one sequence of up to `max_tokens` tokens.
static velo_context * new_context(velo_model * model, int32_t n_blocks, int32_t block_size, int32_t max_tokens) {
    velo_context_params params  = velo_context_default_params();
    velo_context *      context = NULL;
    params.n_blocks             = n_blocks;
    params.block_size           = block_size;
    params.max_seq_len          = max_tokens;
    params.max_batch_tokens     = max_tokens;
    params.max_seqs             = 1;
    params.n_threads            = 2;
    need(velo_context_create(model, &params, &context));
    return context;
}
