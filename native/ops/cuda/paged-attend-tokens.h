// Decode: attention of a tile of eight or sixteen packed query rows, by one thread block of four warps.
//
// Each warp computes some of the tokens, on its own: it waits for no other warp until all add their sums at the end of
// a KV split. Products are transposed, so that tokens and columns of V fill the sixteen rows of a product, and queries
// its eight columns: eight queries need half as many products and registers as sixteen.
#pragma once

#include "paged-attend.h"

namespace paged {

template <int Q_TILES, int V_TILES, class KNumbers, class VNumbers>
struct attend_tokens : staged_tile<BY_TOKENS, Q_TILE * Q_TILES, KNumbers, VNumbers> {
    static constexpr int ROWS = Q_TILE * Q_TILES;
    using tile                = staged_tile<BY_TOKENS, ROWS, KNumbers, VNumbers>;
    using tile::at;
    using tile::item;
    using tile::memory;
    using tile::p;
    using tile::s;

    static constexpr bool HELD  = holds_queries<KNumbers>();
    static constexpr bool CODES = is_direct(KNumbers::type);
    static constexpr int  PAIRS = HELD ? KNumbers::size / (CODES ? CODED_NUMBERS : UNIT) : 1;
    static constexpr bool WORDS = KNumbers::size != 0; // rows begin at words

    // Operands of queries, of a pair: of both terms in a step, or with codes, of both steps of a group.
    using operands = uint32_t[2][Q_TILES][2];

    query_state<Q_TILES, V_TILES> state;
    operands                      held[PAIRS];
    int                           blocks; // lane i: the block of this warp's group i of 32, loaded together

    GPU_FN attend_tokens(const params & p, char * memory, const layout & at, const work_item & item)
        : tile(p, memory, at, item) {}

    // Stages take turns, from one item to the next too: items begin at multiples of the tokens of a step.
    static_assert(SPLIT_ALIGN % STEP_TOKENS == 0, "items begin at multiples of SPLIT_ALIGN");
    GPU_FN static int step_of(int begin) { return begin / STEP_TOKENS; }

    // Start to copy K or V of this warp's tokens; always one group of copies. `of` is empty after the last tokens.
    GPU_FN void fetch_own(bool of_v, const token_group & of) const {
        if (of.high > 0 && !(of_v && p.v_is_k)) {
            tile::fetch(of_v, of, 0, step_of(of.begin));
        }
        gpu::copy_commit();
    }

    // Return this warp's group n from `first` on, for n = 0, 1, ...
    GPU_FN token_group group(int first, int n, int end) {
        if (n % 32 == 0) {
            blocks = block_of(p, s, group_at(p, s, first + (n + gpu::lane()) * STEP_TOKENS, end));
        }
        token_group of = group_at(p, s, first + n * STEP_TOKENS, end);
        of.block       = gpu::shuffle(blocks, n % 32);
        return of;
    }

    // Compute the item, and the planned items that continue it, from `next` on; return the first that does not.
    //
    // Copies run ahead, over the borders of items too. K of a step takes the place of the K that was used last, V the
    // same, so that three of the four pieces of a warp's stages are on their way or have just arrived.
    GPU_FN int run(int next) {
        int last = next - 1;
        while (tile::planned(last).continued) {
            ++last;
        }
        const int end   = tile::planned(last).tokens.end; // of all these items
        const int first = item.tokens.begin + GROUP * gpu::warp();
        int       begin = first, ahead = 0; // groups whose copies have begun
        GPU_ROLLED
        for (; ahead < N_STAGES; ++ahead) {
            const token_group of = group(first, ahead, end);
            fetch_own(false, of);
            fetch_own(true, of);
        }
        tile::load_queries();
        gpu::sync_block();
        hold_queries();
        if (HELD) {
            gpu::sync_block(); // before a warp's sums overwrite the queries
        }
        while (true) {
            const typename tile::bounds all = tile::bounds_of_rows(0, ROWS);
            state.reset();
            for (; begin < item.tokens.end; begin += STEP_TOKENS) {
                attend_own(all, group_of_tokens(p, s, begin, end), group(first, ahead++, end));
            }
            join_warps();
            if (!item.continued) {
                gpu::copy_wait<0>();
                gpu::sync_block(); // before the next item overwrites queries and stages
                return next;
            }
            item = tile::planned(next++);
        }
    }

    static constexpr int LATER = 2 * N_STAGES - 1; // copies that may be on their way when the next one is needed

