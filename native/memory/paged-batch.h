// Rows and tables of a batch, and its checks. Private to this folder.
#pragma once

#include "paged-state.h"

#include <cstring>

// A row of batch.seqs.
struct seq_row {
    int32_t first, n_tokens, length, reserved;
};

inline seq_row row_of(const llama_paged_batch & b, int32_t s) {
    seq_row row;
    memcpy(&row, b.seqs + 4 * s, sizeof(row));
    return row;
}

// The block table of a sequence in one group.
struct group_table {
    int32_t         first; // blocks before the table
    const int32_t * blocks;
};

inline group_table table_of(const llama_paged_batch & b, int32_t group, int32_t s) {
    const size_t row = (size_t) group * b.seq_stride + s;
    return {b.firsts ? b.firsts[row] : 0, b.tables + row * b.table_stride};
}

// Return the number of tokens whose logits are wanted.
int32_t paged_count_outputs(const llama_paged_batch & b);

// Throw if upstream or the operator would abort on the batch, or read or write a slot of no sequence.
void paged_check_batch(const llama_context & ctx, const llama_paged & paged, const llama_paged_batch & b);
