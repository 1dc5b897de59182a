// Products of tiles with rows of bytes. Up to four rows share each line that is unpacked in registers; more rows share
// a chunk of codes of 5 and 6 bits that is unpacked in memory. Sums within a group of one scale are of integers, and a
// row's blocks are added in their order, so a row's bits do not depend on the other rows.
#include "tile-products.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "tile-layout.h"
#include "tile-simd.h"

#if defined(VELO_TILES)

#    include "hand-out.h"
#    include "read-ahead.h"
#    include "tile-lines.h"
#    include "tile-rows.h"
#    include "tile-sums.h"

#    include <algorithm>
#    include <type_traits>

namespace tiles {

namespace {

constexpr int     MOST_ROWS = 4;        // of a pass: registers hold their sums
constexpr int64_t LEAST     = 32 << 10; // bytes of the tiles that a thread takes at a time

// Rows pass one after another over a group of tiles, while the next group comes from memory. More than 16 rows are read
// again for each group, so it is larger.
constexpr int     PREFETCHING = 4;                       // passes that prefetch the next group
constexpr int64_t FEW_ROOM = 16 << 10, ROOM = 128 << 10; // bytes of a group

// Codes of 5 and 6 bits take the most work to unpack. For more rows than a pass it is done once, for a chunk of a tile;
// codes of 4 bits would gain nothing.
constexpr int CHUNK = 1024; // codes along K: 16 KiB of bytes with all columns stay in the first level
template <class Layout> constexpr bool UNPACKS = codes_of<Layout>::BITS == 5 || codes_of<Layout>::BITS == 6;

template <class Layout> using row_of = std::conditional_t<Layout::K == 32, row_32, row_256<Layout::GROUPS>>;

template <int ROWS> using ints_of_rows   = ints[ROWS][PARTS];
template <int ROWS> using floats_of_rows = floats[ROWS][PARTS];

// Sums begin at what makes up for the middle of the codes, if they have room for it.
template <class Layout>
constexpr bool BEGINS_BELOW = codes_of<Layout>::MIDDLE != 0 && products<codes_of<Layout>::BITS>::WIDE;

// Adds the products of a group, line by line; calls drain(sums) when no more fit into the sums, and at the end.
template <class Layout, int ROWS, class Lines, class Drain>
void multiply_group(Lines lines, int group, const row_of<Layout> * const (&rows)[ROWS], Drain drain) {
    using codes          = codes_of<Layout>;
    using row_sums       = sums_of_rows<codes::BITS, ROWS>;
    constexpr int  LINES = Layout::GROUP / 4;
    const auto     read  = [&](int k, int p) { return lines.read(group, k, p); };
    row_sums       sums;
    const int8_t * bytes[ROWS];
    for (int m = 0; m < ROWS; ++m) {
        bytes[m] = rows[m]->q + Layout::GROUP * group;
        if constexpr (BEGINS_BELOW<Layout>) {
            sums.begin(m, rows[m]->starts[group]);
        }
    }
#    pragma GCC unroll 8
    for (int k = 0; k < LINES; k += row_sums::LINES) {
        lines.read_ahead(group, k);
        sums.add(k, read, bytes);
        if ((k + row_sums::LINES) % products<codes::BITS>::ROOM == 0 || k + row_sums::LINES == LINES) {
            drain(sums);
            sums = {};
        }
    }
}

template <class F> void for_parts(int n_rows, F f) {
#    pragma GCC unroll 4
    for (int m = 0; m < n_rows; ++m) {
#    pragma GCC unroll 4
        for (int p = 0; p < PARTS; ++p) {
            f(m, p);
        }
    }
}

// Adds a block of 32 codes along K, which have one scale.
template <class Layout, int ROWS, class Lines>
void add_block(const char * w, Lines lines, const row_32 * const (&rows)[ROWS], floats_of_rows<ROWS> & out) {
    using codes = codes_of<Layout>;
    ints_of_rows<ROWS> totals;
    for_parts(ROWS, [&](int m, int p) { totals[m][p] = splat(BEGINS_BELOW<Layout> ? 0 : rows[m]->starts[0]); });
    multiply_group<Layout, ROWS>(lines, 0, rows, [&](const auto & sums) {
        for_parts(ROWS,
                  [&](int m, int p) { totals[m][p] = add(totals[m][p], products<codes::BITS>::total(sums.at(m, p))); });
    });
    floats d[PARTS];
    for (int p = 0; p < PARTS; ++p) {
        d[p] = Layout::TYPE == GGML_TYPE_MXFP4 ? load_floats(w + Layout::D + 4 * COLUMNS * p)
                                               : load_halves(w + Layout::D + 2 * COLUMNS * p);
    }
    for_parts(ROWS, [&](int m, int p) {
        out[m][p] = multiply_add(to_floats(totals[m][p]), multiply(d[p], splat(rows[m]->d)), out[m][p]);
        if constexpr (Layout::KIND == tiles::codes::PLAIN) {
            out[m][p] = multiply_add(load_halves(w + Layout::D_MIN + 2 * COLUMNS * p), splat(rows[m]->sum), out[m][p]);
        }
    });
}

// Sums of a byte of each group (its scale, or its minimum), times the sum of the row's numbers there. GCC would call
// it, which makes products of four rows 3 % slower.
template <class Layout, int ROWS>
[[gnu::always_inline]] inline void multiply_sums(const char *         w, const row_of<Layout> * const (&rows)[ROWS],
                                                 ints_of_rows<ROWS> & out) {
    for_parts(ROWS, [&](int m, int p) { out[m][p] = splat(0); });
    for (int group = 0; group < Layout::GROUPS; group += 2) {
        ints both[PARTS];
        for (int p = 0; p < PARTS; ++p) {
            const char * scale = w + Layout::SCALE + COLS * group + COLUMNS * p;
            both[p]            = Layout::KIND == codes::PLAIN ? pairs(w + Layout::MIN + COLS * group + 2 * COLUMNS * p)
                                                              : pairs(scale, scale + COLS);
        }
#    pragma GCC unroll 4
        for (int m = 0; m < ROWS; ++m) {
            const ints sums = word(rows[m]->sums + group);
            for (int p = 0; p < PARTS; ++p) {
                out[m][p] = add_pairs(out[m][p], both[p], sums);
            }
        }
    }
}

// Adds a block of 256 codes along K, with a scale for each group.
template <class Layout, int ROWS, class Lines>
void add_block(const char * w, Lines lines, const row_256<Layout::GROUPS> * const (&rows)[ROWS],
               floats_of_rows<ROWS> & out) {
    using codes  = codes_of<Layout>;
    using totals = typename products<codes::BITS>::totals;
    totals of_rows[ROWS][PARTS];
    for (int group = 0; group < Layout::GROUPS; ++group) {
        typename totals::scale scale[PARTS];
        for (int p = 0; p < PARTS; ++p) {
            scale[p] = totals::load_scale(w + Layout::SCALE + COLS * group + COLUMNS * p);
        }
        multiply_group<Layout, ROWS>(lines, group, rows, [&](const auto & sums) {
            for_parts(ROWS, [&](int m, int p) { of_rows[m][p].add(sums.at(m, p), scale[p]); });
        });
    }
    ints_of_rows<ROWS> corrections;
    constexpr bool     HAS_MINIMA = Layout::KIND == tiles::codes::PLAIN;
    constexpr bool     CORRECTED  = codes::MIDDLE != 0 && !BEGINS_BELOW<Layout>;
    if constexpr (HAS_MINIMA || CORRECTED) {
        multiply_sums<Layout, ROWS>(w, rows, corrections);
    }
    floats d[PARTS], minus_min[PARTS];
    for (int p = 0; p < PARTS; ++p) {
        d[p] = load_halves(w + Layout::D + 2 * COLUMNS * p);
        if constexpr (HAS_MINIMA) {
            minus_min[p] = multiply(load_halves(w + Layout::D_MIN + 2 * COLUMNS * p), splat(-1.0f));
        }
    }
    for_parts(ROWS, [&](int m, int p) {
        floats value = of_rows[m][p].value();
        if constexpr (CORRECTED) {
            value = multiply_add(to_floats(corrections[m][p]), splat(static_cast<float>(-codes::MIDDLE)), value);
        }
        value = multiply(value, d[p]);
        if constexpr (HAS_MINIMA) {
            value = multiply_add(to_floats(corrections[m][p]), minus_min[p], value);
        }
        out[m][p] = multiply_add(value, splat(rows[m]->d), out[m][p]);
    });
}

// Some blocks of a tile, from block `begin` of the rows on, and the columns of their results.
template <class Layout, class Lines> struct part {
    const char * w;
    Lines        lines;
    int64_t      begin, n_blocks, column;
};

// Adds the products with a part of a tile, or begins with them at the first block.
template <class Layout, int ROWS, class Lines>
void multiply_part(const part<Layout, Lines> & of, const row_of<Layout> * const * in, float * const * out) {
    const row_of<Layout> * rows[ROWS];
    floats_of_rows<ROWS>   sums;
    for_parts(ROWS, [&](int m, int p) {
        sums[m][p] = of.begin > 0 ? load_floats(out[m] + of.column + COLUMNS * p) : splat(0.0f);
    });
    for (int m = 0; m < ROWS; ++m) {
        rows[m] = in[m] + of.begin;
    }
    const char * w     = of.w;
    Lines        lines = of.lines;
    for (int64_t block = 0; block < of.n_blocks; ++block, w += Layout::BYTES, lines = lines.next()) {
        add_block<Layout, ROWS>(w, lines, rows, sums);
        for (auto & row : rows) {
            ++row;
        }
    }
    for_parts(ROWS, [&](int m, int p) { store(out[m] + of.column + COLUMNS * p, sums[m][p]); });
}

template <class Layout, class Lines>
constexpr void (*multiply_rows[])(const part<Layout, Lines> &, const row_of<Layout> * const *, float * const *) = {
    multiply_part<Layout, 1, Lines>,
    multiply_part<Layout, 2, Lines>,
    multiply_part<Layout, 3, Lines>,
    multiply_part<Layout, 4, Lines>,
};

int64_t passes_of(int64_t n_rows) { return (n_rows + MOST_ROWS - 1) / MOST_ROWS; }
int64_t prefetching(int64_t n_rows) { return std::min<int64_t>(passes_of(n_rows), PREFETCHING); } // of the passes

// Returns the share of the first of the passes that prefetch the weights at `w`; nothing if `w` is null.
template <class Layout> later_weights first_share(const char * w, int64_t n_passes) {
    constexpr int64_t GROUP_BYTES = Layout::BYTES / Layout::GROUPS;
    return w ? later_weights{w, (GROUP_BYTES + n_passes - 1) / n_passes} : later_weights();
}

// Calls f(first row, end, what to prefetch) for each pass over some blocks; `later` is what the first one prefetches.
// The passes have equally many rows, as far as they can.
template <class Layout, class F> void for_passes(int64_t n_rows, int64_t n_blocks, later_weights later, F f) {
    const int64_t passes = passes_of(n_rows);
    for (int64_t i = 0; i < passes; ++i) {
        f(n_rows * i / passes, n_rows * (i + 1) / passes, later);
        later = i + 1 < PREFETCHING ? later.next(n_blocks * Layout::GROUPS) : later_weights();
    }
}

// Multiplies a tile with many rows, chunk by chunk; `next` are the weights after it.
template <class Layout>
void multiply_many(const char * w, const char * next, int64_t n_blocks, int64_t column, int64_t n_rows,
                   const row_of<Layout> * const * in, float * const * out) {
    using lines                = unpacked_lines<Layout>;
    constexpr int64_t BLOCKS   = CHUNK / Layout::K;
    const int64_t     n_passes = prefetching(n_rows);
    alignas(64) char  codes[CHUNK * COLS];
    for (int64_t begin = 0; begin < n_blocks; begin += BLOCKS, w += BLOCKS * Layout::BYTES) {
        const int64_t       n     = std::min(BLOCKS, n_blocks - begin);
        const later_weights first = first_share<Layout>(begin + n < n_blocks ? w + n * Layout::BYTES : next, n_passes);
        unpack<Layout>({w}, n, codes);
        for_passes<Layout>(n_rows, n, first, [&](int64_t i, int64_t end, later_weights later) {
            multiply_rows<Layout, lines>[end - i - 1]({w, {codes, later}, begin, n, column}, in + i, out + i);
        });
    }
}

// ---- which rows each matrix multiplies ----

// Rounded rows of activations, and the products: for each matrix (one, or one of each expert) its rows, and the output
// rows of their results.
template <class Layout> struct problem {
    const ggml_tensor *     dst;
    row_of<Layout> *        rows;   // of src[1]
    const row_of<Layout> ** in;     // of all products, matrix by matrix
    float **                out;    // and their results
    int32_t *               first;  // product of each matrix, and the number of products
    int32_t *               active; // the matrices that have products
    int32_t *               n_active;

    problem(const ggml_tensor * dst, void * memory) : dst(dst) {
        const int64_t n_matrices = dst->src[0]->ne[2], n = ggml_nrows(dst);
        take(memory, in, n);
        take(memory, out, n);
        take(memory, first, n_matrices + 1);
        take(memory, active, n_matrices);
        take(memory, n_active, 1);
        take(memory, rows, ggml_nelements(dst->src[1]) / Layout::K);
    }

    size_t  n_bytes = 0;                                                // of the memory; null measures it
    int64_t n_blocks() const { return dst->src[0]->ne[0] / Layout::K; } // of a row
    int64_t n_tiles() const { return dst->ne[0] / COLS; }               // of a matrix
    int64_t tile_bytes() const { return n_blocks() * Layout::BYTES; }
    int64_t group(int64_t n_rows) const { // of tiles
        return std::max<int64_t>(1, (n_rows <= PREFETCHING * MOST_ROWS ? FEW_ROOM : ROOM) / tile_bytes());
    }

    // Tiles are numbered through the matrices that have products. Weights are null after the last one.
    int32_t      matrix(int64_t tile) const { return active[tile / n_tiles()]; }
    int64_t      column(int64_t tile) const { return tile % n_tiles() * COLS; }
    const char * weights(int64_t tile) const {
        return tile < *n_active * n_tiles() ? static_cast<const char *>(dst->src[0]->data) +
                                                  (matrix(tile) * n_tiles() + tile % n_tiles()) * tile_bytes()
                                            : nullptr;
    }
    int32_t n_products(int64_t matrix) const { return first[matrix + 1] - first[matrix]; }

private:
    template <class T> void take(void * memory, T *& array, int64_t n) {
        array = memory ? reinterpret_cast<T *>(static_cast<char *>(memory) + n_bytes) : nullptr;
        n_bytes += (static_cast<size_t>(n) * sizeof(T) + 63) / 64 * 64;
    }
};

// Returns a row of a tensor.
template <class T> T * row_at(const ggml_tensor * x, int64_t i1, int64_t i2, int64_t i3) {
    return reinterpret_cast<T *>(static_cast<char *>(x->data) + static_cast<size_t>(i1) * x->nb[1] +
                                 static_cast<size_t>(i2) * x->nb[2] + static_cast<size_t>(i3) * x->nb[3]);
}

// Calls f(expert, row of src[1], result) for each product.
template <class F> void for_products(const ggml_tensor * dst, F f) {
    const ggml_tensor * x   = dst->src[1];
    const ggml_tensor * ids = dst->op == GGML_OP_MUL_MAT_ID ? dst->src[2] : nullptr;
    for (int64_t i3 = 0; i3 < dst->ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < dst->ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < dst->ne[1]; ++i1) {
                const int32_t expert = ids ? row_at<const int32_t>(ids, i2, 0, 0)[i1] : 0;
                f(expert, (i3 * x->ne[2] + i2) * x->ne[1] + i1 % x->ne[1], row_at<float>(dst, i1, i2, i3));
            }
        }
    }
}

