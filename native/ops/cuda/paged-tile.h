// Tiles of tokens in shared memory: the layout, copies of raw K and V rows, conversion to 16-bit numbers.
//
// Tokens are copied and converted in groups of sixteen, the tokens of one step of a product; a warp copies a group. If
// warps divide the tokens, each has groups of its own, and no other warp waits for them; else all warps read a tile of
// several groups.
#pragma once

#include "paged-codes.h"
#include "paged-schedule.h"

namespace paged {

constexpr int N_WARPS  = 4; // of a thread block, but for the large tiles of n_warps()
constexpr int N_STAGES = 2;

constexpr int GROUP           = 16; // tokens
constexpr int MAX_TILE_TOKENS = 64;
constexpr int STEP_TOKENS     = GROUP * N_WARPS; // of all warps, if each has tokens of its own
static_assert(N_STAGES >= 2, "a stage is filled while another is computed; more stages are not used");

GPU_BOTH int larger(int a, int b) { return a > b ? a : b; }
GPU_BOTH int number_stride(int d) { return 2 * round_up(d, UNIT) + PAD; }

// Return whether raw rows go to the tensor cores without conversion.
GPU_BOTH bool raw_is_ready(const pages & x, int d) {
    return (x.type == PAGE_F16 || x.type == PAGE_BF16) && x.aligned && d % UNIT == 0;
}

// How the warps of a thread block divide a tile: each warp has tokens (all rows and columns), or rows (all tokens and
// columns), or tokens for the scores and then columns of V.
enum division { BY_TOKENS, BY_ROWS, BY_COLUMNS };

// Return the warps and threads of a thread block whose tile has so many rows.
GPU_BOTH constexpr int n_warps(division by, int rows) { return by == BY_COLUMNS && rows > 16 ? 2 * N_WARPS : N_WARPS; }
GPU_BOTH constexpr int n_threads(division by, int rows) { return 32 * n_warps(by, rows); }

// Return whether K or V is multiplied as codes, without a conversion.
template <class Numbers> GPU_BOTH bool is_direct(division by, const pages & x) {
    return by == BY_TOKENS && Numbers::quantized && is_direct(x.type);
}

// 16-bit terms of a query value: one for codes, which are less exact by far, and in fast tiles of many rows.
constexpr int                          MAX_TERMS = 2;
GPU_BOTH bool                          is_fast(const params & p, int rows) { return p.fast && rows > 16; }
template <class KNumbers> GPU_BOTH int query_terms(const params & p, division by, int rows) {
    return is_fast(p, rows) || is_direct<KNumbers>(by, p.k) ? 1 : MAX_TERMS;
}

// Return whether the operands of queries stay in registers in decode, unless a third or fourth thread block that has
// room on the multiprocessor needs these.
template <class KNumbers> GPU_BOTH constexpr bool holds_queries() {
    return KNumbers::size != 0 && KNumbers::size <= 128 && KNumbers::type != PAGE_Q4_0;
}

// Offsets in shared memory, in bytes. Each owner, a warp or the thread block, has stages and converted rows, after the
// owner before it.
struct layout {
    int tokens; // of an owner's tile
    int q, stages, stage_bytes, v_raw, k, v, converted_bytes, sums, sum_bytes, weights, maxima, positions, output_rows,
        items, total;
};

GPU_BOTH int weight_stride(int tokens) { return 2 * tokens + PAD; }

// Floats of a row of the sums that warps exchange; four rows are in different banks.
GPU_BOTH int sum_stride(int d_v) { return d_v + 8; }

template <class KNumbers, class VNumbers>
GPU_BOTH layout layout_of(const params & p, division by, int rows, int tokens) {
    const bool k_ready = raw_is_ready(p.k, p.d_k), v_ready = raw_is_ready(p.v, p.d_v) || p.v_is_k;
    const bool k_direct = is_direct<KNumbers>(by, p.k), v_direct = is_direct<VNumbers>(by, p.v);
    const int  terms   = query_terms<KNumbers>(p, by, rows);
    const int  owners  = by == BY_TOKENS ? N_WARPS : 1;
    const int  k_bytes = k_ready || k_direct ? 0 : KNumbers::terms * tokens * number_stride(p.d_k);
    const int  v_bytes = v_ready || v_direct ? 0 : VNumbers::terms * tokens * number_stride(p.d_v);
    layout     l;
    l.tokens        = tokens;
    l.q             = 0;
    l.stages        = l.q + terms * rows * number_stride(p.d_k);
    l.sums          = l.q;                                               // of all warps, in the place of the queries
    l.sum_bytes     = N_WARPS * sum_stride(p.d_v) * (int) sizeof(float); // of four rows, when a warp's sums are joined
    const bool held = by == BY_TOKENS && holds_queries<KNumbers>();
    if (held) {
        l.stages = larger(l.stages, l.sums + owners * l.sum_bytes);
    }
    l.v_raw           = tokens * p.k.raw_stride;
    l.stage_bytes     = l.v_raw + (p.v_is_k ? 0 : tokens * p.v.raw_stride);
    l.k               = l.stages + owners * N_STAGES * l.stage_bytes;
    l.v               = by == BY_TOKENS ? l.k : l.k + k_bytes; // a warp converts V when it needs K no more
    l.converted_bytes = by == BY_TOKENS ? larger(k_bytes, v_bytes) : k_bytes + v_bytes;
    if (by == BY_TOKENS && !held) { // or where a warp's converted numbers were
        l.converted_bytes = l.sum_bytes = larger(l.converted_bytes, l.sum_bytes);
        l.sums                          = l.k;
    }
    l.weights = l.maxima = l.k + owners * l.converted_bytes;
    if (by == BY_COLUMNS) {
        l.maxima += (terms < VNumbers::weight_terms ? terms : VNumbers::weight_terms) * rows * weight_stride(tokens);
    }
    l.positions =
        l.maxima + (by == BY_ROWS ? 0 : (by == BY_TOKENS ? 2 : 1) * rows * n_warps(by, rows) * (int) sizeof(float));
    l.output_rows = l.positions + rows * (int) sizeof(int);
    l.items       = l.output_rows + rows * (int) sizeof(int);
    l.total       = l.items + MAX_PLANNED * (int) sizeof(work_item);
    return l;
}

// Return the index in the table's row of the block of a token, and the token's slot if its block is known.
GPU_FN int block_index(const params & p, const sequence & s, int token) {
    return (p.block_shift >= 0 ? token >> p.block_shift : token / p.block_size) - s.first; // divisions are slow
}
GPU_FN uint32_t slot_in(const params & p, int block, int token) {
    return p.block_shift >= 0 ? ((uint32_t) block << p.block_shift) + (token & (p.block_size - 1))
                              : (uint32_t) block * p.block_size + token % p.block_size;
}

// The slots of a group of tokens of a sequence that begins at a multiple of GROUP. The table has tokens low .. high - 1
// of them: tiles may begin in blocks before the window, and end after the sequence.
struct token_group {
    int  begin, low, high;
    bool together; // in one block
    int  block;    // of all, if they are together and the table has any

