// Codes of a tile of packed weights, unpacked into registers, and their products with a few rows of bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace packed {

constexpr int COLS = 16; // of a tile, whose blocks follow each other along K

inline __m512i load(const char * at) { return _mm512_loadu_si512(at); }
inline __m512i negative(__m512i values) { return _mm512_sub_epi32(_mm512_setzero_si512(), values); }
inline __m512i bytes16(const char * at) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) at)); }
inline __m512  halves16(const char * at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) at)); }
inline __m512i low(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline __m512i high(__m512i bytes) { return low(_mm512_srli_epi16(bytes, 4)); }

// `n` bits of each byte, from bit `first`, moved to bit 4 and up.
template <int first, int n> inline __m512i upper(__m512i bytes) {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << n) - 1) << first));
    const __m512i bits = _mm512_and_si512(bytes, mask);
    return first < 4 ? _mm512_slli_epi16(bits, 4 - first) : _mm512_srli_epi16(bits, first - 4);
}

// 32 codes along K of each column, four to a lane.
struct codes32 {
    __m512i at[8];

    static codes32 nibbles(const char * lines) {
        codes32 out;
        for (int k = 0; k < 4; ++k) {
            const __m512i bytes = load(lines + 64 * k);
            out.at[2 * k]       = low(bytes);
            out.at[2 * k + 1]   = high(bytes);
        }
        return out;
    }

    // Signed bytes, plus 128.
    static codes32 shifted_bytes(const char * lines) {
        codes32 out;
        for (int k = 0; k < 8; ++k) {
            out.at[k] = _mm512_xor_si512(load(lines + 64 * k), _mm512_set1_epi8(static_cast<char>(128)));
        }
        return out;
    }

    void add_fifth_bit(__m512i bits) {
        at[0] = _mm512_or_si512(at[0], upper<0, 1>(bits));
        at[1] = _mm512_or_si512(at[1], upper<1, 1>(bits));
        at[2] = _mm512_or_si512(at[2], upper<2, 1>(bits));
        at[3] = _mm512_or_si512(at[3], upper<3, 1>(bits));
        at[4] = _mm512_or_si512(at[4], upper<4, 1>(bits));
        at[5] = _mm512_or_si512(at[5], upper<5, 1>(bits));
        at[6] = _mm512_or_si512(at[6], upper<6, 1>(bits));
        at[7] = _mm512_or_si512(at[7], upper<7, 1>(bits));
    }

    void look_up(__m512i table) {
        for (__m512i & codes : at) {
            codes = _mm512_shuffle_epi8(table, codes);
        }
    }
};

// 32 weights along K of each column: scale * code + offset of unsigned bytes, with a scale and an offset for each 16.
struct weights32 {
    codes32 codes;
    __m512  scale[2], offset[2];
};

// Four bytes of a row, for each column.
inline __m512i word(const void * at) {
    int32_t value;
    std::memcpy(&value, at, sizeof(value));
    return _mm512_set1_epi32(value);
}

// sum += codes * four bytes of a row, in one instruction that reads them: GCC would use two.
inline void multiply(__m512i & sum, __m512i codes, const int8_t * row) {
    using four_bytes [[gnu::may_alias]] = int32_t;
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const four_bytes *>(row)));
}

template <int ROWS> using row_sums = __m512i[ROWS];

// sums += codes * rows, from `first` along K on, of N vectors of unsigned codes and signed bytes of the rows. Rows take
// turns, because a product waits for the last one of its row.
template <int N, int ROWS, class Row>
void        add_products(row_sums<ROWS> & sums, const __m512i * codes, const Row * const (&rows)[ROWS], int first) {
#pragma GCC unroll 8
    for (int k = 0; k < N; ++k) {
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; ++m) {
            multiply(sums[m], codes[k], rows[m]->qs + first + 4 * k);
        }
    }
}

} // namespace packed
