// Sequences that begin with the same blocks: a part of their tokens that lies in these is computed once, in a tile with
// the rows of several. Rows of a tile do not know of each other, so each gets the bits that it would get alone. Who
// goes with whom follows from neighbouring rows of the table, so that whoever looks at one row can tell.
#pragma once

#include "paged-parts.h"

namespace paged {

// Leading parts that a row of the table has in common with the row before: of the same size, in the same blocks, and
// attended whole by all queries of both.
GPU_FN int shared_parts(const view & p, int row, const sequence & s) {
    if (s.shared <= 0 || row == 0 || p.window_type != WINDOW_NONE) {
        return 0;
    }
    const sequence before = sequence_of(p, row - 1);
    const int      n = n_splits(p, s), n_before = n_splits(p, before);
    if (s.n_q != before.n_q || n == 1 || n_before == 1) {
        return 0;
    }
    const int each   = part_tokens(p, s, n);
    const int seen   = s.length < before.length ? s.position(0) + 1 : before.position(0) + 1;
    const int common = s.shared * p.block_size < seen ? s.shared * p.block_size : seen;
    return each == part_tokens(p, before, n_before) ? common / each : 0;
}

// Leading parts of a row of the table that are computed with those of the row before. So many rows as a tile has room
// for keep company; companies begin at multiples of that number.
GPU_FN int skipped_parts(const view & p, int row, const sequence & s, int tile_rows) {
    if (s.shared <= 0 || s.n_q == 0) {
        return 0;
    }
    const int room = tile_rows / packed_rows(p, s);
    return room < 2 || row % room == 0 ? 0 : shared_parts(p, row, s);
}

// Rows of the table, from this one on, that are computed together in its part.
GPU_FN int n_members(const view & p, int row, int part, int tile_rows) {
    int n = 1;
    while (row + n < p.n_rows && skipped_parts(p, row + n, sequence_of(p, row + n), tile_rows) > part) {
        ++n;
    }
    return n;
}

// Whether company is worth it: an item takes about as long for one sequence as for several, and as many of them are
// computed at a time as there are blocks of threads, so what counts is how often these come round.
GPU_FN bool company_wins(int items, int spared, int n_blocks) {
    return ceil_div(items - spared, n_blocks) < ceil_div(items, n_blocks);
}

} // namespace paged
