#include "paged-decode.h"

namespace paged {

namespace {

struct as_f32 {
    static constexpr int64_t size = 4;
    static PAGED_INLINE f32v at(const char * row, int64_t i) { return load((const float *) row + i); }
};
struct as_f16 {
    static constexpr int64_t size = 2;
    static PAGED_INLINE f32v at(const char * row, int64_t i) { return load_f16((const uint16_t *) row + i); }
};
struct as_bf16 {
    static constexpr int64_t size = 2;
    static PAGED_INLINE f32v at(const char * row, int64_t i) { return load_bf16((const uint16_t *) row + i); }
};

// Rows of one KV head in the caller's memory or, dequantized, in ours.
struct kv_rows {
    const char * first;
    size_t       stride;
    int64_t      n;
};

// scores of up to 4 query rows, 4 tokens at a time; writes up to 3 past the last token
template <class T, int rows>
void score_rows(const kv_rows & k, const float * q, int64_t d, float * s, read_ahead & ahead) {
    for (int64_t t = 0; t < k.n; t += 4) {
        const char * row[4];
        for (int64_t i = 0; i < 4; ++i) {
            row[i] = k.first + std::min(t + i, k.n - 1) * k.stride;
        }
        ahead.step();
        f32v dot[rows][4];
        for (int r = 0; r < rows; ++r) {
            dot[r][0] = dot[r][1] = dot[r][2] = dot[r][3] = zero();
        }
        for (int64_t i = 0; i < d; i += lanes) {
            const f32v key[4] = {T::at(row[0], i), T::at(row[1], i), T::at(row[2], i), T::at(row[3], i)};
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                const f32v query = load(q + r * d + i);
                PAGED_UNROLL
                for (int c = 0; c < 4; ++c) {
                    dot[r][c] = fma(key[c], query, dot[r][c]);
                }
            }
        }
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            sum_of_4(dot[r], s + r * score_stride + t);
        }
    }
}

