#include "paged-decode.h"

#include "paged-page.h"

namespace paged {

namespace {

struct scratch {
    query_rows   q;
    float *      s;      // [rows][score_stride]
    float *      chunk;  // [rows][d_v], weighted sums of V of the chunk
    float *      sum;    // [rows][d_v], merged over the chunks so far
    weight_sum * weight; // [rows], of the chunk
    row_state *  state;  // [rows], of the chunks so far
    char *       page;   // a tile of K or V, copied or as floats, and 64 bytes for loads past its end
    float *      few;    // [rows of a KV head][tile_tokens], softmax weights of a partial tile
};

// rows: the query rows of all heads, ordered by KV head
scratch layout(const problem & p, int64_t rows, arena & a) {
    scratch x;
    x.q.x     = a.take<float>(rows * p.d_k);
    x.q.codes = a.take<int8_t>(rows * p.d_k);
    x.q.scale = a.take<float>(rows * (p.d_k / 32 + 1));
    x.q.sum   = a.take<int32_t>(rows * (p.d_k / 32 + 1));
    x.s       = a.take<float>(rows * score_stride);
    x.chunk   = a.take<float>(rows * p.d_v);
    x.sum     = a.take<float>(rows * p.d_v);
    x.weight  = a.take<weight_sum>(rows);
    x.state   = a.take<row_state>(rows);
    x.page    = a.take<char>(tile_tokens * std::max(p.d_k, p.d_v) * sizeof(float) + 64);
    x.few     = a.take<float>(rows * tile_tokens);
    return x;
}

// State of one item. The rows of a KV head are neighbours, member by member, so that its keys and values are unpacked
// once for all of them.
struct job {
    const problem &     p;
    const decode_work & w;
    int64_t             rows; // of a KV head
    scratch             x;
    page_kernel         k, v;
    read_ahead          ahead;

