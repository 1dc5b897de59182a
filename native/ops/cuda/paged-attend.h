// Attention of a tile of packed query rows over a range of tokens, by one block of four warps.
//
// For each tile of tokens the warps share the scores by tokens and the weighted sum of V by its columns, so that each
// number of K and V becomes a fragment once. One kernel serves decode (16 rows, tokens split among blocks) and prefill
// (64 rows): both are bound by what they read, or by products, not by how rows are dealt out.
#pragma once

#include "paged-layout.h"

namespace paged {

template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers> struct attend {
    static constexpr int ROWS = 16 * M_TILES;

    const view & p;
    char *       memory;
    layout       at;
    sequence     s;
    work_item    item;

    float sums[M_TILES][V_PAIRS][2][4]; // of V, of this warp's columns
    float highest[M_TILES][2];          // score of a row so far, base 2
    float total[M_TILES][2];            // of the weights of this thread's columns

    GPU_FN attend(const view & p, char * memory, const layout & at, const work_item & item)
        : p(p), memory(memory), at(at), s(sequence_of(p, item.row)), item(item) {}

    // Rows of all members of a tile, one member's behind the other's; where there are several, there is one tile.
    GPU_FN int n_packed() const { return item.members * packed_rows(p, s) - item.tile * ROWS; }
    GPU_FN int packed(int row) const { return item.tile * ROWS + row; }
    GPU_FN int head_of(int row) const { return item.head_kv * p.group + packed(row) % p.group; }

    // Of each row, in shared memory: the position of its query, -1 where it is nobody's; and the number of the row of
    // `out` or `partial` that it becomes.
    GPU_FN int * positions() const { return (int *) (memory + at.positions); }
    GPU_FN int * places() const { return (int *) (memory + at.places); }

    // ---- what is read ----

    GPU_FN void load_queries() {
        const int units = ceil_div(p.d_k, UNIT), stride = number_stride(p.d_k);
        for (int i = gpu::thread(); i < ROWS * units; i += N_THREADS) {
            const int row = i / units, unit = i % units;
            float     x[UNIT]  = {};
            int       position = -1, place = 0;
            if (row < n_packed()) {
                const int      member = packed(row) / packed_rows(p, s), j = packed(row) % packed_rows(p, s) / p.group;
                const sequence whose = sequence_of(p, item.row + member);
                const float *  from =
                    (const float *) (p.q + head_of(row) * p.q_head_stride + (whose.q0 + j) * p.q_token_stride);
                GPU_UNROLL
                for (int n = 0; n < UNIT; ++n) {
                    x[n] = UNIT * unit + n < p.d_k ? from[UNIT * unit + n] * p.scale : 0.0f;
                }
                position = whose.position(j);
                place    = unit == 0 ? result_row(p, item, member, whose.q0, j, head_of(row)) : 0;
            }
            if (unit == 0) {
                positions()[row] = position;
                places()[row]    = place;
            }
            char * to = memory + at.q + row * stride + 2 * UNIT * unit;
            if (is_fast(p, ROWS)) {
                put_unit<KNumbers, 1>(x, to, 0);
            } else {
                put_unit<KNumbers, MOST_PARTS>(x, to, ROWS * stride);
            }
        }
    }

    GPU_FN void fetch(int tile) { // into its stage of the ring; always one group of copies
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

    struct rows_of_numbers {
        const char * data;
        int          stride, part; // bytes from row to row, from part to part
    };

    template <class Numbers>
    GPU_FN rows_of_numbers ready(const pages & x, int d, int tile, const char * raw, char * room) {
        if (raw_is_ready(x, d)) {
            return {raw, raw_stride(x.row_bytes), 0};
        }
        const int begin = item.tokens.begin + tile * at.tokens;
        convert_rows<Numbers>(p, x, s, item.head_kv, d, begin, item.tokens.end, at.tokens, raw, room);
        return {room, number_stride(d), at.tokens * number_stride(d)};
    }

    // ---- one tile of tokens ----

    static constexpr int MOST_COLUMNS = 2; // groups of eight tokens of a warp: every fourth
    static_assert(MOST_TILE_TOKENS <= 8 * N_WARPS * MOST_COLUMNS, "a warp has a score for each token of a tile");

    GPU_FN bool has_columns(int i) const { return gpu::warp() + N_WARPS * i < at.tokens / 8; }

    // Adds the products of this warp's groups of tokens with all rows: a fragment of the queries is loaded for both.
    template <int PARTS> GPU_FN void score(const rows_of_numbers & k, float (&c)[MOST_COLUMNS][M_TILES][4]) {
        const int    lane = gpu::lane(), stride = number_stride(p.d_k);
        const bool   two  = has_columns(1);
        const int    n    = gpu::warp() + (two ? lane / 16 * N_WARPS : 0); // matrices 2 and 3 are of the second group
        const char * keys = k.data + (8 * n + lane % 8) * k.stride + lane / 8 % 2 * 16;
        for (int step = 0; step < ceil_div(p.d_k, 16); ++step) {
            GPU_UNROLL
            for (int k_part = 0; k_part < KNumbers::parts && k_part < PARTS; ++k_part) {
                uint32_t b[4];
                gpu::load_matrices(b, keys + k_part * k.part + 32 * step);
                GPU_UNROLL
                for (int q_part = 0; q_part < PARTS - k_part; ++q_part) {
                    GPU_UNROLL
                    for (int m = 0; m < M_TILES; ++m) {
                        uint32_t a[4];
                        gpu::load_matrices(a, memory + at.q + (q_part * ROWS + 16 * m + lane % 16) * stride +
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

    // Of products to scores, base 2, of one row; -inf where it does not attend a token. `token`: of the first score.
    GPU_FN void finish(float (&c)[MOST_COLUMNS][M_TILES][4], int m, int h, int token, float & top) const {
        const int   row      = 16 * m + gpu::lane() / 4 + 8 * h;
        const int   position = positions()[row];
        const int   end      = position + 1 < item.tokens.end ? position + 1 : item.tokens.end;
        const int   first    = position < 0 ? 0 : first_visible(p, position);
        const float slope    = alibi_slope(p, head_of(row));
        GPU_UNROLL
        for (int i = 0; i < MOST_COLUMNS; ++i) {
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
                  "one tile is fetched ahead: its stage is free, and a wait for all copies is one for this");

    GPU_FN void tile_of_tokens(int tile) {
        gpu::copy_wait<N_STAGES - 2>();
        gpu::sync_block(); // the tile is there, and nobody reads the one before
        fetch(tile + 1);
        const char *    stage = memory + at.stages + tile % N_STAGES * at.stage_bytes;
        rows_of_numbers k = ready<KNumbers>(p.k, p.d_k, tile, stage, memory + at.k), v = k;
        if (!p.v_is_k) {
            v = ready<VNumbers>(p.v, p.d_v, tile, stage + at.v_raw, memory + at.v);
        }
        gpu::sync_block();
        weigh(k, item.tokens.begin + tile * at.tokens);
        gpu::sync_block();
        if (is_fast(p, ROWS)) {
            add<1>(v);
        } else {
            add<MOST_PARTS>(v);
        }
    }

    // Scores of a tile, the highest of each row, and the weights of V.
    GPU_FN void weigh(const rows_of_numbers & k, int begin) {
        const int column = 8 * gpu::warp() + gpu::lane() % 4 * 2;
        float     scores[MOST_COLUMNS][M_TILES][4], tops[M_TILES][2];
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int r = 0; r < 4; ++r) {
                scores[0][m][r] = scores[1][m][r] = 0.0f;
            }
        }
        if (has_columns(0)) {
            if (is_fast(p, ROWS)) {
                score<1>(k, scores);
            } else {
                score<MOST_PARTS>(k, scores);
            }
        }
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                tops[m][h] = -INFINITY;
                finish(scores, m, h, begin + column, tops[m][h]);
            }
        }
        share_tops(tops);
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                rescale(m, h, tops[m][h]);
                GPU_UNROLL
                for (int i = 0; i < MOST_COLUMNS; ++i) {
                    if (has_columns(i)) {
                        put_weights(scores[i][m][2 * h], scores[i][m][2 * h + 1], m, h, column + 8 * N_WARPS * i);
                    }
                }
            }
        }
    }

    // The highest score of each row in the tile, for all warps.
    GPU_FN void share_tops(float (&tops)[M_TILES][2]) {
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

    // A row's sums and weights so far, relative to a higher score.
    GPU_FN void rescale(int m, int h, float top) {
        top = fmaxf(top, highest[m][h]);
        if (top > highest[m][h]) {
            const float factor = gpu::exp2(highest[m][h] - top);
            total[m][h] *= factor;
            GPU_UNROLL
            for (int n = 0; n < V_PAIRS; ++n) {
                GPU_UNROLL
                for (int r = 0; r < 2; ++r) {
                    sums[m][n][0][2 * h + r] *= factor;
                    sums[m][n][1][2 * h + r] *= factor;
                }
            }
            highest[m][h] = top;
        }
    }

    GPU_FN void put_weights(float a, float b, int m, int h, int column) {
        const float top = highest[m][h];
        a               = a == -INFINITY ? 0.0f : gpu::exp2(a - top);
        b               = b == -INFINITY ? 0.0f : gpu::exp2(b - top);
        total[m][h] += a + b;
        char * row = memory + at.weights + (16 * m + gpu::lane() / 4 + 8 * h) * weight_stride(at.tokens) + 2 * column;
        GPU_UNROLL
        for (int part = 0; part < VNumbers::weight_parts && (part == 0 || !is_fast(p, ROWS)); ++part) {
            *(uint32_t *) (row + part * ROWS * weight_stride(at.tokens)) = VNumbers::pack(a, b);
            a -= VNumbers::rounded(a);
            b -= VNumbers::rounded(b);
        }
    }

    // The weighted sum of the tile's V, of this warp's columns: groups of sixteen, dealt out in turn.
    template <int PARTS> GPU_FN void add(const rows_of_numbers & v) {
        const int lane = gpu::lane(), stride = weight_stride(at.tokens);
        for (int step = 0; step < at.tokens / 16; ++step) {
            GPU_UNROLL
            for (int w_part = 0; w_part < VNumbers::weight_parts && w_part < PARTS; ++w_part) {
                uint32_t a[M_TILES][4];
                GPU_UNROLL
                for (int m = 0; m < M_TILES; ++m) {
                    gpu::load_matrices(a[m], memory + at.weights + (w_part * ROWS + 16 * m + lane % 16) * stride +
                                                 32 * step + lane / 16 * 16);
                }
                GPU_UNROLL
                for (int v_part = 0; v_part < (w_part ? 1 : VNumbers::parts) && v_part < PARTS; ++v_part) {
                    GPU_UNROLL
                    for (int n = 0; n < V_PAIRS; ++n) {
                        const int column = 16 * (gpu::warp() + N_WARPS * n);
                        if (column >= p.d_v) {
                            break;
                        }
                        uint32_t b[4];
                        gpu::load_matrices_transposed(b, v.data + v_part * v.part + (16 * step + lane % 16) * v.stride +
                                                             2 * column + lane / 16 * 16);
                        GPU_UNROLL
                        for (int m = 0; m < M_TILES; ++m) {
                            VNumbers::multiply(sums[m][n][0], a[m], b[0], b[1]);
                            VNumbers::multiply(sums[m][n][1], a[m], b[2], b[3]);
                        }
                    }
                }
            }
        }
    }

    // ---- what is written ----

    static_assert(N_WARPS == 4, "the totals of four warps are added");

    GPU_FN void share_totals() { // over the columns of all threads
        float *   shared = (float *) (memory + at.maxima);
        const int g      = gpu::lane() / 4;
        gpu::sync_block();
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                total[m][h] += gpu::shuffle_xor(total[m][h], 1);
                total[m][h] += gpu::shuffle_xor(total[m][h], 2);
                if (gpu::lane() % 4 == 0) {
                    shared[(16 * m + g + 8 * h) * N_WARPS + gpu::warp()] = total[m][h];
                }
            }
        }
        gpu::sync_block();
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                const float * of_row = shared + (16 * m + g + 8 * h) * N_WARPS;
                total[m][h]          = ((of_row[0] + of_row[1]) + of_row[2]) + of_row[3];
            }
        }
    }