    // Attend a group of tokens. Start to copy the group `ahead` into the place of this one.
    GPU_FN void attend_own(const typename tile::bounds & all, const token_group & of, const token_group & ahead) {
        const int step = step_of(of.begin);
        float     c[Q_TILES][4];
        gpu::copy_wait<LATER>();
        gpu::sync_warp();
        score_own(of, step, c);
        if (!p.v_is_k) {
            gpu::sync_warp(); // all lanes have read the keys
            fetch_own(false, ahead);
        }
        settle_own(all, of.begin, c);
        state.weigh(c);
        uint32_t weights[VNumbers::weight_terms][Q_TILES][2];
        GPU_UNROLL
        for (int i = 0; i < 2 * Q_TILES; ++i) {
            float x = c[i / 2][i % 2 * 2], y = c[i / 2][i % 2 * 2 + 1];
            GPU_UNROLL
            for (int term = 0; term < VNumbers::weight_terms; ++term) { // from queries of a token to tokens of a query
                weights[term][i / 2][i % 2] = gpu::transpose(take_term<VNumbers>(x, y));
            }
        }
        if (!p.v_is_k) {
            gpu::copy_wait<LATER>();
            gpu::sync_warp();
        }
        add_own(of, step, weights);
        gpu::sync_warp(); // all lanes have read V
        if (p.v_is_k) {
            fetch_own(false, ahead);
        }
        fetch_own(true, ahead);
    }

    // ---- scores ----

    GPU_FN void score_own(const token_group & of, int step, float (&c)[Q_TILES][4]) const {
        GPU_UNROLL
        for (int i = 0; i < 4 * Q_TILES; ++i) {
            c[i / 4][i % 4] = 0.0f;
        }
        if (tile::k_direct()) {
            const raw_rows raw(p, p.k, s, of, item.head_kv, tile::raw(false, 0, step));
            p.k.type == PAGE_Q8_0 ? multiply_codes<PAGE_Q8_0>(raw, c) : multiply_codes<PAGE_Q4_0>(raw, c);
            return;
        }
        if (!tile::k_ready()) {
            tile::convert_k(of, 0, step);
            gpu::sync_warp();
        }
        multiply_own(tile::keys(step), c);
    }

    // Load pair n of the operands. direct: of codes.
    GPU_FN void load_operands(bool direct, int n, operands & b) const {
        const int    lane = gpu::lane(), stride = number_stride(p.d_k), second = direct ? 32 : ROWS * stride;
        const char * from = memory + at.q + n * (direct ? 64 : 32) + lane % 8 * stride + lane / 8 % 2 * 16;
        if constexpr (Q_TILES == 1) {
            gpu::load_matrices(*(uint32_t (*)[4]) b, from + lane / 16 * second);
        } else {
            from += lane / 16 * 8 * stride;
            gpu::load_matrices(*(uint32_t (*)[4]) b[0], from);
            gpu::load_matrices(*(uint32_t (*)[4]) b[1], from + second);
        }
    }
    GPU_FN void hold_queries() {
        GPU_UNROLL
        for (int n = 0; HELD && n < PAIRS; ++n) {
            load_operands(CODES, n, held[n]);
        }
    }

    // Add the products of sixteen keys with the queries.
    GPU_FN void multiply_own(const operand & k, float (&sums)[Q_TILES][4]) const {
        float c[MAX_TERMS][Q_TILES][4]; // apart, because each product waits for the one before it
        GPU_UNROLL
        for (int i = 0; i < MAX_TERMS * Q_TILES * 4; ++i) {
            (&c[0][0][0])[i] = 0.0f;
        }
        const char * keys = k.data + gpu::lane() % 16 * k.stride + gpu::lane() / 16 * 16;
        if constexpr (HELD) {
            GPU_UNROLL
            for (int step = 0; step < PAIRS; ++step) {
                multiply_step(keys + 32 * step, k.term, held[step], c);
            }
        } else {
            GPU_UNROLL_4
            for (int step = 0; step < ceil_div(p.d_k, UNIT); ++step) {
                operands b;
                load_operands(false, step, b);
                multiply_step(keys + 32 * step, k.term, b, c);
            }
        }
        GPU_UNROLL
        for (int i = 0; i < 4 * Q_TILES; ++i) {
            sums[i / 4][i % 4] = c[0][i / 4][i % 4] + c[1][i / 4][i % 4];
        }
    }
    GPU_FN void multiply_step(const char * keys, int term_bytes, const operands & b,
                              float (&c)[MAX_TERMS][Q_TILES][4]) const {
        uint32_t a[KNumbers::terms][4];
        GPU_UNROLL
        for (int term = 0; term < KNumbers::terms; ++term) {
            gpu::load_matrices(a[term], keys + term * term_bytes);
        }
        GPU_UNROLL
        for (int q_term = 0; q_term < MAX_TERMS; ++q_term) {
            GPU_UNROLL
            for (int term = 0; term < KNumbers::terms && term < MAX_TERMS - q_term; ++term) {
                GPU_UNROLL
                for (int n = 0; n < Q_TILES; ++n) {
                    KNumbers::multiply(c[q_term][n], a[term], b[q_term][n][0], b[q_term][n][1]);
                }
            }
        }
    }

