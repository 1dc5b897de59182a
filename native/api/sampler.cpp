// Samplers: parameters and token counts of one sequence. Bias and penalties change only the logits of a few tokens.
#include "guard.hpp"
#include "handles.hpp"
#include "row-team.hpp"
#include "timer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

void check_finite(const char * name, float value, float low) {
    if (!std::isfinite(value) || value < low) {
        velo::fail(VELO_INVALID, "%s is %g, but must be a finite number%s", name, static_cast<double>(value),
                   low == 0.0f ? ", 0 or more" : "");
    }
}

void check_params(const velo_sampler_params & params) {
    check_finite("temperature", params.temperature, 0.0f);
    check_finite("presence_penalty", params.presence_penalty, -infinity);
    check_finite("frequency_penalty", params.frequency_penalty, -infinity);
    velo::check_range("top_k", params.top_k, 0, INT32_MAX);
    if (!(params.top_p > 0.0f && params.top_p <= 1.0f)) {
        velo::fail(VELO_INVALID, "top_p is %g, but must be above 0 and at most 1", static_cast<double>(params.top_p));
    }
    if (!(params.min_p >= 0.0f && params.min_p <= 1.0f)) {
        velo::fail(VELO_INVALID, "min_p is %g, but must be from 0 to 1", static_cast<double>(params.min_p));
    }
    if (!(params.repetition_penalty > 0.0f && std::isfinite(params.repetition_penalty))) {
        velo::fail(VELO_INVALID, "repetition_penalty is %g, but must be a finite number above 0",
                   static_cast<double>(params.repetition_penalty));
    }
}

std::vector<llama_logit_bias> read_bias(const velo_sampler_params & params, int32_t n_vocab) {
    velo::check_array(params.bias_tokens, params.n_bias, "bias_tokens");
    velo::check_array(params.bias_values, params.n_bias, "bias_values");
    std::vector<llama_logit_bias> bias;
    for (int32_t i = 0; i < params.n_bias; ++i) {
        const int32_t token = params.bias_tokens[i];
        const float   value = params.bias_values[i];
        if (token < 0 || token >= n_vocab) {
            velo::fail(VELO_INVALID, "a bias names token %d, but the vocabulary has the ids from 0 to %d", token,
                       n_vocab - 1);
        }
        if (std::isnan(value) || value == infinity) {
            velo::fail(VELO_INVALID, "the bias of token %d is %g, but must be a number or -infinity", token,
                       static_cast<double>(value));
        }
        bias.push_back({token, value});
    }
    return bias;
}

void apply_mask(const std::vector<uint8_t> & mask, float * logits, int32_t n_vocab) {
    for (int32_t i = 0; i < n_vocab; ++i) {
        const bool allowed = (mask[static_cast<size_t>(i) / 8] >> (i % 8) & 1) != 0;
        logits[i]          = allowed ? logits[i] : -infinity;
    }
}

void adjust(const velo_sampler & sampler, float * logits) {
    for (const llama_logit_bias & bias : sampler.bias) {
        logits[bias.token] += bias.bias;
    }
    const velo_sampler_params & params = sampler.params;
    for (const auto & [token, count] : sampler.seen) {
        float & logit = logits[token];
        if (logit <= 0.0f) {
            logit *= params.repetition_penalty;
        } else if (logit < infinity) { // keep a damaged model's infinity; a small penalty must not make one
            logit = std::min(logit / params.repetition_penalty, std::numeric_limits<float>::max());
        }
        if (count > 0) {
            logit -= params.presence_penalty + params.frequency_penalty * static_cast<float>(count);
        }
    }
}

// Logits as a sampler sees them. A mask needs a copy; bias and penalties change a few in place, which the destructor
// takes back.
class adjusted_logits {
public:
    adjusted_logits(const velo_sampler & sampler, float * logits, int32_t n_vocab, std::vector<float> & copy)
        : logits_(logits) {
        if (!sampler.mask.empty()) {
            copy.assign(logits, logits + n_vocab);
            logits_ = copy.data();
            apply_mask(sampler.mask, logits_, n_vocab);
        }
        for (const llama_logit_bias & bias : sampler.bias) {
            keep(bias.token);
        }
        for (const auto & [token, count] : sampler.seen) {
            keep(token);
        }
        adjust(sampler, logits_);
    }
    ~adjusted_logits() {
        for (const llama_logit_bias & one : kept_) {
            logits_[one.token] = one.bias;
        }
    }
    adjusted_logits(const adjusted_logits &)             = delete;
    adjusted_logits & operator=(const adjusted_logits &) = delete;

    const float * data() const { return logits_; }

private:
    void keep(llama_token token) { kept_.push_back({token, logits_[token]}); }

    float *                       logits_;
    std::vector<llama_logit_bias> kept_; // tokens and their logits before
};

