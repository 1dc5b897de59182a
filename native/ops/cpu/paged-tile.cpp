#include "paged-tile.h"

namespace paged {

namespace {

constexpr int tile_vectors = tile_tokens / lanes;
constexpr int pass_vectors = tile_vectors < 2 ? tile_vectors : 2; // held beside the sums of a pass
constexpr int pass_rows    = lanes == 16 ? 8 : 4;

int64_t padded(int64_t d) { return (d + lanes - 1) / lanes * lanes; }

struct scratch {
    float *      q;      // [tile_rows][d_k], multiplied by query_factor
    float *      s;      // [tile_rows][score_stride]
    float *      part;   // [tile_rows][padded(d_v)], of the chunk
    float *      sum;    // [tile_rows][padded(d_v)], of the chunks so far
    float *      row;    // [lanes][padded(d_k)]
    float *      k;      // [padded(d_k)][tile_tokens]: tokens in lanes
    float *      v;      // [tile_tokens][padded(d_v)]
    weight_sum * weight; // [tile_rows], of the chunk
    row_state *  state;  // [tile_rows]
    int64_t *    begin;  // [tile_rows]: the positions that the row sees
    int64_t *    end;
};

scratch layout(const problem & p, arena & a) {
    scratch x;
    x.q      = a.take<float>(tile_rows * p.d_k);
    x.s      = a.take<float>(tile_rows * score_stride);
    x.part   = a.take<float>(tile_rows * padded(p.d_v));
    x.sum    = a.take<float>(tile_rows * padded(p.d_v));
    x.row    = a.take<float>(lanes * padded(p.d_k));
    x.k      = a.take<float>(tile_tokens * padded(p.d_k));
    x.v      = a.take<float>(tile_tokens * padded(p.d_v));
    x.weight = a.take<weight_sum>(tile_rows);
    x.state  = a.take<row_state>(tile_rows);
    x.begin  = a.take<int64_t>(tile_rows);
    x.end    = a.take<int64_t>(tile_rows);
    return x;
}

// s[rows][32] = q * k
template <int rows> void score_pass(const float * q, const float * k, int64_t d, float * s) {
    for (int from = 0; from < tile_vectors; from += pass_vectors) {
        f32v dot[rows][pass_vectors];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < pass_vectors; ++c) {
                dot[r][c] = zero();
            }
        }
        for (int64_t i = 0; i < d; ++i) {
            f32v key[pass_vectors];
            PAGED_UNROLL
            for (int c = 0; c < pass_vectors; ++c) {
                key[c] = load(k + i * tile_tokens + (from + c) * lanes);
            }
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const f32v query = splat(q[r * d + i]);
                PAGED_UNROLL
                for (int c = 0; c < pass_vectors; ++c) {
                    dot[r][c] = fma(key[c], query, dot[r][c]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            PAGED_UNROLL
            for (int c = 0; c < pass_vectors; ++c) {
                store(s + r * score_stride + (from + c) * lanes, dot[r][c]);
            }
        }
    }
}

// sum[rows][vectors at `from`] += w * v
template <int rows, int vectors>
PAGED_INLINE void add_pass_columns(const float * w, const float * v, int64_t n, int64_t d, int64_t from, float * sum) {
    f32v a[rows][vectors];
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        PAGED_UNROLL
        for (int c = 0; c < vectors; ++c) {
            a[r][c] = load(sum + r * d + from + c * lanes);
        }
    }
    for (int64_t t = 0; t < n; ++t) {
        f32v x[vectors];
        PAGED_UNROLL
        for (int c = 0; c < vectors; ++c) {
            x[c] = load(v + t * d + from + c * lanes);
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            const f32v weight = splat(w[r * score_stride + t]);
            PAGED_UNROLL
            for (int c = 0; c < vectors; ++c) {
                a[r][c] = fma(x[c], weight, a[r][c]);
            }
        }
    }
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        PAGED_UNROLL
        for (int c = 0; c < vectors; ++c) {
            store(sum + r * d + from + c * lanes, a[r][c]);
        }
    }
}

