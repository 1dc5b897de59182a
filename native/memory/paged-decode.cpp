// One step: split the batch into ubatches of at most n_ubatch tokens, and run them.

#include "paged-attn.h"
#include "paged-batch.h"
#include "paged-state.h"

#include "llama-graph.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"

#include <algorithm>
#include <cstring>

using access = llama_paged_access;

// -- one ubatch of the batch

// Ranges of tokens and sequences in one ubatch.
struct ubatch_range {
    int32_t t0, t1;
    int32_t s0, s1;
};

// Round up, so that more steps have the same shapes and reuse their graph.
static int32_t bucket(int32_t n, int32_t step, uint32_t limit) {
    return std::min<int32_t>((n + step - 1) / step * step, (int32_t) limit);
}

// Return the blocks of a row of a table: of a sequence of `length` tokens, without its first blocks.
static int32_t blocks_of_row(int32_t length, int32_t first, int32_t block_size) {
    return (length - 1) / block_size + 1 - first;
}

// Write a row of a table for each sequence of the ubatch, with the blocks of a part. A sequence's length excludes its
// tokens in later ubatches.
static void write_rows(const llama_paged_cache & cache, const llama_paged_batch & b, const ubatch_range & p,
                       const paged_part & part, int32_t * out, size_t stride) {
    const int32_t block_size = cache.paged->params.block_size;
    for (int32_t s = p.s0; s < p.s1; ++s, out += stride) {
        const seq_row     row      = row_of(b, s);
        const group_table table    = table_of(b, part.group, s);
        const int32_t     begin    = std::max(row.first, p.t0);
        const int32_t     end      = std::min(row.first + row.n_tokens, p.t1);
        const int32_t     length   = row.length - (row.first + row.n_tokens - end);
        const int32_t     n_blocks = blocks_of_row(length, table.first, block_size);
        out[GGML_PAGED_ATTN_Q0]    = begin - p.t0;
        out[GGML_PAGED_ATTN_NQ]    = end - begin;
        out[GGML_PAGED_ATTN_KV]    = length;
        out[GGML_PAGED_ATTN_FIRST] = table.first;
        std::transform(table.blocks, table.blocks + n_blocks, out + GGML_PAGED_ATTN_HEADER,
                       [&](int32_t block) { return block * cache.n_shares + part.share; });
    }
}

// Fill the tables of a cache's parts.
static void set_tables(llama_paged_cache & cache, const llama_paged_batch & b, const ubatch_range & p) {
    const llama_paged & paged = *cache.paged;
    const int32_t       bs    = paged.params.block_size;
    int32_t             width = 1;
    for (const int32_t group : cache.groups) {
        for (int32_t s = p.s0; s < p.s1; ++s) {
            const int32_t first = table_of(b, group, s).first;
            width               = std::max(width, blocks_of_row(row_of(b, s).length, first, bs));
        }
    }
    cache.width         = bucket(width, 64, paged.max_width);
    const size_t stride = GGML_PAGED_ATTN_HEADER + cache.width, of_part = paged.step.n_rows * stride;
    cache.tables.assign(cache.n_parts() * of_part, 0);
    int32_t *             rows    = cache.tables.data();
    const llama_hparams & hparams = access::hparams(*cache.cache);
    for (const paged_part & part : cache.parts) {
        const ggml_paged_attn_params params = paged_params_of(paged, hparams, part.has_window);
        write_rows(cache, b, p, part, rows, stride);
        ggml_paged_attn_find_shared(rows, p.s1 - p.s0, stride, bs);
        ggml_paged_attn_plan(rows, paged.step.n_rows, stride, part.n_queries, &params);
        rows += of_part;
    }
}

// Return whether rows of the tables share a quarter of their blocks or more with the row before.
static bool has_prefixes(const llama_paged & paged, int32_t n_rows) {
    int64_t shared = 0, all = 0;
    for (const llama_paged_cache & cache : paged.caches) {
        const size_t    stride = GGML_PAGED_ATTN_HEADER + cache.width;
        const int32_t * row    = cache.tables.data();
        for (int32_t i = 0; i < n_rows; ++i, row += stride) { // of the first part
            shared += row[GGML_PAGED_ATTN_SHARED];
            all += blocks_of_row(row[GGML_PAGED_ATTN_KV], row[GGML_PAGED_ATTN_FIRST], paged.params.block_size);
        }
    }
    return shared > 0 && 4 * shared >= all;
}

