#include "paged-tile.h"

#include "paged-ahead.h"
#include "paged-products-bf16.h"
#include "paged-products-codes.h"
#include "paged-products-f32.h"

namespace paged {

namespace {

// Buffers with room for whole blocks of rows.
struct scratch {
    float *      q;      // [tile_rows][d_k], multiplied by query_factor
    float *      s;      // [tile_rows][score_stride]
    float *      chunk;  // [tile_rows][padded(d_v)], weighted sums of V of the chunk
    float *      sum;    // [tile_rows][padded(d_v)], merged over the chunks so far
    weight_sum * weight; // [tile_rows], of the chunk
    row_state *  state;  // [tile_rows]
    int64_t *    begin;  // [tile_rows]: the positions that the row sees
    int64_t *    end;
};

scratch layout(const problem & p, int64_t padded_v, arena & a) {
    scratch x;
    x.q      = a.take<float>(tile_rows * p.d_k);
    x.s      = a.take<float>(tile_rows * score_stride);
    x.chunk  = a.take<float>(tile_rows * padded_v);
    x.sum    = a.take<float>(tile_rows * padded_v);
    x.weight = a.take<weight_sum>(tile_rows);
    x.state  = a.take<row_state>(tile_rows);
    x.begin  = a.take<int64_t>(tile_rows);
    x.end    = a.take<int64_t>(tile_rows);
    return x;
}

template <class P> struct job {
    const problem &   p;
    const tile_work & w;
    scratch           x;
    int64_t           rows;
    P                 products;

    job(const problem & p, const tile_work & w, arena & a)
        : p(p), w(w), x(layout(p, P::padded(p.d_v), a)), rows(w.row_end - w.row_begin), products(p, x.q, a) {}

    int64_t query_row(int64_t r) const { return (w.row_begin + r) / p.group; }
    int64_t head(int64_t r) const { return w.head_kv * p.group + (w.row_begin + r) % p.group; }
    float * chunk_sum(int64_t r) const { return x.chunk + r * P::padded(p.d_v); }
    bool    sees(int64_t r, int64_t n, int64_t begin, int64_t end) const {
        for (int64_t i = r; i < r + n; ++i) {
            if (x.begin[i] < end && begin < x.end[i]) {
                return true;
            }
        }
        return false;
    }
};

// Calls compute for the tiles of [begin, end) in order, and prefetches the next tile; after the last of K, the first of
// V.
template <class F>
void for_each_tile(const problem & p, const tile_work & w, const ggml_tensor * t, int64_t begin, int64_t end,
                   F compute) {
    for (int64_t at = begin; at < end;) {
        const tile now = tile_at(p, w.s, at, end);
        at             = now.end;
        rows_ahead ahead;
        if (at < end) {
            ahead = rows_ahead(t, w.head_kv, tile_at(p, w.s, at, end));
        } else if (t == p.k) {
            ahead = rows_ahead(p.v, w.head_kv, tile_at(p, w.s, begin, end));
        }
        compute(now, ahead);
    }
}

template <class P> void score_tiles(job<P> & b, int64_t begin, int64_t end, int64_t start) {
    for_each_tile(b.p, b.w, b.p.k, begin, end, [&](const tile & at, rows_ahead & ahead) {
        b.products.set_keys(b.w.head_kv, at, ahead);
        ahead.finish();
        P::for_each_block(b.rows, [&](int64_t r, int64_t n) {
            if (b.sees(r, n, at.begin, at.end)) {
                b.products.score(r, n, b.x.s + r * score_stride + at.begin - start);
            }
        });
    });
}

template <class P> void add_tiles(job<P> & b, int64_t begin, int64_t end, int64_t start) {
    tile_span spans[P::spans_at_once];
    int       n_spans = 0;
    for_each_tile(b.p, b.w, b.p.v, begin, end, [&](const tile & at, rows_ahead & ahead) {
        b.products.set_values(n_spans, b.w.head_kv, at, ahead);
        ahead.finish();
        spans[n_spans++] = {at.begin - start, at.size()};
        if (n_spans < P::spans_at_once && at.end < end) {
            return;
        }
        P::for_each_block(b.rows, [&](int64_t r, int64_t n) {
            if (b.sees(r, n, start + spans[0].offset, at.end)) {
                b.products.add(n, b.x.s + r * score_stride, spans, n_spans, b.chunk_sum(r));
            }
        });
        n_spans = 0;
    });
}

template <class P> void attend_chunk(job<P> & b, int64_t chunk) {
    const int64_t start = chunk * chunk_tokens;
    const int64_t begin = std::max(start, b.x.begin[0]);
    const int64_t end   = std::min(start + chunk_tokens, b.x.end[b.rows - 1]);
    score_tiles(b, begin, end, start);

    const int64_t clear_begin = (begin - start) / tile_tokens * tile_tokens;
    const int64_t clear_end   = (end - start + tile_tokens - 1) / tile_tokens * tile_tokens;
    for (int64_t r = 0; r < b.rows; ++r) {
        const int64_t own = b.w.s.position(b.query_row(r));
        b.x.weight[r] =
            softmax(b.x.s + r * score_stride, std::max(begin, b.x.begin[r]) - start, std::min(end, b.x.end[r]) - start,
                    clear_begin, clear_end, score_map_of(b.p, b.head(r)), own - start);
    }
    std::fill_n(b.x.chunk, b.rows * P::padded(b.p.d_v), 0.0f);
    add_tiles(b, begin, end, start);
}

template <class P> void prepare_rows(job<P> & b) {
    const float factor = query_factor(b.p);
    for (int64_t r = 0; r < b.rows; ++r) {
        const int64_t j    = b.query_row(r);
        const float * from = b.p.query(b.head(r), b.w.s.q0 + j);
        for (int64_t i = 0; i < b.p.d_k; ++i) {
            b.x.q[r * b.p.d_k + i] = from[i] * factor;
        }
        b.x.begin[r]     = first_visible(b.p, b.w.s.position(j));
        b.x.end[r]       = b.w.s.position(j) + 1;
        b.x.state[r].sum = b.x.sum + r * P::padded(b.p.d_v);
        clear(b.x.state[r], b.p.d_v);
    }
    b.products.set_queries(b.rows);
}

template <class P> void attend(const problem & p, const tile_work & w, const partial_store & partials, char * memory) {
    [[maybe_unused]] const typename P::setting setting;
    arena                                      a = {(uintptr_t) memory};
    job<P>                                     b(p, w, a);
    prepare_rows(b);
    const int64_t first = std::max(w.chunks.first, b.x.begin[0] / chunk_tokens);
    const int64_t last  = std::min(w.chunks.last, (b.x.end[b.rows - 1] + chunk_tokens - 1) / chunk_tokens);
    for (int64_t chunk = first; chunk < last; ++chunk) {
        attend_chunk(b, chunk);
        for (int64_t r = 0; r < b.rows; ++r) {
            if (partials.base) {
                store_partial(partials, p, w.s, chunk, b.query_row(r), b.head(r), b.x.weight[r], b.chunk_sum(r));
            } else {
                merge(b.x.state[r], b.x.weight[r], b.chunk_sum(r), p.d_v);
            }
        }
    }
    for (int64_t r = 0; r < b.rows && !partials.base; ++r) {
        finish(p, b.x.state[r], b.head(r), p.output(b.head(r), w.s.q0 + b.query_row(r)));
    }
}

template <class P> size_t bytes_of(const problem & p) {
    arena a = {0};
    layout(p, P::padded(p.d_v), a);
    P(p, nullptr, a);
    return a.next;
}

// Scores by K's products, sums of values in floats: for quantized keys, whose queries stock rounds even more.
template <class K> class mixed_products {
public:
    using setting = typename K::setting;

    static constexpr int spans_at_once = f32_products::spans_at_once;

    mixed_products(const problem & p, const float * q, arena & a) : keys_(p, q, a), values_(p, q, a) {}

    static int64_t padded(int64_t d) { return f32_products::padded(d); }

    void set_queries(int64_t rows) {
        keys_.set_queries(rows);
        values_.set_queries(rows);
    }
    void set_keys(int64_t head_kv, const tile & at, rows_ahead & ahead) { keys_.set_keys(head_kv, at, ahead); }
    void set_values(int span, int64_t head_kv, const tile & at, rows_ahead & ahead) {
        values_.set_values(span, head_kv, at, ahead);
    }

    template <class F> static void for_each_block(int64_t rows, F f) { K::for_each_block(rows, f); }

    void score(int64_t r, int64_t n, float * s) const { keys_.score(r, n, s); }
    void add(int64_t n, const float * w, const tile_span * spans, int n_spans, float * sum) const {
        f32_products::for_each_block(n, [&](int64_t r, int64_t some) {
            values_.add(some, w + r * score_stride, spans, n_spans, sum + r * values_.width());
        });
    }

private:
    K            keys_;
    f32_products values_;
};

} // namespace

size_t tile_scratch(const problem & p) {
    size_t bytes = bytes_of<f32_products>(p);
    if (code_scores::serve(p)) {
        bytes = std::max(bytes, bytes_of<mixed_products<code_scores>>(p));
    }
#if defined(PAGED_BF16)
    bytes = std::max({bytes, bytes_of<bf16_products<2>>(p), bytes_of<mixed_products<bf16_products<1>>>(p)});
#endif
    return bytes;
}

void attend_tile(const problem & p, const tile_work & w, partial_store partials, char * memory) {
#if defined(PAGED_BF16)
    if (p.fast()) {
        attend<bf16_products<1>>(p, w, partials, memory);
        return;
    }
    const bool more_bits = p.k->type == GGML_TYPE_F32 || p.v->type == GGML_TYPE_F32; // than two parts have
    if (amx::has_tiles() && !more_bits) {
        attend<bf16_products<2>>(p, w, partials, memory);
        return;
    }
    if (ggml_is_quantized(p.k->type)) {
        attend<mixed_products<bf16_products<1>>>(p, w, partials, memory);
        return;
    }
#endif
    if (code_scores::serve(p)) {
        attend<mixed_products<code_scores>>(p, w, partials, memory);
        return;
    }
    attend<f32_products>(p, w, partials, memory);
}

} // namespace paged
