// What the kernels that keep scores in registers share: stages of raw tokens, and their conversion.
//
// Scores and softmax weights stay in a warp's registers: the result of one product is the operand of the next.
#pragma once

#include "paged-queries.h"

namespace paged {

template <division BY, int ROWS, class KNumbers, class VNumbers> struct staged_tile : query_tile<BY, ROWS, KNumbers> {
    static constexpr bool PRIVATE = BY == BY_TOKENS; // each warp has tokens of its own
    using tile                    = query_tile<BY, ROWS, KNumbers>;
    using tile::at;
    using tile::item;
    using tile::memory;
    using tile::p;
    using tile::s;

    GPU_FN staged_tile(const params & p, char * memory, const layout & at, const work_item & item)
        : tile(p, memory, at, item) {}

    GPU_FN int    owner() const { return PRIVATE ? gpu::warp() : 0; }
    GPU_FN char * stage_of(int i) const {
        return memory + at.stages + (owner() * N_STAGES + i % N_STAGES) * at.stage_bytes;
    }

    // Whether codes are multiplied as they lie in the stage.
    GPU_FN bool k_direct() const { return is_direct<KNumbers>(BY, p.k); }
    GPU_FN bool v_direct() const { return is_direct<VNumbers>(BY, p.v); }

    GPU_FN bool k_ready() const { return raw_is_ready(p.k, p.d_k); }
    GPU_FN bool v_ready() const { return p.v_is_k || raw_is_ready(p.v, p.d_v); }

    GPU_FN char * raw(bool of_v, int g, int i) const {
        return stage_of(i) + (of_v ? at.v_raw : 0) + GROUP * g * (of_v ? p.v : p.k).raw_stride;
    }
    GPU_FN void fetch(bool of_v, const token_group & of, int g, int i) const {
        if (KNumbers::size == 0) { // one piece of code for both
            fetch_group<KNumbers>(p, of_v ? p.v : p.k, s, item.head_kv, of, raw(of_v, g, i));
        } else if (of_v) {
            fetch_group<VNumbers>(p, p.v, s, item.head_kv, of, raw(true, g, i));
        } else {
            fetch_group<KNumbers>(p, p.k, s, item.head_kv, of, raw(false, g, i));
        }
    }

    GPU_FN char * converted(bool of_v) const { return memory + (of_v ? at.v : at.k) + owner() * at.converted_bytes; }

    GPU_FN void convert_k(const token_group & of, int g, int i) const {
        const int stride = number_stride(p.d_k);
        convert_group<KNumbers, PRIVATE>({p, p.k, s, of, item.head_kv, raw(false, g, i)}, p.d_k,
                                         converted(false) + GROUP * g * stride, at.tokens * stride);
    }
    GPU_FN void convert_v(const token_group & of, int g, int i) const {
        const int stride = number_stride(p.d_v);
        convert_group<VNumbers, PRIVATE>({p, p.v, s, of, item.head_kv, raw(true, g, i)}, p.d_v,
                                         converted(true) + GROUP * g * stride, at.tokens * stride);
    }

    GPU_FN operand keys(int i) const {
        if (k_ready()) {
            return {stage_of(i), p.k.raw_stride, 0};
        }
        return {converted(false), number_stride(p.d_k), at.tokens * number_stride(p.d_k)};
    }
    GPU_FN operand values(int i) const {
        if (p.v_is_k) {
            return keys(i);
        }
        if (v_ready()) {
            return {stage_of(i) + at.v_raw, p.v.raw_stride, 0};
        }
        return {converted(true), number_stride(p.d_v), at.tokens * number_stride(p.d_v)};
    }

    // Tokens that some rows all attend, and the end of the tokens that any of them attends.
    struct bounds {
        int begin, end, last;
    };

    GPU_FN bounds bounds_of_rows(int first, int n) const {
        const int all = tile::n_packed(), last = first + n < all ? first + n : all;
        if (item.members > 1) { // shared splits are attended completely
            return {item.tokens.begin, item.tokens.end, item.tokens.end};
        }
        if (first >= all) {
            return {0, 0, 0};
        }
        const int least = s.position(tile::packed(first) / p.group),
                  most  = s.position(tile::packed(last - 1) / p.group);
        return {first_visible(p, most), least + 1 < item.tokens.end ? least + 1 : item.tokens.end, most + 1};
    }
};

} // namespace paged