template <int rows> void add_pass(const float * w, const float * v, int64_t n, int64_t d, float * sum) {
    int64_t i = 0;
    for (; i + 2 * lanes <= d; i += 2 * lanes) {
        add_pass_columns<rows, 2>(w, v, n, d, i, sum);
    }
    for (; i < d; i += lanes) {
        add_pass_columns<rows, 1>(w, v, n, d, i, sum);
    }
}

// calls f(first row, number of rows): whole passes, then halves down to one row
template <class F> void for_each_pass(int64_t rows, F f) {
    int64_t r = 0;
    for (int n = pass_rows; n > 0; n /= 2) {
        for (; r + n <= rows; r += n) {
            f(r, n);
        }
    }
}

struct job {
    const problem &   p;
    const tile_work & w;
    scratch           x;
    int64_t           rows;

    int64_t query_row(int64_t r) const { return (w.row_begin + r) / p.group; }
    int64_t head(int64_t r) const { return w.head_kv * p.group + (w.row_begin + r) % p.group; }
    bool    sees(int64_t r, int64_t n, const tile & at) const {
        for (int64_t i = r; i < r + n; ++i) {
            if (x.begin[i] < at.end && at.begin < x.end[i]) {
                return true;
            }
        }
        return false;
    }
};

// Lanes past the tile's last token repeat it: their scores are never looked at.
void pack_keys(const job & b, const tile & at) {
    const row_to_float convert = row_converter(b.p.k->type);
    const int64_t      d       = padded(b.p.d_k);
    for (int64_t t = 0; t < at.size(); t += lanes) {
        for (int64_t i = 0; i < lanes; ++i) {
            const int64_t slot = at.slot + std::min(t + i, at.size() - 1);
            convert(kv_row(b.p.k, b.w.head_kv, slot), b.x.row + i * d, b.p.d_k);
        }
        for (int64_t i = 0; i < d; i += lanes) {
            f32v block[lanes];
            PAGED_UNROLL
            for (int r = 0; r < lanes; ++r) {
                block[r] = load(b.x.row + r * d + i);
            }
            transpose(block);
            PAGED_UNROLL
            for (int r = 0; r < lanes; ++r) {
                store(b.x.k + (i + r) * tile_tokens + t, block[r]);
            }
        }
    }
}

void unpack_values(const job & b, const tile & at) {
    const row_to_float convert = row_converter(b.p.v->type);
    for (int64_t i = 0; i < at.size(); ++i) {
        convert(kv_row(b.p.v, b.w.head_kv, at.slot + i), b.x.v + i * padded(b.p.d_v), b.p.d_v);
    }
}

void score_tile(const job & b, const tile & at, int64_t start) {
    pack_keys(b, at);
    for_each_pass(b.rows, [&](int64_t r, int n) {
        if (!b.sees(r, n, at)) {
            return;
        }
        const float * q = b.x.q + r * b.p.d_k;
        float *       s = b.x.s + r * score_stride + at.begin - start;
        switch (n) {
        case 8:
            score_pass<8>(q, b.x.k, b.p.d_k, s);
            break;
        case 4:
            score_pass<4>(q, b.x.k, b.p.d_k, s);
            break;
        case 2:
            score_pass<2>(q, b.x.k, b.p.d_k, s);
            break;
        case 1:
            score_pass<1>(q, b.x.k, b.p.d_k, s);
            break;
        }
    });
}

void add_tile(const job & b, const tile & at, int64_t start) {
    unpack_values(b, at);
    const int64_t d = padded(b.p.d_v);
    for_each_pass(b.rows, [&](int64_t r, int n) {
        if (!b.sees(r, n, at)) {
            return;
        }
        const float * w   = b.x.s + r * score_stride + at.begin - start;
        float *       sum = b.x.part + r * d;
        switch (n) {
        case 8:
            add_pass<8>(w, b.x.v, at.size(), d, sum);
            break;
        case 4:
            add_pass<4>(w, b.x.v, at.size(), d, sum);
            break;
        case 2:
            add_pass<2>(w, b.x.v, at.size(), d, sum);
            break;
        case 1:
            add_pass<1>(w, b.x.v, at.size(), d, sum);
            break;
        }
    });
}

