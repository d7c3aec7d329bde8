// The routines of kernels.hpp that choose tokens, over the lanes of a simd_*.hpp included before.
//
// Weights are bit-equal on every instruction set: the same operations in the same order, none contracted. Guesses need
// only be near them, and bounds be bounds.
#include "kernels.hpp"
#include "noise.hpp"

namespace {

using sakiyomi::kChooseBlock;
using sakiyomi::NoiseKey;
using sakiyomi::ScoreRule;

enum { kScanAhead = 1024 };  // logits
enum { kVectors = kChooseBlock / 16, kSumLanes = 16 };

#ifndef SAKIYOMI_HAS_WIDE_LANES
// In plain C++, for instruction sets whose simd_*.hpp does not have them.

// Lanes, as bits, with a >= b; with a nan in either.
inline uint32_t lanes_at_least(Vf a, Vf b) {
    float x[16], y[16];
    store(x, a);
    store(y, b);
    uint32_t r = 0;
    for (int i = 0; i < 16; ++i) r |= static_cast<uint32_t>(x[i] >= y[i]) << i;
    return r;
}
inline uint32_t lanes_unordered(Vf a, Vf b) {
    float x[16], y[16];
    store(x, a);
    store(y, b);
    uint32_t r = 0;
    for (int i = 0; i < 16; ++i) r |= static_cast<uint32_t>(x[i] != x[i] || y[i] != y[i]) << i;
    return r;
}

// Sixteen 64-bit lanes whose low halves count; what stands in the high ones is of no interest.
struct Vw {
    uint64_t v[16];
};
inline Vw wide_from(uint32_t first) {
    Vw r;
    for (int i = 0; i < 16; ++i) r.v[i] = first + static_cast<uint32_t>(i);
    return r;
}
inline Vw wide_set1(uint32_t x) {
    Vw r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
}
inline Vw wide_mul(Vw a, Vw b) {
    for (int i = 0; i < 16; ++i) a.v[i] = (a.v[i] & 0xffffffffu) * (b.v[i] & 0xffffffffu);
    return a;
}
// (product >> 32) ^ a ^ key
inline Vw wide_mix(Vw product, Vw a, Vw key) {
    for (int i = 0; i < 16; ++i) a.v[i] ^= product.v[i] >> 32 ^ key.v[i];
    return a;
}
// The low halves: a, b, c, d of lane 0, of lane 1, and so on.
inline void store_words(uint32_t* out, Vw a, Vw b, Vw c, Vw d) {
    for (int i = 0; i < 16; ++i) {
        const uint64_t words[4] = {a.v[i], b.v[i], c.v[i], d.v[i]};
        for (int j = 0; j < 4; ++j) out[4 * i + j] = static_cast<uint32_t>(words[j]);
    }
}
#endif

bool scan_blocks(const float* x, int64_t num_blocks, float* maxima) {
    uint32_t nans = 0;
    for (int64_t block = 0; block < num_blocks; ++block, x += kChooseBlock) {
        // The other threads' logits are still in their caches, which answer late.
        for (int i = 0; i < kChooseBlock; i += 16) prefetch(x + kScanAhead + i);
        const Vf a = load(x), b = load(x + 16), c = load(x + 32), d = load(x + 48);
        nans |= lanes_unordered(a, b) | lanes_unordered(c, d);
        maxima[block] = reduce_max(max(max(a, b), max(c, d)));
    }
    return nans != 0;
}

uint64_t find_in_block(const float* x, float bound) {
    const Vf low = set1(bound), lowest = set1(-__FLT_MAX__);
    uint64_t found = 0;
    for (int i = 0; i < kVectors; ++i) {
        const Vf value = load(x + 16 * i);
        found |= static_cast<uint64_t>(lanes_at_least(value, low) & lanes_at_least(value, lowest)) << 16 * i;
    }
    return found;
}

inline __attribute__((always_inline)) double score_of(float logit, const ScoreRule& rule) {
    return (static_cast<double>(logit) - static_cast<double>(rule.max)) / rule.temperature;
}

// `IS_WARM`: at temperature 1, where the division, the slowest of all these operations, changes nothing.
template <bool IS_WARM>
inline __attribute__((always_inline)) void weigh(const float* x, const ScoreRule& rule, double* weights) {
    double scores[kChooseBlock];
    for (int i = 0; i < kChooseBlock; ++i)
        scores[i] = IS_WARM ? static_cast<double>(x[i]) - static_cast<double>(rule.max) : score_of(x[i], rule);
    for (int i = 0; i < kChooseBlock; ++i) weights[i] = scores[i] > sakiyomi::kExpLowest ? scores[i] : sakiyomi::kExpLowest;
    for (int i = 0; i < kChooseBlock; ++i) weights[i] = sakiyomi::exp_inside(weights[i]);
    if (rule.lowest == -__builtin_inf()) return;
    for (int i = 0; i < kChooseBlock; ++i) weights[i] = scores[i] >= rule.lowest ? weights[i] : 0.0;
}

void weigh_block(const float* x, const ScoreRule* rule, double* weights) {
    if (rule->temperature == 1) return weigh<true>(x, *rule, weights);
    weigh<false>(x, *rule, weights);
}

template <bool IS_WARM>
inline __attribute__((always_inline)) void sum_all(const float* x, int64_t num_blocks, const float* maxima,
                                                   const ScoreRule& rule, double* lanes) {
    double sums[kSumLanes], weights[kChooseBlock];
    for (int lane = 0; lane < kSumLanes; ++lane) sums[lane] = lanes[lane];
    for (int64_t block = 0; block < num_blocks; ++block) {
        if (score_of(maxima[block], rule) < rule.lowest) continue;
        weigh<IS_WARM>(x + block * kChooseBlock, rule, weights);
        for (int start = 0; start < kChooseBlock; start += kSumLanes)
            for (int lane = 0; lane < kSumLanes; ++lane) sums[lane] += weights[start + lane];
    }
    for (int lane = 0; lane < kSumLanes; ++lane) lanes[lane] = sums[lane];
}

void sum_blocks(const float* x, int64_t num_blocks, const float* maxima, const ScoreRule* rule, double* lanes) {
    if (rule->temperature == 1) return sum_all<true>(x, num_blocks, maxima, *rule, lanes);
    sum_all<false>(x, num_blocks, maxima, *rule, lanes);
}

inline Vf guess(const float* x, Vf max, Vf inverse_temperature) {
    return exp_clamped(mul(sub(load(x), max), inverse_temperature));
}

void guess_block(const float* x, const ScoreRule* rule, float* weights) {
    const Vf max = set1(rule->max), inverse = set1(static_cast<float>(1.0 / rule->temperature));
    for (int i = 0; i < kChooseBlock; i += 16) store(weights + i, guess(x + i, max, inverse));
}

double guess_total(const float* x, int64_t num_blocks, const ScoreRule* rule) {
    const Vf max = set1(rule->max), inverse = set1(static_cast<float>(1.0 / rule->temperature));
    double total = 0;
    for (int64_t block = 0; block < num_blocks; ++block, x += kChooseBlock) {
        const Vf first = add(guess(x, max, inverse), guess(x + 16, max, inverse));
        total += reduce_add(add(first, add(guess(x + 32, max, inverse), guess(x + 48, max, inverse))));
    }
    return total;
}

// Philox4x32-10 of 16 neighbouring groups, as `philox_words` of noise.hpp.
void draw_block(const NoiseKey* key, uint32_t first_group, uint32_t* words) {
    const Vw multiplier0 = wide_set1(0xD2511F53u), multiplier1 = wide_set1(0xCD9E8D57u);
    Vw c0 = wide_from(first_group), c1 = wide_set1(key->purpose), c2 = wide_set1(key->t_low), c3 = wide_set1(key->t_high);
    for (int round = 0; round < sakiyomi::kRounds; ++round) {
        const Vw product0 = wide_mul(c0, multiplier0), product1 = wide_mul(c2, multiplier1);
        c0 = wide_mix(product1, c1, wide_set1(key->round0[round]));
        c2 = wide_mix(product0, c3, wide_set1(key->round1[round]));
        c1 = product1;
        c3 = product0;
    }
    store_words(words, c0, c1, c2, c3);
}

// The noise -log(-log(1 - u)) is below -log(u), and log2(u) is above what the bits of a float say when read as a
// fixed-point number.
uint64_t bound_block(const float* x, const ScoreRule* rule, const uint32_t* words, float hurdle) {
    constexpr float kLn2 = 0.69314718f, kSlack = 0.01f;
    const float max = rule->max, inverse_temperature = static_cast<float>(1.0 / rule->temperature);
    float bounds[kChooseBlock];
    for (int i = 0; i < kChooseBlock; ++i) {
        const float half = static_cast<float>(static_cast<int32_t>(words[i] >> 1));  // at most 2^31 u
        int32_t bits;
        __builtin_memcpy(&bits, &half, sizeof bits);
        const float log2_u = static_cast<float>(bits) * 0x1p-23f - (127.0f + 31.0f);
        bounds[i] = (x[i] - max) * inverse_temperature + (kSlack - kLn2 * log2_u);
    }
    uint64_t found = 0;
    for (int i = 0; i < kVectors; ++i)
        found |= static_cast<uint64_t>(lanes_at_least(load(bounds + 16 * i), set1(hurdle))) << 16 * i;
    return found;
}

}  // namespace
