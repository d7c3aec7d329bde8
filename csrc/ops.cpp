// The operations of ops/base.py one by one. Each checks its arrays, so that a mistake raises and never writes astray.
#include <cstring>
#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "attention.hpp"
#include "dispatch.hpp"
#include "head.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "two_terms.hpp"
#include "weights.hpp"

namespace sakiyomi {

Caches::Caches(const nb::list& keys, const nb::list& values, const std::vector<std::int64_t>& lengths,
               const std::vector<std::int64_t>& bounds, const PendingRows& pending, std::int64_t num_kv_heads,
               std::int64_t head_dim)
    : num_kv_heads_(num_kv_heads), head_dim_(head_dim) {
    const std::size_t count = bounds.empty() ? 0 : bounds.size() - 1;
    check(keys.size() == count && values.size() == count && lengths.size() == count,
          "keys, values, lengths and bounds must name the same number of sequences.");
    for (std::size_t s = 0; s < count; ++s) {
        const AnyArray k = nb::cast<AnyArray>(keys[s], false), v = nb::cast<AnyArray>(values[s], false);
        check(k.ndim() == 4 && v.ndim() == 4 && k.dtype() == v.dtype(), "keys and values must have four axes and one type.");
        check(is_byte(k) || is_float(k), "caches must be uint8 or float32.");
        check(s == 0 || is_byte(k) == is_bytes_, "the caches of a call must share one precision.");
        is_bytes_ = is_byte(k);
        for (std::size_t axis = 0; axis < 3; ++axis) check(k.shape(axis) == v.shape(axis), "keys and values differ in shape.");
        check_equal("the number of heads of a cache", static_cast<std::int64_t>(k.shape(1)), num_kv_heads);
        check_equal(is_bytes_ ? "the size of a block of keys" : "the head width of a cache", static_cast<std::int64_t>(k.shape(3)),
                    is_bytes_ ? key_block_bytes(head_dim) : head_dim);
        check_equal(is_bytes_ ? "the size of a block of values" : "the head width of a cache", static_cast<std::int64_t>(v.shape(3)),
                    is_bytes_ ? value_block_bytes(head_dim) : head_dim);
        const std::int64_t layers = static_cast<std::int64_t>(k.shape(0));
        const std::int64_t capacity = static_cast<std::int64_t>(k.shape(2)) * (is_bytes_ ? kKeyBlock : 1);
        num_layers_ = layers < num_layers_ ? layers : num_layers_;
        const std::int64_t num_pending = static_cast<std::int64_t>(pending[s].size());
        const std::int64_t needed = lengths[s] + num_pending + bounds[s + 1] - bounds[s];
        if (lengths[s] < 0 || needed > capacity)
            throw std::invalid_argument("a cache of " + std::to_string(capacity) + " slots is too small for " +
                                        std::to_string(needed) + " positions.");
        entries_.push_back({static_cast<char*>(k.data()), static_cast<char*>(v.data()), capacity, lengths[s]});
    }
}

void multiply_rows(const float* x_rows, std::int64_t num_rows, const PackedWeight& weight, const float* bias, float* y, int num_threads,
                   bool is_fine, const float* norm_weight, float eps) {
    const std::int64_t width = weight.num_inputs;
    const Kernels& kernel = kernels();
    const std::int64_t num_terms = !weight.is_quantized() ? 0 : is_fine ? 2 : 1;
    const std::int64_t term_bytes = QuantizedRows::num_bytes(width, num_rows), left_bytes = num_terms == 2 ? width * 4 : 0;
    const std::int64_t normed_bytes = norm_weight != nullptr ? width * 4 : 0;
    const int team_size = threads_for(num_threads, num_rows * width * weight.num_outputs / 8);
    Pool::Lease lease(team_size);
    const std::int64_t num_sums = num_terms == 2 ? num_rows * kShareBlocks * kLanes : 0;
    std::uint8_t* scratch = reinterpret_cast<std::uint8_t*>(
        lease.scratch(static_cast<std::size_t>(num_terms * term_bytes + num_rows * (left_bytes + normed_bytes) + team_size * num_sums * 4)));
    const QuantizedRows first{scratch, width, num_rows}, rest{scratch + term_bytes, width, num_rows};
    float* left = reinterpret_cast<float*>(scratch + num_terms * term_bytes);
    float* normed = reinterpret_cast<float*>(scratch + num_terms * term_bytes + num_rows * left_bytes);
    const float* sources = norm_weight == nullptr ? x_rows : normed;
    float* sums = reinterpret_cast<float*>(scratch + num_terms * term_bytes + num_rows * (left_bytes + normed_bytes));
    const std::int64_t num_outputs = weight.num_outputs;
    const void* inputs = num_terms == 0 ? static_cast<const void*>(sources) : first.bytes;
    const LinearJob job = linear_job(weight, inputs, width * 4, num_rows, bias, nullptr, y, num_outputs);
    lease.run([&](Team& team, int rank) {
        mark(Phase::kHead);  // the only matrix of a decoder that stands outside its stack
        if (num_terms > 0 || norm_weight != nullptr)
            team.share(rank, num_rows, [&](std::int64_t row) {
                if (norm_weight != nullptr)
                    kernel.rms_norm(x_rows + row * width, norm_weight, eps, width, normed + row * width);
                if (num_terms > 0) first.write(kernel, row, sources + row * width, 0, width);
                if (num_terms == 2) quantize_rest(kernel, first, rest, row, sources + row * width, left + row * width);
            });
        team.share(rank, num_shares(weight.num_blocks()), [&](std::int64_t item) {
            if (num_terms == 2)
                run_both_terms(kernel, weight, job, rest.bytes, item, sums + rank * num_sums);
            else
                run_share(kernel, weight, job, item);
        });
    });
}

namespace {

using Matrix = In<float, nb::ndim<2>>;
using OutMatrix = Out<float, nb::ndim<2>>;
using HeadsIn = In<float, nb::ndim<3>>;
using HeadsOut = Out<float, nb::ndim<3>>;
using Vector = In<float, nb::ndim<1>>;
using Ints = In<std::int32_t, nb::ndim<1>>;

template <class Array>
std::int64_t size_of(const Array& array, std::size_t axis) {
    return static_cast<std::int64_t>(array.shape(axis));
}

// body(begin, end) over `count` items on as many threads as the work deserves.
template <class Body>
void for_items(int num_threads, std::int64_t count, std::int64_t operations_per_item, Body body) {
    check_threads(num_threads, kMaxThreads);
    nb::gil_scoped_release released;
    Pool::Lease lease(threads_for(num_threads, count * operations_per_item));
    lease.run([&](Team& team, int rank) {
        const Range mine = split(count, rank, team.size());
        body(mine.begin, mine.end);
    });
}

void linear(Matrix x, const PackedWeight& weight, std::optional<Vector> bias, OutMatrix out, int num_threads, bool is_fine,
            std::optional<Vector> norm, float eps) {
    const std::int64_t num_rows = size_of(x, 0), width = weight.num_inputs;
    check_equal("the width of x", size_of(x, 1), width);
    check_equal("the number of rows of out", size_of(out, 0), num_rows);
    check_equal("the width of out", size_of(out, 1), weight.num_outputs);
    if (bias) check_equal("the length of bias", size_of(*bias, 0), weight.num_outputs);
    if (norm) check_equal("the length of the norm's weight", size_of(*norm, 0), width);
    check_threads(num_threads, kMaxThreads);
    nb::gil_scoped_release released;
    multiply_rows(x.data(), num_rows, weight, bias ? bias->data() : nullptr, out.data(), num_threads, is_fine, norm ? norm->data() : nullptr, eps);
}

void rms_norm(Matrix x, Vector weight, float eps, OutMatrix out, int num_threads) {
    const std::int64_t num_rows = size_of(x, 0), width = size_of(x, 1);
    check(width > 0, "a row to norm needs at least one number.");
    check_equal("the length of the norm's weight", size_of(weight, 0), width);
    check_equal("the number of rows of out", size_of(out, 0), num_rows);
    check_equal("the width of out", size_of(out, 1), width);
    const Kernels& kernel = kernels();
    for_items(num_threads, num_rows, width, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row)
            kernel.rms_norm(x.data() + row * width, weight.data(), eps, width, out.data() + row * width);
    });
}