    GPU_FN bool any() const { return low < GROUP && high > 0; }
    GPU_FN bool has(int t) const { return t >= low && t < high; }
    GPU_FN bool whole() const { return low <= 0 && high >= GROUP; }
};

// Return a group without its block.
GPU_FN token_group group_at(const params & p, const sequence & s, int begin, int end) {
    return {begin, s.first * p.block_size - begin, end - begin, p.groups_whole != 0, 0};
}
GPU_FN int block_of(const params & p, const sequence & s, const token_group & of) {
    return of.together && of.any() ? s.blocks[block_index(p, s, of.begin)] : 0;
}
GPU_FN token_group group_of_tokens(const params & p, const sequence & s, int begin, int end) {
    token_group of = group_at(p, s, begin, end);
    of.block       = block_of(p, s, of);
    return of;
}

GPU_FN const char * row_of(const params & p, const pages & x, const sequence & s, int head_kv, const token_group & of,
                           int t) {
    const int      token = of.begin + t;
    const uint32_t slot =
        of.together ? slot_in(p, of.block, of.begin) + t : slot_in(p, s.blocks[block_index(p, s, token)], token);
    return x.data + head_kv * x.head_stride + (uint64_t) slot * (uint32_t) x.slot_stride;
}

struct alignas(16) quad { // one store or load
    uint32_t words[4];
};

// Rows that lanes of a warp convert together: how many lanes, a power of two, and this lane's share.
struct row_share {
    int shift;

