// The routines in plain C++, for any machine.
#include "simd_portable.hpp"
#include "kernels_impl.hpp"

namespace sakiyomi {
const Kernels kPortableKernels = SAKIYOMI_KERNELS("portable", 3, linear_quantized, attend_bytes);
}  // namespace sakiyomi