// table [P, D]: at each position D / 2 cosines, then D / 2 sines.
void rope(HeadsIn x, Ints positions, Matrix table, HeadsOut out, int num_threads) {
    const std::int64_t num_rows = size_of(x, 0), num_heads = size_of(x, 1), dim = size_of(x, 2);
    check_equal("the number of positions", size_of(positions, 0), num_rows);
    check_equal("the width of the table", size_of(table, 1), dim);
    check(dim % 2 == 0, "rope needs an even head width.");
    for (std::size_t axis = 0; axis < 3; ++axis) check_equal("an axis of out", size_of(out, axis), size_of(x, axis));
    for (std::int64_t row = 0; row < num_rows; ++row)
        check(positions.data()[row] >= 0 && positions.data()[row] < size_of(table, 0), "a position is outside the table.");
    const Kernels& kernel = kernels();
    for_items(num_threads, num_rows, num_heads * dim, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
            const float* angles = table.data() + positions.data()[row] * dim;
            for (std::int64_t head = row * num_heads; head < (row + 1) * num_heads; ++head)
                kernel.rope(x.data() + head * dim, angles, angles + dim / 2, dim / 2, out.data() + head * dim);
        }
    });
}

void store(HeadsIn k, HeadsIn v, const nb::list& keys, const nb::list& values, const std::vector<std::int64_t>& lengths,
           const PendingRows& pending, std::int64_t layer, const std::vector<std::int64_t>& bounds, HeadsOut k_out,
           HeadsOut v_out) {
    const std::int64_t num_rows = size_of(k, 0), num_heads = size_of(k, 1), dim = size_of(k, 2);
    for (std::size_t axis = 0; axis < 3; ++axis)
        for (const std::int64_t got : {size_of(v, axis), size_of(k_out, axis), size_of(v_out, axis)})
            check_equal("an axis of k, v or their copies", got, size_of(k, axis));
    const RowPlan plan = RowPlan::trees(bounds, nullptr, num_rows, pending);
    const Caches caches(keys, values, lengths, bounds, pending, num_heads, dim);
    check(num_rows == 0 || (layer >= 0 && layer < caches.num_layers()), "the cache has no such layer.");
    const Kernels& kernel = kernels();
    nb::gil_scoped_release released;
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const RowView& view = plan.rows[static_cast<std::size_t>(row)];
        const KeyRows cache = caches.at(static_cast<std::size_t>(view.sequence), layer);
        for (std::int64_t head = 0; head < num_heads; ++head)
            for (const bool is_value : {false, true}) {
                const std::int64_t from = (row * num_heads + head) * dim;
                const HeadSlots slots = head_slots(cache, head, dim, caches.is_bytes(), is_value);
                slots.put(kernel, cache.length + view.index, (is_value ? v : k).data() + from);
                slots.get(cache.length + view.index, (is_value ? v_out : k_out).data() + from);
            }
    }
}