// Fill the graph's inputs.
static void set_step(llama_paged & paged, const llama_paged_batch & b, const ubatch_range & p) {
    paged_step & step = paged.step;
    step.slots        = b.slots + p.t0;
    step.token_stride = b.token_stride;
    step.n_tokens     = p.t1 - p.t0;
    step.n_rows       = bucket(p.s1 - p.s0, 8, paged.params.max_rows);
    for (llama_paged_cache & cache : paged.caches) {
        set_tables(cache, b, p);
    }
    const bool single = p.t1 - p.t0 == p.s1 - p.s0; // each sequence of a ubatch has a token in it
    step.flags =
        (single ? GGML_PAGED_ATTN_SINGLE : 0) | (has_prefixes(paged, p.s1 - p.s0) ? GGML_PAGED_ATTN_PREFIXES : 0);
}

static llama_ubatch make_ubatch(llama_paged & paged, const llama_paged_batch & b, const ubatch_range & p) {
    const int32_t n      = p.t1 - p.t0;
    const bool    states = paged.states != nullptr;
    auto &        buf    = paged.buffers;
    buf.n_seq_id.assign(n, 1);
    buf.seq_ptr.resize(n);
    buf.seq_idx.assign(LLAMA_MAX_SEQ, -1);
    if (states) { // sequences of equally many tokens, each with its own state
        buf.seq_data.assign(b.states + p.s0, b.states + p.s1);
    } else { // paged attention does not use sequence ids
        buf.seq_data.assign(1, 0);
    }
    buf.seq_unq          = buf.seq_data;
    const int32_t n_seqs = (int32_t) buf.seq_data.size();
    for (int32_t i = 0; i < n; ++i) {
        buf.seq_ptr[i] = &buf.seq_data[states ? i / (n / n_seqs) : 0];
    }
    for (int32_t s = 0; s < n_seqs; ++s) {
        buf.seq_idx[buf.seq_unq[s]] = s;
    }

    llama_ubatch ub = {};
    ub.b_equal_seqs = states;
    ub.n_tokens     = n;
    ub.n_seqs       = states ? n_seqs : n;
    ub.n_seq_tokens = n / ub.n_seqs;
    ub.n_seqs_unq   = n_seqs;
    ub.n_pos        = 1;
    ub.token        = const_cast<llama_token *>(b.tokens + p.t0);
    ub.pos          = const_cast<llama_pos *>(b.positions + p.t0);
    ub.n_seq_id     = buf.n_seq_id.data();
    ub.seq_id       = buf.seq_ptr.data();
    ub.seq_id_unq   = buf.seq_unq.data();
    ub.seq_idx      = buf.seq_idx.data();
    ub.output       = const_cast<int8_t *>(b.outputs + p.t0);
    if (states) { // upstream reuses a graph only if it shares ownership of the ubatch's ids
        ub.data             = std::make_shared<llama_ubatch::data_t>();
        ub.data->seq_id_unq = buf.seq_unq;
        ub.seq_id_unq       = ub.data->seq_id_unq.data();
    }
    return ub;
}

// Create the memory context of a model with recurrent layers, with the cells of this ubatch's states.
static llama_memory_context_ptr states_context(llama_context & ctx, llama_paged & paged, const llama_ubatch & ub) {
    std::vector<llama_ubatch> ubatches{ub};
    if (!paged.states->prepare(ubatches)) {
        paged_fail(LLAMA_PAGED_FAILED, "no recurrent state for the sequences of the step");
    }
    if (paged.caches.empty()) {
        return std::make_unique<llama_memory_recurrent_context>(paged.states, ubatches);
    }
    llama_kv_cache::slot_info unused = {};
    unused.resize(1);
    unused.strm[0] = 0;
    unused.idxs[0].assign(1, 0);

    llama_memory_i * memory = &access::memory(ctx);
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return std::make_unique<llama_memory_hybrid_context>(hybrid, llama_kv_cache::slot_info_vec_t{unused}, ubatches);
    }
    return std::make_unique<llama_memory_hybrid_iswa_context>(static_cast<llama_memory_hybrid_iswa *>(memory),
                                                              llama_kv_cache::slot_info_vec_t{unused},
                                                              llama_kv_cache::slot_info_vec_t{unused}, ubatches);
}

