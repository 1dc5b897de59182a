// Embeddings: a vector for a text, pooled from its tokens' vectors, with a stock context.
#include "guard.hpp"
#include "handles.hpp"
#include "host-memory.hpp"
#include "model-facts.h"
#include "team.hpp"
#include "threads.hpp"

#include "ggml.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr int32_t batch_tokens =
    512; // for several short texts: attention computes scores between all tokens of a batch
constexpr int32_t batch_texts = 64;
// upstream allocates logits for all tokens of a batch of embeddings
constexpr int64_t logits_bytes = int64_t{64} << 20;
// most scores of a head that are stored; beyond, use flash attention, which rounds to f16
constexpr int64_t plain_scores = int64_t{1} << 21;

bool is_cancelled(void * embedder) {
    return static_cast<velo_embedder *>(embedder)->phase.load(std::memory_order_relaxed) == velo::RUN_CANCELLED;
}

// Marks the embedder as running, so that velo_embedder_cancel has an effect.
struct running {
    explicit running(velo_embedder & embedder) : embedder(embedder) { embedder.phase = velo::RUN_RUNNING; }
    ~running() { embedder.phase = velo::RUN_IDLE; }
    running(const running &)             = delete;
    running & operator=(const running &) = delete;

    velo_embedder & embedder;
};

// End the graph after the tokens' vectors; the logits follow. Other outputs may precede them: the hidden states for
// multi-token prediction. Callback of the scheduler: whether to observe a tensor if `ask`, else whether to continue.
bool before_logits(ggml_tensor * tensor, bool ask, void * embedder) {
    const llama_context * context = static_cast<velo_embedder *>(embedder)->llama.get();
    return ask && context && tensor == llama_context_vectors(context);
}

// ---- checks ----

void check_model(const velo_model & model) {
    const llama_model * llama = model.llama.get();
    if (model.vocab_only) {
        velo::fail(VELO_INVALID, "%s", model.refusal.c_str());
    }
    if (llama_model_has_encoder(llama) && llama_model_has_decoder(llama)) {
        velo::fail(VELO_UNSUPPORTED, "this model cannot embed texts: it has an encoder and a decoder");
    }
    if (!model.refusal.empty() && !llama_model_is_encoder(llama)) {
        velo::fail(VELO_UNSUPPORTED, "this model cannot embed texts: %s", model.refusal.c_str());
    }
}

int32_t tokens_of_batch(const velo_embedder & embedder) {
    if (embedder.whole) {
        return std::max(batch_tokens, embedder.max_tokens);
    }
    return static_cast<int32_t>(std::clamp<int64_t>(logits_bytes / 4 / embedder.n_vocab, 32, batch_tokens));
}

// Check free memory first: a system that overcommits memory would kill the process later.
void check_memory(const velo_model & model, const velo_embedder & embedder, uint32_t n_ctx) {
    std::vector<velo_layer> layers(static_cast<size_t>(llama_model_cached_layers(model.llama.get(), nullptr, 0)));
    llama_model_cached_layers(model.llama.get(), layers.data(), static_cast<int32_t>(layers.size()));
    double bytes = 4.0 * embedder.max_batch * (static_cast<double>(embedder.n_vocab) + embedder.n_embd);
    for (const velo_layer & layer : layers) {
        bytes += 2.0 * n_ctx * layer.n_head_kv * (layer.head_dim_k + layer.head_dim_v);
    }
    const auto free = static_cast<double>(velo::free_host_memory());
    if (!model.offloads && bytes > free) {
        constexpr double mib = 1024.0 * 1024.0;
        velo::fail(VELO_OUT_OF_MEMORY,
                   "a text of %d tokens needs %.1f MiB to embed, but %.1f MiB of memory are free: shorten it",
                   embedder.max_tokens, bytes / mib, free / mib);
    }
}

llama_context_params context_params(velo_embedder & embedder, int32_t n_threads) {
    llama_context_params out = llama_context_default_params();
    out.n_ctx                = static_cast<uint32_t>(std::max(embedder.max_batch, embedder.max_tokens));
    out.n_batch              = static_cast<uint32_t>(embedder.max_batch);
    out.n_ubatch             = out.n_batch;
    out.n_seq_max            = static_cast<uint32_t>(embedder.max_texts);
    out.n_threads            = velo::threads_for(n_threads);
    out.n_threads_batch      = out.n_threads;
    out.embeddings           = true;
    out.pooling_type         = LLAMA_POOLING_TYPE_NONE; // we pool: a text may be in several batches
    out.flash_attn_type =
        int64_t{out.n_ctx} * out.n_batch <= plain_scores ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_AUTO;
    out.kv_unified          = true;
    out.swa_full            = true;
    out.cb_eval             = before_logits;
    out.cb_eval_user_data   = &embedder;
    out.abort_callback      = is_cancelled;
    out.abort_callback_data = &embedder;
    return out;
}