velo_status sample_row(velo_sampler & sampler, float * raw, int32_t n_vocab, velo::row_buffers & buffers,
                       int32_t & token) {
    const adjusted_logits adjusted(sampler, raw, n_vocab, buffers.logits);
    const float *         logits = adjusted.data();
    const velo::top_logit best   = velo::find_top(logits, n_vocab);
    if (!best.computable) {
        token = -1;
        return velo::report(VELO_FAILED,
                            best.max > -infinity
                                ? "the logits hold a NaN or an infinity: the model or its weights are damaged"
                                : "no token can be drawn: all are banned, or not a number");
    }
    if (sampler.greedy) {
        token = best.token;
    } else {
        const velo_sampler_params & p = sampler.params;
        const double                u = static_cast<double>(sampler.random() >> 11) * 0x1p-53;
        token = buffers.drawer.draw(logits, n_vocab, best.max, {p.temperature, p.top_k, p.top_p, p.min_p}, u);
    }
    if (sampler.counts) {
        ++sampler.seen[token];
    }
    return VELO_OK;
}

template <class T> bool are_distinct(std::vector<T> items) {
    std::sort(items.begin(), items.end());
    return std::adjacent_find(items.begin(), items.end()) == items.end();
}

} // namespace

velo_sampler_params velo_sampler_default_params(void) noexcept {
    velo_sampler_params params{};
    params.temperature        = 1.0f;
    params.top_p              = 1.0f;
    params.repetition_penalty = 1.0f;
    return params;
}

velo_status velo_sampler_create(const velo_model * model, const velo_sampler_params * params,
                                velo_sampler ** sampler) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(sampler, "sampler");
        *sampler = nullptr;
        velo::check_pointer(model, "model");
        velo::check_pointer(params, "params");
        check_params(*params);

        auto made                = std::make_unique<velo_sampler>();
        made->model              = model->llama;
        made->params             = *params;
        made->bias               = read_bias(*params, model->n_vocab);
        made->params.bias_tokens = nullptr;
        made->params.bias_values = nullptr;
        made->counts =
            params->repetition_penalty != 1.0f || params->presence_penalty != 0.0f || params->frequency_penalty != 0.0f;
        made->greedy = params->temperature == 0.0f || params->top_k == 1;
        made->random.seed(params->seed);
        *sampler = made.release();
    });
}

void velo_sampler_free(velo_sampler * sampler) noexcept { delete sampler; }

velo_status velo_sampler_prompt(velo_sampler * sampler, const int32_t * tokens, int32_t n_tokens) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(sampler, "sampler");
        velo::check_array(tokens, n_tokens, "tokens");
        const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(sampler->model.get()));
        for (int32_t i = 0; i < n_tokens; ++i) {
            if (tokens[i] < 0 || tokens[i] >= n_vocab) {
                velo::fail(VELO_INVALID, "token %d is not in the vocabulary, which has the ids from 0 to %d", tokens[i],
                           n_vocab - 1);
            }
        }
        if (sampler->params.repetition_penalty == 1.0f) {
            return; // the other penalties use the output only
        }
        for (int32_t i = 0; i < n_tokens; ++i) {
            sampler->seen.try_emplace(tokens[i], 0);
        }
    });
}

velo_status velo_sampler_mask(velo_sampler * sampler, const uint8_t * bits, size_t size) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(sampler, "sampler");
        const auto n_vocab = static_cast<size_t>(llama_vocab_n_tokens(llama_model_get_vocab(sampler->model.get())));
        if (size > 0) {
            velo::check_pointer(bits, "bits");
        }
        if (size > 0 && size < (n_vocab + 7) / 8) {
            velo::fail(VELO_INVALID, "a mask of %zu bytes is too short for %zu tokens", size, n_vocab);
        }
        sampler->mask.assign(bits, bits + size);
    });
}

velo_status velo_sample(velo_context * context, const int32_t * rows, velo_sampler * const * samplers, int32_t n,
                        int32_t * tokens, int32_t * statuses) noexcept {
    return velo::guarded([&] {
        const auto        held = velo::hold(context);
        const velo::timer timer(context->timings.sample_seconds);
        velo::check_array(rows, n, "rows");
        velo::check_array(samplers, n, "samplers");
        velo::check_array(tokens, n, "tokens");
        velo::check_array(statuses, n, "statuses");
        std::vector<float *> logits;      // of each row
        for (int32_t i = 0; i < n; ++i) { // check everything before the first sampler draws
            velo::check_pointer(samplers[i], "a sampler");
            if (samplers[i]->model != context->model) {
                velo::fail(VELO_INVALID, "sampler %d was made for another model", i);
            }
            logits.push_back(velo::logits_of(*context, rows[i]));
        }
        // a sampler that occurs twice draws in order, and each changes its row for a while
        const bool apart = are_distinct(logits) && are_distinct(std::vector<velo_sampler *>(samplers, samplers + n));
        velo::for_rows(*context, n, apart, [&](int32_t i, velo::row_buffers & buffers) {
            statuses[i] =
                sample_row(*samplers[i], logits[static_cast<size_t>(i)], context->n_vocab, buffers, tokens[i]);
        });
    });
}
