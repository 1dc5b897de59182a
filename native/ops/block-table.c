// What follows from the rows of a block table: shared blocks, and the plan for devices.
#include "kv-splits.h"
#include "paged-attn.h"

// ---- shared blocks ----

static int64_t n_blocks(const int32_t * row, int32_t block_size) {
    const bool whole = row[GGML_PAGED_ATTN_NQ] > 0 && row[GGML_PAGED_ATTN_FIRST] == 0;
    return whole ? ((int64_t) row[GGML_PAGED_ATTN_KV] + block_size - 1) / block_size : 0;
}

void ggml_paged_attn_find_shared(int32_t * table, int64_t n_rows, int64_t stride, int32_t block_size) {
    const int32_t * before = NULL;
    for (int32_t * row = table; row != table + n_rows * stride; row += stride) {
        const int64_t own = n_blocks(row, block_size), others = before ? n_blocks(before, block_size) : 0;
        int32_t       n = 0;
        while (n < own && n < others && row[GGML_PAGED_ATTN_HEADER + n] == before[GGML_PAGED_ATTN_HEADER + n]) {
            ++n;
        }
        row[GGML_PAGED_ATTN_SHARED] = n;
        before                      = row;
    }
}

// ---- the plan ----

enum {
    ONE_SPLIT = 30, // SHIFT of a sequence that is not split
    FIRST_SUM = GGML_PAGED_ATTN_VERY_FEW,
};

static int32_t first_position(const int32_t * row) { return row[GGML_PAGED_ATTN_KV] - row[GGML_PAGED_ATTN_NQ]; }

static int32_t first_visible(const struct ggml_paged_attn_params * params, int32_t position) {
    switch (params->window_type) {
    case GGML_PAGED_ATTN_WINDOW_SLIDING:
        return position < params->window ? 0 : position - params->window + 1;
    case GGML_PAGED_ATTN_WINDOW_CHUNKED:
        return position / params->window * params->window;
    default:
        return 0;
    }
}

static int32_t n_splits(const int32_t * row) {
    const int32_t tokens = row[GGML_PAGED_ATTN_KV] - row[GGML_PAGED_ATTN_BEGIN];
    return tokens > 0 ? ((tokens - 1) >> row[GGML_PAGED_ATTN_SHIFT]) + 1 : 1;
}

static void set_splits(int32_t * row, const struct ggml_paged_attn_params * params) {
    const int32_t n_q          = row[GGML_PAGED_ATTN_NQ];
    row[GGML_PAGED_ATTN_BEGIN] = n_q ? first_visible(params, first_position(row)) / SPLIT_ALIGN * SPLIT_ALIGN : 0;
    row[GGML_PAGED_ATTN_SHIFT] = n_q == 0 || n_q > MAX_SPLIT_QUERIES
                                     ? ONE_SPLIT
                                     : kv_split_shift(row[GGML_PAGED_ATTN_KV] - row[GGML_PAGED_ATTN_BEGIN]);
}

// Return the number of leading splits of the same size, in the same blocks, and attended by all queries of both rows.
static int32_t common_splits(const int32_t * row, const int32_t * before,
                             const struct ggml_paged_attn_params * params) {
    const int32_t shift = row[GGML_PAGED_ATTN_SHIFT];
    if (row[GGML_PAGED_ATTN_SHARED] <= 0 || params->window_type != GGML_PAGED_ATTN_WINDOW_NONE ||
        row[GGML_PAGED_ATTN_NQ] != before[GGML_PAGED_ATTN_NQ] || shift != before[GGML_PAGED_ATTN_SHIFT] ||
        n_splits(row) == 1 || n_splits(before) == 1) {
        return 0;
    }
    const int32_t own = first_position(row), others = first_position(before);
    const int64_t seen = (own < others ? own : others) + 1;
    const int64_t same = (int64_t) row[GGML_PAGED_ATTN_SHARED] * params->block_size;
    return (int32_t) ((same < seen ? same : seen) >> shift);
}

// Return the splits of a row that are computed with the row before it, in tiles of so many packed rows. Rows of the
// table are grouped by as many as fit into a tile, as in attend_plan::skipped of the kernels.
static int32_t saved_splits(const int32_t * row, int64_t index, int32_t packed, int32_t tile_rows) {
    const int32_t fit = tile_rows / packed;
    return fit < 2 || index % fit == 0 ? 0 : row[GGML_PAGED_ATTN_COMMON];
}

static void add_row(int32_t * row, int64_t index, int32_t group) {
    const int32_t n_q = row[GGML_PAGED_ATTN_NQ], packed = n_q * group, n = n_splits(row);
    if (n_q == 0) {
        return;
    }
    row[GGML_PAGED_ATTN_QUERIES] += n_q;
    if (n > 1) {
        row[GGML_PAGED_ATTN_MERGED] += n_q;
        row[GGML_PAGED_ATTN_PARTIALS] += n_q * n;
    }
    if (packed <= FEW_ROWS) {
        row[packed <= VERY_FEW_ROWS ? GGML_PAGED_ATTN_VERY_FEW : GGML_PAGED_ATTN_FEW] += n;
        row[GGML_PAGED_ATTN_SAVED_8] += saved_splits(row, index, packed, 8);
        row[GGML_PAGED_ATTN_SAVED_16] += saved_splits(row, index, packed, 16);
    } else {
        row[GGML_PAGED_ATTN_TILES_16] += (packed + 15) / 16 * n;
        row[GGML_PAGED_ATTN_TILES_64] += (packed + 63) / 64 * n;
        row[GGML_PAGED_ATTN_TILES_128] += (packed + 127) / 128 * n;
        row[GGML_PAGED_ATTN_SAVED_64] += saved_splits(row, index, packed, 64);
        row[GGML_PAGED_ATTN_SAVED_128] += saved_splits(row, index, packed, 128);
    }
}

void ggml_paged_attn_plan(int32_t * table, int64_t n_rows, int64_t stride, int32_t group,
                          const struct ggml_paged_attn_params * params) {
    for (int64_t i = 0; i < n_rows; ++i) {
        int32_t *       row    = table + i * stride;
        const int32_t * before = i > 0 ? row - stride : NULL;
        set_splits(row, params);
        row[GGML_PAGED_ATTN_COMMON] = before ? common_splits(row, before, params) : 0;
        for (int sum = FIRST_SUM; sum < GGML_PAGED_ATTN_HEADER; ++sum) {
            row[sum] = before ? before[sum] : 0;
        }
        add_row(row, i, group);
    }
}
