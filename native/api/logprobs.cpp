// Log probabilities of tokens over the whole vocabulary.
#include "guard.hpp"
#include "handles.hpp"
#include "row-team.hpp"
#include "timer.hpp"

#include <algorithm>
#include <cmath>

namespace {

// Write the k most likely tokens; -1 for the rest if fewer tokens have a probability above 0.
void write_top(const float * logits, int32_t n_vocab, double mass, int32_t k, std::vector<velo::candidate> & best,
               int32_t * tokens, float * logprobs) {
    velo::find_best(logits, n_vocab, k, best);
    std::sort(best.begin(), best.end(), velo::is_better);
    best.resize(static_cast<size_t>(k), {-INFINITY, -1});
    for (const velo::candidate & token : best) {
        *tokens++   = token.id;
        *logprobs++ = static_cast<float>(static_cast<double>(token.value) - mass);
    }
}

} // namespace

velo_status velo_logprobs(velo_context * context, const int32_t * rows, const int32_t * tokens, int32_t n, int32_t k,
                          float * logprobs, int32_t * top_tokens, float * top_logprobs) noexcept {
    return velo::guarded([&] {
        const auto        held = velo::hold(context);
        const velo::timer timer(context->timings.sample_seconds);
        velo::check_array(rows, n, "rows");
        velo::check_array(tokens, n, "tokens");
        velo::check_array(logprobs, n, "logprobs");
        velo::check_range("k", k, 0, context->n_vocab);
        velo::check_array(top_tokens, k > 0 ? n : 0, "top_tokens");
        velo::check_array(top_logprobs, k > 0 ? n : 0, "top_logprobs");
        std::vector<const float *> logits; // of each row
        for (int32_t i = 0; i < n; ++i) {
            velo::check_range("a token", tokens[i], 0, context->n_vocab - 1);
            logits.push_back(velo::logits_of(*context, rows[i]));
        }
        velo::for_rows(*context, n, true, [&](int32_t i, velo::row_buffers & buffers) {
            const float *         row = logits[static_cast<size_t>(i)];
            const velo::top_logit top = velo::find_top(row, context->n_vocab);
            if (!top.computable) {
                velo::fail(VELO_FAILED, "the logits hold a NaN or an infinity: the model or its weights are damaged");
            }
            const double mass = velo::log_sum(row, context->n_vocab, top.max);
            logprobs[i]       = static_cast<float>(static_cast<double>(row[tokens[i]]) - mass);
            if (k > 0) {
                const ptrdiff_t at = static_cast<ptrdiff_t>(i) * k;
                write_top(row, context->n_vocab, mass, k, buffers.best, top_tokens + at, top_logprobs + at);
            }
        });
    });
}