// Sorts the products by their matrix.
template <class Layout> void sort_products(const problem<Layout> & p) {
    const int64_t n_matrices = p.dst->src[0]->ne[2];
    std::fill(p.first, p.first + n_matrices + 1, 0);
    for_products(p.dst, [&](int32_t expert, int64_t, float *) {
        GGML_ASSERT(expert >= 0 && expert < n_matrices); // a file may name experts by token
        ++p.first[expert + 1];
    });
    *p.n_active = 0;
    for (int64_t i = 0; i < n_matrices; ++i) {
        if (p.first[i + 1]) {
            p.active[(*p.n_active)++] = static_cast<int32_t>(i);
        }
        p.first[i + 1] += p.first[i];
    }
    for_products(p.dst, [&](int32_t expert, int64_t row, float * out) {
        const int32_t at = p.first[expert]++; // to the next matrix's
        p.in[at]         = p.rows + row * p.n_blocks();
        p.out[at]        = out;
    });
    std::copy_backward(p.first, p.first + n_matrices, p.first + n_matrices + 1);
    p.first[0] = 0;
}

// Rounds this thread's share of the blocks of activations.
template <class Layout> void round_rows(const ggml_compute_params * params, const problem<Layout> & p) {
    const ggml_tensor * x = p.dst->src[1];
    const int64_t       n = ggml_nrows(x) * p.n_blocks();
    for (int64_t i = n * params->ith / params->nth, end = n * (params->ith + 1) / params->nth; i < end; ++i) {
        const int64_t row = i / p.n_blocks(), i1 = row % x->ne[1], i2 = row / x->ne[1] % x->ne[2];
        const float * from = row_at<const float>(x, i1, i2, row / x->ne[1] / x->ne[2]);
        round_block<codes_of<Layout>::MIDDLE>(from + i % p.n_blocks() * Layout::K, p.rows[i]);
    }
}

