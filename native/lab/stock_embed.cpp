// Embeddings pooled by upstream, through its public interface alone, to compare with ours.
#include "contiguous.h"

#include "llama.h"

#include <algorithm>
#include <memory>

namespace {

struct model_deleter {
    void operator()(llama_model * model) const { llama_model_free(model); }
};
struct context_deleter {
    void operator()(llama_context * context) const { llama_free(context); }
};

} // namespace

int32_t stock_embed(const char * path, int32_t pooling, int32_t n_tokens_max, const int32_t * tokens, int32_t n_tokens,
                    float * out) {
    llama_backend_init();
    const std::unique_ptr<llama_model, model_deleter> model(
        llama_model_load_from_file(path, llama_model_default_params()));
    if (!model) {
        return -1;
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = params.n_ubatch = static_cast<uint32_t>(n_tokens_max);
    params.flash_attn_type                          = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.embeddings                               = true;
    params.pooling_type                             = static_cast<enum llama_pooling_type>(pooling);
    params.n_threads = params.n_threads_batch = 1;
    const std::unique_ptr<llama_context, context_deleter> context(llama_init_from_model(model.get(), params));
    if (!context) {
        return -2;
    }
    llama_batch batch = llama_batch_init(n_tokens, 0, 1);
    batch.n_tokens    = n_tokens;
    for (int32_t i = 0; i < n_tokens; ++i) {
        batch.token[i]     = tokens[i];
        batch.pos[i]       = i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = 1;
    }
    const int32_t status =
        llama_model_has_encoder(model.get()) ? llama_encode(context.get(), batch) : llama_decode(context.get(), batch);
    llama_batch_free(batch);
    const float * from = status == 0 ? llama_get_embeddings_seq(context.get(), 0) : nullptr;
    if (!from) {
        return -3;
    }
    std::copy_n(from, llama_model_n_embd_out(model.get()), out);
    return 0;
}
