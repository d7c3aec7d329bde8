// What benchmarks/forward.py measures the machine with: reading and copying memory, int8 dot products from registers,
// and the switch of the profile.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "profile.hpp"
#ifdef SAKIYOMI_X86
#include <immintrin.h>
#endif

namespace sakiyomi {
#ifdef SAKIYOMI_NEON
std::int64_t multiply_neon(std::int64_t count);  // in the file that is compiled for the instruction
#endif
namespace {

using Bytes = In<std::uint8_t, nb::ndim<1>>;

enum { kLine = 64, kAheadLines = 32, kChains = 8 };

// ---------------------------------------------------------------------------------------------- reading

typedef std::uint64_t Line __attribute__((vector_size(kLine), may_alias, aligned(8)));

// Inlined into wrappers for each instruction set, so that a line is one load where the machine has such loads.
__attribute__((always_inline)) inline std::uint64_t read_lines(const std::uint8_t* bytes, std::int64_t count) {
    Line totals[kChains] = {};
    const Line* lines = reinterpret_cast<const Line*>(bytes);
    std::int64_t i = 0;
    for (; i + kChains <= count; i += kChains)
        for (int chain = 0; chain < kChains; ++chain) {
            __builtin_prefetch(lines + i + chain + kAheadLines);
            totals[chain] ^= lines[i + chain];
        }
    for (; i < count; ++i) totals[0] ^= lines[i];
    for (int chain = 1; chain < kChains; ++chain) totals[0] ^= totals[chain];
    std::uint64_t total = 0;
    for (int lane = 0; lane < kLine / 8; ++lane) total ^= totals[0][lane];
    return total;
}

std::uint64_t read_portable(const std::uint8_t* bytes, std::int64_t count) { return read_lines(bytes, count); }
#ifdef SAKIYOMI_X86
__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::uint8_t* bytes, std::int64_t count) {
    return read_lines(bytes, count);
}
__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::uint8_t* bytes, std::int64_t count) {
    return read_lines(bytes, count);
}
#endif

// ---------------------------------------------------------------------------------------------- multiplying

// Each runs `count` rounds of independent dot products of unsigned by signed bytes and returns the operations done,
// a multiplication and an addition counting as two.
std::int64_t multiply_portable(std::int64_t count) {
    std::int32_t totals[kChains][16] = {};
    std::uint8_t weights[64];
    std::int8_t inputs[64];
    for (int i = 0; i < 64; ++i) weights[i] = static_cast<std::uint8_t>(i), inputs[i] = static_cast<std::int8_t>(i - 32);
    for (std::int64_t round = 0; round < count; ++round)
        for (int chain = 0; chain < kChains; ++chain) {
            asm volatile("" : : "r"(weights), "r"(inputs) : "memory");
            for (int lane = 0; lane < 16; ++lane)
                for (int k = 0; k < 4; ++k) totals[chain][lane] += weights[4 * lane + k] * inputs[4 * lane + k];
        }
    asm volatile("" : : "r"(totals) : "memory");
    return count * kChains * 128;
}

#ifdef SAKIYOMI_X86
__attribute__((target("avx2"))) std::int64_t multiply_avx2(std::int64_t count) {
    __m256i totals[kChains] = {}, weights = _mm256_set1_epi8(3), inputs = _mm256_set1_epi8(-2);
    const __m256i ones = _mm256_set1_epi16(1);
    for (std::int64_t round = 0; round < count; ++round) {
#pragma GCC unroll 8
        for (int chain = 0; chain < kChains; ++chain) {
            asm volatile("" : "+x"(weights), "+x"(inputs));  // or the compiler would multiply once
            const __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(weights, inputs), ones);
            totals[chain] = _mm256_add_epi32(totals[chain], pairs);
        }
    }
    for (int chain = 1; chain < kChains; ++chain) totals[0] = _mm256_add_epi32(totals[0], totals[chain]);
    asm volatile("" : : "x"(totals[0]));
    return count * kChains * 64;
}

__attribute__((target("avx512f,avx512vnni"))) std::int64_t multiply_avx512(std::int64_t count) {
    enum { kManyChains = 16 };  // two units with five cycles of latency need at least ten
    __m512i totals[kManyChains], weights = _mm512_set1_epi8(3), inputs = _mm512_set1_epi8(-2);
#pragma GCC unroll 16
    for (int chain = 0; chain < kManyChains; ++chain) totals[chain] = _mm512_set1_epi32(chain);  // or they would be one
    for (std::int64_t round = 0; round < count; ++round) {
#pragma GCC unroll 16
        for (int chain = 0; chain < kManyChains; ++chain)
            totals[chain] = _mm512_dpbusd_epi32(totals[chain], weights, inputs);
    }
    for (int chain = 1; chain < kManyChains; ++chain) totals[0] = _mm512_add_epi32(totals[0], totals[chain]);
    asm volatile("" : : "v"(totals[0]));
    return count * kManyChains * 128;
}
#endif