    GPU_FN void write_row(int m, int h, float * to, float factor) const {
        GPU_UNROLL
        for (int n = 0; n < 2 * V_PAIRS; ++n) {
            const int column = 16 * (gpu::warp() + N_WARPS * (n / 2)) + 8 * (n % 2) + gpu::lane() % 4 * 2;
            if (column < p.d_v) {
                to[column]     = sums[m][n / 2][n % 2][2 * h] * factor;
                to[column + 1] = sums[m][n / 2][n % 2][2 * h + 1] * factor;
            }
        }
    }

    GPU_FN void write() {
        share_totals();
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                const int row = 16 * m + gpu::lane() / 4 + 8 * h;
                if (row >= n_packed()) {
                    continue;
                }
                const int64_t place = places()[row];
                if (item.n_splits == 1) {
                    write_row(m, h, p.out + place * p.d_v, final_factor(p, head_of(row), highest[m][h], total[m][h]));
                    continue;
                }
                float * to = p.partial + place * partial_floats(p);
                write_row(m, h, to, 1.0f);
                if (gpu::warp() == 0 && gpu::lane() % 4 == 0) {
                    to[p.d_v]     = highest[m][h];
                    to[p.d_v + 1] = total[m][h];
                }
            }
        }
    }

    GPU_FN void run() {
        GPU_UNROLL
        for (int m = 0; m < M_TILES; ++m) {
            GPU_UNROLL
            for (int h = 0; h < 2; ++h) {
                highest[m][h] = -INFINITY;
                total[m][h]   = 0.0f;
            }
            GPU_UNROLL
            for (int n = 0; n < V_PAIRS; ++n) {
                GPU_UNROLL
                for (int r = 0; r < 4; ++r) {
                    sums[m][n][0][r] = sums[m][n][1][r] = 0.0f;
                }
            }
        }
        item.tokens = visible_part(p, s, item, packed(0), packed(n_packed() < ROWS ? n_packed() - 1 : ROWS - 1));
        fetch(0);
        load_queries();
        const int n = ceil_div(item.tokens.end - item.tokens.begin, at.tokens);
        for (int tile = 0; tile < n; ++tile) {
            tile_of_tokens(tile);
        }
        gpu::copy_wait<0>();
        write();
        gpu::sync_block(); // before the next item's queries take the place of these
    }
};

template <int M_TILES, int V_PAIRS, class KNumbers, class VNumbers>
GPU_FN void attend_block(const view & p, row_class of, int tokens, char * memory) {
    const layout     at     = layout_of<KNumbers, VNumbers>(p, 16 * M_TILES, tokens);
    const row_starts starts = starts_in(p, (int *) (memory + at.starts));
    tiles_asked      asks   = {p, of, 16 * M_TILES, false};
    find_items(asks, gpu::n_blocks(), starts);
    for (int number = gpu::block(); number < starts.items[starts.n]; number += gpu::n_blocks()) {
        attend<M_TILES, V_PAIRS, KNumbers, VNumbers> work(p, memory, at, item_of(p, asks, starts, number));
        work.run();
    }
}

} // namespace paged
