// Compares the NEON routines with the portable ones bit by bit: on 64-bit Arm both round alike. `make check-neon` compiles
// this for that processor and runs it there or in an emulator.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "half.hpp"
#include "kernels.hpp"
#include "kv_bytes.hpp"
#include "spans.hpp"

namespace {

using namespace sakiyomi;

int num_checks = 0, num_failures = 0;

// xorshift64* (Vigna, 2016): the same numbers everywhere.
std::uint64_t random_bits() {
    static std::uint64_t state = 0x9e3779b97f4a7c15u;
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du;
}
float random_float(float size) {
    return size * (static_cast<float>(random_bits() >> 40) * 0x1p-23f - 1.0f);
}
std::vector<float> random_floats(std::int64_t count, float size = 3.0f) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& value : x) value = random_float(size);
    return x;
}

template <class T>
void expect_same(const std::string& what, const std::vector<T>& portable, const std::vector<T>& neon) {
    ++num_checks;
    if (portable.size() == neon.size() && std::memcmp(portable.data(), neon.data(), portable.size() * sizeof(T)) == 0) return;
    std::size_t at = 0;
    while (at < portable.size() && std::memcmp(&portable[at], &neon[at], sizeof(T)) == 0) ++at;
    std::printf("DIFFERENT %s, first at %zu of %zu: %.9g and %.9g\n", what.c_str(), at, portable.size(),
                static_cast<double>(portable[at]), static_cast<double>(neon[at]));
    ++num_failures;
}

// `run` fills an array of `count` elements; it starts as the same marks for both.
template <class T>
void compare(const std::string& what, std::int64_t count, const std::function<void(const Kernels&, T*)>& run) {
    std::vector<T> results[2] = {std::vector<T>(static_cast<std::size_t>(count), T(7)), {}};
    results[1] = results[0];
    run(kPortableKernels, results[0].data());
    run(kNeonKernels, results[1].data());
    expect_same(what, results[0], results[1]);
}

std::string name_of(const char* what, std::initializer_list<std::int64_t> sizes) {
    std::string name = what;
    for (const std::int64_t size : sizes) name += " " + std::to_string(size);
    return name;
}

// ---------------------------------------------------------------------------------------------- products

std::vector<std::uint8_t> random_weights(Storage storage, std::int64_t num_blocks, std::int64_t num_groups, bool is_extreme) {
    const std::int64_t block_bytes = quantized_block_bytes(storage, num_groups);
    std::vector<std::uint8_t> weights(static_cast<std::size_t>(num_blocks * block_bytes));
    for (std::uint8_t& byte : weights) byte = static_cast<std::uint8_t>(random_bits());
    for (std::uint8_t* block = weights.data(); block < weights.data() + weights.size(); block += block_bytes) {
        const SpanBases bases{bits_of_float(-0.001f), bits_of_float(0.002f)};
        if (storage == Storage::kSpans) std::memcpy(block, &bases, sizeof bases);
        for (std::int64_t group = 0; group < num_groups; ++group) {
            const GroupPlace place = place_of_group(storage, group, num_groups);
            if (is_extreme) std::memset(block + place.values, 255, static_cast<std::size_t>(value_bytes(storage)));
            std::uint16_t halves[2 * kLanes];
            for (int i = 0; i < kLanes; ++i) halves[i] = float_to_half(0.02f + random_float(0.01f));
            for (int i = kLanes; i < 2 * kLanes; ++i) halves[i] = float_to_half(random_float(1.0f));
            if (storage != Storage::kSpans) std::memcpy(block + place.halves, halves, sizeof halves);
        }
    }
    return weights;
}

std::vector<std::uint8_t> quantize_rows(const std::vector<float>& x, std::int64_t num_rows, std::int64_t width) {
    const std::int64_t num_groups = width / kGroup;
    std::vector<std::uint8_t> results[2];
    const Kernels* tables[2] = {&kPortableKernels, &kNeonKernels};
    for (int i = 0; i < 2; ++i) {
        results[i].resize(static_cast<std::size_t>(num_groups * input_group_bytes(num_rows)));
        for (std::int64_t row = 0; row < num_rows; ++row)
            tables[i]->quantize(x.data() + row * width, num_groups, results[i].data(), row, num_rows);
    }
    expect_same(name_of("quantize", {num_rows, width}), results[0], results[1]);
    return results[0];
}

