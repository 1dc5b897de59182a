// Attention of a tile of packed query rows over a range of tokens, by one thread block of four warps.
//
// In a tile of tokens, each warp computes the scores of some of the tokens, then the weighted sum of some of V's
// columns. So each number of K and V is loaded into a fragment once. One kernel serves decode (16 rows, tokens split
// among thread blocks) and prefill (64 rows).
#pragma once

#include "paged-softmax.h"
#include "paged-tile.h"

namespace paged {

template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers> struct attend {
    static constexpr int ROWS = 16 * M_TILES;

    const params & p;
    char *         memory;
    layout         at;
    sequence       s;
    work_item      item;

    softmax_state<M_TILES, V_PAIRS> softmax;

    GPU_FN attend(const params & p, char * memory, const layout & at, const work_item & item)
        : p(p), memory(memory), at(at), s(sequence_of(p, item.row)), item(item) {}

    // Query rows of the item from this tile on, one sequence after the other. If sequences share the item, it has one
    // tile.
    GPU_FN int n_packed() const { return item.members * packed_rows(p, s) - item.tile * ROWS; }
    GPU_FN int packed(int row) const { return item.tile * ROWS + row; }
    GPU_FN int head_of(int row) const { return item.head_kv * p.group + packed(row) % p.group; }

    // In shared memory, for each row: the position of its query (-1: padding), and its row of `out` or `partial`.
    GPU_FN int * positions() const { return (int *) (memory + at.positions); }
    GPU_FN int * output_rows() const { return (int *) (memory + at.output_rows); }

    // ---- loads ----

    GPU_FN void load_queries() {
        const int units = ceil_div(p.d_k, UNIT), stride = number_stride(p.d_k);
        for (int i = gpu::thread(); i < ROWS * units; i += N_THREADS) {
            const int row = i / units, unit = i % units;
            float     x[UNIT]  = {};
            int       position = -1, out_row = 0;
            if (row < n_packed()) {
                const int      member = packed(row) / packed_rows(p, s), j = packed(row) % packed_rows(p, s) / p.group;
                const sequence seq = sequence_of(p, item.row + member);
                const float *  from =
                    (const float *) (p.q + head_of(row) * p.q_head_stride + (seq.q0 + j) * p.q_token_stride);
                GPU_UNROLL
                for (int n = 0; n < UNIT; ++n) {
                    x[n] = UNIT * unit + n < p.d_k ? from[UNIT * unit + n] * p.scale : 0.0f;
                }
                position = seq.position(j);
                out_row  = unit == 0 ? output_row(p, item, member, seq.q0, j, head_of(row)) : 0;
            }
            if (unit == 0) {
                positions()[row]   = position;
                output_rows()[row] = out_row;
            }
            char * to = memory + at.q + row * stride + 2 * UNIT * unit;
            if (is_fast(p, ROWS)) {
                store_unit<KNumbers, 1>(x, to, 0);
            } else {
                store_unit<KNumbers, MAX_TERMS>(x, to, ROWS * stride);
            }
        }
    }

    GPU_FN void fetch(int tile) { // into its stage; always one group of copies
        const int begin = item.tokens.begin + tile * at.tokens;
        if (begin < item.tokens.end) {
            char * stage = memory + at.stages + tile % N_STAGES * at.stage_bytes;
            fetch_rows(p, p.k, s, item.head_kv, begin, item.tokens.end, at.tokens, stage);
            if (!p.v_is_k) {
                fetch_rows(p, p.v, s, item.head_kv, begin, item.tokens.end, at.tokens, stage + at.v_raw);
            }
        }
        gpu::copy_commit();
    }

    struct operand { // rows of 16-bit numbers in shared memory
        const char * data;
        int          stride, term; // bytes from row to row and from term to term
    };

    template <class Numbers>
    GPU_FN operand ready(const pages & x, int d, int tile, const char * raw, char * converted) {
        if (raw_is_ready(x, d)) {
            return {raw, raw_stride(x.row_bytes), 0};
        }
        const int begin = item.tokens.begin + tile * at.tokens;
        convert_rows<Numbers>(p, x, s, item.head_kv, d, begin, item.tokens.end, at.tokens, raw, converted);
        return {converted, number_stride(d), at.tokens * number_stride(d)};
    }

    // ---- one tile of tokens ----

    static constexpr int MAX_COLUMNS = 2; // groups of eight tokens for a warp: every fourth group
    static_assert(MAX_TILE_TOKENS <= 8 * N_WARPS * MAX_COLUMNS, "a warp has a score for each token of a tile");

    GPU_FN bool has_columns(int i) const { return gpu::warp() + N_WARPS * i < at.tokens / 8; }

    // Add the products of all rows with this warp's groups of tokens. A fragment of queries is loaded once for both.
    template <int TERMS> GPU_FN void multiply_queries(const operand & k, float (&c)[MAX_COLUMNS][M_TILES][4]) {
        const int    lane = gpu::lane(), stride = number_stride(p.d_k);
        const bool   two  = has_columns(1);
        const int    n    = gpu::warp() + (two ? lane / 16 * N_WARPS : 0); // matrices 2 and 3: the second group
        const char * keys = k.data + (8 * n + lane % 8) * k.stride + lane / 8 % 2 * 16;
        for (int step = 0; step < ceil_div(p.d_k, 16); ++step) {
            GPU_UNROLL
            for (int k_term = 0; k_term < KNumbers::terms && k_term < TERMS; ++k_term) {
                uint32_t b[4];
                gpu::load_matrices(b, keys + k_term * k.term + 32 * step);
                GPU_UNROLL
                for (int q_term = 0; q_term < TERMS - k_term; ++q_term) {
                    GPU_UNROLL
                    for (int m = 0; m < M_TILES; ++m) {
                        uint32_t a[4];
                        gpu::load_matrices(a, memory + at.q + (q_term * ROWS + 16 * m + lane % 16) * stride +
                                                  32 * step + lane / 16 * 16);
                        KNumbers::multiply(c[0][m], a, b[0], b[1]);
                        if (two) {
                            KNumbers::multiply(c[1][m], a, b[2], b[3]);
                        }
                    }
                }
            }
        }
    }

    // Turn the products of a row into scores, base 2: soft-cap, bias, mask (-inf). `token`: position of the first
    // score.
    GPU_FN void finish_scores(float (&c)[MAX_COLUMNS][M_TILES][4], int m, int h, int token, float & top) const {
        const int   row      = 16 * m + gpu::lane() / 4 + 8 * h;
        const int   position = positions()[row];
        const int   end      = position + 1 < item.tokens.end ? position + 1 : item.tokens.end;
        const int   first    = position < 0 ? 0 : first_visible(p, position);
        const float slope    = alibi_slope(p, head_of(row));
        GPU_UNROLL
        for (int i = 0; i < MAX_COLUMNS; ++i) {
            GPU_UNROLL
            for (int r = 0; r < 2; ++r) {
                const int here = token + 8 * N_WARPS * i + r;
                float &   x    = c[i][m][2 * h + r];
                if (p.softcap > 0.0f) {
                    x = p.softcap * gpu::tanh(x / p.softcap);
                }
                x   = (x - slope * (float) (position - here)) * LOG2E;
                x   = here < end && here >= first && has_columns(i) ? x : -INFINITY;
                top = fmaxf(top, x);
            }
        }
    }

    static_assert(N_STAGES == 2,
                  "one tile is fetched ahead into a free stage, and a wait for all copies waits for this tile");

    GPU_FN void process_tile(int tile) {
        gpu::copy_wait<N_STAGES - 2>();
        gpu::sync_block(); // the tile has arrived, and no warp reads the one before
        fetch(tile + 1);
        const char * stage = memory + at.stages + tile % N_STAGES * at.stage_bytes;
        operand      k = ready<KNumbers>(p.k, p.d_k, tile, stage, memory + at.k), v = k;
        if (!p.v_is_k) {
            v = ready<VNumbers>(p.v, p.d_v, tile, stage + at.v_raw, memory + at.v);
        }
        gpu::sync_block();
        compute_weights(k, item.tokens.begin + tile * at.tokens);
        gpu::sync_block();
        if (is_fast(p, ROWS)) {
            accumulate<1>(v);
        } else {
            accumulate<MAX_TERMS>(v);
        }
    }

    // Compute the scores of a tile, update the rows' maxima, and store the softmax weights.
    GPU_FN void compute_weights(const operand & k, int begin) {
        const int column = 8 * gpu::warp() + gpu::lane() % 4 * 2;
        float     scores[MAX_COLUMNS][M_TILES][4], tops[M_TILES][2];
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int r = 0; r < 4; ++r) {
                scores[0][m][r] = scores[1][m][r] = 0.0f;
            }
        }
        if (has_columns(0)) {
            if (is_fast(p, ROWS)) {
                multiply_queries<1>(k, scores);
            } else {
                multiply_queries<MAX_TERMS>(k, scores);
            }
        }
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                tops[m][h] = -INFINITY;
                finish_scores(scores, m, h, begin + column, tops[m][h]);
            }
        }
        reduce_maxima(tops);
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                softmax.rescale(m, h, tops[m][h]);
                GPU_UNROLL
                for (int i = 0; i < MAX_COLUMNS; ++i) {
                    if (has_columns(i)) {
                        store_weights(scores[i][m][2 * h], scores[i][m][2 * h + 1], m, h, column + 8 * N_WARPS * i);
                    }
                }
            }
        }
    }

    // Reduce each row's maximum over all warps.
    GPU_FN void reduce_maxima(float (&tops)[M_TILES][2]) {
        float *   maxima = (float *) (memory + at.maxima);
        const int g      = gpu::lane() / 4;
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                tops[m][h] = fmaxf(tops[m][h], gpu::shuffle_xor(tops[m][h], 1));
                tops[m][h] = fmaxf(tops[m][h], gpu::shuffle_xor(tops[m][h], 2));
                if (gpu::lane() % 4 == 0) {
                    maxima[(16 * m + g + 8 * h) * N_WARPS + gpu::warp()] = tops[m][h];
                }
            }
        }
        gpu::sync_block();
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                GPU_UNROLL
                for (int w = 0; w < N_WARPS; ++w) {
                    tops[m][h] = fmaxf(tops[m][h], maxima[(16 * m + g + 8 * h) * N_WARPS + w]);
                }
            }
        }
    }

    GPU_FN void store_weights(float a, float b, int m, int h, int column) {
        const float top = softmax.maximum[m][h];
        a               = a == -INFINITY ? 0.0f : gpu::exp2(a - top);
        b               = b == -INFINITY ? 0.0f : gpu::exp2(b - top);
        softmax.total[m][h] += a + b;
        char * row = memory + at.weights + (16 * m + gpu::lane() / 4 + 8 * h) * weight_stride(at.tokens) + 2 * column;
        GPU_UNROLL
        for (int term = 0; term < VNumbers::weight_terms && (term == 0 || !is_fast(p, ROWS)); ++term) {
            *(uint32_t *) (row + term * ROWS * weight_stride(at.tokens)) = VNumbers::pack(a, b);
            a -= VNumbers::rounded(a);
            b -= VNumbers::rounded(b);
        }
    }

    // Add the weighted sum of the tile's V for this warp's columns: every fourth group of sixteen.
    template <int TERMS> GPU_FN void accumulate(const operand & v) {
        const int lane = gpu::lane(), stride = weight_stride(at.tokens);
        for (int step = 0; step < at.tokens / 16; ++step) {
            GPU_UNROLL
            for (int w_term = 0; w_term < VNumbers::weight_terms && w_term < TERMS; ++w_term) {
                uint32_t a[M_TILES][4];
                GPU_UNROLL
                for (int m = 0; m < M_TILES; ++m) {
                    gpu::load_matrices(a[m], memory + at.weights + (w_term * ROWS + 16 * m + lane % 16) * stride +
                                                 32 * step + lane / 16 * 16);
                }
                GPU_UNROLL
                for (int v_term = 0; v_term < (w_term ? 1 : VNumbers::terms) && v_term < TERMS; ++v_term) {
                    GPU_UNROLL
                    for (int n = 0; n < V_PAIRS; ++n) {
                        const int column = 16 * (gpu::warp() + N_WARPS * n);
                        if (column >= p.d_v) {
                            break;
                        }
                        uint32_t b[4];
                        gpu::load_matrices_transposed(b, v.data + v_term * v.term + (16 * step + lane % 16) * v.stride +
                                                             2 * column + lane / 16 * 16);
                        GPU_UNROLL
                        for (int m = 0; m < M_TILES; ++m) {
                            VNumbers::multiply(softmax.sums[m][n][0], a[m], b[0], b[1]);
                            VNumbers::multiply(softmax.sums[m][n][1], a[m], b[2], b[3]);
                        }
                    }
                }
            }
        }
    }

    // ---- results ----

    static_assert(N_WARPS == 4, "reduce_totals adds four warps");

    GPU_FN void reduce_totals() { // over all threads of a row
        float *   shared = (float *) (memory + at.maxima);
        const int g      = gpu::lane() / 4;
        gpu::sync_block();
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                softmax.total[m][h] += gpu::shuffle_xor(softmax.total[m][h], 1);
                softmax.total[m][h] += gpu::shuffle_xor(softmax.total[m][h], 2);
                if (gpu::lane() % 4 == 0) {
                    shared[(16 * m + g + 8 * h) * N_WARPS + gpu::warp()] = softmax.total[m][h];
                }
            }
        }
        gpu::sync_block();
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                const float * of_row = shared + (16 * m + g + 8 * h) * N_WARPS;
                softmax.total[m][h]  = ((of_row[0] + of_row[1]) + of_row[2]) + of_row[3];
            }
        }
    }

    GPU_FN void write_row(int m, int h, float * to, float factor) const {
        GPU_UNROLL
        for (int n = 0; n < 2 * V_PAIRS; ++n) {
            const int column = 16 * (gpu::warp() + N_WARPS * (n / 2)) + 8 * (n % 2) + gpu::lane() % 4 * 2;
            if (column < p.d_v) {
                to[column]     = softmax.sums[m][n / 2][n % 2][2 * h] * factor;
                to[column + 1] = softmax.sums[m][n / 2][n % 2][2 * h + 1] * factor;
            }
        }
    }

    GPU_FN void write() {
        reduce_totals();
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                const int row = 16 * m + gpu::lane() / 4 + 8 * h;
                if (row >= n_packed()) {
                    continue;
                }
                const int64_t out_row = output_rows()[row];
                if (item.n_splits == 1) {
                    write_row(m, h, p.out + out_row * p.d_v,
                              final_factor(p, head_of(row), softmax.maximum[m][h], softmax.total[m][h]));
                    continue;
                }
                float * to = p.partial + out_row * partial_floats(p);
                write_row(m, h, to, 1.0f);
                if (gpu::warp() == 0 && gpu::lane() % 4 == 0) {
                    to[p.d_v]     = softmax.maximum[m][h];
                    to[p.d_v + 1] = softmax.total[m][h];
                }
            }
        }
    }

    GPU_FN void run() {
        softmax.reset();
        item.tokens = visible_tokens(p, s, item, packed(0), packed(n_packed() < ROWS ? n_packed() - 1 : ROWS - 1));
        fetch(0);
        load_queries();
        const int n = ceil_div(item.tokens.end - item.tokens.begin, at.tokens);
        for (int tile = 0; tile < n; ++tile) {
            process_tile(tile);
        }
        gpu::copy_wait<0>();
        write();
        gpu::sync_block(); // before the next item's queries overwrite these
    }
};

template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers>
GPU_FN void attend_block(const params & p, row_range of, int tokens, char * memory) {
    const layout     at     = layout_of<KNumbers, VNumbers>(p, 16 * M_TILES, tokens);
    const row_starts starts = starts_in(p, (int *) (memory + at.starts));
    attend_plan      plan   = {p, of, 16 * M_TILES, false};
    plan_items(plan, gpu::n_blocks(), starts);
    for (int number = gpu::block(); number < starts.items[starts.n]; number += gpu::n_blocks()) {
        attend<M_TILES, V_PAIRS, KNumbers, VNumbers> work(p, memory, at, item_of(p, plan, starts, number));
        work.run();
    }
}

} // namespace paged