// -- running

// Number the output tokens from n_done on, and copy their logits to the context's. Those of a step of one ubatch may
// stay in their graph: return where they are. Most graphs compute only the outputs' rows; cogvlm's computes all rows.
static float * take_logits(llama_context & ctx, llm_graph_result & result, const llama_ubatch & ub,
                           const ubatch_range & p, bool only, int32_t n_done) {
    ggml_tensor * logits = result.get_logits();
    if (!logits) {
        paged_fail(LLAMA_PAGED_UNSUPPORTED, "the graph of the model computes no logits");
    }
    const ggml_backend_t backend  = ggml_backend_sched_get_tensor_backend(access::sched(ctx), logits);
    const size_t         row      = ctx.get_model().vocab.n_tokens() * sizeof(float);
    uint8_t *            to       = reinterpret_cast<uint8_t *>(access::logits(ctx)) + n_done * row;
    const uint32_t       n_wanted = access::n_outputs(ctx);
    const bool           all      = logits->ne[1] != (int64_t) n_wanted;
    const bool           whole    = ggml_is_contiguous(logits) && ggml_nbytes(logits) == n_wanted * row;
    const bool           stay     = only && n_wanted > 0 && whole && ggml_backend_buffer_is_host(logits->buffer);
    if (!all && !stay && n_wanted > 0) {
        ggml_backend_tensor_get_async(backend, logits, to, 0, n_wanted * row);
    }
    for (uint32_t i = 0; i < ub.n_tokens; ++i) {
        if (!ub.output[i]) {
            continue;
        }
        if (all) {
            ggml_backend_tensor_get_async(backend, logits, to, i * row, row);
            to += row;
        }
        access::output_ids(ctx)[p.t0 + i] = n_done++;
    }
    return stay ? static_cast<float *>(logits->data) : access::logits(ctx);
}

// Clears all recurrent states at its end, unless their graph has run.
struct clear_unless_done {
    llama_memory_recurrent * states;
    bool                     done = false;

    ~clear_unless_done() {
        if (states && !done) {
            states->clear(false);
        }
    }
};

// Run one ubatch, after n_done outputs of earlier ones, and return its number of outputs.
static int32_t run_ubatch(llama_context & ctx, llama_paged & paged, const llama_paged_batch & b, const ubatch_range & p,
                          int32_t n_done) {
    set_step(paged, b, p);
    const llama_ubatch ub = make_ubatch(paged, b, p);

    const int32_t n_outputs =
        (int32_t) std::count_if(ub.output, ub.output + ub.n_tokens, [](int8_t o) { return o != 0; });
    access::n_outputs(ctx) = n_outputs; // the graph depends on it

    llama_memory_context_ptr own;
    if (paged.states) {
        own = states_context(ctx, paged, ub);
    }
    // a graph moves states of other sequences, too, and zeroes the cells of new ones
    clear_unless_done states{paged.states};
    ggml_status       status = GGML_STATUS_FAILED;
    auto * result = ctx.process_ubatch(ub, LLM_GRAPH_TYPE_DEFAULT, own ? own.get() : paged.memory.get(), status);
    if (!result) {
        switch (status) {
        case GGML_STATUS_ABORTED:
            paged_fail(LLAMA_PAGED_ABORTED, "the step was aborted");
        case GGML_STATUS_ALLOC_FAILED:
            paged_fail(LLAMA_PAGED_NO_MEMORY, "no memory for the graph of the step");
        default:
            paged_fail(LLAMA_PAGED_FAILED, "the step could not be computed");
        }
    }
    states.done  = true;
    paged.logits = take_logits(ctx, *result, ub, p, p.t1 - p.t0 == b.n_tokens, n_done);
    if (own) {
        ctx.synchronize(); // the graph uses the memory context, which is freed here
    }
    return n_outputs;
}

