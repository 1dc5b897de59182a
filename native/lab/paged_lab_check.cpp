// Check the paged operator over types, shapes and batches: the same bits for any number of threads, and the scalar
// reference's numbers. Buffers are exactly as long as the tensors, so that a sanitizer notices reads past the end.
// Arguments: numbers of threads to compare with one thread (default: 2 3 7).
#include "ggml.h"
#include "lab.h"
#include "paged-attn.h"
#include "product_lab_check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace {

struct shape {
    int64_t d_k, d_v, n_head, n_head_kv;
    bool    v_of_k = false;
};

struct options {
    float   max_bias = 0, softcap = 0;
    int32_t block_size = 32, window = 0, window_type = 0;
    bool    sinks = false;
};

struct lengths {
    int32_t n_q, tokens;
};
struct batch {
    std::vector<lengths> sequences;
    int32_t              shared_blocks = 0; // leading blocks of every sequence
};
const batch ragged = {{{1, 1}, {7, 7}, {1, 133}, {33, 100}, {0, 64}, {5, 97}, {1, 640}, {1, 1100}, {70, 600}}};
const batch brief  = {{{1, 40}, {3, 33}, {40, 45}}};
// a shared chunk, of more sequences than a work item takes
const batch alike = {std::vector<lengths>(34, {1, 521}), 16};

// Heap memory of exactly this many bytes.
template <class T> struct buffer {
    std::unique_ptr<T[]> data;
    int64_t              n;
    explicit buffer(int64_t n) : data(new T[n]()), n(n) {}
    T * get() const { return data.get(); }
};

struct call {
    lab_paged       op = {};
    buffer<float>   q, sinks, out;
    buffer<uint8_t> k, v;
    buffer<int32_t> table;
};

std::mt19937 rng(1);

void fill(buffer<float> & x, float width) {
    std::normal_distribution<float> normal(0, width);
    for (int64_t i = 0; i < x.n; ++i) {
        x.get()[i] = normal(rng);
    }
}

buffer<uint8_t> pool(int32_t type, int64_t rows, int64_t d) {
    buffer<float> floats(rows * d);
    fill(floats, 1);
    buffer<uint8_t> bytes(rows * lab_row_size(type, d));
    lab_quantize(type, floats.get(), bytes.get(), rows, d);
    return bytes;
}

int32_t blocks_of(int32_t tokens, int32_t block_size) { return (tokens + block_size - 1) / block_size; }

call make(const batch & b, const shape & s, const options & o, int32_t type_k, int32_t type_v) {
    int64_t n_tokens = 0, n_blocks = b.shared_blocks, width = 1;
    for (const lengths & l : b.sequences) {
        n_tokens += l.n_q;
        n_blocks += blocks_of(l.tokens, o.block_size) - b.shared_blocks;
        width = std::max<int64_t>(width, blocks_of(l.tokens, o.block_size));
    }
    constexpr int64_t header  = GGML_PAGED_ATTN_HEADER;
    const int64_t     n_slots = n_blocks * o.block_size, rows = n_slots * s.n_head_kv;
    call              c = {{},
                           buffer<float>(n_tokens * s.n_head * s.d_k),
                           buffer<float>(s.n_head),
                           buffer<float>(n_tokens * s.n_head * s.d_v),
                           pool(type_k, rows, s.d_k),
                           pool(type_v, s.v_of_k ? 1 : rows, s.d_v),
                           buffer<int32_t>((header + width) * b.sequences.size())};
    fill(c.q, 1.5f);
    fill(c.sinks, 1);
    std::vector<int32_t> ids(n_blocks);
    for (int32_t i = 0; i < n_blocks; ++i) {
        ids[i] = i;
    }
    std::shuffle(ids.begin(), ids.end(), rng);
    std::fill_n(c.table.get(), c.table.n, -1);
    int32_t * row = c.table.get();
    int32_t   q0 = 0, next = b.shared_blocks;
    for (const lengths & l : b.sequences) {
        const int32_t head[header] = {q0, l.n_q, l.tokens, 0, 0};
        const int32_t own          = blocks_of(l.tokens, o.block_size) - b.shared_blocks;
        std::copy_n(head, header, row);
        std::copy_n(ids.data(), b.shared_blocks, row + header);
        std::copy_n(ids.data() + next, own, row + header + b.shared_blocks);
        next += own;
        q0 += l.n_q;
        row += header + width;
    }
    c.op = {type_k,
            type_v,
            s.d_k,
            s.d_v,
            s.n_head,
            s.n_head_kv,
            n_tokens,
            n_slots,
            (int64_t) b.sequences.size(),
            width,
            0,
            0,
            0,
            0,
            0,
            0,
            1.0f / sqrtf((float) s.d_k),
            o.max_bias,
            o.softcap,
            o.block_size,
            o.window,
            o.window_type,
            0,
            c.q.get(),
            c.k.get(),
            s.v_of_k ? nullptr : c.v.get(),
            c.table.get(),
            o.sinks ? c.sinks.get() : nullptr,
            c.out.get()};
    return c;
}

