// Log probabilities of tokens over the whole vocabulary.
#include "guard.hpp"
#include "handles.hpp"
#include "timer.hpp"

#include "llama-paged.h"

#include <algorithm>
#include <cmath>

namespace {

// Write the k most likely tokens; -1 for the rest if fewer tokens have a probability above 0.
void write_top(velo_context & context, const float * logits, double mass, int32_t k, int32_t * tokens,
               float * logprobs) {
    velo::find_best(logits, context.n_vocab, k, context.best);
    std::sort(context.best.begin(), context.best.end(), velo::is_better);
    context.best.resize(static_cast<size_t>(k), {-INFINITY, -1});
    for (const velo::candidate & token : context.best) {
        *tokens++   = token.id;
        *logprobs++ = static_cast<float>(static_cast<double>(token.value) - mass);
    }
}

} // namespace

velo_status velo_logprobs(velo_context * context, const int32_t * rows, const int32_t * tokens, int32_t n, int32_t k,
                          float * logprobs, int32_t * top_tokens, float * top_logprobs) noexcept {
    return velo::guarded([&] {
        const auto        lock = velo::lock_context(context);
        const velo::timer timer(context->timings.sample_seconds);
        velo::check_array(rows, n, "rows");
        velo::check_array(tokens, n, "tokens");
        velo::check_array(logprobs, n, "logprobs");
        velo::check_range("k", k, 0, context->n_vocab);
        velo::check_array(top_tokens, k > 0 ? n : 0, "top_tokens");
        velo::check_array(top_logprobs, k > 0 ? n : 0, "top_logprobs");
        for (int32_t i = 0; i < n; ++i) {
            velo::check_range("a token", tokens[i], 0, context->n_vocab - 1);
            const float * logits = llama_paged_logits(context->llama.get(), rows[i]);
            if (!logits) {
                velo::fail(VELO_INVALID, "%s", llama_paged_error());
            }
            const velo::top_logit top = velo::find_top(logits, context->n_vocab);
            if (!top.computable) {
                velo::fail(VELO_FAILED, "the logits hold a NaN or an infinity: the model or its weights are damaged");
            }
            const double mass = velo::log_sum(logits, context->n_vocab, top.max);
            logprobs[i]       = static_cast<float>(static_cast<double>(logits[tokens[i]]) - mass);
            if (k > 0) {
                const ptrdiff_t at = static_cast<ptrdiff_t>(i) * k;
                write_top(*context, logits, mass, k, top_tokens + at, top_logprobs + at);
            }
        }
    });
}
