// The routines for AVX-512 with VNNI, and the same with the matrix unit (AMX) for products of many rows.
#include "simd_avx512.hpp"
#include "kernels_impl.hpp"
#include "linear_amx.hpp"

namespace sakiyomi {
const Kernels kAvx512Kernels = SAKIYOMI_KERNELS("avx512", 3, linear_quantized);
const Kernels kAmxKernels = SAKIYOMI_KERNELS("amx", 3, linear_amx);
}  // namespace sakiyomi
