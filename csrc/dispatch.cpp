// Picks the instruction set once, from what processor and operating system offer or from SAKIYOMI_ISA.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "dispatch.hpp"
#include "kernels.hpp"
#ifdef SAKIYOMI_X86
#include <cpuid.h>
#elif defined(SAKIYOMI_NEON) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(SAKIYOMI_NEON)
#include <sys/auxv.h>
#endif

namespace sakiyomi {
namespace {

struct Support {
    bool avx2 = false, avx512 = false, neon = false;
};

#ifdef SAKIYOMI_X86
// Register state that the operating system saves on a context switch; without it wide registers would be corrupted.
std::uint64_t saved_state() {
    std::uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<std::uint64_t>(high) << 32 | low;
}

Support detect() {
    unsigned a, b, c, d, b7, c7;
    Support support;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return support;
    const bool has_xsave = c >> 27 & 1, has_avx = c >> 28 & 1, has_fma = c >> 12 & 1, has_f16c = c >> 29 & 1;
    if (!has_xsave || !has_avx || !has_fma || !has_f16c) return support;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) return support;
    const std::uint64_t state = saved_state();
    const auto bit = [](unsigned word, int index) { return (word >> index & 1) != 0; };
    support.avx2 = (state & 0x6) == 0x6 && bit(b7, 5);
    support.avx512 = support.avx2 && (state & 0xe6) == 0xe6 && bit(b7, 16) && bit(b7, 17) && bit(b7, 30) &&
                     bit(b7, 31) && bit(c7, 11);
    return support;
}
#elif defined(SAKIYOMI_NEON) && defined(__APPLE__)
Support detect() {
    int has_dot_product = 0;
    std::size_t size = sizeof has_dot_product;
    Support support;
    support.neon = sysctlbyname("hw.optional.arm.FEAT_DotProd", &has_dot_product, &size, nullptr, 0) == 0 && has_dot_product;
    return support;
}
#elif defined(SAKIYOMI_NEON)
Support detect() {
    constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP; old headers do not name it
    Support support;
    support.neon = (getauxval(AT_HWCAP) & kDotProduct) != 0;
    return support;
}
#else
Support detect() { return {}; }
#endif

const Kernels* find(const std::string& name, const Support& support) {
    if (name == "portable") return &kPortableKernels;
#ifdef SAKIYOMI_X86
    if (name == "avx2" && support.avx2) return &kAvx2Kernels;
    if (name == "avx512" && support.avx512) return &kAvx512Kernels;
#endif
#ifdef SAKIYOMI_NEON
    if (name == "neon" && support.neon) return &kNeonKernels;
#endif
    (void)support;
    return nullptr;
}

}  // namespace

std::string available_isas() {
    const Support support = detect();
    return std::string("portable") + (support.avx2 ? " avx2" : "") + (support.avx512 ? " avx512" : "") +
           (support.neon ? " neon" : "");
}

namespace {

const Kernels& choose_kernels() {
    const Support support = detect();
    const std::string widest = support.avx512 ? "avx512" : support.avx2 ? "avx2" : support.neon ? "neon" : "portable";
    const char* wish = std::getenv("SAKIYOMI_ISA");
    const std::string name = wish != nullptr && *wish != '\0' ? wish : widest;
    const Kernels* found = find(name, support);
    if (found != nullptr) return *found;
    throw std::invalid_argument("SAKIYOMI_ISA=" + name + " is not available here; use one of: " + available_isas() + ".");
}

}  // namespace

const Kernels& kernels() {
    static const Kernels& chosen = choose_kernels();
    return chosen;
}

}  // namespace sakiyomi