// Rows of a cache in 8 bits to other slots, one after the other.
void move_slots(Out<std::uint8_t, nb::ndim<4>> keys, Out<std::uint8_t, nb::ndim<4>> values, std::int64_t head_dim,
                const std::vector<std::int64_t>& source, const std::vector<std::int64_t>& target) {
    check(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim must be 1 to 512.");
    check_equal("the size of a block of keys", size_of(keys, 3), key_block_bytes(head_dim));
    check_equal("the size of a block of values", size_of(values, 3), value_block_bytes(head_dim));
    for (std::size_t axis = 0; axis < 3; ++axis) check(keys.shape(axis) == values.shape(axis), "keys and values differ in shape.");
    check(source.size() == target.size(), "each source needs a target.");
    const std::int64_t num_slots = size_of(keys, 2) * kKeyBlock;
    for (const auto& slots : {source, target})
        for (const std::int64_t slot : slots) check(slot >= 0 && slot < num_slots, "a slot is outside the cache.");
    for (std::int64_t head = 0; head < size_of(keys, 0) * size_of(keys, 1); ++head) {
        const HeadSlots head_keys{keys.data() + head * size_of(keys, 2) * size_of(keys, 3), head_dim, true, false};
        const HeadSlots head_values{values.data() + head * size_of(values, 2) * size_of(values, 3), head_dim, true, true};
        for (std::size_t i = 0; i < source.size(); ++i) {
            head_keys.move(source[i], target[i]);
            head_values.move(source[i], target[i]);
        }
    }
}

void run_attention(Attention& attention, const std::vector<KeyRows>& views, std::int64_t window, int num_threads,
                   std::int64_t num_keys) {
    nb::gil_scoped_release released;
    const std::int64_t operations = num_keys * attention.heads.num_heads * attention.heads.head_dim / 4;
    const int useful = threads_for(check_threads(num_threads, kMaxThreads), operations);
    std::vector<std::int64_t> lengths;
    for (const KeyRows& view : views) lengths.push_back(view.length);
    attention.choose_items(useful, lengths);
    Pool::Lease lease(useful);
    const std::int64_t parts_bytes = attention.parts_bytes(), num_rows = static_cast<std::int64_t>(attention.plan->rows.size());
    std::byte* scratch = lease.scratch(static_cast<std::size_t>(parts_bytes + attention.rounded_bytes()));
    attention.parts = reinterpret_cast<float*>(scratch);
    attention.rounded = reinterpret_cast<std::uint8_t*>(scratch) + parts_bytes;
    lease.run([&](Team& team, int rank) {
        if (attention.is_bytes)
            team.share(rank, num_rows, [&](std::int64_t row) {
                for (std::int64_t head = 0; head < attention.heads.num_heads; ++head) attention.round_query(row, head);
            });
        team.share(rank, attention.num_items(), [&](std::int64_t item) { attention.run_item(item, views.data(), window); });
    });
}

Attention describe_attention(HeadsIn q, std::int64_t num_kv_heads, const RowPlan& plan, std::int64_t window, float scale,
                             OutMatrix out) {
    const Heads heads{size_of(q, 1), num_kv_heads, size_of(q, 2)};
    heads.check_sizes();
    check(window >= 0, "window must not be negative.");
    const std::int64_t width = heads.num_heads * heads.head_dim;
    check_equal("the number of rows of out", size_of(out, 0), size_of(q, 0));
    check_equal("the width of out", size_of(out, 1), width);
    return {&kernels(), &plan, heads, false, scale, q.data(), width, out.data(), width};
}

void attend_cache(HeadsIn q, std::int64_t num_kv_heads, const nb::list& keys, const nb::list& values,
                  const std::vector<std::int64_t>& lengths, const PendingRows& pending, std::int64_t layer,
                  const std::vector<std::int64_t>& bounds, std::optional<Ints> parents, std::int64_t window, float scale, OutMatrix out, int num_threads) {
    const std::int64_t num_rows = size_of(q, 0);
    if (parents) check_equal("the number of parents", size_of(*parents, 0), num_rows);
    const RowPlan plan = RowPlan::trees(bounds, parents ? parents->data() : nullptr, num_rows, pending);
    Attention attention = describe_attention(q, num_kv_heads, plan, window, scale, out);
    const Caches caches(keys, values, lengths, bounds, pending, num_kv_heads, attention.heads.head_dim);
    if (num_rows == 0) return;
    check(layer >= 0 && layer < caches.num_layers(), "the cache has no such layer.");
    attention.is_bytes = caches.is_bytes();
    std::vector<KeyRows> views;
    std::int64_t num_keys = 0;
    for (std::size_t s = 0; s < caches.size(); ++s) {
        views.push_back(caches.at(s, layer));
        num_keys += (lengths[s] + static_cast<std::int64_t>(pending[s].size()) + 1) * (bounds[s + 1] - bounds[s]);
    }
    run_attention(attention, views, window, num_threads, num_keys);
}

// Row r attends to rows columns[offsets[r]:offsets[r + 1]] of k and v, at positions 0, 1, ... in that order.
void attend_rows(HeadsIn q, HeadsIn k, HeadsIn v, In<std::int64_t, nb::ndim<1>> offsets, Ints columns,
                 std::int64_t window, float scale, OutMatrix out, int num_threads) {
    const std::int64_t num_rows = size_of(q, 0), num_kv_heads = size_of(k, 1), dim = size_of(k, 2);
    for (std::size_t axis = 0; axis < 3; ++axis) check_equal("an axis of v", size_of(v, axis), size_of(k, axis));
    check_equal("the number of rows of k", size_of(k, 0), num_rows);
    check_equal("the number of offsets", size_of(offsets, 0), num_rows + 1);
    RowPlan plan;
    Attention attention = describe_attention(q, num_kv_heads, plan, window, scale, out);
    check_equal("the head width of k", dim, attention.heads.head_dim);
    for (std::int64_t row = 0; row < num_rows; ++row) {
        const std::int64_t begin = offsets.data()[row], end = offsets.data()[row + 1];
        check(0 <= begin && begin < end && end <= size_of(columns, 0), "each row must attend to at least one row.");
        plan.rows.push_back({0, static_cast<std::int32_t>(row), end - begin, begin});
    }
    for (std::int64_t i = 0; i < size_of(columns, 0); ++i)
        check(columns.data()[i] >= 0 && columns.data()[i] < num_rows, "a row attends to a row that does not exist.");
    if (num_rows == 0) return;
    plan.chains.assign(columns.data(), columns.data() + size_of(columns, 0));
    const KeyRows view{const_cast<float*>(k.data()), const_cast<float*>(v.data()), dim * 4, dim * 4, num_kv_heads * dim, 0};
    run_attention(attention, {view}, window, num_threads, size_of(columns, 0));
}

void silu_mul(Matrix gate_up, OutMatrix out, int num_threads) {
    const std::int64_t num_rows = size_of(gate_up, 0), width = size_of(out, 1);
    check_equal("the width of gate_up", size_of(gate_up, 1), 2 * width);
    check_equal("the number of rows of out", size_of(out, 0), num_rows);
    const Kernels& kernel = kernels();
    for_items(num_threads, num_rows, 4 * width, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
            const float* gate = gate_up.data() + row * 2 * width;
            kernel.silu_mul(gate, gate + width, width, out.data() + row * width);
        }
    });
}

