// Softmax of the scores of one query row, and the state of a row over the chunks of its context.
//
// The context is split into chunks at fixed positions. Each chunk has a partial result: its largest score, the sum of
// its softmax weights, and the weighted sum of V. Partial results are merged in position order, whichever thread
// computed them, so the bits of a row depend neither on the threads nor on the other rows. Scores are in units of
// log 2.
#pragma once

#include "paged-problem.h"
#include "paged-simd.h"

namespace paged {

constexpr int64_t chunk_tokens = 512;
constexpr int64_t tile_tokens  = 32; // computed at a time; a multiple of lanes, a divisor of chunk_tokens
constexpr int64_t score_stride = chunk_tokens + tile_tokens + 16; // floats; a tile may begin at the chunk's last token

constexpr float log2_e = 1.4426950408889634f;

// What a score needs after q*k, for a q that was multiplied by query_factor.
struct score_map {
    float softcap; // 0: none
    float slope;   // of ALiBi, per position, in units of log 2; 0: none
};

inline float query_factor(const problem & p) {
    return p.params.softcap > 0.0f ? p.params.scale / p.params.softcap : p.params.scale * log2_e;
}
inline score_map score_map_of(const problem & p, int64_t head) {
    return {p.params.softcap, alibi_slope(p, head) * log2_e};
}

struct weight_sum {
    float largest; // score; -inf: the row sees nothing of the chunk
    float total;
};

inline void map_scores(float * s, int64_t from, int64_t to, score_map map, int64_t own) {
    for (int64_t i = from; i < to; i += lanes) {
        f32v x = load(s + i);
        if (map.softcap > 0.0f) {
            x = mul(splat(map.softcap * log2_e), tanh_of(x));
        }
        if (map.slope > 0.0f) {
            x = fma(splat(map.slope), add(iota(), splat((float) (i - own))), x);
        }
        store(s + i, x);
    }
}

// Replaces the scores s[begin..end) that the row sees by softmax weights, and the rest of [clear_begin, clear_end) by
// zeros. All positions, and the row's `own`, are counted from the start of the chunk.
inline weight_sum softmax(float * s, int64_t begin, int64_t end, int64_t clear_begin, int64_t clear_end, score_map map,
                          int64_t own) {
    if (begin >= end) {
        std::fill(s + clear_begin, s + clear_end, 0.0f);
        return {-INFINITY, 0.0f};
    }
    const int64_t from = begin / lanes * lanes, to = (end + lanes - 1) / lanes * lanes;
    if (map.softcap > 0.0f || map.slope > 0.0f) {
        map_scores(s, from, to, map, own);
    }
    f32v top = splat(-INFINITY);
    for (int64_t i = from; i < to; i += lanes) {
        const f32v x = select(load(s + i), (int) (begin - i), (int) (end - i), splat(-INFINITY));
        store(s + i, x);
        top = max(top, x);
    }
    const float largest_score = largest(top);
    f32v        total         = zero();
    for (int64_t i = from; i < to; i += lanes) {
        const f32v w = exp2_of(sub(load(s + i), splat(largest_score)));
        store(s + i, w);
        total = add(total, w);
    }
    std::fill(s + clear_begin, s + std::max(clear_begin, from), 0.0f);
    std::fill(s + std::min(clear_end, to), s + clear_end, 0.0f);
    return {largest_score, sum(total)};
}

// A row's state over the chunks so far, relative to the largest score.
struct row_state {
    float   largest;
    float   total;
    float * sum; // [d_v]
};

inline void clear(row_state & state, int64_t d_v) {
    state.largest = -INFINITY;
    state.total   = 0.0f;
    std::fill_n(state.sum, d_v, 0.0f);
}

// Merges the next chunk in position order.
inline void merge(row_state & state, weight_sum chunk, const float * chunk_sum, int64_t d_v) {
    if (chunk.largest == -INFINITY && chunk.total == 0.0f) {
        return;
    }
    const float top    = std::max(state.largest, chunk.largest);
    const float before = exp2f(state.largest - top), now = exp2f(chunk.largest - top);
    state.total   = state.total * before + chunk.total * now;
    state.largest = top;
    int64_t i     = 0;
    for (; i + lanes <= d_v; i += lanes) {
        store(state.sum + i, fma(load(chunk_sum + i), splat(now), mul(load(state.sum + i), splat(before))));
    }
    for (; i < d_v; ++i) {
        state.sum[i] = std::fma(chunk_sum[i], now, state.sum[i] * before);
    }
}

// Adds the sink, divides, and writes the row. A negative zero becomes a positive one, because masked tokens may have
// been added to it.
inline void finish(const problem & p, const row_state & state, int64_t head, float * out) {
    float total = state.total, factor = 1.0f;
    if (p.sinks) {
        const float sink = p.sinks[head] * log2_e, top = std::max(state.largest, sink);
        factor = exp2f(state.largest - top);
        total  = total * factor + exp2f(sink - top);
    }
    factor = total == 0.0f ? 0.0f : factor / total;
    for (int64_t i = 0; i < p.d_v; ++i) {
        out[i] = state.sum[i] * factor + 0.0f;
    }
}

} // namespace paged
