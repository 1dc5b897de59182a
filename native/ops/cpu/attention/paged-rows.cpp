#include "paged-rows.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"
#include "iq4-values.h"
#include "paged-codes.h"

#include <cstring>

namespace paged {

namespace {

float scale_of(ggml_half h) {
#if defined(PAGED_AVX512) || defined(PAGED_AVX2)
    return _cvtsh_ss(h);
#else
    return ggml_fp16_to_fp32(h);
#endif
}

void f32_row(const char * row, float * out, int64_t n) { memcpy(out, row, n * sizeof(float)); }

void f16_row(const char * row, float * out, int64_t n) {
    const uint16_t * x = (const uint16_t *) row;
    int64_t          i = 0;
    for (; i + lanes <= n; i += lanes) {
        store(out + i, load_f16(x + i));
    }
    for (; i < n; ++i) {
        out[i] = ggml_fp16_to_fp32(x[i]);
    }
}

void bf16_row(const char * row, float * out, int64_t n) {
    const uint16_t * x = (const uint16_t *) row;
    int64_t          i = 0;
    for (; i + lanes <= n; i += lanes) {
        store(out + i, load_bf16(x + i));
    }
    for (; i < n; ++i) {
        out[i] = ggml_bf16_to_fp32({x[i]});
    }
}

void q8_0_row(const char * row, float * out, int64_t n) {
    for (int64_t g = 0; g < n / QK8_0; ++g, out += QK8_0) {
        const block_q8_0 & group = ((const block_q8_0 *) row)[g];
        const float        d     = scale_of(group.d);
        put(out, load_codes(group.qs), d, 0.0f);
        put(out + 16, load_codes(group.qs + 16), d, 0.0f);
    }
}

// The narrow types: byte i holds element i in its low nibble and element i + 16 in its high one.

void q4_0_row(const char * row, float * out, int64_t n) {
    for (int64_t g = 0; g < n / QK4_0; ++g, out += QK4_0) {
        const block_q4_0 & group = ((const block_q4_0 *) row)[g];
        const float        d     = scale_of(group.d);
        const codes16      codes = load_codes(group.qs);
        put(out, minus(low_nibbles(codes), 8), d, 0.0f);
        put(out + 16, minus(high_nibbles(codes), 8), d, 0.0f);
    }
}

void q4_1_row(const char * row, float * out, int64_t n) {
    for (int64_t g = 0; g < n / QK4_1; ++g, out += QK4_1) {
        const block_q4_1 & group = ((const block_q4_1 *) row)[g];
        const float        d = scale_of(group.data.data.d), m = scale_of(group.data.data.m);
        const codes16      codes = load_codes(group.qs);
        put(out, low_nibbles(codes), d, m);
        put(out + 16, high_nibbles(codes), d, m);
    }
}

// Returns the fifth bits of a group: bit i belongs to element i.
uint32_t fifth_bits(const uint8_t * qh) {
    uint32_t bits;
    memcpy(&bits, qh, sizeof(bits));
    return bits;
}

void q5_0_row(const char * row, float * out, int64_t n) {
    for (int64_t g = 0; g < n / QK5_0; ++g, out += QK5_0) {
        const block_q5_0 & group = ((const block_q5_0 *) row)[g];
        const float        d     = scale_of(group.d);
        const uint32_t     bits  = fifth_bits(group.qh);
        const codes16      codes = load_codes(group.qs);
        put(out, minus(with_fifth_bits(low_nibbles(codes), bits), 16), d, 0.0f);
        put(out + 16, minus(with_fifth_bits(high_nibbles(codes), bits >> 16), 16), d, 0.0f);
    }
}

void q5_1_row(const char * row, float * out, int64_t n) {
    for (int64_t g = 0; g < n / QK5_1; ++g, out += QK5_1) {
        const block_q5_1 & group = ((const block_q5_1 *) row)[g];
        const float        d = scale_of(group.data.data.d), m = scale_of(group.data.data.m);
        const uint32_t     bits  = fifth_bits(group.qh);
        const codes16      codes = load_codes(group.qs);
        put(out, with_fifth_bits(low_nibbles(codes), bits), d, m);
        put(out + 16, with_fifth_bits(high_nibbles(codes), bits >> 16), d, m);
    }
}

void iq4_nl_row(const char * row, float * out, int64_t n) {
    static const int8_t table[16] = {VELO_IQ4_VALUES};
    for (int64_t g = 0; g < n / QK4_NL; ++g, out += QK4_NL) {
        const block_iq4_nl & group = ((const block_iq4_nl *) row)[g];
        const float          d     = scale_of(group.d);
        const codes16        codes = load_codes(group.qs);
        put(out, looked_up(low_nibbles(codes), table), d, 0.0f);
        put(out + 16, looked_up(high_nibbles(codes), table), d, 0.0f);
    }
}

} // namespace

row_to_float row_converter(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F16:
        return f16_row;
    case GGML_TYPE_BF16:
        return bf16_row;
    case GGML_TYPE_Q8_0:
        return q8_0_row;
    case GGML_TYPE_Q5_1:
        return q5_1_row;
    case GGML_TYPE_Q5_0:
        return q5_0_row;
    case GGML_TYPE_Q4_1:
        return q4_1_row;
    case GGML_TYPE_Q4_0:
        return q4_0_row;
    case GGML_TYPE_IQ4_NL:
        return iq4_nl_row;
    default:
        return f32_row;
    }
}

} // namespace paged