void look_ahead(const job & b, const ggml_tensor * t, const tile & next) {
    const int64_t bytes = ggml_row_size(t->type, t->ne[0]);
    for (int64_t i = 0; i < next.size(); ++i) {
        const char * row = kv_row(t, b.w.head_kv, next.slot + i);
        for (int64_t offset = 0; offset < bytes; offset += 64) {
            prefetch_line(row + offset);
        }
    }
}

template <class F> void for_each_tile(const job & b, const ggml_tensor * t, int64_t begin, int64_t end, F compute) {
    for (int64_t at = begin; at < end;) {
        const tile now = tile_at(b.p, b.w.s, at, end);
        at             = now.end;
        if (at < end) {
            look_ahead(b, t, tile_at(b.p, b.w.s, at, end));
        } else if (t == b.p.k) {
            look_ahead(b, b.p.v, tile_at(b.p, b.w.s, begin, end));
        }
        compute(now);
    }
}

void attend_chunk(const job & b, int64_t chunk) {
    const int64_t start = chunk * chunk_tokens;
    const int64_t begin = std::max(start, b.x.begin[0]);
    const int64_t end   = std::min(start + chunk_tokens, b.x.end[b.rows - 1]);
    for_each_tile(b, b.p.k, begin, end, [&](const tile & at) { score_tile(b, at, start); });

    const int64_t clear_begin = (begin - start) / tile_tokens * tile_tokens;
    const int64_t clear_end   = (end - start + tile_tokens - 1) / tile_tokens * tile_tokens;
    for (int64_t r = 0; r < b.rows; ++r) {
        const int64_t own = b.w.s.position(b.query_row(r));
        b.x.weight[r] =
            softmax(b.x.s + r * score_stride, std::max(begin, b.x.begin[r]) - start, std::min(end, b.x.end[r]) - start,
                    clear_begin, clear_end, score_map_of(b.p, b.head(r)), own - start);
    }
    std::fill_n(b.x.part, b.rows * padded(b.p.d_v), 0.0f);
    for_each_tile(b, b.p.v, begin, end, [&](const tile & at) { add_tile(b, at, start); });
}

void prepare_rows(const job & b) {
    const float factor = query_factor(b.p);
    for (int64_t r = 0; r < b.rows; ++r) {
        const int64_t j    = b.query_row(r);
        const float * from = b.p.query(b.head(r), b.w.s.q0 + j);
        for (int64_t i = 0; i < b.p.d_k; ++i) {
            b.x.q[r * b.p.d_k + i] = from[i] * factor;
        }
        b.x.begin[r]     = first_visible(b.p, b.w.s.position(j));
        b.x.end[r]       = b.w.s.position(j) + 1;
        b.x.state[r].sum = b.x.sum + r * padded(b.p.d_v);
        clear(b.x.state[r], b.p.d_v);
    }
    // what pads a row is multiplied, never used: it only has to be a number
    std::fill_n(b.x.row, lanes * padded(b.p.d_k), 0.0f);
    std::fill_n(b.x.v, tile_tokens * padded(b.p.d_v), 0.0f);
}

} // namespace

size_t tile_scratch(const problem & p) {
    arena a = {0};
    layout(p, a);
    return a.next;
}

void attend_tile(const problem & p, const tile_work & w, partial_store partials, char * memory) {
    arena     a = {(uintptr_t) memory};
    const job b = {p, w, layout(p, a), w.row_end - w.row_begin};
    prepare_rows(b);
    const int64_t first = std::max(w.chunks.first, b.x.begin[0] / chunk_tokens);
    const int64_t last  = std::min(w.chunks.last, (b.x.end[b.rows - 1] + chunk_tokens - 1) / chunk_tokens);
    for (int64_t chunk = first; chunk < last; ++chunk) {
        attend_chunk(b, chunk);
        for (int64_t r = 0; r < b.rows; ++r) {
            const float * part = b.x.part + r * padded(p.d_v);
            if (partials.base) {
                keep(partials, p, w.s, chunk, b.query_row(r), b.head(r), b.x.weight[r], part);
            } else {
                join(b.x.state[r], b.x.weight[r], part, p.d_v);
            }
        }
    }
    for (int64_t r = 0; r < b.rows && !partials.base; ++r) {
        finish(p, b.x.state[r], b.head(r), p.output(b.head(r), w.s.q0 + b.query_row(r)));
    }
}

} // namespace paged
