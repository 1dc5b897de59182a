// Vocabulary: text to tokens, tokens to text.
#include "big-stack.hpp"
#include "guard.hpp"
#include "handles.hpp"
#include "model-facts.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <stdexcept>

namespace {

const llama_vocab * vocab_of(const velo_model * model) {
    velo::check_pointer(model, "model");
    if (llama_vocab_type(model->vocab) == LLAMA_VOCAB_TYPE_NONE) {
        velo::fail(VELO_UNSUPPORTED, "this model has no vocabulary: use token ids instead of text");
    }
    return model->vocab;
}

void check_token(const velo_model * model, int32_t token) {
    if (token < 0 || token >= model->n_vocab) {
        velo::fail(VELO_INVALID, "token %d is not in the vocabulary, which has the ids from 0 to %d", token,
                   model->n_vocab - 1);
    }
}

// Check the special tokens that upstream adds: it asserts that they exist.
void check_special(const llama_vocab * vocab) {
    const bool   always  = llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_WPM;
    const char * missing = nullptr;
    if ((always || llama_vocab_get_add_bos(vocab)) && llama_vocab_bos(vocab) == LLAMA_TOKEN_NULL) {
        missing = "begins";
    } else if (always ? llama_vocab_sep(vocab) == LLAMA_TOKEN_NULL
                      : llama_vocab_get_add_eos(vocab) && llama_vocab_eos(vocab) == LLAMA_TOKEN_NULL) {
        missing = "ends";
    }
    if (missing) {
        velo::fail(VELO_MODEL_ERROR,
                   "a text of this model %s with a special token, but the model has none: tokenize without add_special",
                   missing);
    }
}

// Upstream splits text by regular expressions of the standard library, which recurse for every character of a match.
#if defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
constexpr size_t stack_per_character = 8192;
#else
constexpr size_t stack_per_character = 1024; // about 300 were measured
#endif

template <class Body> void with_room_for(const llama_vocab * vocab, size_t text_len, const Body & body) {
    constexpr size_t small = 4096;
    if (text_len <= small || llama_vocab_type(vocab) != LLAMA_VOCAB_TYPE_BPE) {
        body();
    } else {
        velo::on_big_stack(text_len * stack_per_character, body);
    }
}

// Limit a capacity to upstream's 32-bit lengths.
int32_t room(size_t capacity) { return static_cast<int32_t>(std::min<size_t>(capacity, INT32_MAX)); }

// Write bytes with an upstream function, which returns their number, or minus the required number.
template <class Write> void put_bytes(char * bytes, size_t capacity, size_t * len, const Write & write) {
    velo::check_pointer(len, "len");
    if (capacity > 0) {
        velo::check_pointer(bytes, "bytes");
    }
    const int64_t written = write(bytes, room(capacity));
    *len                  = static_cast<size_t>(std::abs(written));
    if (written < 0) {
        velo::fail(VELO_BUFFER_TOO_SMALL, "the buffer has %zu bytes, but %zu are needed", capacity, *len);
    }
}

// Write the bytes of all tokens, and return their number as put_bytes expects it. Upstream's llama_detokenize also
// removes spaces in front of punctuation for some vocabularies; generated text has them.
int64_t join_pieces(const llama_vocab * vocab, const int32_t * tokens, int32_t n_tokens, bool special, char * to,
                    int32_t size) {
    int64_t total = 0;
    for (int32_t i = 0; i < n_tokens; ++i) {
        const int64_t left   = std::max<int64_t>(0, size - total);
        const int32_t lstrip = i == 0 && llama_vocab_adds_space(vocab);
        total += std::abs(llama_token_to_piece(vocab, tokens[i], left ? to + total : to, static_cast<int32_t>(left),
                                               lstrip, special));
    }
    return total > size ? -total : total;
}

} // namespace

