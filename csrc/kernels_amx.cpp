// The routines for AVX-512 with VNNI, and attention for the matrix unit.
#include "simd_avx512.hpp"
#include "kernels_impl.hpp"
#include "kernels_amx.hpp"

namespace sakiyomi {
const Kernels kAmxKernels = SAKIYOMI_KERNELS("amx", 40, attend_matrix);
}  // namespace sakiyomi
