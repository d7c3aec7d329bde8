// The routines for AVX-512 with VNNI, and the same with the matrix unit (AMX) for many rows.
#include "simd_avx512.hpp"
#include "kernels_impl.hpp"
#include "linear_amx.hpp"
#include "attend_amx.hpp"

namespace sakiyomi {
const Kernels kAvx512Kernels = SAKIYOMI_KERNELS("avx512", 3, NarrowTiles, linear_quantized<NarrowTiles>, attend_bytes);
const Kernels kAmxKernels = SAKIYOMI_KERNELS("amx", 7, WideTiles, linear_amx, attend_bytes_amx);
}  // namespace sakiyomi
