// The routines in plain C++, for any machine.
#include "simd_portable.hpp"
#include "kernels_impl.hpp"

namespace sakiyomi {
const Kernels kPortableKernels = SAKIYOMI_KERNELS("portable", 3, NarrowTiles, linear_quantized<NarrowTiles>, attend_bytes);
}  // namespace sakiyomi
