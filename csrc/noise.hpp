// Keyed noise, bit for bit what sakiyomi/noise.py computes (see there for the definitions and sources).
//
// Only IEEE 754 double additions, subtractions, multiplications, divisions and integer operations, in a fixed order;
// compile with -ffp-contract=off. Every function here is branch-free arithmetic that a compiler may vectorise.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__GNUC__) || defined(__clang__)
#define SAKIYOMI_INLINE inline __attribute__((always_inline))
#else
#define SAKIYOMI_INLINE inline
#endif

namespace sakiyomi {

constexpr double kLn2High = 0x1.62e42feep-1;
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr double kRounding = 0x1.8p+52;
constexpr double kExpLowest = -0x1.6232bdd7abcd2p+9;
constexpr double kExpHighest = 0x1.62e42fefa39efp+9;
constexpr std::uint64_t kSqrtHalfBits = 0x3FE6A09E667F3BCDull;
constexpr std::uint64_t kOneBits = 0x3FF0000000000000ull;
constexpr std::uint64_t kMantissaMask = 0x000FFFFFFFFFFFFFull;

// No noise is above this: -log(-log(1 - 2^-33)) is 22.874.
constexpr double kGumbelMax = 22.875;

constexpr int kRounds = 10;

// What all ids of one position share: the round keys and the other counter words.
struct NoiseKey {
    std::uint32_t round0[kRounds];
    std::uint32_t round1[kRounds];
    std::uint32_t purpose, t_low, t_high;

    NoiseKey(std::uint64_t seed, std::uint64_t t, std::uint32_t purpose_ = 0)
        : purpose(purpose_), t_low(static_cast<std::uint32_t>(t)), t_high(static_cast<std::uint32_t>(t >> 32)) {
        auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
        for (int round = 0; round < kRounds; ++round) {
            round0[round] = key0;
            round1[round] = key1;
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
    }
};

// Philox4x32-10 of the counter (group, purpose, t low, t high): the words of ids 4 group, ..., 4 group + 3.
SAKIYOMI_INLINE void philox_words(const NoiseKey& key, std::uint32_t group, std::uint32_t words[4]) {
    std::uint32_t c0 = group, c1 = key.purpose, c2 = key.t_low, c3 = key.t_high;
    for (int round = 0; round < kRounds; ++round) {
        const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * c0, product1 = std::uint64_t{0xCD9E8D57u} * c2;
        c0 = static_cast<std::uint32_t>(product1 >> 32) ^ c1 ^ key.round0[round];
        c2 = static_cast<std::uint32_t>(product0 >> 32) ^ c3 ^ key.round1[round];
        c1 = static_cast<std::uint32_t>(product1);
        c3 = static_cast<std::uint32_t>(product0);
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

// The 32 random bits of one id.
SAKIYOMI_INLINE std::uint32_t random_word(const NoiseKey& key, std::uint32_t id) {
    std::uint32_t words[4];
    philox_words(key, id / 4, words);
    return words[id % 4];
}

SAKIYOMI_INLINE std::uint64_t bits_of(double x) {
    std::uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

SAKIYOMI_INLINE double double_of(std::uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// log(x * 2^-down) of a positive normal finite x.
SAKIYOMI_INLINE double log_normal(double x, double down = 0.0) {
    const std::uint64_t shifted = bits_of(x) + (kOneBits - kSqrtHalfBits);
    // The biased exponent becomes a double through the low bits of 2^52: no 64-bit conversion is needed.
    const double k = double_of((shifted >> 52) | 0x4330000000000000ull) - 0x1p+52 - 1023.0 - down;
    const double f = double_of((shifted & kMantissaMask) + kSqrtHalfBits) - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double tail = 2.0 / 21.0;
    tail = tail * z + 2.0 / 19.0;
    tail = tail * z + 2.0 / 17.0;
    tail = tail * z + 2.0 / 15.0;
    tail = tail * z + 2.0 / 13.0;
    tail = tail * z + 2.0 / 11.0;
    tail = tail * z + 2.0 / 9.0;
    tail = tail * z + 2.0 / 7.0;
    tail = tail * z + 2.0 / 5.0;
    tail = tail * z + 2.0 / 3.0;
    tail = tail * z;
    return k * kLn2High + (f - (s * (f - tail) - k * kLn2Low));
}

// exact_log of noise.py for every double.
inline double exact_log(double x) {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    if (x == 0) return -infinity;
    if (!(x > 0)) return std::numeric_limits<double>::quiet_NaN();
    if (x == infinity) return x;
    return x < 0x1p-1022 ? log_normal(x * 0x1p+54, 54.0) : log_normal(x);
}

// exp(x) for kExpLowest <= x <= kExpHighest. At k = -1022 the scale is 0: no subnormal results.
SAKIYOMI_INLINE double exp_inside(double x) {
    const double shifted = x * kLog2E + kRounding;
    const double k = shifted - kRounding;
    const double r = (x - k * kLn2High) - k * kLn2Low;
    double tail = 1.0 / 6227020800.0;
    tail = tail * r + 1.0 / 479001600.0;
    tail = tail * r + 1.0 / 39916800.0;
    tail = tail * r + 1.0 / 3628800.0;
    tail = tail * r + 1.0 / 362880.0;
    tail = tail * r + 1.0 / 40320.0;
    tail = tail * r + 1.0 / 5040.0;
    tail = tail * r + 1.0 / 720.0;
    tail = tail * r + 1.0 / 120.0;
    tail = tail * r + 1.0 / 24.0;
    tail = tail * r + 1.0 / 6.0;
    tail = tail * r + 1.0 / 2.0;
    const double mantissa = 1.0 + (r + (r * r) * tail);
    const double half_scale = double_of((bits_of(shifted) + 1022u) << 52);
    return (mantissa * 2.0) * half_scale;
}

// exact_exp of noise.py for every double.
inline double exact_exp(double x) {
    if (x != x) return x;
    if (x > kExpHighest) return std::numeric_limits<double>::infinity();
    return exp_inside(x > kExpLowest ? x : kExpLowest);
}

// Standard Gumbel noise from 32 random bits.
SAKIYOMI_INLINE double gumbel_of(std::uint32_t word) {
    const double exponential = -log_normal(1.0 - (static_cast<double>(word) + 0.5) * 0x1p-32);
    return -log_normal(exponential);
}

}  // namespace sakiyomi