// Split the batch every n_ubatch tokens: paged attention takes any mixture of sequences.
static std::vector<ubatch_range> split_by_tokens(const llama_paged_batch & b, int32_t n_ubatch) {
    std::vector<ubatch_range> ranges;
    int32_t                   s = 0;
    for (int32_t t = 0; t < b.n_tokens; t += n_ubatch) {
        const int32_t end = std::min(b.n_tokens, t + n_ubatch);
        while (row_of(b, s).first + row_of(b, s).n_tokens <= t) {
            ++s;
        }
        int32_t s1 = s;
        while (s1 < b.n_seqs && row_of(b, s1).first < end) {
            ++s1;
        }
        ranges.push_back({t, end, s, s1});
    }
    return ranges;
}

// Split the batch for recurrent layers: into sequences of equally many tokens, or chunks of a long one.
static std::vector<ubatch_range> split_by_length(const llama_paged_batch & b, int32_t n_ubatch) {
    std::vector<ubatch_range> ranges;
    for (int32_t s = 0; s < b.n_seqs;) {
        const seq_row row = row_of(b, s);
        if (row.n_tokens > n_ubatch) {
            for (int32_t t = 0; t < row.n_tokens; t += n_ubatch) {
                ranges.push_back({row.first + t, row.first + std::min(row.n_tokens, t + n_ubatch), s, s + 1});
            }
            ++s;
            continue;
        }
        int32_t end = s;
        while (end < b.n_seqs && row_of(b, end).n_tokens == row.n_tokens && (end - s + 1) * row.n_tokens <= n_ubatch) {
            ++end;
        }
        ranges.push_back({row.first, row.first + (end - s) * row.n_tokens, s, end});
        s = end;
    }
    return ranges;
}

// Outside a step the graph builder reserves the largest graph: end the step on every path.
struct step_scope {
    paged_step & step;
    ~step_scope() { step.slots = nullptr; }
};

static void decode(llama_context & ctx, llama_paged & paged, const llama_paged_batch & b) {
    paged_check_batch(ctx, paged, b);
    paged.n_logits = 0; // until the step has succeeded
    access::begin(ctx, b.n_tokens, paged_count_outputs(b));

    const step_scope scope{paged.step};
    const int32_t    n_ubatch = ctx.get_cparams().n_ubatch;
    int32_t          n_done   = 0;
    for (const ubatch_range & p : paged.states ? split_by_length(b, n_ubatch) : split_by_tokens(b, n_ubatch)) {
        n_done += run_ubatch(ctx, paged, b, p, n_done);
    }
    access::n_outputs(ctx) = n_done;
    paged.n_logits         = n_done;
}

llama_paged_status llama_decode_paged(llama_context * ctx, const llama_paged_batch * batch) {
    return paged_guard([&] {
        llama_paged & paged = paged_of(ctx);
        if (!batch) {
            paged_fail(LLAMA_PAGED_INVALID, "the batch is null");
        }
        paged.computing = true;
        decode(*ctx, paged, *batch);
        int32_t highest = -1;
        for (int32_t g = 0; g < paged.n_groups; ++g) {
            const int32_t * slots = batch->slots + (size_t) g * batch->token_stride;
            highest               = std::max(highest, *std::max_element(slots, slots + batch->n_tokens));
        }
        paged.ahead.stored(highest, (int64_t) paged.n_groups * batch->n_tokens);
    });
}

void llama_paged_drop_step(llama_context * ctx) {
    paged_guard([&] {
        llama_paged & paged = paged_of(ctx);
        ctx->synchronize();
        paged.n_logits = 0;
        if (paged.states) {
            paged.states->clear(false);
        }
    });
}

llama_paged_status llama_paged_logits(llama_context * ctx, int32_t row, float ** logits) {
    return paged_guard([&] {
        llama_paged & paged = paged_of(ctx);
        if (paged.computing) { // once for all rows
            ctx->synchronize();
            paged.computing = false;
        }
        if (row < 0 || row >= paged.n_logits) {
            paged_fail(LLAMA_PAGED_INVALID, "row " + std::to_string(row) + " is not one of the " +
                                                std::to_string(paged.n_logits) + " outputs of the last step");
        }
        *logits = paged.logits + (int64_t) row * ctx->get_model().vocab.n_tokens();
    });
}
