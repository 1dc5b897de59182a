// The tile registers of AMX: whether the processor has them and this process may use them, and their configuration.
#pragma once

#include <cstdint>

#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__GNUC__)
#    define VELO_AMX_TILES // this build has products of bfloat16 in tiles
#endif

namespace amx {

enum class feature { bf16 = 22, bytes = 25 }; // bits of edx, leaf 7 of CPUID

// Returns whether the processor has it. PYVELO_NO_AMX hides all of AMX.
bool processor_has(feature wanted);

// Returns whether this process may use the tile registers for bfloat16. Asks the system once.
bool has_tiles();

// Configures 8 tiles of 16 rows of 64 bytes, if there are tiles, and restores the configuration at the end of its
// lifetime: upstream's products configure the tiles only once.
class tile_configuration {
public:
    tile_configuration();
    ~tile_configuration();
    tile_configuration(const tile_configuration &)             = delete;
    tile_configuration & operator=(const tile_configuration &) = delete;

private:
    struct alignas(64) shapes {
        uint8_t  palette, start_row, unused[14];
        uint16_t bytes_per_row[16];
        uint8_t  rows[16];
    };
    [[maybe_unused]] bool   on_;
    [[maybe_unused]] shapes before_;
};

// The order of words that puts two vectors of 16 bfloat16 into pairs: words 0 and 16, 1 and 17, ...
struct alignas(64) word_pairs {
    uint16_t x[32];
};
constexpr word_pairs make_word_pairs() {
    word_pairs made = {};
    for (int i = 0; i < 32; ++i) {
        made.x[i] = (uint16_t) (i / 2 + i % 2 * 16);
    }
    return made;
}
constexpr word_pairs paired_words = make_word_pairs();

} // namespace amx