void add(Vector x, Vector y, Out<float, nb::ndim<1>> out, int num_threads) {
    check_equal("the size of y", size_of(y, 0), size_of(x, 0));
    check_equal("the size of out", size_of(out, 0), size_of(x, 0));
    const Kernels& kernel = kernels();
    for_items(num_threads, size_of(x, 0), 1, [&](std::int64_t begin, std::int64_t end) {
        kernel.add(x.data() + begin, y.data() + begin, end - begin, out.data() + begin);
    });
}

void argmax(Matrix x, Out<std::int64_t, nb::ndim<1>> out, int num_threads) {
    const std::int64_t num_rows = size_of(x, 0), width = size_of(x, 1);
    check(width > 0, "argmax needs at least one column.");
    check_equal("the length of out", size_of(out, 0), num_rows);
    const Kernels& kernel = kernels();
    for_items(num_threads, num_rows, width, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) out.data()[row] = kernel.argmax(x.data() + row * width, width);
    });
}

}  // namespace
}  // namespace sakiyomi

void bind_ops(nanobind::module_& m) {
    using namespace sakiyomi;
    using nb::arg;
    m.def("isas", [] { return available_isas(); }, "Instruction sets that run here, narrowest first, separated by blanks.");
    m.def("isa", [] { return kernels().name; }, "The instruction set in use: portable, avx2 or avx512.");
    m.def("linear", &linear, arg("x").noconvert(), arg("weight"), arg("bias").noconvert().none(), arg("out").noconvert(),
          arg("threads"), arg("fine") = false, arg("norm").noconvert().none() = nb::none(), arg("eps") = 0.0f);
    m.def("rms_norm", &rms_norm, arg("x").noconvert(), arg("weight").noconvert(), arg("eps"), arg("out").noconvert(),
          arg("threads"));
    m.def("rope", &rope, arg("x").noconvert(), arg("positions").noconvert(), arg("table").noconvert(),
          arg("out").noconvert(), arg("threads"));
    m.def("store", &store, arg("k").noconvert(), arg("v").noconvert(), arg("keys"), arg("values"), arg("lengths"),
          arg("pending"), arg("layer"), arg("bounds"), arg("k_out").noconvert(), arg("v_out").noconvert());
    m.def("key_block_bytes", &key_block_bytes, arg("head_dim"));
    m.def("value_block_bytes", &value_block_bytes, arg("head_dim"));
    m.def("move_slots", &move_slots, arg("keys").noconvert(), arg("values").noconvert(), arg("head_dim"), arg("source"), arg("target"));
    m.def("attend_cache", &attend_cache, arg("q").noconvert(), arg("num_kv_heads"), arg("keys"), arg("values"),
          arg("lengths"), arg("pending"), arg("layer"), arg("bounds"), arg("parents").noconvert().none(), arg("window"), arg("scale"),
          arg("out").noconvert(), arg("threads"));
    m.def("attend_rows", &attend_rows, arg("q").noconvert(), arg("k").noconvert(), arg("v").noconvert(),
          arg("offsets").noconvert(), arg("columns").noconvert(), arg("window"), arg("scale"), arg("out").noconvert(),
          arg("threads"));
    m.def("silu_mul", &silu_mul, arg("gate_up").noconvert(), arg("out").noconvert(), arg("threads"));
    m.def("add", &add, arg("x").noconvert(), arg("y").noconvert(), arg("out").noconvert(), arg("threads"));
    m.def("argmax", &argmax, arg("x").noconvert(), arg("out").noconvert(), arg("threads"));
}