velo_status velo_vocab_get_info(const velo_model * model, velo_vocab_info * info) noexcept {
    return velo::guarded([&] {
        velo::check_pointer(model, "model");
        velo::check_pointer(info, "info");
        const llama_vocab * vocab = model->vocab;
        info->n_tokens            = model->n_vocab;
        info->bos                 = llama_vocab_bos(vocab);
        info->eos                 = llama_vocab_eos(vocab);
        info->eot                 = llama_vocab_eot(vocab);
        info->pad                 = llama_vocab_pad(vocab);
        info->add_bos             = llama_vocab_get_add_bos(vocab);
        info->add_eos             = llama_vocab_get_add_eos(vocab);
    });
}

velo_status velo_tokenize(const velo_model * model, const char * text, size_t text_len, int32_t add_special,
                          int32_t parse_special, int32_t * tokens, int32_t capacity, int32_t * count) noexcept {
    return velo::guarded([&] {
        const llama_vocab * vocab = vocab_of(model);
        velo::check_pointer(count, "count");
        if (text_len > INT32_MAX) {
            velo::fail(VELO_INVALID, "the text has %zu bytes, but at most %d can be tokenized at once", text_len,
                       INT32_MAX);
        }
        velo::check_array(text, static_cast<int64_t>(text_len), "text");
        velo::check_array(tokens, capacity, "tokens");
        if (add_special) {
            check_special(vocab);
        }
        int32_t n = 0;
        with_room_for(vocab, text_len, [&] {
            const velo::catch_aborts catching(VELO_MODEL_ERROR);
            try {
                n = llama_tokenize(vocab, text_len ? text : "", static_cast<int32_t>(text_len), tokens, capacity,
                                   add_special != 0, parse_special != 0);
            } catch (const std::out_of_range &) { // a vocabulary with byte tokens that lacks some bytes
                velo::fail(VELO_MODEL_ERROR, "the vocabulary has no tokens for a part of this text");
            }
        });
        if (n == INT32_MIN) {
            velo::fail(VELO_INVALID, "the text has more tokens than a 32-bit number counts");
        }
        *count = std::abs(n);
        if (n < 0) {
            velo::fail(VELO_BUFFER_TOO_SMALL, "the buffer has room for %d tokens, but %d are needed", capacity, -n);
        }
    });
}

velo_status velo_token_to_bytes(const velo_model * model, int32_t token, int32_t special, char * bytes, size_t capacity,
                                size_t * len) noexcept {
    return velo::guarded([&] {
        const llama_vocab * vocab = vocab_of(model);
        check_token(model, token);
        const velo::catch_aborts catching(VELO_MODEL_ERROR);
        put_bytes(bytes, capacity, len, [&](char * to, int32_t size) {
            return llama_token_to_piece(vocab, token, to, size, 0, special != 0);
        });
    });
}

velo_status velo_detokenize(const velo_model * model, const int32_t * tokens, int32_t n_tokens, int32_t special,
                            char * bytes, size_t capacity, size_t * len) noexcept {
    return velo::guarded([&] {
        const llama_vocab * vocab = vocab_of(model);
        velo::check_array(tokens, n_tokens, "tokens");
        for (int32_t i = 0; i < n_tokens; ++i) {
            check_token(model, tokens[i]);
        }
        if (!special && n_tokens > 0) {
            // the tokens that add_special added
            const int32_t bos = llama_vocab_get_add_bos(vocab) && tokens[0] == llama_vocab_bos(vocab);
            tokens += bos;
            n_tokens -= bos;
            n_tokens -=
                n_tokens > 0 && llama_vocab_get_add_eos(vocab) && tokens[n_tokens - 1] == llama_vocab_eos(vocab);
        }
        const velo::catch_aborts catching(VELO_MODEL_ERROR);
        put_bytes(bytes, capacity, len, [&](char * to, int32_t size) {
            return join_pieces(vocab, tokens, n_tokens, special != 0, to, size);
        });
    });
}

velo_status velo_token_is_end(const velo_model * model, int32_t token, int32_t * is_end) noexcept {
    return velo::guarded([&] {
        const llama_vocab * vocab = vocab_of(model);
        check_token(model, token);
        velo::check_pointer(is_end, "is_end");
        *is_end = llama_vocab_is_eog(vocab, token);
    });
}
