// Sixteen lanes in plain C++.
#include <math.h>
#include <string.h>

#include "half.hpp"

namespace {

enum { kTileRows = 4, kHeldTotals = 0, kDenseRows = 4, kDenseBlocks = 1, kScoreBlocks = 1 };

struct Vf {
    float v[16];
};
struct Vi {
    int32_t v[16];
};
struct Wq {
    uint8_t v[64];
};
struct Aq {
    int32_t v[4];
};

#define LANES for (int i = 0; i < 16; ++i)

inline void prefetch(const void*) {}
inline void prefetch_far(const void* p) { prefetch(p); }
enum { kNarrowAheadBytes = 1920 };
enum { kNarrowPrefersSpans = 0 };

inline Vf set1(float x) {
    Vf r;
    LANES r.v[i] = x;
    return r;
}
inline Vf load(const float* p) {
    Vf r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
inline Vf load_tail(const float* p, int64_t n) {
    Vf r = set1(0.0f);
    memcpy(r.v, p, static_cast<size_t>(n) * sizeof(float));
    return r;
}
inline void store(float* p, Vf a) { memcpy(p, a.v, sizeof a.v); }
inline void store_tail(float* p, Vf a, int64_t n) { memcpy(p, a.v, static_cast<size_t>(n) * sizeof(float)); }
inline Vf load(const uint16_t* p) {
    Vf r;
    LANES r.v[i] = half_to_float(p[i]);
    return r;
}

inline Vf add(Vf a, Vf b) {
    LANES a.v[i] += b.v[i];
    return a;
}
inline Vf sub(Vf a, Vf b) {
    LANES a.v[i] -= b.v[i];
    return a;
}
inline Vf mul(Vf a, Vf b) {
    LANES a.v[i] *= b.v[i];
    return a;
}
inline Vf div(Vf a, Vf b) {
    LANES a.v[i] /= b.v[i];
    return a;
}
// One rounding where the machine has an instruction for it. Two elsewhere: a path promises equality with itself only.
inline Vf fma(Vf a, Vf b, Vf c) {
#if defined(__FP_FAST_FMAF) || defined(__aarch64__)
    LANES c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
#else
    LANES c.v[i] = a.v[i] * b.v[i] + c.v[i];
#endif
    return c;
}
// On NaN both return b, as the x86 instructions do.
inline Vf max(Vf a, Vf b) {
    LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline Vf min(Vf a, Vf b) {
    LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
inline Vf abs(Vf a) {
    LANES a.v[i] = a.v[i] < 0.0f ? -a.v[i] : a.v[i];
    return a;
}
inline float reduce_add(Vf a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
    return a.v[0];
}
inline float first_lane(Vf a) { return a.v[0]; }
inline float reduce_max(Vf a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    return a.v[0];
}
// Sums of four vectors.
struct Quad {
    float v[4];
};
inline Quad reduce_add_four(const Vf* rows) {
    Quad r;
    for (int i = 0; i < 4; ++i) r.v[i] = reduce_add(rows[i]);
    return r;
}
inline Vf join_quads(const Quad* quads) {
    Vf r;
    LANES r.v[i] = quads[i / 4].v[i % 4];
    return r;
}
inline Vf keep(Vf a) { return a; }
inline Wq keep(Wq a) { return a; }
inline float sqrt_scalar(float x) { return sqrtf(x); }

inline Vi zero_int() {
    Vi r;
    memset(r.v, 0, sizeof r.v);
    return r;
}
inline Vi fresh_zero() { return zero_int(); }
inline Vi set1_int(int32_t x) {
    Vi r;
    LANES r.v[i] = x;
    return r;
}
// Sums wrap: what rounding makes of a nan is no small number.
inline Vi add(Vi a, Vi b) {
    LANES a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
    return a;
}
inline int32_t reduce_add(Vi a) {
    uint32_t r = 0;
    LANES r += static_cast<uint32_t>(a.v[i]);
    return static_cast<int32_t>(r);
}
// Adding 1.5 * 2^23 leaves the nearest integer (ties to even) in the low bits of the sum.
inline Vi round_to_int(Vf a) {
    Vi r;
    LANES r.v[i] = static_cast<int32_t>(bits_of_float(a.v[i] + 12582912.0f) - 0x4b400000u);
    return r;
}
inline Vf to_float(Vi a) {
    Vf r;
    LANES r.v[i] = static_cast<float>(a.v[i]);
    return r;
}
inline Vf scale_by_power(Vf a, Vi exponent) {
    LANES a.v[i] = float_of_bits(bits_of_float(a.v[i]) + (static_cast<uint32_t>(exponent.v[i]) << 23));
    return a;
}
inline void store_int8(int8_t* p, Vi a) {
    LANES p[i] = static_cast<int8_t>(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]);
}

// Sixteen spans (spans.hpp), and of their codes the floats that are so many steps of 2^16 behind a base.
inline Vi load_spans(const uint8_t* p) {
    Vi r;
    LANES {
        uint16_t lower;
        memcpy(&lower, p + 2 * i, sizeof lower);
        r.v[i] = lower | (p[32 + i % 2 * 4 + i / 4] >> (i / 2 % 2 * 4) & 15) << 16;
    }
    return r;
}
inline float steps_behind(int32_t steps, int32_t base) {
    return float_of_bits(static_cast<uint32_t>(base) + (static_cast<uint32_t>(steps) << 16));
}
inline Vf low_ends(Vi spans, Vi base) {
    Vf r;
    LANES r.v[i] = steps_behind(spans.v[i] & 0x3ff, base.v[i]);
    return r;
}
inline Vf high_ends(Vi spans, Vi base) {
    Vf r;
    LANES r.v[i] = steps_behind(spans.v[i] >> 10, base.v[i]);
    return r;
}

inline Vi sub(Vi a, Vi b) {
    LANES a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i]));
    return a;
}
inline Vi times_256(Vi a) {
    LANES a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) << 8);
    return a;
}
inline Vi divide_256(Vi a) {  // halves upwards
    a = add(a, set1_int(128));
    LANES a.v[i] >>= 8;
    return a;
}

inline Wq load_weights(const uint8_t* p) {
    Wq r;
    memcpy(r.v, p, sizeof r.v);
    return r;
}
// Quads k and k + 4 of a group in four-bit storage.
inline Wq load_low(const uint8_t* p) {
    Wq r;
    for (int i = 0; i < 64; ++i) r.v[i] = p[i] & 15;
    return r;
}
inline Wq load_high(const uint8_t* p) {
    Wq r;
    for (int i = 0; i < 64; ++i) r.v[i] = p[i] >> 4;
    return r;
}
enum { kShiftedRows = 1 };  // the high quads as they are
inline Wq load_shifted(const uint8_t* p) { return load_high(p); }
inline Vi shift_high(Vi a) { return a; }
inline Vi start_sums(const int8_t*) { return zero_int(); }  // what sums of bytes start from
inline Aq load_inputs(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
inline Vi dot4(Vi acc, const Wq& w, Aq a) {
    LANES acc.v[i] += w.v[4 * i] * a.v[0] + w.v[4 * i + 1] * a.v[1] + w.v[4 * i + 2] * a.v[2] + w.v[4 * i + 3] * a.v[3];
    return acc;
}

#undef LANES

}  // namespace