    int64_t heads() const { return w.head_end - w.head_begin; }
};

// f(row, member, query row, query head)
template <class F> void for_each_row(const job & b, F f) {
    int64_t row = 0;
    for (int64_t head = b.w.head_begin; head < b.w.head_end; ++head) {
        for (int64_t i = 0; i < b.w.n_members; ++i) {
            const decode_member & m = b.w.members[i];
            for (int64_t j = 0; j < m.s.n_q; ++j) {
                for (int64_t g = 0; g < b.p.group; ++g) {
                    f(row++, m, j, head * b.p.group + g);
                }
            }
        }
    }
}

kv_rows copied(const job & b, const ggml_tensor * t, const char * first, int64_t n) {
    const size_t bytes = ggml_row_size(t->type, t->ne[0]);
    for (int64_t i = 0; i < n; ++i) {
        memcpy(b.x.page + i * bytes, first + i * t->nb[2], bytes);
    }
    memset(b.x.page + n * bytes, 0, (tile_tokens - n) * bytes);
    return {b.x.page, bytes, tile_tokens};
}

kv_rows converted(const job & b, const ggml_tensor * t, const char * first, int64_t n) {
    const row_to_float convert = row_converter(t->type);
    for (int64_t i = 0; i < n; ++i) {
        convert(first + i * t->nb[2], (float *) b.x.page + i * t->ne[0], t->ne[0]);
    }
    return {b.x.page, t->ne[0] * sizeof(float), n};
}

bool is_copied(const ggml_tensor * t, const tile & at) {
    // a load may read past a row, but not past the last row of the pool
    return at.size() < tile_tokens || at.slot + at.size() == t->ne[2];
}

// Calls f(rows in the kernel's form, their first query row): once for all heads if the kernel reads them in place, else
// for each head.
template <class F> void with_rows(const job & b, const ggml_tensor * t, page_form form, const tile & at, F f) {
    if (form == page_form::in_place || (form == page_form::whole && !is_copied(t, at))) {
        f(kv_rows{kv_row(t, b.w.head_begin, at.slot), t->nb[2], at.size(), b.heads(), t->nb[1]}, 0);
        return;
    }
    for (int64_t head = b.w.head_begin; head < b.w.head_end; ++head) {
        const char * first = kv_row(t, head, at.slot);
        f(form == page_form::floats ? converted(b, t, first, at.size()) : copied(b, t, first, at.size()),
          (head - b.w.head_begin) * b.rows);
    }
}

void score_tile(job & b, const tile & at, int64_t chunk_begin) {
    with_rows(b, b.p.k, b.k.form, at, [&](const kv_rows & k, int64_t row) {
        b.k.score(k, from_row(b.x.q, row, b.p.d_k), b.rows, b.p.d_k,
                  b.x.s + row * score_stride + at.begin - chunk_begin, b.ahead);
    });
}

// Copies the softmax weights of a head's partial tile and pads them with zeros.
const float * padded_weights(const job & b, const float * w, int64_t n) {
    for (int64_t r = 0; r < b.rows; ++r) {
        std::copy_n(w + r * score_stride, n, b.x.few + r * tile_tokens);
        std::fill_n(b.x.few + r * tile_tokens + n, tile_tokens - n, 0.0f);
    }
    return b.x.few;
}

void add_tile(job & b, const tile & at, int64_t chunk_begin) {
    const bool pad = b.v.form == page_form::whole && at.size() < tile_tokens;
    with_rows(b, b.p.v, b.v.form, at, [&](const kv_rows & v, int64_t row) {
        const float * w = b.x.s + row * score_stride + at.begin - chunk_begin;
        b.v.add(v, pad ? padded_weights(b, w, at.size()) : w, pad ? tile_tokens : score_stride, b.rows, b.p.d_v,
                b.x.chunk + row * b.p.d_v, b.ahead);
    });
}

// Starts to prefetch the tile `next` of `t`, during the steps of the tile `at` of `now`.
void look_ahead(job & b, const ggml_tensor * now, const tile & at, const ggml_tensor * t, const tile & next) {
    const bool    is_key = now == b.p.k;
    const int64_t steps  = is_key ? b.k.score_steps(b.rows, b.p.d_k) : b.v.add_steps(b.rows, b.p.d_v);
    const bool    whole  = (is_key ? b.k : b.v).form == page_form::whole; // a part of a tile takes as many
    b.ahead.start(kv_row(t, b.w.head_begin, next.slot), b.heads() * t->nb[1], t->nb[2], next.size(),
                  b.heads() * (whole ? steps : steps * at.size() / tile_tokens));
}

template <class F> void for_each_tile(job & b, const ggml_tensor * t, int64_t begin, int64_t end, F compute) {
    const sequence & s = b.w.members->s; // the other members have the same blocks here
    for (tile at = tile_at(b.p, s, begin, end);;) {
        const bool last = at.end >= end;
        if (!last) {
            look_ahead(b, t, at, t, tile_at(b.p, s, at.end, end));
        } else if (t == b.p.k) {
            look_ahead(b, t, at, b.p.v, tile_at(b.p, s, begin, end));
        } else if (end < b.w.chunks.last * chunk_tokens && end < s.length) {
            look_ahead(b, t, at, b.p.k, tile_at(b.p, s, end, s.length));
        } else if (b.w.next.s) {
            look_ahead(b, t, at, b.p.k, tile_at(b.p, *b.w.next.s, b.w.next.position, b.w.next.s->length));
        } else {
            b.ahead = {};
        }
        compute(at);
        if (last) {
            return;
        }
        at = tile_at(b.p, s, at.end, end);
    }
}

void prepare_rows(job & b) {
    const float factor = query_factor(b.p);
    for_each_row(b, [&](int64_t row, const decode_member & m, int64_t j, int64_t head) {
        const float *    from = b.p.query(head, m.s.q0 + j);
        const query_rows q    = from_row(b.x.q, row, b.p.d_k);
        for (int64_t i = 0; i < b.p.d_k; ++i) {
            q.x[i] = from[i] * factor;
        }
        if (b.k.form == page_form::whole) {
            quantize_query(q.x, b.p.d_k, q.codes, q.scale, q.sum);
        }
        b.x.state[row].sum = b.x.sum + row * b.p.d_v;
        clear(b.x.state[row], b.p.d_v);
    });
}

void attend_chunk(job & b, int64_t chunk) {
    const sequence & s     = b.w.members->s;
    const int64_t    start = chunk * chunk_tokens;
    const int64_t    begin = std::max(start, first_visible(b.p, s.position(0)));
    const int64_t    end   = std::min(start + chunk_tokens, s.length);
    for_each_tile(b, b.p.k, begin, end, [&](const tile & at) { score_tile(b, at, start); });

    const int64_t clear_begin = (begin - start) / tile_tokens * tile_tokens;
    const int64_t clear_end   = (end - start + tile_tokens - 1) / tile_tokens * tile_tokens;
    for_each_row(b, [&](int64_t row, const decode_member & m, int64_t j, int64_t head) {
        const int64_t own = m.s.position(j);
        b.x.weight[row] =
            softmax(b.x.s + row * score_stride, std::max(begin, first_visible(b.p, own)) - start,
                    std::min(end, own + 1) - start, clear_begin, clear_end, score_map_of(b.p, head), own - start);
        std::fill_n(b.x.chunk + row * b.p.d_v, b.p.d_v, 0.0f);
    });
    for_each_tile(b, b.p.v, begin, end, [&](const tile & at) { add_tile(b, at, start); });
}

} // namespace

bool decode_fits(const problem & p) { return p.d_k % lanes == 0 && p.d_v % lanes == 0; }

size_t decode_scratch(const problem & p, int64_t n_q) {
    arena a = {0};
    layout(p, n_q * p.n_head, a);
    return a.next;
}

void decode(const problem & p, const decode_work & w, char * memory) {
    int64_t rows = 0;
    for (int64_t i = 0; i < w.n_members; ++i) {
        rows += w.members[i].s.n_q * p.group;
    }
    arena a = {(uintptr_t) memory};
    job   b = {p,
               w,
               rows,
               layout(p, (w.head_end - w.head_begin) * rows, a),
               page_kernel_of(p.k->type, p.d_k, rows),
               page_kernel_of(p.v->type, p.d_v, rows),
               {}};
    prepare_rows(b);
    for (int64_t chunk = w.chunks.first; chunk < w.chunks.last; ++chunk) {
        attend_chunk(b, chunk);
        for_each_row(b, [&](int64_t row, const decode_member & m, int64_t j, int64_t head) {
            const float * sum = b.x.chunk + row * p.d_v;
            if (m.partials.base) {
                store_partial(m.partials, p, m.s, chunk, j, head, b.x.weight[row], sum);
            } else {
                merge(b.x.state[row], b.x.weight[row], sum, p.d_v);
            }
        });
    }
    for_each_row(b, [&](int64_t row, const decode_member & m, int64_t j, int64_t head) {
        if (!m.partials.base) {
            finish(p, b.x.state[row], head, p.output(head, m.s.q0 + j));
        }
    });
}

} // namespace paged