// ---- the threads' work ----

// Computes tiles [begin, end), which are of one matrix. next() returns the tile after them; it is called late, because
// a thread that knows its next chunk keeps it from the others.
template <class Layout, class Next>
void multiply_tiles(const problem<Layout> & p, int64_t begin, int64_t end, Next next) {
    const int64_t matrix = p.matrix(begin), n_rows = p.n_products(matrix);
    const auto    in         = p.in + p.first[matrix];
    const auto    out        = p.out + p.first[matrix];
    const char *  weights    = p.weights(begin);
    const int64_t tile_bytes = p.tile_bytes(), n_blocks = p.n_blocks(), column = p.column(begin);
    const auto    weights_of = [&](int64_t tile) { return weights + (tile - begin) * tile_bytes; };
    const auto    column_of  = [&](int64_t tile) { return column + (tile - begin) * COLS; };
    const auto    after      = [&](int64_t tile) { return tile < end ? weights_of(tile) : p.weights(next()); };
    const auto    multiply   = [&](int64_t tile, auto lines, int64_t i, int64_t end_row) {
        multiply_rows<Layout, decltype(lines)>[end_row - i - 1]({lines.w, lines, 0, n_blocks, column_of(tile)}, in + i,
                                                                out + i);
    };
    if (n_rows <= MOST_ROWS) {
        for (int64_t tile = begin; tile < end; ++tile) {
            multiply(tile, packed_lines<Layout>{weights_of(tile)}, 0, n_rows);
        }
    } else if constexpr (UNPACKS<Layout>) {
        for (int64_t tile = begin; tile < end; ++tile) {
            multiply_many<Layout>(weights_of(tile), after(tile + 1), n_blocks, column_of(tile), n_rows, in, out);
        }
    } else {
        for (int64_t at = begin, group = p.group(n_rows); at < end; at += group) {
            const int64_t n     = std::min(group, end - at) * n_blocks;
            const auto    first = first_share<Layout>(after(at + group), prefetching(n_rows));
            for_passes<Layout>(n_rows, n, first, [&](int64_t i, int64_t end_row, later_weights later) {
                for (int64_t tile = at; tile < std::min(end, at + group); ++tile) {
                    multiply(tile, shared_lines<Layout>{{weights_of(tile)}, later}, i, end_row);
                    later = later.next(n_blocks * Layout::GROUPS);
                }
            });
        }
    }
}

