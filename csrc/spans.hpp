// A group's scale and min as the numbers where it begins and ends, in 20 bits in place of 32.
//
// Where a file in 4 bits was rounded from bfloat16 weights, each group's smallest and largest number are two of these, and
// what the file holds follows from them: min is the smallest, and scale a fifteenth of the distance in half precision. Of
// neighbouring outputs these numbers lie near one another, so that 10 bits say how far each is from the first of its block:
// 1,024 bfloat16 numbers are eight powers of two.
#pragma once

#include <stdint.h>
#include <string.h>

#include "half.hpp"
#include "kernels.hpp"

namespace sakiyomi {

// A group's scale and min in half precision.
struct GroupHalves {
    uint16_t scale, min;
};

// The smallest and the largest number of a group, in bfloat16.
struct Span {
    uint16_t low, high;
};

// The bits of the smallest low and the smallest high end of a block, as floats; what a code counts are steps of 2^16.
struct SpanBases {
    uint32_t low, high;
};
static_assert(sizeof(SpanBases) == kSpanBasesBytes, "as they lie at the start of a block");

}  // namespace sakiyomi

namespace {

using sakiyomi::GroupHalves;
using sakiyomi::Span;
using sakiyomi::SpanBases;

enum { kSpanBits = 10 };
constexpr float kSpanStep = 1.0f / 15.0f;
constexpr float kLargeStep = 8192.0f * kSpanStep;

// A fifteenth of a group's length, rounded to the 11 bits of half precision: what is 2^13 times as large has no finer ones.
[[maybe_unused]] inline float scale_of_length(float length) {
    const float large = length * kLargeStep;
    return large - (large - length * kSpanStep);
}

[[maybe_unused]] inline GroupHalves halves_of_span(Span span) {
    const float low = float_of_bits(uint32_t{span.low} << 16), high = float_of_bits(uint32_t{span.high} << 16);
    return {float_to_half(scale_of_length(high - low)), float_to_half(low)};
}

// The span from which the kernels make these very halves, if there is one.
[[maybe_unused]] inline bool find_span(GroupHalves halves, Span* span) {
    const float scale = half_to_float(halves.scale), low = half_to_float(halves.min);
    span->low = static_cast<uint16_t>(bits_of_float(low) >> 16);
    span->high = static_cast<uint16_t>((bits_of_float(low + 15.0f * scale) + 0x8000u) >> 16);
    const float again = float_of_bits(uint32_t{span->low} << 16), high = float_of_bits(uint32_t{span->high} << 16);
    return bits_of_float(again) == bits_of_float(low) && bits_of_float(scale_of_length(high - low)) == bits_of_float(scale);
}

// A code of 20 bits, in the group of spans at `place`: [16] the lower 16 bits, then of even outputs and of odd ones [8] nibbles with
// the upper 4.
[[maybe_unused]] inline void put_span(Span span, SpanBases bases, int64_t lane, uint8_t* place) {
    const uint32_t low = (uint32_t{span.low} << 16) - bases.low, high = (uint32_t{span.high} << 16) - bases.high;
    const uint32_t code = low >> 16 | high >> 16 << kSpanBits;
    const uint16_t lower = static_cast<uint16_t>(code);
    memcpy(place + lane * 2, &lower, 2);
    uint8_t* upper = place + 2 * sakiyomi::kLanes + lane % 2 * 4 + lane / 4;
    *upper = static_cast<uint8_t>(*upper | (code >> 16) << (lane / 2 % 2 * 4));
}

[[maybe_unused]] inline Span get_span(SpanBases bases, int64_t lane, const uint8_t* place) {
    uint16_t lower;
    memcpy(&lower, place + lane * 2, 2);
    const uint32_t upper = place[2 * sakiyomi::kLanes + lane % 2 * 4 + lane / 4] >> (lane / 2 % 2 * 4) & 15u;
    const uint32_t code = lower | upper << 16, mask = (1u << kSpanBits) - 1;
    return {static_cast<uint16_t>((bases.low >> 16) + (code & mask)), static_cast<uint16_t>((bases.high >> 16) + (code >> kSpanBits))};
}

}  // namespace
