// Packing matrices, and reading single rows back for embeddings.
#include "weights.hpp"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define SAKIYOMI_HAS_MMAP 1
#endif

#include <nanobind/stl/unique_ptr.h>

#include "arrays.hpp"
#include "half.hpp"
#include "parallel.hpp"

namespace sakiyomi {

PackedWeight::PackedWeight(Storage stored, std::int64_t n, std::int64_t k) : PackedWeight(stored, n, k, nullptr) {
    bytes = SlabBytes(static_cast<std::size_t>(num_bytes()));
}

PackedWeight::PackedWeight(Storage stored, std::int64_t n, std::int64_t k, const std::uint8_t* packed)
    : storage(stored), num_outputs(n), num_inputs(k), bytes(SlabBytes::borrow(packed)) {
    check(n > 0 && k > 0, "a weight needs at least one row and one column.");
    check(!is_quantized() || k % kGroup == 0, "a quantized weight needs K to be a multiple of 32.");
}

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20, kSlabBytes = std::size_t{32} << 20;

std::shared_ptr<void> new_memory(std::size_t num_bytes) {
#ifdef SAKIYOMI_HAS_MMAP
    void* start = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(start, num_bytes, MADV_HUGEPAGE);
#endif
    return std::shared_ptr<void>(start, [num_bytes](void* p) { munmap(p, num_bytes); });
#else
    void* start = std::calloc(num_bytes, 1);
    if (start == nullptr) throw std::bad_alloc();
    return std::shared_ptr<void>(start, [](void* p) { std::free(p); });
#endif
}

}  // namespace