    // Add the products of sixteen keys that are codes with the queries, which lie in the order of the codes.
    template <int TYPE> GPU_FN void multiply_codes(const raw_rows & raw, float (&c)[Q_TILES][4]) const {
        const char * first  = raw.row(gpu::lane() / 4);
        const char * second = raw.row(gpu::lane() / 4 + 8);
        if constexpr (HELD) {
            GPU_UNROLL
            for (int group = 0; group < PAIRS; ++group) {
                multiply_group<TYPE>(first, second, group, held[group], c);
            }
        } else {
            GPU_UNROLL_2
            for (int group = 0; group < p.d_k / CODED_NUMBERS; ++group) {
                operands b;
                load_operands(true, group, b);
                multiply_group<TYPE>(first, second, group, b, c);
            }
        }
    }
    template <int TYPE>
    GPU_FN void multiply_group(const char * first, const char * second, int group, const operands & b,
                               float (&c)[Q_TILES][4]) const {
        uint32_t    x[2][2], y[2][2];
        const int   from  = group * group_bytes(TYPE);
        const float upper = unpack_keys<TYPE, WORDS>(first + from, group, gpu::lane() % 4, x);
        const float lower = unpack_keys<TYPE, WORDS>(second + from, group, gpu::lane() % 4, y);
        GPU_UNROLL
        for (int n = 0; n < Q_TILES; ++n) {
            float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            GPU_UNROLL
            for (int step = 0; step < 2; ++step) {
                const uint32_t a[4] = {x[step][0], y[step][0], x[step][1], y[step][1]};
                KNumbers::multiply(sums, a, b[step][n][0], b[step][n][1]);
            }
            GPU_UNROLL
            for (int i = 0; i < 4; ++i) {
                c[n][i] += sums[i] * (i < 2 ? upper : lower);
            }
        }
    }

    // Apply what changes scores. `begin`: position of the first token.
    GPU_FN void settle_own(const typename tile::bounds & all, int begin, float (&c)[Q_TILES][4]) const {
        const bool whole = begin >= all.begin && begin + GROUP <= all.end, bends = tile::bends();
        if (!GPU_SELDOM(!whole || bends)) {
            return;
        }
        GPU_UNROLL
        for (int i = 0; i < 4 * Q_TILES; ++i) {
            const int row   = i / 4 * Q_TILE + gpu::lane() % 4 * 2 + i % 2;
            const int token = begin + gpu::lane() / 4 + i % 4 / 2 * 8;
            float &   score = c[i / 4][i % 4];
            score           = bends ? tile::bend(row, token, score) : score;
            score           = whole || tile::attends(row, token) ? score : -INFINITY;
        }
    }

    // ---- weighted sums of V ----

    GPU_FN void add_own(const token_group & of, int step,
                        const uint32_t (&weights)[VNumbers::weight_terms][Q_TILES][2]) {
        if (tile::v_direct()) {
            const raw_rows raw(p, p.v_is_k ? p.k : p.v, s, of, item.head_kv, tile::raw(!p.v_is_k, 0, step));
            p.v.type == PAGE_Q8_0 ? accumulate_codes<PAGE_Q8_0>(raw, weights[0])
                                  : accumulate_codes<PAGE_Q4_0>(raw, weights[0]);
            return;
        }
        if (!tile::v_ready()) {
            tile::convert_v(of, 0, step);
            gpu::sync_warp();
        }
        accumulate_own(tile::values(step), weights);
    }

    GPU_FN void accumulate_own(const operand & v, const uint32_t (&weights)[VNumbers::weight_terms][Q_TILES][2]) {
        const int    lane = gpu::lane();
        const char * rows = v.data + (lane % 8 + lane / 16 * 8) * v.stride + lane / 8 % 2 * 16;
        GPU_UNROLL
        for (int t = 0; t < V_TILES; ++t) {
            if (16 * t >= p.d_v) {
                break;
            }
            GPU_UNROLL
            for (int v_term = 0; v_term < VNumbers::terms; ++v_term) {
                uint32_t a[4];
                gpu::load_matrices_transposed(a, rows + v_term * v.term + 32 * t);
                GPU_UNROLL
                for (int term = 0; term < VNumbers::weight_terms && term < MAX_TERMS - v_term; ++term) {
                    GPU_UNROLL
                    for (int n = 0; n < Q_TILES; ++n) {
                        VNumbers::multiply(state.sums[n][t], a, weights[term][n][0], weights[term][n][1]);
                    }
                }
            }
        }
    }

