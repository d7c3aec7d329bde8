// Sixteen lanes in one AVX-512 register.
#include <immintrin.h>
#include <stdint.h>

namespace {

// Integer accumulators fill the 32 registers; float ones live in the first cache.
enum { kTileRows = 8, kHeldTotals = 12, kDenseRows = 4, kDenseBlocks = 3, kScoreBlocks = 2 };

typedef __m512 Vf;
typedef __m512i Vi;
typedef __m512i Wq;
typedef __m512i Aq;

inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }  // into the second cache
enum { kNarrowAheadBytes = 5760 };  // far enough that one stream keeps memory busy
enum { kNarrowPrefersSpans = 1 };

inline Vf set1(float x) { return _mm512_set1_ps(x); }
inline Vf load(const float* p) { return _mm512_loadu_ps(p); }
inline Vf load_tail(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
inline void store(float* p, Vf a) { _mm512_storeu_ps(p, a); }
inline void store_tail(float* p, Vf a, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), a); }
inline Vf load(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

inline Vf add(Vf a, Vf b) { return _mm512_add_ps(a, b); }
inline Vf sub(Vf a, Vf b) { return _mm512_sub_ps(a, b); }
inline Vf mul(Vf a, Vf b) { return _mm512_mul_ps(a, b); }
inline Vf div(Vf a, Vf b) { return _mm512_div_ps(a, b); }
inline Vf fma(Vf a, Vf b, Vf c) { return _mm512_fmadd_ps(a, b, c); }
inline Vf max(Vf a, Vf b) { return _mm512_max_ps(a, b); }
inline Vf min(Vf a, Vf b) { return _mm512_min_ps(a, b); }
inline Vf abs(Vf a) { return _mm512_abs_ps(a); }

inline float reduce_add(Vf a) {
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), upper);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float first_lane(Vf a) { return _mm512_cvtss_f32(a); }
inline float reduce_max(Vf a) { return _mm512_reduce_max_ps(a); }

// Sums within each quarter of four rows: lanes 4q + j hold the sum of quarter q of row j.
inline Vf add_quarters(const Vf* rows) {
    const Vf ab = add(_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
    const Vf cd = add(_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
inline Vf add_neighbours(Vf a, Vf b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
// Sums of four vectors, half done; of sixteen, done: lane i is the sum of vector i.
typedef Vf Quad;
inline Quad reduce_add_four(const Vf* rows) { return add_quarters(rows); }
inline Vf join_quads(const Quad* quads) {
    return add_neighbours(add_neighbours(quads[0], quads[1]), add_neighbours(quads[2], quads[3]));
}
// Keeps a value in a register, where the compiler would read memory once per use.
inline Vf keep(Vf a) {
    asm("" : "+v"(a));
    return a;
}
inline Wq keep(Wq a) {
    asm("" : "+v"(a));
    return a;
}
inline float sqrt_scalar(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

inline Vi zero_int() { return _mm512_setzero_si512(); }
// Made anew, which costs no unit that multiplies; a compiler would copy one zero, and many copies at once do.
inline Vi fresh_zero() {
    Vi zero;
    __asm__("vpxord %x0, %x0, %x0" : "=v"(zero));
    return zero;
}
inline Vi set1_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Vi add(Vi a, Vi b) { return _mm512_add_epi32(a, b); }
// Of additions that wrap, where the header's own reduction adds plain integers: what rounding makes of a nan is no small number.
inline int32_t reduce_add(Vi a) {
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
inline Vi round_to_int(Vf a) {
    return _mm512_cvt_roundps_epi32(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vf to_float(Vi a) { return _mm512_cvtepi32_ps(a); }
inline Vf scale_by_power(Vf a, Vi exponent) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(exponent, 23)));
}
inline void store_int8(int8_t* p, Vi a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a));
}

// Sixteen spans (spans.hpp), and of their codes the floats that are so many steps of 2^16 behind a base.
inline Vi load_spans(const uint8_t* p) {
    const __m512i lower = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    long long nibbles;
    __builtin_memcpy(&nibbles, p + 32, sizeof nibbles);
    const __m512i turns = _mm512_setr_epi32(16, 16, 20, 20, 24, 24, 28, 28, 0, 0, 4, 4, 8, 8, 12, 12);  // to bits 16 to 19
    const __m512i upper = _mm512_rorv_epi32(_mm512_set1_epi64(nibbles), turns);
    return _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi32(0xf0000), 0xf8);  // lower | (upper & mask)
}
inline Vf steps_behind(Vi steps, Vi base) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_and_si512(steps, _mm512_set1_epi32(0x3ff0000)), base));
}
inline Vf low_ends(Vi spans, Vi base) { return steps_behind(_mm512_slli_epi32(spans, 16), base); }
inline Vf high_ends(Vi spans, Vi base) { return steps_behind(_mm512_slli_epi32(spans, 6), base); }

