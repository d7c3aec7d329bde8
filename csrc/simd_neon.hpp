// Sixteen lanes in four NEON registers, with the dot product extension (Armv8.2). Sums over lanes are taken in the order
// of simd_portable.hpp, so that on such machines both paths give the same bits.
#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

namespace {

// Six rows of sums, the weights and one input fill 29 of the 32 registers; float totals live in the first cache.
enum { kTileRows = 6, kHeldTotals = 0, kDenseRows = 4, kDenseBlocks = 1, kScoreBlocks = 1 };

// Members have names, since compilers leave arrays within arrays in memory.
struct Vf {
    float32x4_t v0, v1, v2, v3;
};
struct Vi {
    int32x4_t v0, v1, v2, v3;
};
struct Wq {
    int8x16_t v0, v1, v2, v3;
};
typedef int8x16_t Aq;

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
inline void prefetch_far(const void* p) { prefetch(p); }
enum { kNarrowAheadBytes = 1920 };
enum { kNarrowPrefersSpans = 0 };

inline Vf set1(float x) {
    const float32x4_t all = vdupq_n_f32(x);
    return {all, all, all, all};
}
inline Vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline Vf load_tail(const float* p, int64_t n) {
    float padded[16] = {0.0f};
    __builtin_memcpy(padded, p, static_cast<size_t>(n) * sizeof(float));
    return load(padded);
}
inline void store(float* p, Vf a) {
    vst1q_f32(p, a.v0);
    vst1q_f32(p + 4, a.v1);
    vst1q_f32(p + 8, a.v2);
    vst1q_f32(p + 12, a.v3);
}
inline void store_tail(float* p, Vf a, int64_t n) {
    float padded[16];
    store(padded, a);
    __builtin_memcpy(p, padded, static_cast<size_t>(n) * sizeof(float));
}
inline Vf load(const uint16_t* p) {
    Vf r;
    r.v0 = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
    r.v1 = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4)));
    r.v2 = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 8)));
    r.v3 = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 12)));
    return r;
}