    template <int TYPE> GPU_FN void accumulate_codes(const raw_rows & raw, const uint32_t (&weights)[Q_TILES][2]) {
        const char * of[4];
        GPU_UNROLL
        for (int i = 0; i < 4; ++i) {
            of[i] = raw.row(gpu::lane() % 4 * 2 + i % 2 + i / 2 * 8);
        }
        GPU_UNROLL
        for (int group = 0; group < V_TILES / 2; ++group) {
            if (group * CODED_NUMBERS >= p.d_v) {
                break;
            }
            const int from = group * group_bytes(TYPE);
            uint32_t  x[4], y[4];
            unpack_values<TYPE, WORDS>(of[0] + from, of[1] + from, group, gpu::lane() / 4, x);
            unpack_values<TYPE, WORDS>(of[2] + from, of[3] + from, group, gpu::lane() / 4, y);
            GPU_UNROLL
            for (int t = 0; t < 2; ++t) {
                const uint32_t a[4] = {x[2 * t], x[2 * t + 1], y[2 * t], y[2 * t + 1]};
                GPU_UNROLL
                for (int n = 0; n < Q_TILES; ++n) {
                    VNumbers::multiply(state.sums[n][2 * group + t], a, weights[n][0], weights[n][1]);
                }
            }
        }
    }

    // ---- the warps' sums ----

    // In shared memory: the sums, references and totals of four rows and each warp.
    static constexpr int JOINED = N_WARPS; // rows that are joined at a time, one by each warp

    GPU_FN float * sums(int warp, int row) const {
        return (float *) (memory + at.sums + warp * at.sum_bytes) + row * sum_stride(p.d_v);
    }
    GPU_FN float * references(int row) const { return (float *) (memory + at.maxima) + row * 2 * N_WARPS; }
    GPU_FN float * totals(int row) const { return references(row) + N_WARPS; }

    GPU_FN void join_warps() {
        const int n = tile::n_packed() < ROWS ? tile::n_packed() : ROWS;
        GPU_UNROLL
        for (int part = 0; part < ROWS / JOINED; ++part) {
            if (JOINED * part >= n) {
                break;
            }
            if (part > 0) {
                gpu::sync_block(); // all rows before are joined
            }
            store_own(part / 2, part % 2);
            gpu::sync_block();
            if (JOINED * part + gpu::warp() < n) {
                join_row(JOINED * part + gpu::warp());
            }
        }
        gpu::sync_block(); // before a warp overwrites its sums
    }

    // Store the sums of four queries of a tile: its lower or upper ones.
    GPU_FN void store_own(int n, int upper) const {
        const int g = gpu::lane() / 4, c = gpu::lane() % 4;
        GPU_UNROLL
        for (int q = 0; q < 2; ++q) {
            const float total = state.of_tokens(state.total[n][q], [](float x, float y) { return x + y; });
            if (c / 2 != upper) {
                continue;
            }
            const int row = c % 2 * 2 + q;
            float *   to  = sums(gpu::warp(), row);
            GPU_UNROLL
            for (int half = 0; half < 2 * V_TILES; ++half) {
                const int column = column_of(half, g);
                if (VNumbers::size != 0 || column < p.d_v) {
                    to[column] = state.sums[n][half / 2][half % 2 * 2 + q];
                }
            }
            if (g == 0) {
                references(row)[gpu::warp()] = state.reference[n][q];
                totals(row)[gpu::warp()]     = total;
            }
        }
    }

    // Return the column of V that is row k of half a tile.
    GPU_FN int column_of(int half, int k) const {
        return tile::v_direct() ? half / 4 * CODED_NUMBERS + column_at(p.v.type, half / 4, half % 4, k) : 8 * half + k;
    }

    GPU_FN void join_row(int row) const { // by one warp
        const float * each  = references(row % JOINED);
        const float   top   = fmaxf(fmaxf(each[0], each[1]), fmaxf(each[2], each[3]));
        float         total = 0.0f, factors[N_WARPS];
        GPU_UNROLL
        for (int w = 0; w < N_WARPS; ++w) {
            factors[w] = each[w] == -INFINITY ? 0.0f : gpu::exp2(each[w] - top);
            total += totals(row % JOINED)[w] * factors[w];
        }
        const float factor = tile::destination_factor(row, top, total);
        float *     to     = tile::destination(row);
        for (int column = 4 * gpu::lane(); column < p.d_v; column += 128) {
            floats4 sum = {};
            GPU_UNROLL
            for (int w = 0; w < N_WARPS; ++w) {
                const floats4 one = *(const floats4 *) (sums(w, row % JOINED) + column);
                GPU_UNROLL
                for (int i = 0; i < 4; ++i) {
                    sum.x[i] += one.x[i] * factors[w];
                }
            }
            GPU_UNROLL
            for (int i = 0; i < 4; ++i) {
                sum.x[i] *= factor;
            }
            *(floats4 *) (to + column) = sum;
        }
        if (gpu::lane() == 0) {
            tile::write_state(to, top, total);
        }
    }
    static_assert(N_WARPS == 4, "join_row has the references of four warps");
};

} // namespace paged
