// The routines for AVX2 with FMA and F16C.
#include "simd_avx2.hpp"
#include "kernels_impl.hpp"

namespace sakiyomi {
const Kernels kAvx2Kernels = SAKIYOMI_KERNELS("avx2", 3, NarrowTiles, linear_quantized<NarrowTiles>, attend_bytes);
}  // namespace sakiyomi