std::shared_ptr<std::uint8_t> new_pages(std::size_t num_bytes) {
    const std::size_t whole = (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
    const std::shared_ptr<void> memory = new_memory(whole + kHugePage);
    const std::size_t offset = reinterpret_cast<std::uintptr_t>(memory.get()) % kHugePage;
    return {memory, static_cast<std::uint8_t*>(memory.get()) + (kHugePage - offset)};
}

SlabBytes::SlabBytes(std::size_t num_bytes) {
    static std::mutex mutex;
    static std::weak_ptr<std::uint8_t> open_slab;  // the last slab, while anything in it is alive
    static std::uint8_t* next = nullptr;
    static std::size_t num_left = 0;
    const std::size_t rounded = (num_bytes + 63) / 64 * 64;
    std::lock_guard<std::mutex> lock(mutex);
    slab_ = open_slab.lock();
    if (!slab_ || rounded > num_left) {
        const std::size_t size = rounded > kSlabBytes ? rounded : kSlabBytes;
        slab_ = new_pages(size);
        open_slab = slab_;
        next = slab_.get();
        num_left = size;
    }
    bytes_ = next;
    next += rounded;
    num_left -= rounded;
}

NewBytes new_bytes(std::size_t count) {
    auto* held = new std::shared_ptr<std::uint8_t>(new_pages(count));
    const nb::capsule owner(held, [](void* pages) noexcept { delete static_cast<std::shared_ptr<std::uint8_t>*>(pages); });
    return NewBytes(held->get(), {count}, owner);
}

void put_group(const std::uint8_t* values, Storage storage, std::int64_t lane, std::uint8_t* group) {
    if (storage == Storage::kNibbles) {
        for (int i = 0; i < kGroup / 2; ++i)
            group[(i / 4 * kLanes + lane) * 4 + i % 4] = static_cast<std::uint8_t>(values[i] | values[i + kGroup / 2] << 4);
    } else {
        for (int quad = 0; quad < kGroup / 4; ++quad) std::memcpy(group + (quad * kLanes + lane) * 4, values + quad * 4, 4);
    }
}

void put_halves(std::uint16_t scale, std::uint16_t min, std::int64_t lane, std::uint8_t* place) {
    std::memcpy(place + lane * 2, &scale, 2);
    std::memcpy(place + (kLanes + lane) * 2, &min, 2);
}

void unpack_row(const PackedWeight& weight, std::int64_t n, float* out) {
    const std::uint8_t* source = weight.bytes.get() + n / kLanes * weight.block_bytes();
    const std::int64_t lane = n % kLanes;
    if (!weight.is_quantized()) {
        const float* floats = reinterpret_cast<const float*>(source);
        for (std::int64_t k = 0; k < weight.num_inputs; ++k) out[k] = floats[k * kLanes + lane];
        return;
    }
    const bool is_nibbles = weight.storage == Storage::kNibbles;
    const std::int64_t size = value_bytes(weight.storage);
    for (std::int64_t group = 0; group < weight.num_inputs / kGroup; ++group, source += group_bytes(weight.storage)) {
        std::uint16_t halves[2];
        std::memcpy(halves, source + size + lane * 2, 2);
        std::memcpy(halves + 1, source + size + (kLanes + lane) * 2, 2);
        const float scale = half_to_float(halves[0]), low = half_to_float(halves[1]);
        for (int i = 0; i < kGroup; ++i) {
            const int at = is_nibbles ? i % (kGroup / 2) : i, byte = source[(at / 4 * kLanes + lane) * 4 + at % 4];
            const int value = !is_nibbles ? byte : i < kGroup / 2 ? byte & 15 : byte >> 4;
            out[group * kGroup + i] = scale * static_cast<float>(value) + low;
        }
    }
}

namespace {

struct QuantizedSource {
    const std::uint8_t* values;
    const std::uint16_t* scales;
    const std::uint16_t* mins;
};

void pack_quantized_row(PackedWeight& weight, std::int64_t n, const QuantizedSource& source, std::int64_t row) {
    const std::int64_t k = weight.num_inputs, num_groups = k / kGroup, lane = n % kLanes;
    const std::int64_t size = value_bytes(weight.storage);
    std::uint8_t* target = weight.bytes.get() + n / kLanes * weight.block_bytes();
    for (std::int64_t group = 0; group < num_groups; ++group, target += group_bytes(weight.storage)) {
        put_group(source.values + row * k + group * kGroup, weight.storage, lane, target);
        put_halves(source.scales[row * num_groups + group], source.mins[row * num_groups + group], lane, target + size);
    }
}

void pack_dense_row(PackedWeight& weight, std::int64_t n, const float* row) {
    float* block = reinterpret_cast<float*>(weight.bytes.get() + n / kLanes * weight.block_bytes());
    for (std::int64_t k = 0; k < weight.num_inputs; ++k) block[k * kLanes + n % kLanes] = row[k];
}

bool fits_nibbles(const std::uint8_t* values, std::int64_t count) {
    std::uint8_t all = 0;
    for (std::int64_t i = 0; i < count; ++i) all |= values[i];
    return all < 16;
}

// Parts: (values uint8 [N, K], scales float16 [N, K / 32], mins float16 [N, K / 32]) each. Values that all fit four bits
// are stored in four, unless `bytes_only`.
std::unique_ptr<PackedWeight> pack_quantized(const nb::list& parts, bool bytes_only) {
    std::vector<In<std::uint8_t, nb::ndim<2>>> values;
    std::vector<AnyInput> scales, mins;
    std::int64_t n = 0, k = 0;
    for (nb::handle part : parts) {
        const nb::tuple fields = nb::cast<nb::tuple>(part);
        values.push_back(nb::cast<In<std::uint8_t, nb::ndim<2>>>(fields[0], false));
        scales.push_back(nb::cast<AnyInput>(fields[1], false));
        mins.push_back(nb::cast<AnyInput>(fields[2], false));
        k = values.size() == 1 ? static_cast<std::int64_t>(values.back().shape(1)) : k;
        check_equal("the width of a stacked matrix", static_cast<std::int64_t>(values.back().shape(1)), k);
        for (const AnyInput& halves : {scales.back(), mins.back()}) {
            check(is_half(halves) && halves.ndim() == 2, "scales and mins must be float16 [N, K / 32].");
            check_equal("the number of rows of scales or mins", static_cast<std::int64_t>(halves.shape(0)),
                        static_cast<std::int64_t>(values.back().shape(0)));
            check_equal("the width of scales or mins", static_cast<std::int64_t>(halves.shape(1)), k / kGroup);
        }
        n += static_cast<std::int64_t>(values.back().shape(0));
    }
    nb::gil_scoped_release released;
    bool is_small = !bytes_only;
    for (const auto& part : values)
        is_small = is_small && fits_nibbles(part.data(), static_cast<std::int64_t>(part.shape(0)) * k);
    auto weight = std::make_unique<PackedWeight>(is_small ? Storage::kNibbles : Storage::kBytes, n, k);
    n = 0;
    for (std::size_t part = 0; part < values.size(); ++part) {
        const QuantizedSource source{values[part].data(), static_cast<const std::uint16_t*>(scales[part].data()),
                                     static_cast<const std::uint16_t*>(mins[part].data())};
        for (std::size_t row = 0; row < values[part].shape(0); ++row, ++n)
            pack_quantized_row(*weight, n, source, static_cast<std::int64_t>(row));
    }
    return weight;
}

// Parts: float32 [N, K] each.
std::unique_ptr<PackedWeight> pack_dense(const nb::list& parts) {
    std::vector<In<float, nb::ndim<2>>> matrices;
    std::int64_t n = 0, k = 0;
    for (nb::handle part : parts) {
        matrices.push_back(nb::cast<In<float, nb::ndim<2>>>(part, false));
        k = matrices.size() == 1 ? static_cast<std::int64_t>(matrices.back().shape(1)) : k;
        check_equal("the width of a stacked matrix", static_cast<std::int64_t>(matrices.back().shape(1)), k);
        n += static_cast<std::int64_t>(matrices.back().shape(0));
    }
    auto weight = std::make_unique<PackedWeight>(Storage::kFloats, n, k);
    nb::gil_scoped_release released;
    n = 0;
    for (const auto& matrix : matrices)
        for (std::size_t row = 0; row < matrix.shape(0); ++row, ++n)
            pack_dense_row(*weight, n, matrix.data() + static_cast<std::int64_t>(row) * k);
    return weight;
}

int value_bits(const PackedWeight& weight) {
    return weight.storage == Storage::kFloats ? 32 : weight.storage == Storage::kBytes ? 8 : 4;
}

using PackedBytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;

// The bytes as `from_packed` takes them back; the array keeps the weight alive.
PackedBytes packed_bytes(nb::handle self) {
    const PackedWeight& weight = nb::cast<const PackedWeight&>(self);
    const std::size_t shape[1] = {static_cast<std::size_t>(weight.num_bytes())};
    return PackedBytes(weight.bytes.get(), 1, shape, self);
}

// The caller keeps `bytes` alive (nb::keep_alive).
std::unique_ptr<PackedWeight> from_packed(int bits, std::int64_t n, std::int64_t k, In<std::uint8_t, nb::ndim<1>> bytes) {
    check(bits == 4 || bits == 8 || bits == 32, "a packed weight has 4, 8 or 32 bits a value.");
    const Storage storage = bits == 4 ? Storage::kNibbles : bits == 8 ? Storage::kBytes : Storage::kFloats;
    auto weight = std::make_unique<PackedWeight>(storage, n, k, bytes.data());
    check_equal("the number of packed bytes", static_cast<std::int64_t>(bytes.shape(0)), weight->num_bytes());
    check(reinterpret_cast<std::uintptr_t>(bytes.data()) % 64 == 0, "packed bytes must start at a multiple of 64.");
    return weight;
}

// Rows `ids` of a weight, in that order, as a weight of its own with the same storage: nothing is rounded again.
std::unique_ptr<PackedWeight> select_rows(const PackedWeight& source, In<std::int32_t, nb::ndim<1>> ids) {
    const std::int64_t count = static_cast<std::int64_t>(ids.shape(0)), k = source.num_inputs;
    for (std::int64_t i = 0; i < count; ++i)
        if (ids.data()[i] < 0 || ids.data()[i] >= source.num_outputs)
            throw std::out_of_range("row " + std::to_string(ids.data()[i]) + " is out of range; rows are 0 to " +
                                    std::to_string(source.num_outputs - 1) + ".");
    auto chosen = std::make_unique<PackedWeight>(source.storage, count, k);
    // In pieces of `unit` bytes a block holds [pieces][16 outputs]: 4 bytes of values, then halves, or floats.
    const auto copy_pieces = [](std::uint8_t* target, std::int64_t to, const std::uint8_t* from, std::int64_t lane,
                                std::int64_t unit, std::int64_t num_pieces) {
        for (std::int64_t piece = 0; piece < num_pieces; ++piece)
            std::memcpy(target + (piece * kLanes + to) * unit, from + (piece * kLanes + lane) * unit,
                        static_cast<std::size_t>(unit));
    };
    nb::gil_scoped_release released;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t row = ids.data()[i], lane = row % kLanes, to = i % kLanes;
        const std::uint8_t* from = source.bytes.get() + row / kLanes * source.block_bytes();
        std::uint8_t* target = chosen->bytes.get() + i / kLanes * chosen->block_bytes();
        if (!source.is_quantized()) {
            copy_pieces(target, to, from, lane, 4, k);
            continue;
        }
        const std::int64_t size = value_bytes(source.storage), step = group_bytes(source.storage);
        for (std::int64_t group = 0; group < k / kGroup; ++group, from += step, target += step) {
            copy_pieces(target, to, from, lane, 4, size / (4 * kLanes));
            copy_pieces(target + size, to, from + size, lane, 2, 2);
        }
    }
    return chosen;
}

// A checksum that runs at the speed of memory: eight sums of words, each turned before the next word, joined at the end.
std::uint64_t checksum(In<std::uint8_t, nb::ndim<1>> bytes) {
    nb::gil_scoped_release released;
    std::uint64_t sums[8] = {1, 2, 3, 4, 5, 6, 7, 8}, word = 0;
    const std::size_t size = bytes.shape(0), whole = size / 64 * 64;
    for (std::size_t i = 0; i < whole; i += 64)
        for (int lane = 0; lane < 8; ++lane) {
            std::memcpy(&word, bytes.data() + i + lane * 8, 8);
            sums[lane] = (sums[lane] << 5 | sums[lane] >> 59) + word;
        }
    std::uint64_t total = size;
    for (const std::uint64_t sum : sums) total = (total ^ sum) * 0x9e3779b97f4a7c15u;
    for (std::size_t i = whole; i < size; ++i) total = (total ^ bytes.data()[i]) * 0x9e3779b97f4a7c15u;
    return total;
}

void embed(const PackedWeight& weight, In<std::int32_t, nb::ndim<1>> ids, Out<float, nb::ndim<2>> out) {
    const std::int64_t num_rows = static_cast<std::int64_t>(ids.shape(0));
    check_equal("the number of rows of out", static_cast<std::int64_t>(out.shape(0)), num_rows);
    check_equal("the width of out", static_cast<std::int64_t>(out.shape(1)), weight.num_inputs);
    for (std::int64_t row = 0; row < num_rows; ++row)
        if (ids.data()[row] < 0 || ids.data()[row] >= weight.num_outputs)
            throw std::out_of_range("id " + std::to_string(ids.data()[row]) + " is out of range; ids are 0 to " +
                                    std::to_string(weight.num_outputs - 1) + ".");
    nb::gil_scoped_release released;
    for (std::int64_t row = 0; row < num_rows; ++row)
        unpack_row(weight, ids.data()[row], out.data() + row * weight.num_inputs);
}

}  // namespace
}  // namespace sakiyomi

