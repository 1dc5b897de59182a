#include "contiguous.h"

#include "llama.h"

#include <cstring>

struct contiguous {
    llama_model *   model   = nullptr;
    llama_context * context = nullptr;

    ~contiguous() {
        llama_free(context);
        llama_model_free(model);
    }
};

static llama_context_params context_params(const contiguous_params & p) {
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx                = p.n_ctx;
    cp.n_batch              = p.n_batch;
    cp.n_ubatch             = p.n_batch;
    cp.n_seq_max            = p.n_seqs;
    cp.n_threads            = p.n_threads;
    cp.n_threads_batch      = p.n_threads;
    cp.type_k               = (ggml_type) p.type_k;
    cp.type_v               = (ggml_type) p.type_v;
    cp.flash_attn_type      = p.flash_attn ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    cp.kv_unified           = true;
    cp.swa_full             = true;
    return cp;
}

contiguous * contiguous_open(const char * model, const contiguous_params * params) {
    llama_backend_init();
    llama_model_params mp = llama_model_default_params();
    mp.use_extra_bufts    = params->repack != 0;
    auto * c              = new contiguous;
    c->model              = llama_model_load_from_file(model, mp);
    c->context            = c->model ? llama_init_from_model(c->model, context_params(*params)) : nullptr;
    if (!c->context) {
        delete c;
        return nullptr;
    }
    return c;
}

void contiguous_close(contiguous * c) { delete c; }

int32_t contiguous_n_vocab(const contiguous * c) { return llama_vocab_n_tokens(llama_model_get_vocab(c->model)); }

int32_t contiguous_decode(contiguous * c, const int32_t * tokens, int32_t n, int32_t first, int32_t seq) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens    = n;
    for (int32_t i = 0; i < n; ++i) {
        batch.token[i]     = tokens[i];
        batch.pos[i]       = first + i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i]    = 1; // some graphs always compute all rows, so that the last row is not the first
    }
    const int32_t status = llama_decode(c->context, batch);
    llama_batch_free(batch);
    return status;
}

int32_t contiguous_keep(contiguous * c, int32_t n, int32_t seq) {
    llama_memory_t memory = llama_get_memory(c->context);
    if (llama_memory_seq_rm(memory, seq, n, -1)) {
        return n;
    }
    llama_memory_seq_rm(memory, seq, -1, -1);
    return 0;
}

int32_t contiguous_logits(contiguous * c, float * logits) {
    const float * from = llama_get_logits_ith(c->context, -1);
    if (!from) {
        return -1;
    }
    memcpy(logits, from, contiguous_n_vocab(c) * sizeof(float));
    return 0;
}

int64_t contiguous_state(contiguous * c, int32_t seq, uint8_t * bytes, int64_t capacity) {
    const int64_t size = llama_state_seq_get_size(c->context, seq);
    if (size <= capacity) {
        llama_state_seq_get_data(c->context, bytes, size, seq);
    }
    return size;
}