void compare_products() {
    for (const Storage storage : {Storage::kBytes, Storage::kNibbles, Storage::kSpans})
        for (const std::int64_t width : {32, 96, 576})
            for (std::int64_t rows = 1; rows <= 19; ++rows)
                for (const bool is_extreme : {false, true}) {
                    const std::int64_t outputs = 50, blocks = 4, groups = width / kGroup;
                    const auto weights = random_weights(storage, blocks, groups, is_extreme);
                    auto x = random_floats(rows * width);
                    for (std::size_t i = 0; is_extreme && i < x.size(); ++i) x[i] = i % 5 ? -1.0f : 1.0f;
                    if (!is_extreme && rows > 2)
                        for (std::int64_t i = 0; i < kGroup; ++i) x[static_cast<std::size_t>(width + i)] = i % 2 ? 0.0f : 1e-35f;
                    const auto inputs = quantize_rows(x, rows, width);
                    const auto bias = random_floats(outputs), residual = random_floats(rows * outputs);
                    const LinearJob plain{storage, weights.data(), quantized_block_bytes(storage, groups), outputs, width, inputs.data(),
                                          0, rows, rows % 2 ? bias.data() : nullptr, rows % 3 ? residual.data() : nullptr,
                                          nullptr, outputs};
                    compare<float>(name_of("quantized product", {static_cast<int>(storage), width, rows, is_extreme}), rows * outputs,
                                   [&](const Kernels& kernels, float* out) {
                                       LinearJob job = plain;
                                       job.outputs = out;
                                       kernels.linear_quantized(&job, 0, blocks);
                                   });
                }
    for (const std::int64_t width : {1, 47, 96})
        for (std::int64_t rows = 1; rows <= 9; ++rows) {
            const std::int64_t outputs = 50, blocks = 4;
            const auto weights = random_floats(blocks * kLanes * width), x = random_floats(rows * width);
            compare<float>(name_of("float product", {width, rows}), rows * outputs, [&](const Kernels& kernels, float* out) {
                const LinearJob job{Storage::kFloats, reinterpret_cast<const std::uint8_t*>(weights.data()), width * kLanes * 4,
                                    outputs, width, reinterpret_cast<const std::uint8_t*>(x.data()), width * 4, rows, nullptr,
                                    nullptr, out, outputs};
                kernels.linear_dense(&job, 0, blocks);
            });
        }
}

// ---------------------------------------------------------------------------------------------- rows

void compare_rows() {
    for (const std::int64_t width : {1, 7, 16, 24, 33, 576}) {
        const auto x = random_floats(2 * width, 40.0f), y = random_floats(2 * width);
        compare<float>(name_of("rms_norm", {width}), width,
                       [&](const Kernels& k, float* out) { k.rms_norm(x.data(), y.data(), 1e-5f, width, out); });
        compare<float>(name_of("rope", {width}), 2 * width, [&](const Kernels& k, float* out) {
            k.rope(x.data(), y.data(), y.data() + width, width, out);
        });
        compare<float>(name_of("add", {width}), width,
                       [&](const Kernels& k, float* out) { k.add(x.data(), y.data(), width, out); });
        auto gate = random_floats(width, 120.0f);
        gate[0] = -0.0f;
        compare<float>(name_of("silu_mul", {width}), width,
                       [&](const Kernels& k, float* out) { k.silu_mul(gate.data(), y.data(), width, out); });
    }
    for (const std::int64_t width : {1, 5, 16, 17, 1000})
        for (int trial = 0; trial < 20; ++trial) {
            auto x = random_floats(width);
            for (float& value : x) value = std::floor(value);
            if (trial == 0) x.assign(x.size(), -INFINITY);
            if (trial > 15) x[random_bits() % x.size()] = NAN;
            compare<std::int64_t>(name_of("argmax", {width, trial}), 1,
                                  [&](const Kernels& k, std::int64_t* out) { *out = k.argmax(x.data(), width); });
        }
}

void compare_halves() {
    std::vector<std::uint16_t> halves;
    for (std::uint32_t bits = 0; bits < 0x10000u; ++bits)
        if ((bits & 0x7c00u) != 0x7c00u || (bits & 0x3ffu) == 0 || (bits & 0x200u)) halves.push_back(static_cast<std::uint16_t>(bits));
    const std::int64_t count = static_cast<std::int64_t>(halves.size()) / kLanes * kLanes;
    compare<float>("from_half", count, [&](const Kernels& k, float* out) { k.from_half(halves.data(), count, out); });
}

void compare_runs() {
    for (const std::int64_t count : {1, 15, 16, 20, 32, 64, 80, 128, 512})
        for (const float scale : {1.0f, 1e-20f, 1e20f, 1e-32f}) {
            auto x = random_floats(count);
            for (float& value : x) value *= scale;
            compare<std::int8_t>(name_of("quantize_run", {count}), (count + kLanes - 1) / kLanes * kLanes + 8,
                                 [&](const Kernels& k, std::int8_t* out) {
                                     std::int32_t sum = 0;
                                     const float own = k.quantize_run(x.data(), count, out, &sum);
                                     std::int8_t* end = out + (count + kLanes - 1) / kLanes * kLanes;
                                     std::memcpy(end, &own, sizeof own);
                                     std::memcpy(end + 4, &sum, sizeof sum);
                                 });
        }
}

// ---------------------------------------------------------------------------------------------- attention

