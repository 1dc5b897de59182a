// A greedy answer through the C interface, without Python: velo-lab-generate MODEL PROMPT TOKENS. The smallest program
// that uses velo.h, for systems whose Python is not here.
#include "velo_program.h"

#include <string.h>

enum { BLOCK = 32, BLOCKS = 16, MOST = BLOCK * BLOCKS };

// Run tokens `first` to `last` - 1 of the sequence, whose blocks are 0, 1, 2, ...; return the best next token.
static int32_t next_token(velo_context * context, const int32_t * tokens, int32_t first, int32_t last, float * logits,
                          int32_t n_vocab) {
    int32_t table[BLOCKS], positions[MOST];
    int8_t  outputs[MOST] = {0};
    for (int32_t i = 0; i < BLOCKS; ++i) {
        table[i] = i * BLOCK < last ? i : -1;
    }
    for (int32_t i = first; i < last; ++i) {
        positions[i - first] = i;
    }
    outputs[last - first - 1] = 1;

    const int32_t    sequence[4] = {0, last - first, last, 0};
    const velo_batch batch       = {
        .n_tokens     = last - first,
        .tokens       = tokens + first,
        .positions    = positions,
        .n_groups     = 1,
        .slots        = positions, // of blocks in order
        .token_stride = last - first,
        .outputs      = outputs,
        .n_seqs       = 1,
        .seqs         = sequence,
        .tables       = table,
        .seq_stride   = 1,
        .table_stride = BLOCKS,
    };
    need(velo_context_run(context, &batch));
    need(velo_context_logits(context, 0, logits, n_vocab));
    int32_t best = 0;
    for (int32_t i = 1; i < n_vocab; ++i) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

static void print_token(const velo_model * model, int32_t token) {
    char   bytes[256];
    size_t len = 0;
    need(velo_token_to_bytes(model, token, 0, bytes, sizeof(bytes), &len));
    fwrite(bytes, 1, len, stdout);
    fflush(stdout);
}

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "velo-lab-generate MODEL PROMPT TOKENS\n");
        return 2;
    }
    velo_model *    model = load(argv[1]);
    velo_model_info info;
    need(velo_model_get_info(model, &info));

    velo_context * context = new_context(model, BLOCKS, BLOCK, MOST);

    int32_t tokens[MOST], n = 0;
    need(velo_tokenize(model, argv[2], strlen(argv[2]), 1, 0, tokens, MOST, &n));
    float *       logits = malloc(sizeof(float) * (size_t) info.n_vocab);
    const int32_t end    = n + atoi(argv[3]) < MOST ? n + atoi(argv[3]) : MOST;
    for (int32_t computed = 0; logits && n < end;) {
        tokens[n]      = next_token(context, tokens, computed, n, logits, info.n_vocab);
        int32_t is_end = 0;
        need(velo_token_is_end(model, tokens[n], &is_end));
        if (is_end) {
            break;
        }
        print_token(model, tokens[n]);
        computed = n++;
    }
    printf("\n");
    free(logits);
    velo_context_free(context);
    velo_model_free(model);
    return 0;
}
