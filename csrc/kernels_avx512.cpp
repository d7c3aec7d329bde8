// The routines for AVX-512 with VNNI.
#include "simd_avx512.hpp"
#include "kernels_impl.hpp"

namespace sakiyomi {
const Kernels kAvx512Kernels = SAKIYOMI_KERNELS("avx512", 3, attend<uint16_t>);
}  // namespace sakiyomi