template <int PICK>
inline Vf pick_quarters(Vf a, Vf b) { return _mm512_shuffle_f32x4(a, b, PICK); }
template <int PICK>
inline Vi pick_quarters(Vi a, Vi b) { return _mm512_shuffle_i32x4(a, b, PICK); }
template <int ORDER>
inline Vf order_quarters(Vf a) { return _mm512_permute_ps(a, ORDER); }
template <int ORDER>
inline Vi order_quarters(Vi a) { return _mm512_shuffle_epi32(a, static_cast<_MM_PERM_ENUM>(ORDER)); }

#define SAKIYOMI_HAS_EACH
// Joins the lanes of each of up to four vectors at once: its halves, then the quarters of that, and so on, as reduce_add does.
template <int COUNT, class V, class T, class Join>
inline void reduce_each(const V* v, T* out, Join join) {
    const V &a = v[0], &b = v[COUNT > 1 ? 1 : 0], &c = v[COUNT > 2 ? 2 : 0], &d = v[COUNT - 1];
    const V ab = join(pick_quarters<0x44>(a, b), pick_quarters<0xee>(a, b));
    const V cd = join(pick_quarters<0x44>(c, d), pick_quarters<0xee>(c, d));
    const V four = join(pick_quarters<0x88>(ab, cd), pick_quarters<0xdd>(ab, cd));
    const V two = join(four, order_quarters<0x4e>(four)), one = join(two, order_quarters<0xb1>(two));
    T lanes[16];
    __builtin_memcpy(lanes, &one, sizeof lanes);
    for (int i = 0; i < COUNT; ++i) out[i] = lanes[4 * i];
}
template <int COUNT>
inline void reduce_add_each(const Vf* v, float* out) {
    reduce_each<COUNT>(v, out, [](Vf a, Vf b) { return add(a, b); });
}
template <int COUNT>
inline void reduce_add_each(const Vi* v, int32_t* out) {
    reduce_each<COUNT>(v, out, [](Vi a, Vi b) { return add(a, b); });
}
template <int COUNT>
inline void reduce_max_each(const Vf* v, float* out) {
    reduce_each<COUNT>(v, out, [](Vf a, Vf b) { return max(a, b); });
}

inline Vi times_256(Vi a) { return _mm512_slli_epi32(a, 8); }
#define SAKIYOMI_HAS_TERMS
// Two terms [2][32] of 8 bits of 32 numbers of 0 to 32512, 256 times the first and the second; returns total + numbers.
inline Vi store_terms(int8_t* out, Vi a, Vi b, Vi total) {
    const __m512i words = _mm512_packs_epi32(a, b);
    const __m512i high = _mm512_srli_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
    const __m512i low = _mm512_and_si512(words, _mm512_set1_epi16(255));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(high, low)));
    return _mm512_dpwssd_epi32(total, words, _mm512_set1_epi16(1));
}
// Four vectors' unsigned maxima, one for each lane.
inline __m128i reduce_max_four(const __m512i* v) {
    const __m512i ab = _mm512_max_epu32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i cd = _mm512_max_epu32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    const __m512i all = _mm512_max_epu32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half = _mm256_max_epu32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_max_epu32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

#define SAKIYOMI_HAS_FOUR_GROUPS
// Symmetric 8-bit values of four groups of 32 numbers. scales[g] gets a group's scale, and what stands `sums_at` behind it
// scale * sum of values: the same bits as group by group. Bits of magnitudes compare like integers, nan being the largest.
inline void quantize_four(const float* const* x, int8_t* const* values, float* const* scales, int64_t sums_at) {
    __m512 v[8];
    __m512i most[4];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
        v[2 * g] = load(x[g]);
        v[2 * g + 1] = load(x[g] + 16);
        most[g] = _mm512_max_epu32(_mm512_castps_si512(abs(v[2 * g])), _mm512_castps_si512(abs(v[2 * g + 1])));
    }
    const __m128 largest = _mm_castsi128_ps(reduce_max_four(most)), highest = _mm_set1_ps(127.0f);
    const __mmask8 is_zero = _mm_cmp_ps_mask(largest, _mm_set1_ps(1e-30f), _CMP_LT_OQ);
    const __m128 scale = _mm_maskz_div_ps(static_cast<__mmask8>(~is_zero), largest, highest);
    const __m512 inverse = _mm512_broadcast_f32x4(_mm_maskz_div_ps(static_cast<__mmask8>(~is_zero), highest, largest));
    const __m512 factors[4] = {_mm512_permute_ps(inverse, 0x00), _mm512_permute_ps(inverse, 0x55),
                               _mm512_permute_ps(inverse, 0xaa), _mm512_permute_ps(inverse, 0xff)};
    __m512i pairs[4], sums[2];
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g)
        pairs[g] = _mm512_packs_epi32(round_to_int(mul(v[2 * g], factors[g])), round_to_int(mul(v[2 * g + 1], factors[g])));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
        const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(pairs[2 * half], pairs[2 * half + 1]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(values[2 * half]), _mm512_castsi512_si256(bytes));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(values[2 * half + 1]), _mm512_extracti64x4_epi64(bytes, 1));
        sums[half] = _mm512_dpbusd_epi32(zero_int(), _mm512_set1_epi8(1), bytes);
    }
    // Lanes of each quarter: a part of the sum of groups 0 and 2, or 1 and 3 in the upper half.
    const __m512i mixed = add(_mm512_unpacklo_epi32(sums[0], sums[1]), _mm512_unpackhi_epi32(sums[0], sums[1]));
    const __m512i quarters = add(mixed, _mm512_shuffle_epi32(mixed, _MM_PERM_BADC));
    const __m256i low = _mm512_castsi512_si256(quarters), high = _mm512_extracti64x4_epi64(quarters, 1);
    const __m128i even = _mm_add_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    const __m128i odd = _mm_add_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
    alignas(16) float all_scales[4], all_sums[4];
    _mm_store_ps(all_scales, scale);
    _mm_store_ps(all_sums, _mm_mul_ps(scale, _mm_cvtepi32_ps(_mm_unpacklo_epi32(even, odd))));