    GPU_FN int row() const { return gpu::lane() >> shift; }
    GPU_FN int rows() const { return 32 >> shift; }
    GPU_FN int piece() const { return gpu::lane() & (pieces() - 1); }
    GPU_FN int pieces() const { return 1 << shift; }
};

GPU_BOTH row_share share_of_rows(int n) { // of n pieces
    return {(n > 1) + (n > 2) + (n > 4) + (n > 8) + (n > 16)};
}

// Rows are copied from the multiple of sixteen bytes at or before them.
GPU_FN int bytes_before(const char * row) { return (int) ((uint64_t) row & (PIECE - 1)); }

// Start to copy sixteen rows of one block, the first at `first`; PIECES lanes copy a row. STEADY: all rows begin at the
// same place of a piece.
template <int PIECES, bool STEADY> GPU_FN void fetch_rows(const pages & x, const char * first, char * to) {
    constexpr int  n     = 32 / PIECES; // rows at a time
    constexpr bool LINES = STEADY && PIECES % 8 == 0;
    const int      row = gpu::lane() / PIECES, from = gpu::lane() % PIECES * PIECE;
    const auto     stride  = (uint32_t) x.slot_stride;
    const char *   address = first + (uint64_t) row * stride;
    const int      before  = bytes_before(address);
    to += row * x.raw_stride + from;
    GPU_UNROLL
    for (int t = 0; t < GROUP; t += n) {
        const bool mine = 32 % PIECES == 0 || (row < n && t + row < GROUP);
        const int  here = STEADY ? before : (before + t * (int) (stride & (PIECE - 1))) & (PIECE - 1);
        gpu::copy_async_if<PIECE, LINES>(mine && from < here + x.row_bytes, to + t * x.raw_stride,
                                         address + (from - here) + (uint64_t) t * stride);
    }
}

// Start to copy rows one by one. Rows that the table does not have become zeros.
GPU_FN void fetch_apart(const params & p, const pages & x, const sequence & s, int head_kv, const token_group & of,
                        char * to) {
    const int n = x.raw_stride / PIECE;
    GPU_ROLLED
    for (int i = gpu::lane(); i < GROUP * n; i += 32) {
        const int t = i / n, at = PIECE * (i % n);
        if (!of.has(t)) {
            *(quad *) (to + PIECE * i) = {};
            continue;
        }
        const char * row    = row_of(p, x, s, head_kv, of, t);
        const int    before = bytes_before(row);
        gpu::copy_async_if<PIECE>(at < before + x.row_bytes, to + PIECE * i, row + (at - before));
    }
}

// Start to copy the rows of a group.
template <class Numbers>
GPU_FN void fetch_group(const params & p, const pages & x, const sequence & s, int head_kv, const token_group & of,
                        char * to) {
    if (GPU_SELDOM(!of.together || !of.whole() || x.pieces == 0)) {
        return fetch_apart(p, x, s, head_kv, of, to);
    }
    const char * first = row_of(p, x, s, head_kv, of, 0);
    if constexpr (Numbers::size != 0) {
        constexpr int pieces = known_pieces(Numbers::type, Numbers::size);
        return fetch_rows<pieces, true>(x, first, to);
    }
    switch (2 * x.pieces + x.steps_aligned) {
    case 2 * 32 + 1:
        return fetch_rows<32, true>(x, first, to);
    case 2 * 32:
        return fetch_rows<32, false>(x, first, to);
    case 2 * 16 + 1:
        return fetch_rows<16, true>(x, first, to);
    case 2 * 16:
        return fetch_rows<16, false>(x, first, to);
    case 2 * 8 + 1:
        return fetch_rows<8, true>(x, first, to);
    case 2 * 8:
        return fetch_rows<8, false>(x, first, to);
    case 2 * 4 + 1:
        return fetch_rows<4, true>(x, first, to);
    default:
        return fetch_rows<4, false>(x, first, to);
    }
}

template <int N> GPU_FN void store_words(const uint32_t (&words)[N], char * to) {
    GPU_UNROLL
    for (int i = 0; i < N; i += 4) {
        ((quad *) to)[i / 4] = {{words[i], words[i + 1], words[i + 2], words[i + 3]}};
    }
}

// Store sixteen numbers as sums of `terms` 16-bit numbers each. A term is `term_stride` bytes after the one before.
template <class Numbers, int terms> GPU_FN void store_unit(float (&x)[UNIT], char * to, int term_stride) {
    GPU_UNROLL
    for (int term = 0; term < terms; ++term) {
        uint32_t words[UNIT / 2];
        GPU_UNROLL
        for (int w = 0; w < UNIT / 2; ++w) {
            words[w] = take_term<Numbers>(x[2 * w], x[2 * w + 1]);
        }
        store_words(words, to + term * term_stride);
    }
}

// The raw rows of a group of tokens in shared memory.
struct raw_rows {
    const params &      p;
    const pages &       x;
    const sequence &    s;
    const token_group & of;
    int                 head_kv;
    const char *        data;
    int                 before; // bytes_before the first row, or any if all are the same; else unused

