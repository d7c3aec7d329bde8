// The routines for 64-bit Arm with the dot product extension.
#include "simd_neon.hpp"
#include "kernels_impl.hpp"

namespace sakiyomi {
const Kernels kNeonKernels = SAKIYOMI_KERNELS("neon");
}  // namespace sakiyomi