// ---- running ----

struct text {
    const int32_t * tokens;
    int32_t         n_tokens;
    int32_t         n_done = 0;
};

// Pooling of a text over several batches.
class pool {
public:
    pool(int32_t pooling, int32_t n_embd) : pooling(pooling), values(static_cast<size_t>(n_embd)) {}

    void add(const float * token) {
        ++n;
        if (pooling == VELO_POOLING_MEAN) {
            for (size_t i = 0; i < values.size(); ++i) {
                values[i] += static_cast<double>(token[i]);
            }
        } else if (pooling == VELO_POOLING_LAST || n == 1) {
            std::copy_n(token, values.size(), values.begin());
        }
    }

    void write(float * out) const {
        const double count = pooling == VELO_POOLING_MEAN ? n : 1;
        for (size_t i = 0; i < values.size(); ++i) {
            out[i] = static_cast<float>(values[i] / count);
            if (!std::isfinite(out[i])) {
                velo::fail(VELO_FAILED, "an embedding is not finite: the model or its weights are damaged");
            }
        }
    }

private:
    int32_t             pooling;
    int32_t             n = 0;
    std::vector<double> values;
};

void check_status(int32_t status) {
    if (status == 2) {
        velo::fail(VELO_CANCELLED, "the embedding was cancelled");
    }
    if (status == -2) {
        velo::fail(VELO_OUT_OF_MEMORY, "no memory for the embeddings of a batch%s; use shorter texts",
                   velo::failure().c_str());
    }
    if (status != 0) {
        velo::fail(VELO_FAILED, "the embeddings cannot be computed (status %d)%s", status, velo::failure().c_str());
    }
}

// Batch of tokens of several sequences, all of them outputs.
struct token_batch {
    std::vector<llama_token>    tokens;
    std::vector<llama_pos>      positions;
    std::vector<llama_seq_id>   owners;
    std::vector<llama_seq_id *> owner_lists; // lists of one owner
    std::vector<int32_t>        n_owners;
    std::vector<int8_t>         outputs;

    void add(llama_token token, llama_pos position, llama_seq_id owner) {
        tokens.push_back(token);
        positions.push_back(position);
        owners.push_back(owner);
    }

    llama_batch view() {
        owner_lists.clear();
        for (llama_seq_id & owner : owners) {
            owner_lists.push_back(&owner);
        }
        n_owners.assign(tokens.size(), 1);
        outputs.assign(tokens.size(), 1);
        return {static_cast<int32_t>(tokens.size()),
                tokens.data(),
                nullptr,
                positions.data(),
                n_owners.data(),
                owner_lists.data(),
                outputs.data()};
    }
};

// Compute the next tokens of some texts, up to a batch, with one sequence for each text.
void run_batch(velo_embedder & embedder, text * texts, pool * pools, int32_t n_texts) {
    llama_context * ctx = embedder.llama.get();
    token_batch     taken;
    for (int32_t seq = 0; seq < n_texts; ++seq) {
        text & from = texts[seq];
        while (from.n_done < from.n_tokens && taken.tokens.size() < static_cast<size_t>(embedder.max_batch)) {
            taken.add(from.tokens[from.n_done], from.n_done, seq);
            ++from.n_done;
        }
    }
    const llama_batch batch = taken.view();
    velo::check_files(embedder.files);
    velo::forget_failure();
    const int32_t status = embedder.has_encoder ? llama_encode(ctx, batch) : llama_decode(ctx, batch);
    velo::check_files(embedder.files); // fail before results of lost pages (read as zeros) are used
    check_status(status);
    for (int32_t at = 0; at < batch.n_tokens; ++at) {
        const float * token = llama_get_embeddings_ith(ctx, at);
        if (!token) {
            velo::fail(VELO_FAILED, "the model computes no embeddings of tokens");
        }
        pools[taken.owners[static_cast<size_t>(at)]].add(token);
    }
}

// Return how many of the texts fit into one batch.
int32_t group_of(const velo_embedder & embedder, const std::vector<text> & texts, size_t first) {
    int32_t n_tokens = 0, n = 0;
    while (first + static_cast<size_t>(n) < texts.size() && n < embedder.max_texts) {
        n_tokens += texts[first + static_cast<size_t>(n)].n_tokens;
        if (n > 0 && n_tokens > std::min(embedder.max_batch, batch_tokens)) {
            break;
        }
        ++n;
    }
    return n;
}