    GPU_FN raw_rows(const params & p, const pages & x, const sequence & s, const token_group & of, int head_kv,
                    const char * data)
        : p(p), x(x), s(s), of(of), head_kv(head_kv), data(data),
          before(x.steps_aligned ? bytes_before(x.data + head_kv * x.head_stride)
                 : of.together   ? bytes_before(row_of(p, x, s, head_kv, of, 0))
                                 : 0) {}

    // Return where a row begins; of a row that the table does not have, any place.
    GPU_FN const char * row(int t) const {
        const char * from = data + t * x.raw_stride;
        if (x.steps_aligned) {
            return from + before;
        }
        if (of.together) {
            return from + (before + t * (int) (x.slot_stride & 15)) % 16;
        }
        return of.has(t) ? from + bytes_before(row_of(p, x, s, head_kv, of, t)) : from;
    }
};

// Convert rows of groups of a quantized type. Rows that the table does not have become zeros.
template <int TYPE> GPU_FN void convert_quantized(const raw_rows & raw, int d, char * to, int stride) {
    const int       n     = d / CODED_NUMBERS;
    const row_share share = share_of_rows(n);
    GPU_ROLLED
    for (int t = share.row(); t < GROUP; t += share.rows()) {
        const char * from = raw.row(t);
        GPU_ROLLED
        for (int i = share.piece(); i < n; i += share.pieces()) {
            uint32_t words[CODED_NUMBERS / 2] = {};
            if (raw.of.has(t)) {
                unpack_group<TYPE>(from + i * group_bytes(TYPE), words);
            }
            store_words(words, to + t * stride + 2 * CODED_NUMBERS * i);
        }
    }
}

template <class Numbers>
GPU_FN void convert_floats(const raw_rows & raw, int d, char * to, int stride, int term_stride) {
    const row_share share = share_of_rows(ceil_div(d, UNIT));
    GPU_ROLLED
    for (int t = share.row(); t < GROUP; t += share.rows()) {
        const char * from = raw.row(t);
        GPU_ROLLED
        for (int unit = share.piece(); unit < ceil_div(d, UNIT); unit += share.pieces()) {
            float x[UNIT] = {};
            if (raw.of.has(t)) {
                unpack_floats(raw.x.type, from, unit, x);
                GPU_UNROLL
                for (int n = 0; n < UNIT; ++n) { // other bytes follow the row
                    x[n] = UNIT * unit + n < d ? x[n] : 0.0f;
                }
            }
            store_unit<Numbers, Numbers::terms>(x, to + t * stride + 2 * UNIT * unit, term_stride);
        }
    }
}

// Convert the raw rows of a group to rows of 16-bit numbers. A term is `term_stride` bytes after the one before.
// DIRECT: types that is_direct() names are never converted.
template <class Numbers, bool DIRECT = false>
GPU_FN void convert_group(const raw_rows & raw, int d, char * to, int term_stride) {
    const int stride = number_stride(d);
    if (!Numbers::quantized || !is_quantized(raw.x.type)) {
        return convert_floats<Numbers>(raw, d, to, stride, term_stride);
    }
    if (!DIRECT && raw.x.type == PAGE_Q8_0) {
        return convert_quantized<PAGE_Q8_0>(raw, d, to, stride);
    }
    if (!DIRECT && raw.x.type == PAGE_Q4_0) {
        return convert_quantized<PAGE_Q4_0>(raw, d, to, stride);
    }
    switch (raw.x.type) { // here, so that the loops have no branches
    case PAGE_Q5_1:
        return convert_quantized<PAGE_Q5_1>(raw, d, to, stride);
    case PAGE_Q5_0:
        return convert_quantized<PAGE_Q5_0>(raw, d, to, stride);
    case PAGE_Q4_1:
        return convert_quantized<PAGE_Q4_1>(raw, d, to, stride);
    default:
        return convert_quantized<PAGE_IQ4_NL>(raw, d, to, stride);
    }
}

} // namespace paged
