// Packing matrices, and reading single rows back for embeddings.
#include "weights.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>
#include <string>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#define SAKIYOMI_HAS_MMAP 1
#endif

#include <nanobind/stl/string.h>
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
    if (is_in_nibbles(storage)) {
        for (int i = 0; i < kGroup / 2; ++i)
            group[(i / 4 * kLanes + lane) * 4 + i % 4] = static_cast<std::uint8_t>(values[i] | values[i + kGroup / 2] << 4);
    } else {
        for (int quad = 0; quad < kGroup / 4; ++quad) std::memcpy(group + (quad * kLanes + lane) * 4, values + quad * 4, 4);
    }
}

void put_halves(GroupHalves halves, std::int64_t lane, std::uint8_t* place) {
    std::memcpy(place + lane * 2, &halves.scale, 2);
    std::memcpy(place + (kLanes + lane) * 2, &halves.min, 2);
}

GroupHalves get_halves(const PackedWeight& weight, std::int64_t n, std::int64_t index) {
    const std::int64_t block = n / kLanes, lane = n % kLanes;
    const std::uint8_t* place = weight.block(block) + place_of_group(weight.storage, index, weight.num_groups()).halves;
    if (weight.storage == Storage::kSpans) {
        SpanBases bases;
        std::memcpy(&bases, weight.block(block), sizeof bases);
        return halves_of_span(get_span(bases, lane, place));
    }
    GroupHalves halves;
    std::memcpy(&halves.scale, place + lane * 2, 2);
    std::memcpy(&halves.min, place + (kLanes + lane) * 2, 2);
    return halves;
}

Group get_group(const PackedWeight& weight, std::int64_t n, std::int64_t index) {
    Group group;
    const std::uint8_t* source = weight.block(n / kLanes) + place_of_group(weight.storage, index, weight.num_groups()).values + n % kLanes * 4;
    const bool is_small = is_in_nibbles(weight.storage);
    for (int i = 0; i < kGroup; ++i) {
        const int at = is_small ? i % (kGroup / 2) : i, byte = source[at / 4 * kLanes * 4 + at % 4];
        group.values[i] = static_cast<std::uint8_t>(!is_small ? byte : i < kGroup / 2 ? byte & 15 : byte >> 4);
    }
    group.halves = get_halves(weight, n, index);
    return group;
}

void unpack_row(const PackedWeight& weight, std::int64_t n, float* out) {
    if (!weight.is_quantized()) {
        const float* floats = reinterpret_cast<const float*>(weight.block(n / kLanes)) + n % kLanes;
        for (std::int64_t k = 0; k < weight.num_inputs; ++k) out[k] = floats[k * kLanes];
        return;
    }
    for (std::int64_t k = 0; k < weight.num_inputs; k += kGroup) {
        const Group group = get_group(weight, n, k / kGroup);
        const float scale = half_to_float(group.halves.scale), low = half_to_float(group.halves.min);
        for (int i = 0; i < kGroup; ++i) out[k + i] = scale * static_cast<float>(group.values[i]) + low;
    }
}

namespace {

// Row n of what is to be packed: values [K], scales and mins [K / 32].
struct QuantizedSource {
    const std::uint8_t* values;
    const std::uint16_t* scales;
    const std::uint16_t* mins;

