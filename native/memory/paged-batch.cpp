// Checks of a batch: upstream would abort on these errors.

#include "paged-batch.h"

#include <algorithm>

[[noreturn]] static void invalid(const std::string & what) { paged_fail(LLAMA_PAGED_INVALID, what); }

static std::string sequence(int32_t s) { return "sequence " + std::to_string(s) + ": "; }

static void check_sequence(const llama_paged & paged, const llama_paged_batch & b, int32_t s, int32_t first) {
    const seq_row row = row_of(b, s);
    if (row.first != first || row.n_tokens < 1 || row.n_tokens > b.n_tokens - first) {
        invalid(sequence(s) +
                "its tokens must follow the tokens of the sequence before, and be at least 1; got first " +
                std::to_string(row.first) + " and number " + std::to_string(row.n_tokens));
    }
    if (row.reserved != 0) {
        invalid(sequence(s) + "the fourth number of its row must be 0, got " + std::to_string(row.reserved));
    }
    if (row.length < row.n_tokens || (uint32_t) row.length > paged.params.max_seq_len) {
        invalid(sequence(s) + "its length must be " + std::to_string(row.n_tokens) + " to " +
                std::to_string(paged.params.max_seq_len) + ", got " + std::to_string(row.length));
    }
    for (int32_t i = first; i < first + row.n_tokens; ++i) {
        const int32_t position = row.length - row.n_tokens + i - first;
        if (b.positions[i] != position) {
            invalid(sequence(s) + "the position of token " + std::to_string(i) + " must be " +
                    std::to_string(position) + " by the sequence's length, got " + std::to_string(b.positions[i]));
        }
    }
}

// Return the first position that the first token of a sequence attends in the layers of a cache.
static int32_t first_visible(const llama_hparams & hparams, const llama_paged_cache & cache, const seq_row & row) {
    const int32_t position = row.length - row.n_tokens, window = (int32_t) hparams.n_swa;
    if (!cache.is_windowed || window <= 0) {
        return 0;
    }
    return hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED ? position / window * window : std::max(0, position - window + 1);
}

static void check_table(const llama_context & ctx, const llama_paged_cache & cache, const llama_paged_batch & b,
                        int32_t g, int32_t s) {
    const llama_paged & paged = *cache.paged;
    const group_table   table = table_of(b, g, s);
    const seq_row       row   = row_of(b, s);
    const int32_t       bs    = paged.params.block_size;
    const int32_t       most  = first_visible(ctx.get_model().hparams, cache, row) / bs;
    const auto where = [&] { return sequence(s) + (paged.n_groups > 1 ? "group " + std::to_string(g) + ": " : ""); };
    if (table.first < 0 || table.first > most) {
        invalid(where() + "its table must begin with block 0 to " + std::to_string(most) +
                " because of its window, got " + std::to_string(table.first));
    }
    const int32_t n_blocks = (row.length - 1) / bs + 1 - table.first;
    if (n_blocks > b.table_stride) {
        invalid(where() + "its length needs " + std::to_string(n_blocks) + " blocks, but table_stride is " +
                std::to_string(b.table_stride));
    }
    for (int32_t i = 0; i < n_blocks; ++i) {
        if (table.blocks[i] < 0 || (uint32_t) table.blocks[i] >= paged.params.n_blocks) {
            invalid(where() + "block " + std::to_string(table.blocks[i]) + " is not in the pool");
        }
    }
    const int32_t * slots = b.slots + (size_t) g * b.token_stride;
    for (int32_t i = row.first; i < row.first + row.n_tokens; ++i) {
        const int32_t position = row.length - row.n_tokens + i - row.first;
        const int32_t slot     = table.blocks[position / bs - table.first] * bs + position % bs;
        if (slots[i] != slot) {
            invalid(where() + "the slot of token " + std::to_string(i) + " must be " + std::to_string(slot) +
                    " by the table, got " + std::to_string(slots[i]));
        }
    }
}

static void check_tables(const llama_context & ctx, const llama_paged & paged, const llama_paged_batch & b) {
    if (b.n_groups != paged.n_groups) {
        invalid("a batch must have tables for " + std::to_string(paged.n_groups) + " groups of layers, got " +
                std::to_string(b.n_groups));
    }
    if (b.token_stride < b.n_tokens || b.seq_stride < b.n_seqs || b.table_stride < 1) {
        invalid("the strides of slots and tables must be at least " + std::to_string(b.n_tokens) + " tokens, " +
                std::to_string(b.n_seqs) + " sequences and 1 block, got " + std::to_string(b.token_stride) + ", " +
                std::to_string(b.seq_stride) + " and " + std::to_string(b.table_stride));
    }
    for (const llama_paged_cache & cache : paged.caches) {
        for (const int32_t group : cache.groups) {
            for (int32_t s = 0; s < b.n_seqs; ++s) {
                check_table(ctx, cache, b, group, s);
            }
        }
    }
}

int32_t paged_count_outputs(const llama_paged_batch & b) {
    return (int32_t) std::count_if(b.outputs, b.outputs + b.n_tokens, [](int8_t wanted) { return wanted != 0; });
}

static void check_states(const llama_context & ctx, const llama_paged & paged, const llama_paged_batch & b) {
    if (!paged.states) {
        return;
    }
    if (!b.states) {
        invalid("states is null, but the model has recurrent layers: every sequence needs a state");
    }
    const int32_t     n_states = ctx.get_cparams().n_seq_max;
    std::vector<bool> taken(n_states);
    for (int32_t s = 0; s < b.n_seqs; ++s) {
        const int32_t state = b.states[s];
        if (state < 0 || state >= n_states || taken[state]) {
            invalid(sequence(s) + "state " + std::to_string(state) + " is used twice or does not exist; there are " +
                    std::to_string(n_states));
        }
        taken[state] = true;
    }
}

void paged_check_batch(const llama_context & ctx, const llama_paged & paged, const llama_paged_batch & b) {
    const auto & cp = ctx.get_cparams();
    if (!b.tokens || !b.positions || !b.slots || !b.outputs || !b.seqs || !b.tables) {
        invalid("an array of the batch is null");
    }
    if (b.n_tokens < 1 || b.n_tokens > (int32_t) cp.n_batch) {
        invalid("a batch must have 1 to " + std::to_string(cp.n_batch) + " tokens, got " + std::to_string(b.n_tokens));
    }
    if (b.n_seqs < 1 || b.n_seqs > b.n_tokens) {
        invalid("a batch of " + std::to_string(b.n_tokens) + " tokens must have 1 to as many sequences, got " +
                std::to_string(b.n_seqs));
    }
    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    for (int32_t i = 0; i < b.n_tokens; ++i) {
        if (b.tokens[i] < 0 || b.tokens[i] >= n_vocab) {
            invalid("token " + std::to_string(b.tokens[i]) + " is not in the vocabulary of " + std::to_string(n_vocab));
        }
    }
    int32_t first = 0;
    for (int32_t s = 0; s < b.n_seqs; ++s) {
        check_sequence(paged, b, s, first);
        first += row_of(b, s).n_tokens;
    }
    if (first != b.n_tokens) {
        invalid("the sequences cover " + std::to_string(first) + " of " + std::to_string(b.n_tokens) + " tokens");
    }
    check_tables(ctx, paged, b);
    if (paged_count_outputs(b) > (int32_t) cp.n_outputs_max) {
        invalid("a batch must have at most " + std::to_string(cp.n_outputs_max) + " outputs, got " +
                std::to_string(paged_count_outputs(b)));
    }
    check_states(ctx, paged, b);
}
