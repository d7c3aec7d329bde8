// The routines for 64-bit Arm with the dot product extension.
#include "simd_neon.hpp"
#include "kernels_impl.hpp"

namespace sakiyomi {
const Kernels kNeonKernels = SAKIYOMI_KERNELS("neon", 3, NarrowTiles, linear_quantized<NarrowTiles>, attend_bytes);

// What bench.cpp measures the machine with: `count` rounds of independent dot products from registers. Returns the
// operations done, a multiplication and an addition counting as two.
int64_t multiply_neon(int64_t count) {
    enum { kChains = 16 };
    int32x4_t totals[kChains];
    int8x16_t weights = vdupq_n_s8(3), inputs = vdupq_n_s8(-2);
#pragma GCC unroll 16
    for (int chain = 0; chain < kChains; ++chain) totals[chain] = vdupq_n_s32(chain);
    for (int64_t round = 0; round < count; ++round) {
        asm volatile("" : "+w"(weights), "+w"(inputs));
#pragma GCC unroll 16
        for (int chain = 0; chain < kChains; ++chain) totals[chain] = vdotq_s32(totals[chain], weights, inputs);
    }
#pragma GCC unroll 16
    for (int chain = 1; chain < kChains; ++chain) totals[0] = vaddq_s32(totals[0], totals[chain]);
    asm volatile("" : : "w"(totals[0]));
    return count * kChains * 32;
}
}  // namespace sakiyomi
