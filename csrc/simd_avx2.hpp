// Sixteen lanes in two AVX2 registers.
#include <immintrin.h>
#include <stdint.h>

namespace {

enum { kTileRows = 3, kHeldTotals = 0, kDenseRows = 3, kDenseBlocks = 1, kScoreBlocks = 1 };

struct Vf {
    __m256 lo, hi;
};
struct Vi {
    __m256i lo, hi;
};
// Bytes of four neighbouring inputs, widened to 16 bit: multiplying two 8-bit pairs at once could saturate.
struct Wq {
    __m256i lo_even, lo_odd, hi_even, hi_odd;
};
struct Aq {
    __m256i even, odd;
};

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_far(const void* p) { prefetch(p); }
enum { kNarrowAheadBytes = 1920 };
enum { kNarrowPrefersSpans = 0 };  // a tenth slower from two rows on

inline Vf set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256i lanes_below(int64_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(n)), lanes);
}
inline Vf load_tail(const float* p, int64_t n) {
    if (n <= 8) return {_mm256_maskload_ps(p, lanes_below(n)), _mm256_setzero_ps()};
    return {_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, lanes_below(n - 8))};
}
inline void store(float* p, Vf a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline void store_tail(float* p, Vf a, int64_t n) {
    _mm256_maskstore_ps(p, lanes_below(n), a.lo);
    if (n > 8) _mm256_maskstore_ps(p + 8, lanes_below(n - 8), a.hi);
}
inline Vf load(const uint16_t* p) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}