template <class Layout> void run(const ggml_compute_params * params, const ggml_tensor * dst) {
    const problem<Layout> p(dst, params->wdata);
    if (params->ith == 0) {
        sort_products(p);
    }
    hand_out::reset(params);
    round_rows(params, p);
    ggml_barrier(params->threadpool);

    const int64_t n_tiles = p.n_tiles();
    hand_out      work =
        hand_out_tiles(params, ggml_nrows(dst), *p.n_active * n_tiles, p.tile_bytes(), LEAST / p.tile_bytes());
    while (work.next()) {
        for (int64_t begin = work.begin(), end = begin; begin < work.end(); begin = end) {
            end = std::min(work.end(), (begin / n_tiles + 1) * n_tiles); // a share goes on in the next matrix
            multiply_tiles(p, begin, end, [&] { return end < work.end() ? end : work.following(); });
        }
    }
}

} // namespace

size_t work_size(const ggml_tensor * dst) {
    return with_layout(dst->src[0]->type, size_t{0},
                       [&](auto layout) { return problem<decltype(layout)>(dst, nullptr).n_bytes; });
}

void multiply(const ggml_compute_params * params, ggml_tensor * dst) {
    with_layout(dst->src[0]->type, false, [&](auto layout) {
        run<decltype(layout)>(params, dst);
        return true;
    });
}

} // namespace tiles

#endif