std::vector<float> run(call & c, int32_t threads, bool use_ref, int32_t flags) {
    const lab_run how = {threads, use_ref, 1, 1, 0, nullptr};
    c.op.flags        = flags;
    std::fill_n(c.out.get(), c.out.n, NAN);
    if (const char * wrong = lab_paged_attn(&c.op, &how)) {
        printf("refused: %s\n", wrong);
        exit(1);
    }
    return std::vector<float>(c.out.get(), c.out.get() + c.out.n);
}

double nmse(const std::vector<float> & a, const std::vector<float> & exact) {
    double error = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        error += ((double) a[i] - exact[i]) * ((double) a[i] - exact[i]);
        size += (double) exact[i] * exact[i];
    }
    return error / size;
}

std::vector<int32_t> many_threads = {2, 3, 7};

bool check(const batch & b, const shape & s, const options & o, int32_t type_k, int32_t type_v) {
    call                     c     = make(b, s, o, type_k, type_v);
    const std::vector<float> exact = run(c, 2, true, 0);
    bool                     good  = true;
    double                   worst = 0;
    for (int32_t flags : {0, 1, 2}) { // the last allows bfloat16
        const double             limit = flags == 2 || ggml_is_quantized((ggml_type) type_k) ? 2e-4 : 1e-7;
        const std::vector<float> first = run(c, 1, false, flags);
        worst                          = std::max(worst, nmse(first, exact));
        good                           = good && nmse(first, exact) <= limit; // false for NaN too
        for (int32_t threads : many_threads) {
            const std::vector<float> again = run(c, threads, false, flags);
            good = good && memcmp(again.data(), first.data(), first.size() * sizeof(float)) == 0;
        }
    }
    printf("%-6s %-6s %3d/%3d heads %3d/%d block %d window %d/%d: nmse %.1e %s\n", lab_type_name(type_k),
           lab_type_name(type_v), (int) s.d_k, (int) s.d_v, (int) s.n_head, (int) s.n_head_kv, o.block_size, o.window,
           o.window_type, worst, good ? "ok" : "WRONG");
    fflush(stdout);
    return good;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc > 1) {
        many_threads.clear();
    }
    for (int i = 1; i < argc; ++i) {
        many_threads.push_back(std::max(1, atoi(argv[i])));
    }
    int wrong = 0;
    for (int32_t type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1, GGML_TYPE_Q5_0,
                         GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL}) {
        wrong += !check(ragged, {128, 128, 8, 4}, {}, type, type);
        wrong += !check(ragged, {64, 96, 6, 1}, {8, 0, 64, 0, 0, true}, type, type);
        wrong += !check(ragged, {192, 128, 2, 2}, {0, 20, 32, 70, 1, true}, type, GGML_TYPE_F16);
        wrong += !check(ragged, {576, 512, 16, 1, true}, {0, 0, 32, 300, 2, false}, type, type);
        wrong += !check(alike, {32, 64, 2, 2}, {}, type, type);
        for (int64_t d : {608, 640, 672, 1024}) { // around the largest head of the kernels over quantized values
            wrong += !check(brief, {d, d, 2, 1}, {}, type, type);
        }
        wrong += !check(brief, {4096, 32, 2, 1}, {}, type, type);
        wrong += !check(brief, {32, 4096, 2, 1}, {}, type, type);
    }
    wrong += !check(ragged, {80, 112, 4, 2}, {}, GGML_TYPE_F16, GGML_TYPE_BF16);
    wrong += !check(ragged, {40, 20, 4, 2}, {0, 0, 5, 0, 0, false}, GGML_TYPE_F16, GGML_TYPE_F32);
    wrong += lab_team_barrier(3, 2000) != nullptr;
    wrong += check_products();
    printf(wrong ? "%d wrong\n" : "all right\n", wrong);
    return wrong != 0;
}