#pragma GCC unroll 4
    for (int g = 0; g < 4; ++g) {
        scales[g][0] = all_scales[g];
        scales[g][sums_at] = all_sums[g];
    }
}

#define SAKIYOMI_HAS_WIDE_LANES
// Lanes, as bits, with a >= b; with a nan in either.
inline uint32_t lanes_at_least(Vf a, Vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline uint32_t lanes_unordered(Vf a, Vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }

// Sixteen 64-bit lanes whose low halves count; what stands in the high ones is of no interest.
struct Vw {
    __m512i lo, hi;
};
inline Vw wide_from(uint32_t first) {
    const __m512i steps = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), start = _mm512_set1_epi64(first);
    return {_mm512_add_epi64(start, steps), _mm512_add_epi64(start, _mm512_add_epi64(steps, _mm512_set1_epi64(8)))};
}
inline Vw wide_set1(uint32_t x) { return {_mm512_set1_epi64(x), _mm512_set1_epi64(x)}; }
inline Vw wide_mul(Vw a, Vw b) { return {_mm512_mul_epu32(a.lo, b.lo), _mm512_mul_epu32(a.hi, b.hi)}; }
inline __m512i mix_high(__m512i product, __m512i a, __m512i key) {
    return _mm512_ternarylogic_epi64(_mm512_srli_epi64(product, 32), a, key, 0x96);
}
// (product >> 32) ^ a ^ key
inline Vw wide_mix(Vw product, Vw a, Vw key) {
    return {mix_high(product.lo, a.lo, key.lo), mix_high(product.hi, a.hi, key.hi)};
}
inline void store_fours(uint32_t* out, __m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_mask_blend_epi32(0xaaaa, a, _mm512_slli_epi64(b, 32));
    const __m512i cd = _mm512_mask_blend_epi32(0xaaaa, c, _mm512_slli_epi64(d, 32));
    const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(ab, first, cd));
    _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi64(ab, _mm512_add_epi64(first, _mm512_set1_epi64(4)), cd));
}
// The low halves: a, b, c, d of lane 0, of lane 1, and so on.
inline void store_words(uint32_t* out, Vw a, Vw b, Vw c, Vw d) {
    store_fours(out, a.lo, b.lo, c.lo, d.lo);
    store_fours(out + 32, a.hi, b.hi, c.hi, d.hi);
}

inline Wq load_weights(const uint8_t* p) { return _mm512_loadu_si512(p); }
// Quads k and k + 4 of a group in four-bit storage; the latter times 16, which shift_high takes back from a sum.
inline Wq load_low(const uint8_t* p) { return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(0x0f)); }
inline Wq load_high(const uint8_t* p) { return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0xf0))); }
// The same without the factor: from kShiftedRows rows on shifting weights is less than shifting sums.
enum { kShiftedRows = 5 };
inline Wq load_shifted(const uint8_t* p) {
    return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(0x0f));
}
inline Vi shift_high(Vi a) { return _mm512_srai_epi32(a, 4); }
inline Vi start_sums(const int8_t*) { return zero_int(); }  // what sums of bytes start from
inline Aq load_inputs(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}
inline Vi dot4(Vi acc, Wq w, Aq a) { return _mm512_dpbusd_epi32(acc, w, a); }

}  // namespace