inline Vf add(Vf a, Vf b) {
    a.v0 = vaddq_f32(a.v0, b.v0);
    a.v1 = vaddq_f32(a.v1, b.v1);
    a.v2 = vaddq_f32(a.v2, b.v2);
    a.v3 = vaddq_f32(a.v3, b.v3);
    return a;
}
inline Vf sub(Vf a, Vf b) {
    a.v0 = vsubq_f32(a.v0, b.v0);
    a.v1 = vsubq_f32(a.v1, b.v1);
    a.v2 = vsubq_f32(a.v2, b.v2);
    a.v3 = vsubq_f32(a.v3, b.v3);
    return a;
}
inline Vf mul(Vf a, Vf b) {
    a.v0 = vmulq_f32(a.v0, b.v0);
    a.v1 = vmulq_f32(a.v1, b.v1);
    a.v2 = vmulq_f32(a.v2, b.v2);
    a.v3 = vmulq_f32(a.v3, b.v3);
    return a;
}
inline Vf div(Vf a, Vf b) {
    a.v0 = vdivq_f32(a.v0, b.v0);
    a.v1 = vdivq_f32(a.v1, b.v1);
    a.v2 = vdivq_f32(a.v2, b.v2);
    a.v3 = vdivq_f32(a.v3, b.v3);
    return a;
}
inline Vf fma(Vf a, Vf b, Vf c) {
    c.v0 = vfmaq_f32(c.v0, a.v0, b.v0);
    c.v1 = vfmaq_f32(c.v1, a.v1, b.v1);
    c.v2 = vfmaq_f32(c.v2, a.v2, b.v2);
    c.v3 = vfmaq_f32(c.v3, a.v3, b.v3);
    return c;
}
// On NaN both return b, as on the other paths; the instructions FMAX and FMIN would return NaN.
inline float32x4_t max_of_four(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Vf max(Vf a, Vf b) {
    a.v0 = max_of_four(a.v0, b.v0);
    a.v1 = max_of_four(a.v1, b.v1);
    a.v2 = max_of_four(a.v2, b.v2);
    a.v3 = max_of_four(a.v3, b.v3);
    return a;
}
inline Vf min(Vf a, Vf b) {
    a.v0 = vbslq_f32(vcltq_f32(a.v0, b.v0), a.v0, b.v0);
    a.v1 = vbslq_f32(vcltq_f32(a.v1, b.v1), a.v1, b.v1);
    a.v2 = vbslq_f32(vcltq_f32(a.v2, b.v2), a.v2, b.v2);
    a.v3 = vbslq_f32(vcltq_f32(a.v3, b.v3), a.v3, b.v3);
    return a;
}
inline Vf abs(Vf a) {
    a.v0 = vabsq_f32(a.v0);
    a.v1 = vabsq_f32(a.v1);
    a.v2 = vabsq_f32(a.v2);
    a.v3 = vabsq_f32(a.v3);
    return a;
}
inline float32x4_t add_quarters(Vf a) { return vaddq_f32(vaddq_f32(a.v0, a.v2), vaddq_f32(a.v1, a.v3)); }
inline float reduce_add(Vf a) {
    const float32x4_t four = add_quarters(a);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float first_lane(Vf a) { return vgetq_lane_f32(a.v0, 0); }
inline float reduce_max(Vf a) {
    const float32x4_t four = max_of_four(max_of_four(a.v0, a.v2), max_of_four(a.v1, a.v3));
    const float32x4_t two = max_of_four(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(max_of_four(two, vextq_f32(two, two, 1)), 0);
}
// Lane 0 + lane 2 and lane 1 + lane 3 of two vectors.
inline float32x4_t add_halves(float32x4_t a, float32x4_t b) {
    const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
    return vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(x, y)), vreinterpretq_f32_f64(vzip2q_f64(x, y)));
}
// Sums of four vectors.
typedef float32x4_t Quad;
inline Quad reduce_add_four(const Vf* rows) {
    const float32x4_t ab = add_halves(add_quarters(rows[0]), add_quarters(rows[1]));
    const float32x4_t cd = add_halves(add_quarters(rows[2]), add_quarters(rows[3]));
    return vpaddq_f32(ab, cd);
}
inline Vf join_quads(const Quad* quads) { return {quads[0], quads[1], quads[2], quads[3]}; }
inline Vf keep(Vf a) { return a; }
inline Wq keep(Wq a) { return a; }
inline float sqrt_scalar(float x) { return vget_lane_f32(vsqrt_f32(vdup_n_f32(x)), 0); }

inline Vi zero_int() {
    const int32x4_t zero = vdupq_n_s32(0);
    return {zero, zero, zero, zero};
}
inline Vi fresh_zero() { return zero_int(); }
inline Vi set1_int(int32_t x) {
    const int32x4_t all = vdupq_n_s32(x);
    return {all, all, all, all};
}
inline Vi add(Vi a, Vi b) {
    a.v0 = vaddq_s32(a.v0, b.v0);
    a.v1 = vaddq_s32(a.v1, b.v1);
    a.v2 = vaddq_s32(a.v2, b.v2);
    a.v3 = vaddq_s32(a.v3, b.v3);
    return a;
}
inline int32_t reduce_add(Vi a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v0, a.v1), vaddq_s32(a.v2, a.v3)));
}
inline Vi round_to_int(Vf a) {
    Vi r;
    r.v0 = vcvtnq_s32_f32(a.v0);
    r.v1 = vcvtnq_s32_f32(a.v1);
    r.v2 = vcvtnq_s32_f32(a.v2);
    r.v3 = vcvtnq_s32_f32(a.v3);
    return r;
}
inline Vf to_float(Vi a) {
    Vf r;
    r.v0 = vcvtq_f32_s32(a.v0);
    r.v1 = vcvtq_f32_s32(a.v1);
    r.v2 = vcvtq_f32_s32(a.v2);
    r.v3 = vcvtq_f32_s32(a.v3);
    return r;
}
inline Vf scale_by_power(Vf a, Vi exponent) {
    a.v0 = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v0), vshlq_n_s32(exponent.v0, 23)));
    a.v1 = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v1), vshlq_n_s32(exponent.v1, 23)));
    a.v2 = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v2), vshlq_n_s32(exponent.v2, 23)));
    a.v3 = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v3), vshlq_n_s32(exponent.v3, 23)));
    return a;
}
inline void store_int8(int8_t* p, Vi a) {
    const int16x8_t lo = vcombine_s16(vqmovn_s32(a.v0), vqmovn_s32(a.v1));
    const int16x8_t hi = vcombine_s16(vqmovn_s32(a.v2), vqmovn_s32(a.v3));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(lo), vqmovn_s16(hi)));
}

