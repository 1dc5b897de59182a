// Query rows of a work item in shared memory, and the products that all kernels make of them.
#pragma once

#include "paged-softmax.h"
#include "paged-tile.h"

namespace paged {

struct operand { // rows of 16-bit numbers in shared memory
    const char * data;
    int          stride, term; // bytes from row to row and from term to term
};

template <division BY, int ROWS, class KNumbers> struct query_tile {
    const params & p;
    char *         memory;
    layout         at;
    sequence       s;
    work_item      item;

    GPU_FN query_tile(const params & p, char * memory, const layout & at, const work_item & item)
        : p(p), memory(memory), at(at), s(sequence_of(p, item.row)), item(item) {}

    // The items that the thread block has planned.
    GPU_FN const work_item & planned(int i) const { return ((const work_item *) (memory + at.items))[i]; }

    // Query rows of the item from this tile on, one sequence after the other. If sequences share the item, it has one
    // tile.
    GPU_FN int n_packed() const { return item.members * packed_rows(p, s) - item.tile * ROWS; }
    GPU_FN int packed(int row) const { return item.tile * ROWS + row; }
    GPU_FN int head_of(int row) const { return item.head_kv * p.group + packed(row) % p.group; }

    // In shared memory, for each row: the position of its query (-1: padding), and its row of `out` or, for the
    // first KV split, of `partial`.
    GPU_FN int * positions() const { return (int *) (memory + at.positions); }
    GPU_FN int * output_rows() const { return (int *) (memory + at.output_rows); }

    // Scores are to the base 2; a soft-cap comes before this factor.
    GPU_FN float query_scale() const { return p.softcap > 0.0f ? p.scale : p.scale * LOG2E; }

    // Load sixteen numbers of a query for a step of the product with keys that are codes of this type.
    GPU_FN void load_query_for(int type, const float * from, int unit, float (&x)[UNIT]) const {
        GPU_UNROLL
        for (int n = 0; n < UNIT; ++n) {
            x[n] = from[unit / 2 * CODED_NUMBERS + number_at(type, unit / 2, unit % 2, n)] * query_scale();
        }
    }

    GPU_FN void load_query(const float * from, int first, float (&x)[UNIT]) const { // d_k is a multiple of 8
        const bool  aligned = ((uint64_t) p.q | p.q_head_stride | p.q_token_stride) % sizeof(floats4) == 0;
        const float scale   = query_scale();
        GPU_UNROLL
        for (int n = 0; n < UNIT; n += 4) {
            floats4 four = {};
            if (first + n < p.d_k) {
                const float * at = from + first + n;
                four             = aligned ? *(const floats4 *) at : floats4{{at[0], at[1], at[2], at[3]}};
            }
            GPU_UNROLL
            for (int i = 0; i < 4; ++i) {
                x[n + i] = four.x[i] * scale;
            }
        }
    }

    GPU_FN void load_queries() {
        const bool      direct = is_direct<KNumbers>(BY, p.k);
        const int       units = ceil_div(p.d_k, UNIT), stride = number_stride(p.d_k);
        const row_share share = share_of_rows(units);
        for (int row = gpu::thread() >> share.shift; row < ROWS; row += n_threads(BY, ROWS) >> share.shift) {
            const char * from = nullptr;
            if (row < n_packed()) {
                const int      member = packed(row) / packed_rows(p, s), j = packed(row) % packed_rows(p, s) / p.group;
                const sequence seq = sequence_of(p, item.row + member);
                from               = p.q + head_of(row) * p.q_head_stride + (seq.q0 + j) * p.q_token_stride;
                if (share.piece() == 0) {
                    positions()[row]   = seq.position(j);
                    output_rows()[row] = output_row(p, item, member, seq.q0, j, head_of(row));
                }
            } else if (share.piece() == 0) {
                positions()[row] = -1;
            }
            for (int unit = share.piece(); unit < units; unit += share.pieces()) {
                float x[UNIT] = {};
                if (from != nullptr && direct) {
                    load_query_for(p.k.type, (const float *) from, unit, x);
                } else if (from != nullptr) {
                    load_query((const float *) from, UNIT * unit, x);
                }
                char * to = memory + at.q + row * stride + 2 * UNIT * unit;
                if (query_terms<KNumbers>(p, BY, ROWS) == 1) {
                    store_unit<KNumbers, 1>(x, to, 0);
                } else {
                    store_unit<KNumbers, MAX_TERMS>(x, to, ROWS * stride);
                }
            }
        }
    }

    // Where the sums of a row go.
    GPU_FN bool    complete() const { return item.n_splits == 1; }
    GPU_FN float * destination(int row) const {
        const int64_t at = output_rows()[row];
        return complete() ? p.out + at * p.d_v : p.partial + (at + item.split) * partial_floats(p);
    }
    GPU_FN float destination_factor(int row, float top, float total) const {
        return complete() ? final_factor(p, head_of(row), top, total) : 1.0f;
    }
    GPU_FN void write_state(float * to, float top, float total) const { // after the sums
        if (!complete()) {
            to[p.d_v]     = top;
            to[p.d_v + 1] = total;
        }
    }

    // ---- scores ----

    // Add the products of rows first .. first + 16 * M - 1 with 16 * T tokens, whose keys begin at `k`.
    template <int TERMS, int M, int T>
    GPU_FN void multiply(int first, const operand & k, float (&c)[M][2 * T][4]) const {
        const int    lane = gpu::lane(), stride = number_stride(p.d_k), steps = ceil_div(p.d_k, 16);
        const char * keys = k.data + (lane % 8 + lane / 16 * 8) * k.stride + lane / 8 % 2 * 16;
        const char * rows = memory + at.q + (first + lane % 16) * stride + lane / 16 * 16;
        GPU_UNROLL_4
        for (int step = 0; step < steps; ++step) {
            constexpr int K_TERMS = KNumbers::terms < TERMS ? KNumbers::terms : TERMS;
            uint32_t      b[K_TERMS][T][4];
            GPU_UNROLL
            for (int term = 0; term < K_TERMS; ++term) {
                GPU_UNROLL
                for (int t = 0; t < T; ++t) {
                    gpu::load_matrices(b[term][t], keys + term * k.term + GROUP * t * k.stride + 32 * step);
                }
            }
            GPU_UNROLL
            for (int q_term = 0; q_term < TERMS; ++q_term) {
                GPU_UNROLL
                for (int m = 0; m < M; ++m) {
                    uint32_t a[4];
                    gpu::load_matrices(a, rows + (q_term * ROWS + 16 * m) * stride + 32 * step);
                    GPU_UNROLL
                    for (int k_term = 0; k_term < K_TERMS && k_term < TERMS - q_term; ++k_term) {
                        GPU_UNROLL
                        for (int t = 0; t < T; ++t) {
                            KNumbers::multiply(c[m][2 * t], a, b[k_term][t][0], b[k_term][t][1]);
                            KNumbers::multiply(c[m][2 * t + 1], a, b[k_term][t][2], b[k_term][t][3]);
                        }
                    }
                }
            }
        }
    }

    // Apply soft-cap and bias to a score.
    GPU_FN float bend(int row, int token, float score) const {
        if (p.softcap > 0.0f) {
            score = p.softcap * LOG2E * gpu::tanh(score / p.softcap);
        }
        return score - alibi_slope(p, head_of(row)) * LOG2E * (float) (positions()[row] - token);
    }

    GPU_FN bool attends(int row, int token) const {
        const int position = positions()[row];
        const int end      = position + 1 < item.tokens.end ? position + 1 : item.tokens.end;
        return token < end && token >= (position < 0 ? 0 : first_visible(p, position));
    }

    // Apply what changes scores, and set the scores of tokens that a row does not attend to -inf. h: rows lane / 4 +
    // 8 * h of tiles; x[n] are of tokens begin + 8 * n and the next. `whole`: the row attends all.
    template <int N> GPU_FN void settle(int row, int begin, int h, bool whole, float (&x)[N][4]) const {
        if (bends()) {
            GPU_UNROLL
            for (int i = 0; i < 2 * N; ++i) {
                float & score = x[i / 2][2 * h + i % 2];
                score         = bend(row, begin + i / 2 * 8 + i % 2, score);
            }
        }
        if (!whole) {
            GPU_UNROLL
            for (int i = 0; i < 2 * N; ++i) {
                float & score = x[i / 2][2 * h + i % 2];
                score         = attends(row, begin + i / 2 * 8 + i % 2) ? score : -INFINITY;
            }
        }
    }

    GPU_FN bool bends() const { return p.softcap > 0.0f || p.n_slopes > 0; }
};

} // namespace paged
