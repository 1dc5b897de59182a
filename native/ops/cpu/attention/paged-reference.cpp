#include "paged-reference.h"

namespace paged {

namespace {

void row_to_float(const ggml_tensor * t, int64_t head, int64_t slot, float * out) {
    const char * row = (const char *) t->data + head * t->nb[1] + slot * t->nb[2];
    if (t->type == GGML_TYPE_F32) {
        memcpy(out, row, t->ne[0] * sizeof(float));
    } else {
        ggml_get_type_traits(t->type)->to_float(row, out, t->ne[0]);
    }
}

struct scratch {
    float *  row; // a dequantized row of K or of V
    double * sum; // the weighted sum of V
    scratch(const problem & p, char * work) : row((float *) work), sum((double *) (work + row_bytes(p))) {}
    static size_t row_bytes(const problem & p) { return (std::max(p.d_k, p.d_v) + 1) / 2 * 2 * sizeof(float); }
    static size_t bytes(const problem & p) { return row_bytes(p) + p.d_v * sizeof(double); }
};

double score(const problem & p, const float * query, const float * key, float slope, int64_t distance) {
    double dot = 0;
    for (int64_t i = 0; i < p.d_k; ++i) {
        dot += (double) query[i] * key[i];
    }
    dot *= p.params.scale;
    if (p.params.softcap > 0.0f) {
        dot = p.params.softcap * tanh(dot / p.params.softcap);
    }
    return dot - (double) slope * distance;
}

void attend_row(const problem & p, const sequence & s, int64_t j, int64_t head, scratch work) {
    const int64_t head_kv = head / p.group, position = s.position(j);
    const float   slope = alibi_slope(p, head);
    const float * query = p.query(head, s.q0 + j);

    double maximum = -INFINITY, total = 0;
    std::fill_n(work.sum, p.d_v, 0.0);
    for (int64_t t = first_visible(p, position); t <= position; ++t) {
        const int64_t slot = s.slot(t, p.params.block_size);
        row_to_float(p.k, head_kv, slot, work.row);
        const double x = score(p, query, work.row, slope, position - t);
        if (x > maximum) {
            const double shrink = exp(maximum - x);
            total *= shrink;
            for (int64_t i = 0; i < p.d_v; ++i) {
                work.sum[i] *= shrink;
            }
            maximum = x;
        }
        const double weight = exp(x - maximum);
        total += weight;
        row_to_float(p.v, head_kv, slot, work.row);
        for (int64_t i = 0; i < p.d_v; ++i) {
            work.sum[i] += weight * work.row[i];
        }
    }

    double factor = 1.0 / total;
    if (p.sinks) {
        const double sink = p.sinks[head], top = std::max(maximum, sink);
        factor = exp(maximum - top) / (total * exp(maximum - top) + exp(sink - top));
    }
    float * out = p.output(head, s.q0 + j);
    for (int64_t i = 0; i < p.d_v; ++i) {
        out[i] = (float) (work.sum[i] * factor);
    }
}

} // namespace

size_t reference_work_size(const problem & p) { return scratch::bytes(p); }

void reference(const problem & p, int ith, int nth, char * work) {
    int64_t item = 0;
    for (int64_t row = 0; row < p.n_rows; ++row) {
        const sequence s = sequence_of(p, row);
        for (int64_t j = 0; j < s.n_q; ++j) {
            for (int64_t head = 0; head < p.n_head; ++head, ++item) {
                if (item % nth == ith) {
                    attend_row(p, s, j, head, scratch(p, work));
                }
            }
        }
    }
}

} // namespace paged
