// Half precision in plain C++ (IEEE binary16, round to nearest even).
#pragma once

#include <stdint.h>
#include <string.h>

namespace {

[[maybe_unused]] inline float float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

[[maybe_unused]] inline uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

[[maybe_unused]] inline float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
    uint32_t bits;
    if (exponent == 0) {
        bits = bits_of_float(static_cast<float>(fraction) * (1.0f / 16777216.0f));
    } else if (exponent == 31) {
        bits = 0x7f800000u | fraction << 13;
    } else {
        bits = (exponent + 112u) << 23 | fraction << 13;
    }
    return float_of_bits(bits | sign);
}

[[maybe_unused]] inline uint16_t float_to_half(float x) {
    uint32_t bits = bits_of_float(x);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
    if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (bits < 0x38800000u) {
        // Adding one half lets the adder round to a multiple of the smallest subnormal, 2^-24.
        return static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(bits) + 0.5f) - 0x3f000000u));
    }
    bits += 0xfffu + (bits >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13));
}

}  // namespace