// Sixteen spans (spans.hpp), and of their codes the floats that are so many steps of 2^16 behind a base.
inline int32x4_t join_code(const uint8_t* lower, uint32x4_t nibbles, int32_t even, int32_t odd) {
    const int32_t turns[4] = {even, even, odd, odd};
    const uint32x4_t upper = vandq_u32(vshlq_u32(nibbles, vld1q_s32(turns)), vdupq_n_u32(15));
    const uint16x4_t words = vreinterpret_u16_u8(vld1_u8(lower));
    return vreinterpretq_s32_u32(vorrq_u32(vmovl_u16(words), vshlq_n_u32(upper, 16)));
}
inline Vi load_spans(const uint8_t* p) {
    const uint32x2_t both = vreinterpret_u32_u8(vld1_u8(p + 32));
    const uint32x4_t nibbles = vcombine_u32(both, both);
    Vi r;
    r.v0 = join_code(p, nibbles, 0, -4);
    r.v1 = join_code(p + 8, nibbles, -8, -12);
    r.v2 = join_code(p + 16, nibbles, -16, -20);
    r.v3 = join_code(p + 24, nibbles, -24, -28);
    return r;
}
inline float32x4_t steps_behind(int32x4_t steps, int32x4_t base) {
    return vreinterpretq_f32_s32(vaddq_s32(vandq_s32(steps, vdupq_n_s32(0x3ff0000)), base));
}
inline Vf low_ends(Vi spans, Vi base) {
    Vf r;
    r.v0 = steps_behind(vshlq_n_s32(spans.v0, 16), base.v0);
    r.v1 = steps_behind(vshlq_n_s32(spans.v1, 16), base.v1);
    r.v2 = steps_behind(vshlq_n_s32(spans.v2, 16), base.v2);
    r.v3 = steps_behind(vshlq_n_s32(spans.v3, 16), base.v3);
    return r;
}
inline Vf high_ends(Vi spans, Vi base) {
    Vf r;
    r.v0 = steps_behind(vshlq_n_s32(spans.v0, 6), base.v0);
    r.v1 = steps_behind(vshlq_n_s32(spans.v1, 6), base.v1);
    r.v2 = steps_behind(vshlq_n_s32(spans.v2, 6), base.v2);
    r.v3 = steps_behind(vshlq_n_s32(spans.v3, 6), base.v3);
    return r;
}

inline Vi sub(Vi a, Vi b) {
    a.v0 = vsubq_s32(a.v0, b.v0);
    a.v1 = vsubq_s32(a.v1, b.v1);
    a.v2 = vsubq_s32(a.v2, b.v2);
    a.v3 = vsubq_s32(a.v3, b.v3);
    return a;
}
inline Vi times_256(Vi a) {
    a.v0 = vshlq_n_s32(a.v0, 8);
    a.v1 = vshlq_n_s32(a.v1, 8);
    a.v2 = vshlq_n_s32(a.v2, 8);
    a.v3 = vshlq_n_s32(a.v3, 8);
    return a;
}
inline Vi divide_256(Vi a) {  // halves upwards
    a.v0 = vrshrq_n_s32(a.v0, 8);
    a.v1 = vrshrq_n_s32(a.v1, 8);
    a.v2 = vrshrq_n_s32(a.v2, 8);
    a.v3 = vrshrq_n_s32(a.v3, 8);
    return a;
}

// The dot product takes two signed operands: bytes lose 128, and their sums start from 128 times that of the inputs.
inline Wq load_weights(const uint8_t* p) {
    Wq r;
    r.v0 = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p), vdupq_n_u8(0x80)));
    r.v1 = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 16), vdupq_n_u8(0x80)));
    r.v2 = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 32), vdupq_n_u8(0x80)));
    r.v3 = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(p + 48), vdupq_n_u8(0x80)));
    return r;
}
inline Vi start_sums(const int8_t* group) {
    const int8x16_t half = vdupq_n_s8(64);
    const int32x4_t halves = vdotq_s32(vdotq_s32(vdupq_n_s32(0), vld1q_s8(group), half), vld1q_s8(group + 16), half);
    const int32x4_t all = vdupq_n_s32(2 * vaddvq_s32(halves));
    return {all, all, all, all};
}
// Quads k and k + 4 of a group in four-bit storage.
inline Wq load_low(const uint8_t* p) {
    Wq r;
    r.v0 = vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(0x0f)));
    r.v1 = vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p + 16), vdupq_n_u8(0x0f)));
    r.v2 = vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p + 32), vdupq_n_u8(0x0f)));
    r.v3 = vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p + 48), vdupq_n_u8(0x0f)));
    return r;
}
inline Wq load_high(const uint8_t* p) {
    Wq r;
    r.v0 = vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4));
    r.v1 = vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p + 16), 4));
    r.v2 = vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p + 32), 4));
    r.v3 = vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p + 48), 4));
    return r;
}
enum { kShiftedRows = 1 };  // the high quads as they are
inline Wq load_shifted(const uint8_t* p) { return load_high(p); }
inline Vi shift_high(Vi a) { return a; }
inline Aq load_inputs(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
inline Vi dot4(Vi acc, const Wq& w, Aq a) {
    acc.v0 = vdotq_s32(acc.v0, w.v0, a);
    acc.v1 = vdotq_s32(acc.v1, w.v1, a);
    acc.v2 = vdotq_s32(acc.v2, w.v2, a);
    acc.v3 = vdotq_s32(acc.v3, w.v3, a);
    asm volatile("" : "+w"(acc.v0), "+w"(acc.v1), "+w"(acc.v2), "+w"(acc.v3));  // here, or all weights of a group stay alive
    return acc;
}

}  // namespace