inline Vf add(Vf a, Vf b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vf sub(Vf a, Vf b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vf mul(Vf a, Vf b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vf div(Vf a, Vf b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vf fma(Vf a, Vf b, Vf c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vf max(Vf a, Vf b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vf min(Vf a, Vf b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vf abs(Vf a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

inline float reduce_add(Vf a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float first_lane(Vf a) { return _mm256_cvtss_f32(a.lo); }
inline float reduce_max(Vf a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline __m256 add_halves(Vf a) { return _mm256_add_ps(a.lo, a.hi); }
// Sums of four vectors, half done; of sixteen, done: lane i is the sum of vector i.
typedef __m256 Quad;
inline Quad reduce_add_four(const Vf* rows) {
    const __m256 ab = _mm256_hadd_ps(add_halves(rows[0]), add_halves(rows[1]));
    const __m256 cd = _mm256_hadd_ps(add_halves(rows[2]), add_halves(rows[3]));
    return _mm256_hadd_ps(ab, cd);
}
inline __m256 join_two(Quad a, Quad b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}
inline Vf join_quads(const Quad* quads) { return {join_two(quads[0], quads[1]), join_two(quads[2], quads[3])}; }
inline Vf keep(Vf a) { return a; }
inline Wq keep(Wq a) { return a; }
inline float sqrt_scalar(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

inline Vi zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Vi fresh_zero() { return zero_int(); }
inline Vi set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Vi add(Vi a, Vi b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline int32_t reduce_add(Vi a) {
    const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
inline Vi round_to_int(Vf a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline Vf to_float(Vi a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline __m256 scale_by_power(__m256 a, __m256i exponent) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(exponent, 23)));
}
inline Vf scale_by_power(Vf a, Vi exponent) {
    return {scale_by_power(a.lo, exponent.lo), scale_by_power(a.hi, exponent.hi)};
}
inline void store_int8(int8_t* p, Vi a) {
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// Sixteen spans (spans.hpp), and of their codes the floats that are so many steps of 2^16 behind a base.
inline __m256i join_code(const uint8_t* lower, __m256i nibbles, __m256i shifts) {
    const __m256i upper = _mm256_and_si256(_mm256_srlv_epi32(nibbles, shifts), _mm256_set1_epi32(15));
    return _mm256_or_si256(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lower))), _mm256_slli_epi32(upper, 16));
}
inline Vi load_spans(const uint8_t* p) {
    long long eight;
    __builtin_memcpy(&eight, p + 32, sizeof eight);
    const __m256i nibbles = _mm256_set1_epi64x(eight);
    return {join_code(p, nibbles, _mm256_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12)),
            join_code(p + 16, nibbles, _mm256_setr_epi32(16, 16, 20, 20, 24, 24, 28, 28))};
}
inline __m256 steps_behind(__m256i steps, __m256i base) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_and_si256(steps, _mm256_set1_epi32(0x3ff0000)), base));
}
inline Vf low_ends(Vi spans, Vi base) {
    return {steps_behind(_mm256_slli_epi32(spans.lo, 16), base.lo), steps_behind(_mm256_slli_epi32(spans.hi, 16), base.hi)};
}
inline Vf high_ends(Vi spans, Vi base) {
    return {steps_behind(_mm256_slli_epi32(spans.lo, 6), base.lo), steps_behind(_mm256_slli_epi32(spans.hi, 6), base.hi)};
}

inline Vi sub(Vi a, Vi b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline Vi times_256(Vi a) { return {_mm256_slli_epi32(a.lo, 8), _mm256_slli_epi32(a.hi, 8)}; }
inline Vi divide_256(Vi a) {  // halves upwards
    a = add(a, set1_int(128));
    return {_mm256_srai_epi32(a.lo, 8), _mm256_srai_epi32(a.hi, 8)};
}

#define SAKIYOMI_HAS_WIDE_LANES
// Lanes, as bits, with a >= b; with a nan in either.
inline uint32_t lanes_of(__m256 lo, __m256 hi) {
    return static_cast<uint32_t>(_mm256_movemask_ps(lo)) | static_cast<uint32_t>(_mm256_movemask_ps(hi)) << 8;
}
inline uint32_t lanes_at_least(Vf a, Vf b) {
    return lanes_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ));
}
inline uint32_t lanes_unordered(Vf a, Vf b) {
    return lanes_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, b.hi, _CMP_UNORD_Q));
}

// Sixteen 64-bit lanes whose low halves count; what stands in the high ones is of no interest.
struct Vw {
    __m256i v[4];
};
#define QUARTERS for (int i = 0; i < 4; ++i)
inline Vw wide_set1(uint32_t x) {
    Vw r;
    QUARTERS r.v[i] = _mm256_set1_epi64x(x);
    return r;
}
inline Vw wide_from(uint32_t first) {
    Vw r = wide_set1(first);
    QUARTERS r.v[i] = _mm256_add_epi64(r.v[i], _mm256_setr_epi64x(4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3));
    return r;
}
inline Vw wide_mul(Vw a, Vw b) {
    QUARTERS a.v[i] = _mm256_mul_epu32(a.v[i], b.v[i]);
    return a;
}
// (product >> 32) ^ a ^ key
inline Vw wide_mix(Vw product, Vw a, Vw key) {
    QUARTERS a.v[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product.v[i], 32), a.v[i]), key.v[i]);
    return a;
}
// The low halves: a, b, c, d of lane 0, of lane 1, and so on.
inline void store_words(uint32_t* out, Vw a, Vw b, Vw c, Vw d) {
    QUARTERS {
        const __m256i ab = _mm256_blend_epi32(a.v[i], _mm256_slli_epi64(b.v[i], 32), 0xaa);
        const __m256i cd = _mm256_blend_epi32(c.v[i], _mm256_slli_epi64(d.v[i], 32), 0xaa);
        const __m256i even = _mm256_unpacklo_epi64(ab, cd), odd = _mm256_unpackhi_epi64(ab, cd);
        __m256i* fours = reinterpret_cast<__m256i*>(out + 16 * i);
        _mm256_storeu_si256(fours, _mm256_permute2x128_si256(even, odd, 0x20));
        _mm256_storeu_si256(fours + 1, _mm256_permute2x128_si256(even, odd, 0x31));
    }
}
#undef QUARTERS

inline Wq load_weights(const uint8_t* p) {
    const __m256i low_bytes = _mm256_set1_epi16(0xff);
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    return {_mm256_and_si256(lo, low_bytes), _mm256_srli_epi16(lo, 8), _mm256_and_si256(hi, low_bytes),
            _mm256_srli_epi16(hi, 8)};
}
// Quads k and k + 4 of a group in four-bit storage.
inline Wq load_low(const uint8_t* p) {
    const __m256i low = _mm256_set1_epi16(0x0f);
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    return {_mm256_and_si256(lo, low), _mm256_and_si256(_mm256_srli_epi16(lo, 8), low), _mm256_and_si256(hi, low),
            _mm256_and_si256(_mm256_srli_epi16(hi, 8), low)};
}
inline Wq load_high(const uint8_t* p) {
    const __m256i low = _mm256_set1_epi16(0x0f);
    const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    return {_mm256_and_si256(_mm256_srli_epi16(lo, 4), low), _mm256_srli_epi16(lo, 12),
            _mm256_and_si256(_mm256_srli_epi16(hi, 4), low), _mm256_srli_epi16(hi, 12)};
}
enum { kShiftedRows = 1 };  // the high quads as they are
inline Wq load_shifted(const uint8_t* p) { return load_high(p); }
inline Vi shift_high(Vi a) { return a; }
inline Vi start_sums(const int8_t*) { return zero_int(); }  // what sums of bytes start from
inline Aq load_inputs(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    const __m256i all = _mm256_set1_epi32(four);
    return {_mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), _mm256_srai_epi16(all, 8)};
}
inline Vi dot4(Vi acc, Wq w, Aq a) {
    const __m256i lo = _mm256_add_epi32(_mm256_madd_epi16(w.lo_even, a.even), _mm256_madd_epi16(w.lo_odd, a.odd));
    const __m256i hi = _mm256_add_epi32(_mm256_madd_epi16(w.hi_even, a.even), _mm256_madd_epi16(w.hi_odd, a.odd));
    acc = {_mm256_add_epi32(acc.lo, lo), _mm256_add_epi32(acc.hi, hi)};
    asm("" : "+x"(acc.lo), "+x"(acc.hi));  // here, or the compiler keeps all weights of a group alive
    return acc;
}

}  // namespace
