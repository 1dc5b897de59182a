// The shape of a block: its warps, and where in its shared memory the queries, the tiles on their way, what is
// exchanged between warps and whose the rows are lie.
#pragma once

#include "paged-tile.h"

namespace paged {

constexpr int N_WARPS   = 4;
constexpr int N_THREADS = 32 * N_WARPS;
constexpr int N_STAGES  = 2;

constexpr int MOST_TILE_TOKENS = 64; // tokens of a tile
static_assert(N_WARPS <= 32, "find_starts has room for the sums of 32 warps");

// Numbers of 16 bits whose sum a query is, a number of f32, or a weight for bf16; in tiles of many rows one, on
// request.
constexpr int MOST_PARTS = 2;
GPU_BOTH bool is_fast(const view & p, int rows) { return p.fast && rows > 16; }

// Bytes of shared memory, and where things lie there.
struct layout {
    int rows, tokens; // of a tile
    int q, stages, stage_bytes, v_raw, k, v, weights, maxima, positions, places, starts, total;
};

GPU_BOTH int weight_stride(int tokens) { return 2 * tokens + PAD; }

template <class KNumbers, class VNumbers> GPU_BOTH layout layout_of(const view & p, int rows, int tokens) {
    const bool k_ready = raw_is_ready(p.k, p.d_k), v_ready = raw_is_ready(p.v, p.d_v);
    const int  parts        = is_fast(p, rows) ? 1 : MOST_PARTS;
    const int  weight_parts = parts < VNumbers::weight_parts ? parts : VNumbers::weight_parts;
    layout     l;
    l.rows        = rows;
    l.tokens      = tokens;
    l.q           = 0;
    l.stages      = l.q + parts * rows * number_stride(p.d_k);
    l.v_raw       = tokens * raw_stride(p.k.row_bytes);
    l.stage_bytes = l.v_raw + (p.v_is_k ? 0 : tokens * raw_stride(p.v.row_bytes));
    l.k           = l.stages + N_STAGES * l.stage_bytes;
    l.v           = l.k + (k_ready ? 0 : KNumbers::parts * tokens * number_stride(p.d_k));
    l.weights     = l.v + (v_ready || p.v_is_k ? 0 : VNumbers::parts * tokens * number_stride(p.d_v));
    l.maxima      = l.weights + weight_parts * rows * weight_stride(tokens);
    l.positions   = l.maxima + rows * N_WARPS * (int) sizeof(float);
    l.places      = l.positions + rows * (int) sizeof(int);
    l.starts      = l.places + rows * (int) sizeof(int);
    l.total       = l.starts + START_INTS * (int) sizeof(int);
    return l;
}

} // namespace paged