void bind_weights(nanobind::module_& m) {
    using namespace sakiyomi;
    nb::class_<PackedWeight>(m, "PackedWeight")
        .def_static("from_quantized", &pack_quantized, nb::arg("parts"), nb::arg("bytes_only") = false)
        .def_static("from_dense", &pack_dense, nb::arg("parts"))
        .def_prop_ro("shape", [](const PackedWeight& w) { return nb::make_tuple(w.num_outputs, w.num_inputs); })
        .def_prop_ro("is_quantized", &PackedWeight::is_quantized)
        .def_static("from_packed", &from_packed, nb::arg("bits"), nb::arg("n"), nb::arg("k"), nb::arg("bytes").noconvert(),
                    nb::keep_alive<0, 4>())
        .def_prop_ro("value_bits", &value_bits)
        .def_prop_ro("packed", &packed_bytes)
        .def_prop_ro("num_bytes", &PackedWeight::num_bytes);
    m.def("new_bytes", &new_bytes, nb::arg("count"));
    m.def("select_rows", &select_rows, nb::arg("weight"), nb::arg("ids").noconvert());
    m.def("checksum", &checksum, nb::arg("bytes").noconvert());
    m.def("embed", &embed, nb::arg("weight"), nb::arg("ids").noconvert(), nb::arg("out").noconvert());
}