std::vector<text> check_texts(const velo_embedder & embedder, const int32_t * tokens, const int32_t * lengths,
                              int32_t n) {
    velo::check_array(lengths, n, "lengths");
    std::vector<text> texts;
    int64_t           n_tokens = 0;
    for (int32_t i = 0; i < n; ++i) {
        velo::check_range("the length of a text", lengths[i], 1, embedder.max_tokens);
        n_tokens += lengths[i];
    }
    velo::check_array(tokens, n_tokens, "tokens");
    for (int64_t i = 0; i < n_tokens; ++i) {
        velo::check_range("a token", tokens[i], 0, embedder.n_vocab - 1);
    }
    for (int32_t i = 0; i < n; ++i) {
        texts.push_back({tokens, lengths[i]});
        tokens += lengths[i];
    }
    return texts;
}

} // namespace

velo_status velo_embedder_create(velo_model * model, const velo_embedder_params * params,
                                 velo_embedder ** embedder) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(embedder, "embedder");
        *embedder = nullptr;
        velo::check_pointer(model, "model");
        velo::check_pointer(params, "params");
        check_model(*model);
        const llama_model * llama = model->llama.get();
        velo::check_range("max_tokens", params->max_tokens, 1, llama_model_n_ctx_train(llama));

        auto made         = std::make_unique<velo_embedder>();
        made->model       = model->llama;
        made->files       = model->files;
        made->packing     = model->packing;
        made->n_vocab     = model->n_vocab;
        made->n_embd      = llama_model_n_embd_out(llama);
        made->max_tokens  = params->max_tokens;
        made->whole       = llama_model_is_encoder(llama);
        made->has_encoder = llama_model_has_encoder(llama);
        made->max_texts   = llama_model_is_recurrent(llama) || llama_model_is_hybrid(llama) ? 1 : batch_texts;
        made->max_batch   = tokens_of_batch(*made);

        const llama_context_params context = context_params(*made, params->n_threads);
        check_memory(*model, *made, context.n_ctx);
        const velo::error_log    log;
        const velo::catch_aborts catching(VELO_UNSUPPORTED);
        made->llama.reset(llama_init_from_model(model->llama.get(), context));
        if (!made->llama) {
            const std::string cause  = log.cause("no reason was given");
            const bool        memory = velo::tells_of_memory(cause);
            velo::fail(memory ? VELO_OUT_OF_MEMORY : VELO_UNSUPPORTED,
                       "the context for embeddings cannot be created: %s%s", cause.c_str(),
                       memory ? "; use shorter texts (n_ctx)" : "");
        }
        *embedder = made.release();
    });
}

void velo_embedder_free(velo_embedder * embedder) noexcept { velo::free_runner(embedder); }

velo_status velo_embed(velo_embedder * embedder, const int32_t * tokens, const int32_t * lengths, int32_t n_texts,
                       int32_t pooling, float * out, size_t capacity) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(embedder, "embedder");
        const velo::held_context held(embedder->mutex);
        std::vector<text>        texts = check_texts(*embedder, tokens, lengths, n_texts);
        velo::check_range("pooling", pooling, VELO_POOLING_MEAN, VELO_POOLING_LAST);
        const auto n_embd = static_cast<size_t>(embedder->n_embd);
        if (capacity < texts.size() * n_embd) {
            velo::fail(VELO_INVALID, "the buffer has room for %zu numbers, but %zu are needed", capacity,
                       texts.size() * n_embd);
        }
        velo::check_array(out, n_texts, "the buffer");

        const running run(*embedder);
        velo::check_files(embedder->files);
        velo::check_team(llama_n_threads(embedder->llama.get()));
        embedder->packing->finish(llama_n_threads(embedder->llama.get()), [&] { return is_cancelled(embedder); });
        for (size_t first = 0; first < texts.size();) {
            const int32_t     n = group_of(*embedder, texts, first);
            std::vector<pool> pools(static_cast<size_t>(n), pool(pooling, embedder->n_embd));
            llama_memory_clear(llama_get_memory(embedder->llama.get()), true);
            const text & last = texts[first + static_cast<size_t>(n) - 1];
            while (last.n_done < last.n_tokens) {
                if (is_cancelled(embedder)) {
                    check_status(2);
                }
                run_batch(*embedder, &texts[first], pools.data(), n);
            }
            for (const pool & done : pools) {
                done.write(out + first++ * n_embd);
            }
        }
    });
}

velo_status velo_embedder_cancel(velo_embedder * embedder) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(embedder, "embedder");
        int expected = velo::RUN_RUNNING;
        embedder->phase.compare_exchange_strong(expected, velo::RUN_CANCELLED);
    });
}
