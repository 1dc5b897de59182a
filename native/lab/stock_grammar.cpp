// Grammars of upstream, through its public interface alone, to compare with ours.
#include "contiguous.h"

#include "llama.h"

#include <memory>
#include <vector>

namespace {

struct sampler_deleter {
    void operator()(llama_sampler * sampler) const { llama_sampler_free(sampler); }
};

} // namespace

void * stock_vocab_open(const char * path) {
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.vocab_only         = true;
    return llama_model_load_from_file(path, params);
}

void stock_vocab_close(void * model) { llama_model_free(static_cast<llama_model *>(model)); }

int32_t stock_grammar_masks(void * model, const char * grammar, const int32_t * tokens, int32_t n_tokens,
                            uint8_t * allowed) {
    const llama_vocab * vocab = llama_model_get_vocab(static_cast<llama_model *>(model));
    const std::unique_ptr<llama_sampler, sampler_deleter> sampler(llama_sampler_init_grammar(vocab, grammar, "root"));
    if (!sampler) {
        return -1;
    }
    const int32_t                 n_vocab = llama_vocab_n_tokens(vocab);
    std::vector<llama_token_data> data(static_cast<size_t>(n_vocab));
    for (int32_t step = 0; step <= n_tokens; ++step) {
        for (int32_t id = 0; id < n_vocab; ++id) {
            data[static_cast<size_t>(id)] = {id, 0.0f, 0.0f};
        }
        llama_token_data_array all = {data.data(), data.size(), -1, false};
        llama_sampler_apply(sampler.get(), &all);
        uint8_t * mask = allowed + static_cast<size_t>(step) * static_cast<size_t>(n_vocab);
        for (int32_t id = 0; id < n_vocab; ++id) {
            mask[id] = data[static_cast<size_t>(id)].logit == 0.0f;
        }
        // upstream must not get a token that it does not allow, or one after the end
        if (step == n_tokens || !mask[tokens[step]] || llama_vocab_is_eog(vocab, tokens[step])) {
            return step + 1;
        }
        llama_sampler_accept(sampler.get(), tokens[step]);
    }
    return n_tokens + 1;
}
