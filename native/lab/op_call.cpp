#include "op_call.h"

#include "paged-attn.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace {

int blocks_of(int tokens) { return (tokens + BLOCK - 1) / BLOCK; }

bytes rows_of(ggml_type type, int64_t n, std::mt19937 & random) {
    std::vector<float>                    values((size_t) n);
    std::uniform_real_distribution<float> draw(-1, 1);
    for (float & value : values) {
        value = draw(random);
    }
    bytes out(ggml_row_size(type, n));
    ggml_quantize_chunk(type, values.data(), out.data(), 0, 1, n, nullptr);
    return out;
}

void fill(bytes & to, const bytes & pattern, size_t size) {
    to.resize(size);
    for (size_t at = 0; at < size; at += pattern.size()) {
        memcpy(to.data() + at, pattern.data(), std::min(pattern.size(), size - at));
    }
}

} // namespace

const std::vector<std::pair<const char *, ggml_type>> & op_types() {
    static const std::vector<std::pair<const char *, ggml_type>> types = {
        {"f32", GGML_TYPE_F32},   {"f16", GGML_TYPE_F16},   {"bf16", GGML_TYPE_BF16},
        {"q8_0", GGML_TYPE_Q8_0}, {"q5_1", GGML_TYPE_Q5_1}, {"q5_0", GGML_TYPE_Q5_0},
        {"q4_1", GGML_TYPE_Q4_1}, {"q4_0", GGML_TYPE_Q4_0}, {"iq4_nl", GGML_TYPE_IQ4_NL},
    };
    return types;
}

call make_call(const shape & s, bool poison, bool repeat) {
    std::mt19937 random(1);
    call         c;
    int          n_blocks = 3;
    c.s                   = s;
    for (const auto & [rows, length] : s.sequences) {
        c.n_tokens += rows;
        n_blocks += blocks_of(length);
        c.width = std::max<int64_t>(c.width, blocks_of(length));
    }
    n_blocks += n_blocks % 2;
    c.n_slots           = (int64_t) n_blocks * BLOCK;
    c.rows              = (int64_t) s.sequences.size() + 1; // one row without a sequence
    const size_t  row_k = ggml_row_size(s.type, s.d_k * s.heads_kv), row_v = ggml_row_size(s.type, s.d_v * s.heads_kv);
    const int64_t drawn = repeat ? std::min<int64_t>(c.n_slots, 1024) : c.n_slots;
    fill(c.q, rows_of(GGML_TYPE_F32, s.d_k * s.heads * std::min<int64_t>(c.n_tokens, 256), random),
         (size_t) (s.d_k * s.heads * c.n_tokens) * 4);
    fill(c.k, rows_of(s.type, drawn * s.d_k * s.heads_kv, random), row_k * c.n_slots);
    fill(c.v, rows_of(s.type, drawn * s.d_v * s.heads_kv, random), row_v * c.n_slots);

    std::vector<int> order(n_blocks);
    for (int i = 0; i < n_blocks; ++i) {
        order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), random);
    std::vector<bool> named(c.n_slots);
    const int64_t     stride = GGML_PAGED_ATTN_HEADER + c.width;
    c.table.assign(c.rows * stride, -1);
    memset(&c.table[(c.rows - 1) * stride], 0, GGML_PAGED_ATTN_HEADER * sizeof(int32_t));
    int next = 0, q0 = 0;
    for (size_t i = 0; i < s.sequences.size(); ++i) {
        const auto [rows, length]  = s.sequences[i];
        int32_t * row              = &c.table[i * stride];
        row[GGML_PAGED_ATTN_Q0]    = q0;
        row[GGML_PAGED_ATTN_NQ]    = rows;
        row[GGML_PAGED_ATTN_KV]    = length;
        row[GGML_PAGED_ATTN_FIRST] = 0;
        for (int t = 0; t < length; ++t) {
            const int at = GGML_PAGED_ATTN_HEADER + t / BLOCK;
            if (t % BLOCK == 0) {
                row[at] = i > 0 && t / BLOCK < s.common_blocks ? c.table[at] : order[next++];
            }
            named[(size_t) row[at] * BLOCK + t % BLOCK] = true;
        }
        q0 += rows;
    }
    ggml_paged_attn_params params = {};
    params.block_size             = BLOCK;
    ggml_paged_attn_find_shared(c.table.data(), c.rows, stride, BLOCK);
    ggml_paged_attn_plan(c.table.data(), c.rows, stride, (int32_t) (s.heads / s.heads_kv), &params);
    for (int64_t slot = 0; poison && slot < c.n_slots; ++slot) {
        if (!named[slot]) {
            memset(&c.k[slot * row_k], 0xff, row_k);
            memset(&c.v[slot * row_v], 0xff, row_v);
        }
    }
    return c;
}