    GroupHalves halves(std::int64_t group) const { return {scales[group], mins[group]}; }
};

// The spans of a block's rows and their smallest ends; empty where a group has none or they lie too far apart for codes.
struct BlockSpans {
    SpanBases bases{};
    std::vector<Span> spans;  // [rows][groups]
};

BlockSpans find_spans(const QuantizedSource* rows, std::int64_t num_groups) {
    BlockSpans found;
    std::uint16_t least[2] = {0xffff, 0xffff}, most[2] = {0, 0};
    for (std::int64_t lane = 0; lane < kLanes; ++lane)
        for (std::int64_t group = 0; group < num_groups; ++group) {
            Span span;
            if (!find_span(rows[lane].halves(group), &span)) return {};
            const std::uint16_t ends[2] = {span.low, span.high};
            for (int i = 0; i < 2; ++i) {
                least[i] = std::min(least[i], ends[i]);
                most[i] = std::max(most[i], ends[i]);
                if (most[i] - least[i] >> kSpanBits != 0) return {};
            }
            found.spans.push_back(span);
        }
    found.bases = {std::uint32_t{least[0]} << 16, std::uint32_t{least[1]} << 16};
    return found;
}

// Of all blocks, or none.
std::vector<BlockSpans> find_all_spans(const std::vector<QuantizedSource>& rows, std::int64_t num_groups) {
    std::vector<BlockSpans> blocks;
    if (rows.size() % kLanes != 0) return {};
    for (std::size_t n = 0; n < rows.size(); n += kLanes) {
        blocks.push_back(find_spans(rows.data() + n, num_groups));
        if (blocks.back().spans.empty()) return {};
    }
    return blocks;
}

void pack_spans(const BlockSpans& block, std::int64_t num_groups, std::uint8_t* target) {
    std::size_t at = 0;
    for (std::int64_t lane = 0; lane < kLanes; ++lane)
        for (std::int64_t group = 0; group < num_groups; ++group)
            put_span(block.spans[at++], block.bases, lane, target + place_of_group(Storage::kSpans, group, num_groups).halves);
    std::memcpy(target, &block.bases, sizeof block.bases);
}

// As nibbles where spans are wanted and cannot be.
std::unique_ptr<PackedWeight> pack_rows(const std::vector<QuantizedSource>& rows, std::int64_t k, Storage wanted) {
    const std::int64_t num_groups = k / kGroup, num_rows = static_cast<std::int64_t>(rows.size());
    const std::vector<BlockSpans> spans = wanted == Storage::kSpans ? find_all_spans(rows, num_groups) : std::vector<BlockSpans>();
    const bool falls_back = wanted == Storage::kSpans && spans.empty();
    auto weight = std::make_unique<PackedWeight>(falls_back ? Storage::kNibbles : wanted, num_rows, k);
    std::uint8_t* target = weight->bytes.get();
    for (std::int64_t n = 0; n < num_rows; ++n) {
        const QuantizedSource& row = rows[static_cast<std::size_t>(n)];
        std::uint8_t* block = target + n / kLanes * weight->block_bytes();
        for (std::int64_t group = 0; group < num_groups; ++group) {
            const GroupPlace place = place_of_group(weight->storage, group, num_groups);
            put_group(row.values + group * kGroup, weight->storage, n % kLanes, block + place.values);
            if (spans.empty()) put_halves(row.halves(group), n % kLanes, block + place.halves);
        }
    }
    for (const BlockSpans& block : spans) {
        pack_spans(block, num_groups, target);
        target += weight->block_bytes();
    }
    return weight;
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

constexpr const char* kStorageNames[] = {"floats", "bytes", "nibbles", "spans"};  // in the order of Storage

Storage storage_of(const std::string& name) {
    const auto place = std::find(std::begin(kStorageNames), std::end(kStorageNames), name);
    check(place != std::end(kStorageNames), "a weight is stored as floats, bytes, nibbles or spans.");
    return static_cast<Storage>(place - std::begin(kStorageNames));
}

// Parts: (values uint8 [N, K], scales float16 [N, K / 32], mins float16 [N, K / 32]) each. `small` says how values that all
// fit four bits are stored: as bytes, as nibbles, or with spans where these give the same scales and mins.
std::unique_ptr<PackedWeight> pack_quantized(const nb::list& parts, const std::string& small) {
    const Storage small_storage = storage_of(small);
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
    bool is_small = small_storage != Storage::kBytes;
    for (const auto& part : values)
        is_small = is_small && fits_nibbles(part.data(), static_cast<std::int64_t>(part.shape(0)) * k);
    std::vector<QuantizedSource> rows;
    for (std::size_t part = 0; part < values.size(); ++part)
        for (std::int64_t row = 0; row < static_cast<std::int64_t>(values[part].shape(0)); ++row)
            rows.push_back({values[part].data() + row * k, static_cast<const std::uint16_t*>(scales[part].data()) + row * (k / kGroup),
                            static_cast<const std::uint16_t*>(mins[part].data()) + row * (k / kGroup)});
    return pack_rows(rows, k, is_small ? small_storage : Storage::kBytes);
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

using PackedBytes = nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>, nb::c_contig>;

// The bytes as `from_packed` takes them back; the array keeps the weight alive.
PackedBytes packed_bytes(nb::handle self) {
    const PackedWeight& weight = nb::cast<const PackedWeight&>(self);
    const std::size_t shape[1] = {static_cast<std::size_t>(weight.num_bytes())};
    return PackedBytes(weight.bytes.get(), 1, shape, self);
}

// The caller keeps `bytes` alive (nb::keep_alive).
std::unique_ptr<PackedWeight> from_packed(const std::string& storage, std::int64_t n, std::int64_t k, In<std::uint8_t, nb::ndim<1>> bytes) {
    auto weight = std::make_unique<PackedWeight>(storage_of(storage), n, k, bytes.data());
    check_equal("the number of packed bytes", static_cast<std::int64_t>(bytes.shape(0)), weight->num_bytes());
    check(reinterpret_cast<std::uintptr_t>(bytes.data()) % 64 == 0, "packed bytes must start at a multiple of 64.");
    return weight;
}

std::unique_ptr<PackedWeight> select_dense_rows(const PackedWeight& source, const std::int32_t* ids, std::int64_t count) {
    auto chosen = std::make_unique<PackedWeight>(Storage::kFloats, count, source.num_inputs);
    std::vector<float> row(static_cast<std::size_t>(source.num_inputs));
    for (std::int64_t i = 0; i < count; ++i) {
        unpack_row(source, ids[i], row.data());
        pack_dense_row(*chosen, i, row.data());
    }
    return chosen;
}

std::unique_ptr<PackedWeight> select_quantized_rows(const PackedWeight& source, const std::int32_t* ids, std::int64_t count) {
    const std::int64_t k = source.num_inputs, num_groups = k / kGroup;
    std::vector<std::uint8_t> values(static_cast<std::size_t>(count * k));
    std::vector<std::uint16_t> scales(static_cast<std::size_t>(count * num_groups)), mins(scales.size());
    std::vector<QuantizedSource> rows;
    for (std::int64_t i = 0; i < count; ++i) {
        rows.push_back({values.data() + i * k, scales.data() + i * num_groups, mins.data() + i * num_groups});
        for (std::int64_t index = 0; index < num_groups; ++index) {
            const Group group = get_group(source, ids[i], index);
            std::memcpy(values.data() + i * k + index * kGroup, group.values, kGroup);
            scales[static_cast<std::size_t>(i * num_groups + index)] = group.halves.scale;
            mins[static_cast<std::size_t>(i * num_groups + index)] = group.halves.min;
        }
    }
    return pack_rows(rows, k, source.storage);
}

// Rows `ids` of a weight, in that order, as a weight of its own: nothing is rounded again.
std::unique_ptr<PackedWeight> select_rows(const PackedWeight& source, In<std::int32_t, nb::ndim<1>> ids) {
    const std::int64_t count = static_cast<std::int64_t>(ids.shape(0));
    for (std::int64_t i = 0; i < count; ++i)
        if (ids.data()[i] < 0 || ids.data()[i] >= source.num_outputs)
            throw std::out_of_range("row " + std::to_string(ids.data()[i]) + " is out of range; rows are 0 to " +
                                    std::to_string(source.num_outputs - 1) + ".");
    nb::gil_scoped_release released;
    return (source.is_quantized() ? select_quantized_rows : select_dense_rows)(source, ids.data(), count);
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
        .def_static("from_quantized", &pack_quantized, nb::arg("parts"), nb::arg("small"))
        .def_static("from_dense", &pack_dense, nb::arg("parts"))
        .def_prop_ro("shape", [](const PackedWeight& w) { return nb::make_tuple(w.num_outputs, w.num_inputs); })
        .def_prop_ro("is_quantized", &PackedWeight::is_quantized)
        .def_static("from_packed", &from_packed, nb::arg("storage"), nb::arg("n"), nb::arg("k"), nb::arg("bytes").noconvert(),
                    nb::keep_alive<0, 4>())
        .def_prop_ro("storage", [](const PackedWeight& w) { return kStorageNames[static_cast<int>(w.storage)]; })
        .def_prop_ro("packed", &packed_bytes)
        .def_prop_ro("num_bytes", &PackedWeight::num_bytes);
    m.def("prefers_spans", [] { return kernels().prefers_spans; });
    m.def("new_bytes", &new_bytes, nb::arg("count"));
    m.def("select_rows", &select_rows, nb::arg("weight"), nb::arg("ids").noconvert());
    m.def("checksum", &checksum, nb::arg("bytes").noconvert());
    m.def("embed", &embed, nb::arg("weight"), nb::arg("ids").noconvert(), nb::arg("out").noconvert());
}
