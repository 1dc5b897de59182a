// Pages of codes on AVX2: 8 tokens in lanes; dot products of bytes by AVX-VNNI if the build has it.
//
// A build for AVX2 alone on two Sapphire Rapids cores, 16/8 heads of 128, one sequence at 4096: q8_0 20 GB/s, q4_0 13,
// on a machine whose memory gives 35.
#include "iq4-values.h"
#include "paged-page-codes.h"

#if defined(PAGED_CODES_AVX2)

namespace paged {

namespace {

struct avx2 {
    using ints  = __m256i;
    using codes = __m256i;

    static PAGED_INLINE __m256i load_2x16(const char * p, size_t stride) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) p)),
                                       _mm_loadu_si128((const __m128i *) (p + stride)), 1);
    }
    static PAGED_INLINE void transpose(const char * p, size_t stride, ints * out) {
        __m256i x[4];
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) {
            x[i] = load_2x16(p + i * stride, 4 * stride);
        }
        const __m256i a = _mm256_unpacklo_epi32(x[0], x[1]), b = _mm256_unpackhi_epi32(x[0], x[1]);
        const __m256i c = _mm256_unpacklo_epi32(x[2], x[3]), d = _mm256_unpackhi_epi32(x[2], x[3]);
        out[0] = _mm256_unpacklo_epi64(a, c);
        out[1] = _mm256_unpackhi_epi64(a, c);
        out[2] = _mm256_unpacklo_epi64(b, d);
        out[3] = _mm256_unpackhi_epi64(b, d);
    }

    static PAGED_INLINE ints low(ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static PAGED_INLINE ints high(ints x) { return low(_mm256_srli_epi16(x, 4)); }
    static PAGED_INLINE ints iq4_values(ints x) {
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_setr_epi8(VELO_IQ4_VALUES)), x);
    }

    static PAGED_INLINE codes load(const char * p) { return _mm256_loadu_si256((const __m256i *) p); }
    static PAGED_INLINE codes nibbles(const char * p) {
        const __m128i both = _mm_loadu_si128((const __m128i *) p);
        return low(_mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1));
    }
    static PAGED_INLINE codes with_fifth_bits(codes x, const char * bits) {
        int32_t all;
        memcpy(&all, bits, sizeof(all));
        const __m256i pick = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3,
                                              3, 3, 3, 3, 3, 3, 3);
        const __m256i bit  = _mm256_set1_epi64x((int64_t) 0x8040201008040201);
        const __m256i own  = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(all), pick), bit);
        return _mm256_or_si256(x, _mm256_and_si256(_mm256_cmpeq_epi8(own, bit), _mm256_set1_epi8(16)));
    }
    static PAGED_INLINE codes minus(codes x, int n) { return _mm256_sub_epi8(x, _mm256_set1_epi8((char) n)); }
    static PAGED_INLINE void  store(char * p, codes x) { _mm256_store_si256((__m256i *) p, x); }

    static PAGED_INLINE __m256i query_codes(const int8_t * q, int i) {
        int32_t dword;
        memcpy(&dword, q + 4 * i, sizeof(dword));
        return _mm256_set1_epi32(dword);
    }

    template <class C> static constexpr bool multiplies_faster = true;

    static PAGED_INLINE ints raised(ints x) { return raise ? _mm256_xor_si256(x, _mm256_set1_epi8((char) raise)) : x; }

#    if defined(__AVXVNNI__)
    static constexpr int raise = 128;

    static PAGED_INLINE __m256i dot_bytes(__m256i sum, __m256i positive, __m256i any) {
        return _mm256_dpbusd_avx_epi32(sum, positive, any);
    }
#    else
    static constexpr int raise = 0;

    static PAGED_INLINE __m256i dot_bytes(__m256i sum, __m256i positive,
                                          __m256i any) { // no pair of products above 2^15
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(positive, any), _mm256_set1_epi16(1)));
    }
#    endif

    template <class C> static PAGED_INLINE ints dot(int32_t start, const ints * keys, const int8_t * query) {
        ints sum = _mm256_set1_epi32(start);
#    if defined(__AVXVNNI__)
        ints more = _mm256_setzero_si256();
        PAGED_UNROLL
        for (int i = 0; i < 4; ++i) { // two chains: each product waits for the one before
            sum  = dot_bytes(sum, keys[i], query_codes(query, i));
            more = dot_bytes(more, keys[4 + i], query_codes(query, 4 + i));
        }
        sum = _mm256_add_epi32(sum, more);
#    else
        if constexpr (C::largest_key == 0) {
            PAGED_UNROLL
            for (int i = 0; i < 8; ++i) {
                const __m256i x = query_codes(query, i);
                sum             = dot_bytes(sum, _mm256_abs_epi8(x), _mm256_sign_epi8(keys[i], x));
            }
            return sum;
        }
        constexpr int at_once = C::largest_key > 15 ? 4 : 8; // pairs of products that fit a sum of 16 bits
        PAGED_UNROLL
        for (int i = 0; i < 8; i += at_once) {
            __m256i part = _mm256_maddubs_epi16(keys[i], query_codes(query, i));
            PAGED_UNROLL
            for (int k = 1; k < at_once; ++k) {
                part = _mm256_add_epi16(part, _mm256_maddubs_epi16(keys[i + k], query_codes(query, i + k)));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
        }
#    endif
        return sum;
    }

    static PAGED_INLINE f32v floats(ints x) { return _mm256_cvtepi32_ps(x); }
    static PAGED_INLINE f32v floats(codes x, int i) {
        const __m128i half  = i < 2 ? _mm256_castsi256_si128(x) : _mm256_extracti128_si256(x, 1);
        const __m128i eight = i % 2 ? _mm_srli_si128(half, 8) : half;
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
    }
    static PAGED_INLINE f32v halves(const char * p, size_t stride) {
        uint16_t h[8];
        PAGED_UNROLL
        for (int i = 0; i < 8; ++i) {
            memcpy(h + i, p + i * stride, 2);
        }
        return _mm256_cvtph_ps(_mm_setr_epi16((short) h[0], (short) h[1], (short) h[2], (short) h[3], (short) h[4],
                                              (short) h[5], (short) h[6], (short) h[7]));
    }
};

} // namespace

code_kernels kernels_of_codes() { return code_kernels_of<avx2>(); }

} // namespace paged

#endif