// ---------------------------------------------------------------------------------------------- bindings

struct Routines {
    std::uint64_t (*read)(const std::uint8_t*, std::int64_t);
    std::int64_t (*multiply)(std::int64_t);
};

Routines routines() {
#ifdef SAKIYOMI_X86
    const std::string isa = kernels().name;
    if (isa == "avx512") return {read_avx512, multiply_avx512};
    if (isa == "avx2") return {read_avx2, multiply_avx2};
#elif defined(SAKIYOMI_NEON)
    if (std::string(kernels().name) == "neon") return {read_portable, multiply_neon};
#endif
    return {read_portable, multiply_portable};
}

std::uint64_t read_memory(Bytes bytes, int num_threads) {
    const Routines routine = routines();
    const std::int64_t num_lines = static_cast<std::int64_t>(bytes.size()) / kLine;
    std::vector<std::uint64_t> totals(static_cast<std::size_t>(check_threads(num_threads, kMaxThreads)));
    nb::gil_scoped_release released;
    Pool::Lease lease(num_threads);
    lease.run([&](Team& team, int rank) {
        const Range mine = split(num_lines, rank, team.size());
        totals[static_cast<std::size_t>(rank)] = routine.read(bytes.data() + mine.begin * kLine, mine.end - mine.begin);
    });
    std::uint64_t total = 0;
    for (const std::uint64_t part : totals) total ^= part;
    return total;
}

void copy_memory(Bytes source, Out<std::uint8_t, nb::ndim<1>> target, int num_threads) {
    check_equal("the size of target", static_cast<std::int64_t>(target.size()), static_cast<std::int64_t>(source.size()));
    check_threads(num_threads, kMaxThreads);
    nb::gil_scoped_release released;
    Pool::Lease lease(num_threads);
    lease.run([&](Team& team, int rank) {
        const Range mine = split(static_cast<std::int64_t>(source.size()), rank, team.size(), kLine);
        std::memcpy(target.data() + mine.begin, source.data() + mine.begin, static_cast<std::size_t>(mine.end - mine.begin));
    });
}

std::int64_t multiply(std::int64_t count, int num_threads) {
    const Routines routine = routines();
    std::vector<std::int64_t> done(static_cast<std::size_t>(check_threads(num_threads, kMaxThreads)));
    nb::gil_scoped_release released;
    Pool::Lease lease(num_threads);
    lease.run([&](Team&, int rank) { done[static_cast<std::size_t>(rank)] = routine.multiply(count); });
    std::int64_t total = 0;
    for (const std::int64_t part : done) total += part;
    return total;
}

void start_profile() {
    Profile& profile = Profile::instance();
    for (Timeline& timeline : profile.ranks) timeline.clear();
    profile.is_on.store(true);
}

nb::dict stop_profile(int num_threads) {
    Profile& profile = Profile::instance();
    profile.is_on.store(false);
    nb::dict seconds;
    for (int phase = 0; phase < static_cast<int>(Phase::kCount); ++phase) {
        nb::list ranks;
        for (int rank = 0; rank < check_threads(num_threads, Profile::kMaxRanks); ++rank)
            ranks.append(profile.ranks[rank].seconds(static_cast<Phase>(phase)));
        seconds[kPhaseNames[phase]] = ranks;
    }
    return seconds;
}

}  // namespace
}  // namespace sakiyomi

void bind_bench(nanobind::module_& m) {
    using namespace sakiyomi;
    using nb::arg;
    m.def("read_memory", &read_memory, arg("bytes").noconvert(), arg("threads"), "Read every byte once.");
    m.def("copy_memory", &copy_memory, arg("source").noconvert(), arg("target").noconvert(), arg("threads"));
    m.def("multiply", &multiply, arg("count"), arg("threads"),
          "int8 dot products from registers; returns the operations done, a multiplication and an addition being two.");
    m.def("start_profile", &start_profile);
    m.def("stop_profile", &stop_profile, arg("threads"),
          "Seconds since start_profile by phase, a list with one number per thread.");
}