// sum[rows][d] += weights * V for `vectors` vectors of each row
template <class T, int rows, int vectors>
PAGED_INLINE void add_columns(const kv_rows & v, int64_t from, const float * w, float * sum, int64_t d,
                              read_ahead & ahead) {
    f32v a[rows][vectors];
    PAGED_UNROLL
    for (int r = 0; r < rows; ++r) {
        PAGED_UNROLL
        for (int c = 0; c < vectors; ++c) {
            a[r][c] = load(sum + r * d + from + c * lanes);
        }
    }
    for (int64_t t = 0; t < v.n; ++t) {
        if (t % 4 == 0) {
            ahead.step();
        }
        const char * row = v.first + t * v.stride;
        f32v         weight[rows];
        PAGED_UNROLL
        for (int r = 0; r < rows; ++r) {
            weight[r] = splat(w[r * score_stride + t]);
        }
        PAGED_UNROLL
        for (int c = 0; c < vectors; ++c) {
            const f32v x = T::at(row, from + c * lanes);
            PAGED_UNROLL
            for (int r = 0; r < rows; ++r) {
                a[r][c] = fma(x, weight[r], a[r][c]);
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

template <class T, int rows>
void add_rows(const kv_rows & v, const float * w, float * sum, int64_t d, read_ahead & ahead) {
    constexpr int registers = lanes == 16 ? 16 : 8;
    constexpr int most      = registers / (rows == 3 ? 4 : rows) > 8 ? 8 : registers / (rows == 3 ? 4 : rows);
    int64_t       i         = 0;
    for (; i + most * lanes <= d; i += most * lanes) {
        add_columns<T, rows, most>(v, i, w, sum, d, ahead);
    }
    for (; i < d; i += lanes) {
        add_columns<T, rows, 1>(v, i, w, sum, d, ahead);
    }
}

template <class T>
void score_group(const kv_rows & k, int64_t rows, const float * q, int64_t d, float * s, read_ahead & ahead) {
    for (int64_t r = 0; r < rows; r += 4) {
        switch (std::min<int64_t>(4, rows - r)) {
        case 1:
            score_rows<T, 1>(k, q + r * d, d, s + r * score_stride, ahead);
            break;
        case 2:
            score_rows<T, 2>(k, q + r * d, d, s + r * score_stride, ahead);
            break;
        case 3:
            score_rows<T, 3>(k, q + r * d, d, s + r * score_stride, ahead);
            break;
        case 4:
            score_rows<T, 4>(k, q + r * d, d, s + r * score_stride, ahead);
            break;
        }
    }
}

template <class T>
void add_group(const kv_rows & v, int64_t rows, const float * w, int64_t d, float * sum, read_ahead & ahead) {
    for (int64_t r = 0; r < rows; r += 4) {
        switch (std::min<int64_t>(4, rows - r)) {
        case 1:
            add_rows<T, 1>(v, w + r * score_stride, sum + r * d, d, ahead);
            break;
        case 2:
            add_rows<T, 2>(v, w + r * score_stride, sum + r * d, d, ahead);
            break;
        case 3:
            add_rows<T, 3>(v, w + r * score_stride, sum + r * d, d, ahead);
            break;
        case 4:
            add_rows<T, 4>(v, w + r * score_stride, sum + r * d, d, ahead);
            break;
        }
    }
}

struct scratch {
    float *      q;      // [rows][d_k], multiplied by query_factor
    float *      s;      // [rows][score_stride]
    float *      part;   // [rows][d_v], of the chunk
    float *      sum;    // [rows][d_v], of the chunks so far
    weight_sum * weight; // [rows], of the chunk
    row_state *  state;  // [rows], of the chunks so far
    float *      row;    // a tile of dequantized K or V
};

// rows: every query row of every head, a KV head's together
scratch layout(const problem & p, int64_t rows, arena & a) {
    scratch x;
    x.q      = a.take<float>(rows * p.d_k);
    x.s      = a.take<float>(rows * score_stride);
    x.part   = a.take<float>(rows * p.d_v);
    x.sum    = a.take<float>(rows * p.d_v);
    x.weight = a.take<weight_sum>(rows);
    x.state  = a.take<row_state>(rows);
    x.row    = a.take<float>(tile_tokens * std::max(p.d_k, p.d_v));
    return x;
}

// One item on its way.
struct job {
    const problem &     p;
    const decode_work & w;
    scratch             x;
    int64_t             rows; // of a KV head: n_q * group
    read_ahead          ahead;

    int64_t row_of(int64_t head_kv, int64_t j, int64_t g) const {
        return (head_kv - w.head_begin) * rows + j * p.group + g;
    }
};

bool lies_as_floats(ggml_type type) { return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16; }

// the rows of a tile as the arithmetic takes them
kv_rows rows_of(const job & b, const ggml_tensor * t, int64_t head, const tile & at) {
    const char * first = kv_row(t, head, at.slot);
    if (lies_as_floats(t->type)) {
        return {first, t->nb[2], at.size()};
    }
    const row_to_float convert = row_converter(t->type);
    for (int64_t i = 0; i < at.size(); ++i) {
        convert(first + i * t->nb[2], b.x.row + i * t->ne[0], t->ne[0]);
    }
    return {(const char *) b.x.row, t->ne[0] * sizeof(float), at.size()};
}

void score_tile(job & b, int64_t head, const tile & at, int64_t chunk_begin) {
    const kv_rows k   = rows_of(b, b.p.k, head, at);
    const int64_t row = b.row_of(head, 0, 0);
    const float * q   = b.x.q + row * b.p.d_k;
    float *       s   = b.x.s + row * score_stride + at.begin - chunk_begin;
    switch (b.p.k->type) {
    case GGML_TYPE_F16:
        score_group<as_f16>(k, b.rows, q, b.p.d_k, s, b.ahead);
        break;
    case GGML_TYPE_BF16:
        score_group<as_bf16>(k, b.rows, q, b.p.d_k, s, b.ahead);
        break;
    default:
        score_group<as_f32>(k, b.rows, q, b.p.d_k, s, b.ahead);
        break;
    }
}

void add_tile(job & b, int64_t head, const tile & at, int64_t chunk_begin) {
    const kv_rows v   = rows_of(b, b.p.v, head, at);
    const int64_t row = b.row_of(head, 0, 0);
    const float * s   = b.x.s + row * score_stride + at.begin - chunk_begin;
    float *       sum = b.x.part + row * b.p.d_v;
    switch (b.p.v->type) {
    case GGML_TYPE_F16:
        add_group<as_f16>(v, b.rows, s, b.p.d_v, sum, b.ahead);
        break;
    case GGML_TYPE_BF16:
        add_group<as_bf16>(v, b.rows, s, b.p.d_v, sum, b.ahead);
        break;
    default:
        add_group<as_f32>(v, b.rows, s, b.p.d_v, sum, b.ahead);
        break;
    }
}

// points the reading ahead at the tile after `at`, of K or else of V
void look_ahead(job & b, const ggml_tensor * t, const tile & next) {
    const int64_t heads = b.w.head_end - b.w.head_begin;
    b.ahead.start(kv_row(t, b.w.head_begin, next.slot), heads * t->nb[1], t->nb[2], next.size(),
                  heads * (tile_tokens / 4));
}

template <class F> void for_each_tile(job & b, const ggml_tensor * t, int64_t begin, int64_t end, F compute) {
    for (tile at = tile_at(b.p, b.w.s, begin, end);;) {
        const bool last = at.end >= end;
        // after the last tile of K comes the first of V; after the last of V the next chunk, which another may have
        const tile next = last ? tile_at(b.p, b.w.s, begin, end) : tile_at(b.p, b.w.s, at.end, end);
        if (!last || t == b.p.k) {
            look_ahead(b, last ? b.p.v : t, next);
        } else {
            b.ahead = {};
        }
        for (int64_t head = b.w.head_begin; head < b.w.head_end; ++head) {
            compute(head, at);
        }
        if (last) {
            return;
        }
        at = next;
    }
}

void prepare_queries(job & b) {
    const float factor = query_factor(b.p);
    for (int64_t head = b.w.head_begin; head < b.w.head_end; ++head) {
        for (int64_t j = 0; j < b.w.s.n_q; ++j) {
            for (int64_t g = 0; g < b.p.group; ++g) {
                const float * from = b.p.query(head * b.p.group + g, b.w.s.q0 + j);
                float *       to   = b.x.q + b.row_of(head, j, g) * b.p.d_k;
                for (int64_t i = 0; i < b.p.d_k; ++i) {
                    to[i] = from[i] * factor;
                }
            }
        }
    }
}

template <class F> void for_each_row(const job & b, F f) {
    for (int64_t head = b.w.head_begin; head < b.w.head_end; ++head) {
        for (int64_t j = 0; j < b.w.s.n_q; ++j) {
            for (int64_t g = 0; g < b.p.group; ++g) {
                f(b.row_of(head, j, g), j, head * b.p.group + g);
            }
        }
    }
}

void attend_chunk(job & b, int64_t chunk) {
    const sequence & s     = b.w.s;
    const int64_t    start = chunk * chunk_tokens;
    const int64_t    begin = std::max(start, first_visible(b.p, s.position(0)));
    const int64_t    end   = std::min(start + chunk_tokens, s.length);
    for_each_tile(b, b.p.k, begin, end, [&](int64_t head, const tile & at) { score_tile(b, head, at, start); });

    const int64_t clear_begin = (begin - start) / tile_tokens * tile_tokens;
    const int64_t clear_end   = (end - start + tile_tokens - 1) / tile_tokens * tile_tokens;
    for_each_row(b, [&](int64_t row, int64_t j, int64_t head) {
        const int64_t own = s.position(j);
        b.x.weight[row] =
            softmax(b.x.s + row * score_stride, std::max(begin, first_visible(b.p, own)) - start,
                    std::min(end, own + 1) - start, clear_begin, clear_end, score_map_of(b.p, head), own - start);
        std::fill_n(b.x.part + row * b.p.d_v, b.p.d_v, 0.0f);
    });
    for_each_tile(b, b.p.v, begin, end, [&](int64_t head, const tile & at) { add_tile(b, head, at, start); });
}

} // namespace

bool decode_fits(const problem & p) { return p.d_k % lanes == 0 && p.d_v % lanes == 0; }

size_t decode_scratch(const problem & p, int64_t n_q) {
    arena a = {0};
    layout(p, n_q * p.n_head, a);
    return a.next;
}

void decode(const problem & p, const decode_work & w, partial_store partials, char * memory) {
    const int64_t rows = (w.head_end - w.head_begin) * p.group * w.s.n_q;
    arena         a    = {(uintptr_t) memory};
    job           b    = {p, w, layout(p, rows, a), p.group * w.s.n_q, {}};
    prepare_queries(b);
    for (int64_t row = 0; row < rows; ++row) {
        b.x.state[row].sum = b.x.sum + row * p.d_v;
        clear(b.x.state[row], p.d_v);
    }
    for (int64_t chunk = w.chunks.first; chunk < w.chunks.last; ++chunk) {
        attend_chunk(b, chunk);
        for_each_row(b, [&](int64_t row, int64_t j, int64_t head) {
            if (partials.base) {
                keep(partials, p, w.s, chunk, j, head, b.x.weight[row], b.x.part + row * p.d_v);
            } else {
                join(b.x.state[row], b.x.weight[row], b.x.part + row * p.d_v, p.d_v);
            }
        });
    }
    if (!partials.base) {
        for_each_row(b, [&](int64_t row, int64_t j, int64_t head) {
            finish(p, b.x.state[row], head, p.output(head, w.s.q0 + j));
        });
    }
}

} // namespace paged
