// Random calls of the operator, for velo-op-bench.
#pragma once

#include "ggml.h"

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

using bytes = std::vector<uint8_t>;

constexpr int BLOCK = 32;

struct shape {
    ggml_type                       type;
    int64_t                         d_k, d_v, heads, heads_kv;
    std::vector<std::array<int, 2>> sequences;         // query rows, length
    int                             common_blocks = 0; // leading blocks shared by all sequences
};

struct call {
    shape                s;
    int64_t              n_tokens = 0, n_slots = 0, width = 1, rows = 0;
    bytes                q, k, v;
    std::vector<int32_t> table;

    bool latent() const { return s.d_k > 256; } // V is a view of K
};

// Types of K and V by name.
const std::vector<std::pair<const char *, ggml_type>> & op_types();

// Create a call with shuffled blocks. poison: NaN in every slot without a token. repeat: repeat a few random rows.
call make_call(const shape & s, bool poison, bool repeat);