void compare_attention(std::int64_t dim, std::int64_t num_heads, std::int64_t num_rows, std::int64_t length, std::int64_t window) {
    const std::int64_t num_keys = length + num_rows;
    const auto keys = random_floats(num_keys * dim), values = random_floats(num_keys * dim);
    const auto queries = random_floats(num_rows * num_heads * dim);
    const std::int64_t num_blocks = num_keys / kKeyBlock + 1;
    std::vector<std::uint8_t> byte_keys(static_cast<std::size_t>(num_blocks * key_block_bytes(dim)), 255);
    std::vector<std::uint8_t> byte_values(static_cast<std::size_t>(num_blocks * value_block_bytes(dim)), 255);
    for (std::int64_t slot = 0; slot < num_keys; ++slot) {
        std::vector<std::int8_t> bytes(static_cast<std::size_t>(num_groups(dim) * kGroup));
        std::vector<float> scales;
        for (std::int64_t start = 0; start < dim; start += kGroup)
            scales.push_back(kPortableKernels.quantize_run(keys.data() + slot * dim + start, std::min<std::int64_t>(kGroup, dim - start),
                                                           bytes.data() + start, nullptr));
        put_key(byte_keys.data(), slot, dim, bytes.data(), scales.data());
        const float scale = kPortableKernels.quantize_run(values.data() + slot * dim, dim, bytes.data(), nullptr);
        put_value(byte_values.data(), slot, dim, bytes.data(), scale);
    }
    // Row r is a chain of its own of r / 2 + 1 drafted rows, itself the last.
    std::vector<std::vector<std::int32_t>> chains(static_cast<std::size_t>(num_rows));
    for (std::int32_t r = 0; r < num_rows; ++r)
        for (std::int32_t i = 0; i <= r / 2; ++i) chains[static_cast<std::size_t>(r)].push_back(i == r / 2 ? r : 2 * i);
    for (const bool is_bytes : {true, false})
        compare<float>(name_of(is_bytes ? "attend_bytes" : "attend_float", {dim, num_heads, num_rows, length, window}),
                       num_rows * num_heads * dim, [&](const Kernels& kernels, float* out) {
                           const std::int64_t size = part_floats(dim);
                           std::vector<float> parts(static_cast<std::size_t>(num_rows * num_heads * size)), states(parts.size());
                           for (std::int64_t i = 0; i < num_rows * num_heads; ++i) states[static_cast<std::size_t>(i * size)] = -INFINITY;
                           std::vector<AttendRow> rows;
                           std::vector<std::uint8_t> rounded(static_cast<std::size_t>(num_rows * num_heads * query_bytes(dim)));
                           const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
                           for (std::int64_t i = 0; i < num_rows * num_heads; ++i)
                               kernels.round_query(queries.data() + i * dim, dim, scale, rounded.data() + i * query_bytes(dim));
                           std::int64_t furthest = 0;
                           for (std::int64_t r = 0; r < num_rows; ++r) {
                               const auto& chain = chains[static_cast<std::size_t>(r)];
                               const std::int64_t last = length + static_cast<std::int64_t>(chain.size()) - 1;
                               furthest = last > furthest ? last : furthest;
                               const void* own_queries = queries.data() + r * num_heads * dim;
                               if (is_bytes) own_queries = rounded.data() + r * num_heads * query_bytes(dim);
                               rows.push_back({own_queries, parts.data() + r * num_heads * size, chain.data(), window > 0 && last >= window ? last - window + 1 : 0, last});
                           }
                           for (std::int64_t begin = 0; begin <= furthest; begin += kKeyChunk) {
                               const AttendJob job{rows.data(), num_rows, num_heads, dim,
                                                   is_bytes ? static_cast<const void*>(byte_keys.data()) : keys.data(),
                                                   is_bytes ? static_cast<const void*>(byte_values.data()) : values.data(), dim,
                                                   length, begin, scale, begin > 0};
                               (is_bytes ? kernels.attend_bytes : kernels.attend_float)(&job);
                               kernels.join_parts(parts.data(), num_rows * num_heads, dim, states.data());
                           }
                           for (std::int64_t i = 0; i < num_rows * num_heads; ++i)
                               kernels.finish_attention(states.data() + i * size, dim, out + i * dim);
                       });
}

}  // namespace

int main() {
    compare_products();
    compare_rows();
    compare_halves();
    compare_runs();
    for (const std::int64_t dim : {20, 64, 80, 128})
        for (std::int64_t heads = 1; heads <= 4; ++heads)
            for (const std::int64_t rows : {1, 3, 8})
                for (const std::int64_t length : {0, 31, 70, 130})
                    for (const std::int64_t window : {0, 9}) compare_attention(dim, heads, rows, length, window);
    std::printf("%d passed, %d failed\n", num_checks - num_failures, num_failures);
    return num_failures == 0 ? 0 : 1;
}
