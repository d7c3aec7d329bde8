// A whole stack of decoder layers in one call: the composed form of ops/base.py with the same routines per row, its
// phases separated by barriers, without Python or allocation between layers.
#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "attention.hpp"
#include "burst.hpp"
#include "greedy.hpp"
#include "head.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "weights.hpp"

namespace sakiyomi {
namespace {

using Matrix = In<float, nb::ndim<2>>;
using Vector = In<float, nb::ndim<1>>;
using Ints = In<std::int32_t, nb::ndim<1>>;

struct Layer {
    const float* input_norm;
    const PackedWeight* qkv;
    const float* qkv_bias;
    const float* q_norm;
    const float* k_norm;
    const PackedWeight* output;
    const float* output_bias;
    const float* post_norm;
    const PackedWeight* gate_up;
    const PackedWeight* down;
    std::int64_t window;
};

struct Sizes {
    std::int64_t hidden, inner;
    std::int64_t read;  // inputs of the first layer's projection: `hidden`, or what a drafter's head puts side by side
    Heads heads;
    std::int64_t num_slots() const { return heads.num_heads + 2 * heads.num_kv_heads; }
    std::int64_t qkv_width() const { return num_slots() * heads.head_dim; }
    std::int64_t attended_width() const { return heads.num_heads * heads.head_dim; }
};

enum {
    kMaxRepeatedRows = 16,
    kFetchBytes = 15360,  // of the next matrix, where a thread begins in it: what memory brings while threads wait
    kSmallBlocks = 64,    // of matrices in which one share more is a good part of a thread's work
    kFewRows = 4,         // whose products take less time than what they read
    kGateColumns = 2 * kShareBlocks * kLanes,  // gate and up of a share
};

// What stands around the stack of a drafter's head: in front of it the token's embedding beside the state that is fed, each
// with a norm of its own; behind it a norm and the matrix to logits.
struct Ends {
    const PackedWeight* embedding;
    const float* embed_norm;
    const float* feature_norm;
    bool norm_before_residual;
    const float* final_norm;
    const PackedWeight* head;
};

// What makes a feature of the target's hidden states side by side: a norm for each of as many equal parts, then a matrix.
struct Fuse {
    std::vector<const float*> norms;
    const PackedWeight* weight;
};

// Where a pass with ends reads and writes; without ends `read` may give what the first layer reads, or be null.
struct Around {
    const float* read = nullptr;        // [rows, sizes.read]
    const Ends* ends = nullptr;
    const float* features = nullptr;    // [rows, hidden]
    const std::int32_t* ids = nullptr;  // [rows]
    float* normed = nullptr;            // [rows, hidden]
    float* logits = nullptr;            // [rows, outputs of the head], or null
};

// Hidden states to keep: after how many layers each, and where its first row goes, the next one `stride` numbers on.
struct Taps {
    std::vector<std::int64_t> layers;
    std::vector<float*> rows;
    std::int64_t stride;
};

// The working memory of a pass over `rows` rows, laid out in one piece.
struct Workspace {
    float* read;           // [copies, rows, sizes.read], where the pass puts it together
    float* normed;         // [copies, rows, hidden]
    std::uint8_t* inputs;  // the same, quantized
    float* qkv;
    float* attended;
    std::uint8_t* attended_inputs;
    float* gate_up;
    float* gate_sums;      // [threads, rows, kGateColumns]
    std::uint8_t* inner_inputs;

    static std::size_t layout(const Sizes& sizes, std::int64_t rows, std::int64_t copies, std::int64_t threads, std::byte* base,
                              Workspace* out) {
        std::size_t used = 0;
        const auto take = [&](std::int64_t bytes) {
            std::byte* place = base == nullptr ? nullptr : base + used;
            used += (static_cast<std::size_t>(bytes) + 63) / 64 * 64;
            return static_cast<void*>(place);
        };
        Workspace space;
        space.read = static_cast<float*>(take(sizes.read == sizes.hidden ? 0 : copies * rows * sizes.read * 4));
        space.normed = static_cast<float*>(take(copies * rows * sizes.hidden * 4));
        const std::int64_t widest = sizes.read > sizes.hidden ? sizes.read : sizes.hidden;
        space.inputs = static_cast<std::uint8_t*>(take(copies * QuantizedRows::num_bytes(widest, rows)));
        space.qkv = static_cast<float*>(take(rows * sizes.qkv_width() * 4));
        space.attended = static_cast<float*>(take(rows * sizes.attended_width() * 4));
        space.attended_inputs = static_cast<std::uint8_t*>(take(QuantizedRows::num_bytes(sizes.attended_width(), rows)));
        space.gate_up = static_cast<float*>(take(rows * 2 * sizes.inner * 4));
        space.gate_sums = static_cast<float*>(take(threads * rows * kGateColumns * 4));
        space.inner_inputs = static_cast<std::uint8_t*>(take(QuantizedRows::num_bytes(sizes.inner, rows)));
        if (out != nullptr) *out = space;
        return used;
    }
};

// One pass, seen by one thread.
class Pass {
   public:
    const Kernels& kernels;
    const Sizes& sizes;
    float eps;
    std::int64_t num_rows;
    const RowPlan& plan;
    const Caches& caches;
    const std::int32_t* positions;
    const float* table;
    float* x;  // [rows, hidden], the residual stream
    Workspace space;
    const Attention& attention;
    const Around& around;

    // Called by every thread of the team. Each phase ends in a barrier; five of them are needed.
    void run_layer(const Layer& layer, const Layer* next, bool is_first, std::int64_t cache_layer, KeyRows* views, Team& team,
                   int rank) const {
        for (std::size_t s = 0; s < caches.size(); ++s) views[s] = caches.at(s, cache_layer);
        mark(Phase::kNorm);
        const Rows normed = is_first && reads_apart() ? take_read(*layer.qkv, team, rank)
                                                        : norm(layer.input_norm, *layer.qkv, team, rank);
        mark(Phase::kQkv);
        project(layer, normed, views, team, rank);
        mark(Phase::kAttention);
        const Rows attended = attend(layer, views, team, rank);
        mark(Phase::kOutput);
        linear(*layer.output, attended, layer.output_bias, x, x, team, rank, [&] { fetch_gates(layer, team, rank); });
        mark(Phase::kNorm);
        const Rows post_normed = norm(layer.post_norm, *layer.gate_up, team, rank);
        mark(Phase::kGateUp);
        const Rows inner = gate(layer, post_normed, team, rank);
        mark(Phase::kDown);
        linear(*layer.down, inner, nullptr, x, x, team, rank, [&] {
            if (next != nullptr) fetch_projection(*next, team, rank);
        });
        mark(Phase::kOther);
    }

    // Whether the first layer reads something else than the normed residual stream.
    bool reads_apart() const { return around.read != nullptr || around.ends != nullptr; }

    // Norm and logits behind the last layer.
    void finish(Team& team, int rank) const {
        const Ends& ends = *around.ends;
        mark(Phase::kHead);
        const Rows rows = norm(ends.final_norm, *ends.head, team, rank);
        if (rank == 0) std::memcpy(around.normed, space.normed, static_cast<std::size_t>(num_rows * sizes.hidden) * sizeof(float));
        if (around.logits != nullptr) linear(*ends.head, rows, nullptr, nullptr, around.logits, team, rank);
        mark(Phase::kOther);
    }

    Range my_rows(const Team& team, int rank) const { return split(num_rows, rank, team.size()); }

   private:
    struct Rows {
        const void* data;
        std::int64_t stride;
    };

    // What a thread does before it waits for the others: ask for what it will read first of the next matrix.
    void fetch(const PackedWeight& weight, std::int64_t block, int num_bytes = kFetchBytes) const {
        const std::uint8_t* start = weight.bytes.get() + block * weight.block_bytes();
        for (int b = 0; b < kernels.num_streams; ++b)
            for (int at = 0; at < num_bytes / kernels.num_streams; at += 64) __builtin_prefetch(start + b * weight.block_bytes() + at);
    }

    // Blocks of a matrix that a thread takes at once.
    std::int64_t unit_of(const PackedWeight& weight) const {
        const bool is_small = weight.num_blocks() <= kSmallBlocks && num_rows <= kFewRows;
        return is_small && kernels.num_streams < kShareBlocks ? kShareBlocks / 2 : std::int64_t{kShareBlocks};
    }

    static std::int64_t first_block(std::int64_t num_blocks, std::int64_t unit, const Team& team, int rank) {
        return split(num_shares(num_blocks, unit), rank, team.size()).begin * unit;
    }

    void fetch_linear(const PackedWeight& weight, const Team& team, int rank) const {
        fetch(weight, first_block(weight.num_blocks(), unit_of(weight), team, rank));
    }

    void fetch_projection(const Layer& layer, const Team& team, int rank) const {
        fetch(*layer.qkv, split(sizes.num_slots(), rank, team.size()).begin * sizes.heads.head_dim / kLanes);
    }

    void fetch_gates(const Layer& layer, const Team& team, int rank) const {
        const std::int64_t blocks = sizes.inner / kLanes, block = first_block(blocks, kShareBlocks, team, rank);
        fetch(*layer.gate_up, block, kFetchBytes / 2);
        fetch(*layer.gate_up, blocks + block, kFetchBytes / 2);
    }

    template <class Last>
    void linear(const PackedWeight& weight, Rows rows, const float* bias, const float* residual, float* out, Team& team, int rank,
                Last&& last) const {
        const LinearJob job = linear_job(weight, rows.data, rows.stride, num_rows, bias, residual, out, weight.num_outputs);
        const std::int64_t unit = unit_of(weight);
        team.share_then(
            rank, num_shares(weight.num_blocks(), unit), [&](std::int64_t item) { run_share(kernels, weight, job, item, unit); }, last);
    }

    void linear(const PackedWeight& weight, Rows rows, const float* bias, const float* residual, float* out, Team& team,
                int rank) const {
        linear(weight, rows, bias, residual, out, team, rank, [] {});
    }

    // Normed rows as the next weight wants them. A few rows are cheaper to repeat on every thread than to wait for.
    Rows norm(const float* weight, const PackedWeight& next, Team& team, int rank) const {
        const bool is_repeated = num_rows <= kMaxRepeatedRows;
        const std::int64_t copy = is_repeated ? rank : 0;
        float* normed = space.normed + copy * num_rows * sizes.hidden;
        const QuantizedRows quantized{space.inputs + copy * QuantizedRows::num_bytes(sizes.hidden, num_rows), sizes.hidden,
                                      num_rows};
        const auto norm_row = [&](std::int64_t row) {
            float* out = normed + row * sizes.hidden;
            kernels.rms_norm(x + row * sizes.hidden, weight, eps, sizes.hidden, out);
            if (next.is_quantized()) quantized.write(kernels, row, out, 0, sizes.hidden);
        };
        if (is_repeated)
            for (std::int64_t row = 0; row < num_rows; ++row) norm_row(row);
        else
            team.share(rank, num_rows, norm_row);
        if (next.is_quantized()) return {quantized.bytes, 0};
        return {normed, sizes.hidden * 4};
    }

    Rows take_read(const PackedWeight& next, Team& team, int rank) const {
        const bool is_repeated = num_rows <= kMaxRepeatedRows;
        const std::int64_t copy = is_repeated ? rank : 0, width = sizes.read;
        float* made = around.ends == nullptr ? nullptr : space.read + copy * num_rows * width;
        const float* rows = made == nullptr ? around.read : made;
        const QuantizedRows quantized{space.inputs + copy * QuantizedRows::num_bytes(width, num_rows), width, num_rows};
        const auto take_row = [&](std::int64_t row) {
            if (made != nullptr) put_together(row, made + row * width);
            if (next.is_quantized()) quantized.write(kernels, row, rows + row * width, 0, width);
        };
        if (is_repeated)
            for (std::int64_t row = 0; row < num_rows; ++row) take_row(row);
        else
            team.share(rank, num_rows, take_row);
        if (next.is_quantized()) return {quantized.bytes, 0};
        return {rows, width * 4};
    }

    void put_together(std::int64_t row, float* out) const {
        const Ends& ends = *around.ends;
        unpack_row(*ends.embedding, around.ids[row], out);
        kernels.rms_norm(out, ends.embed_norm, eps, sizes.hidden, out);
        kernels.rms_norm(around.features + row * sizes.hidden, ends.feature_norm, eps, sizes.hidden, out + sizes.hidden);
    }

    // Queries, keys and values; where a head is whole blocks, whoever computes it also rotates and stores it.
    void project(const Layer& layer, Rows rows, const KeyRows* views, Team& team, int rank) const {
        const std::int64_t dim = sizes.heads.head_dim, slots = sizes.num_slots();
        const auto finish_head = [&](std::int64_t slot) {
            for (std::int64_t row = 0; row < num_rows; ++row) rotate_and_store(layer, views, row, slot);
        };
        if (dim % kLanes == 0) {
            const LinearJob job = linear_job(*layer.qkv, rows.data, rows.stride, num_rows, layer.qkv_bias, nullptr,
                                             space.qkv, layer.qkv->num_outputs);
            const std::int64_t blocks = dim / kLanes;
            team.share(rank, slots, [&](std::int64_t slot) {
                run_linear(kernels, *layer.qkv, job, slot * blocks, (slot + 1) * blocks);
                finish_head(slot);
            });
        } else {
            linear(*layer.qkv, rows, layer.qkv_bias, nullptr, space.qkv, team, rank);
            team.share(rank, slots, finish_head);
        }
    }

    void rotate_and_store(const Layer& layer, const KeyRows* views, std::int64_t row, std::int64_t slot) const {
        const Heads& heads = sizes.heads;
        const std::int64_t dim = heads.head_dim;
        float* head = space.qkv + (row * sizes.num_slots() + slot) * dim;
        const bool is_query = slot < heads.num_heads, is_value = slot >= heads.num_heads + heads.num_kv_heads;
        if (!is_value) {
            const float* weight = is_query ? layer.q_norm : layer.k_norm;
            if (weight != nullptr) kernels.rms_norm(head, weight, eps, dim, head);
            const float* angles = table + positions[row] * dim;
            kernels.rope(head, angles, angles + dim / 2, dim / 2, head);
        }
        if (is_query) {
            if (attention.is_bytes) attention.round_query(row, slot);
            return;
        }
        const RowView& view = plan.rows[static_cast<std::size_t>(row)];
        const KeyRows& cache = views[view.sequence];
        const std::int64_t kv_head = (slot - heads.num_heads) % heads.num_kv_heads;
        head_slots(cache, kv_head, dim, caches.is_bytes(), is_value).put(kernels, cache.length + view.index, head);
    }

    Rows attend(const Layer& layer, const KeyRows* views, Team& team, int rank) const {
        const std::int64_t dim = sizes.heads.head_dim, width = sizes.attended_width();
        const QuantizedRows quantized{space.attended_inputs, width, num_rows};
        const bool quantize = layer.output->is_quantized(), by_head = dim % kGroup == 0;
        team.share_then(
            rank, attention.num_items(),
            [&](std::int64_t item) {
                const Attention::Done done = attention.run_item(item, views, layer.window);
                const std::int64_t begin = done.first_head * dim, end = begin + done.num_heads * dim;
                for (std::int64_t row = done.row; quantize && by_head && row < done.row + done.num_rows; ++row)
                    quantized.write(kernels, row, space.attended + row * width, begin, end);
            },
            [&] { fetch_linear(*layer.output, team, rank); });
        if (quantize && !by_head)
            team.share(rank, num_rows, [&](std::int64_t row) {
                quantized.write(kernels, row, space.attended + row * width, 0, width);
            });
        if (quantize) return {quantized.bytes, 0};
        return {space.attended, width * 4};
    }

    // silu(gate) * up. Where the width allows, whoever computes columns of both gates them at once, in memory of its own:
    // rows of the whole lie a multiple of 4 KB apart, so that few sets of a cache would hold them.
    Rows gate(const Layer& layer, Rows normed, Team& team, int rank) const {
        const std::int64_t inner = sizes.inner, blocks = inner / kLanes;
        const QuantizedRows quantized{space.inner_inputs, inner, num_rows};
        const bool quantize = layer.down->is_quantized();
        if (inner % kGroup == 0) {
            LinearJob job = linear_job(*layer.gate_up, normed.data, normed.stride, num_rows, nullptr, nullptr, nullptr, kGateColumns);
            float* sums = space.gate_sums + rank * num_rows * kGateColumns;
            team.share_then(
                rank, num_shares(blocks),
                [&](std::int64_t item) {
                    const std::int64_t begin = item * kShareBlocks;
                    const std::int64_t end = begin + kShareBlocks < blocks ? begin + kShareBlocks : blocks;
                    const std::int64_t width = (end - begin) * kLanes;
                    for (int half = 0; half < 2; ++half) {
                        job.weights = layer.gate_up->bytes.get() + (half * blocks + begin) * job.block_bytes;
                        job.num_outputs = layer.gate_up->num_outputs - (half * blocks + begin) * kLanes;
                        job.outputs = sums + half * kGateColumns / 2;
                        run_linear(kernels, *layer.gate_up, job, 0, end - begin);
                    }
                    for (std::int64_t row = 0; row < num_rows; ++row) {
                        float* gate = sums + row * kGateColumns;
                        kernels.silu_mul(gate, gate + kGateColumns / 2, width, gate);
                        if (quantize)
                            quantized.write_columns(kernels, row, gate, begin * kLanes, end * kLanes);
                        else
                            std::memcpy(space.gate_up + row * 2 * inner + begin * kLanes, gate, static_cast<std::size_t>(width) * sizeof(float));
                    }
                },
                [&] { fetch_linear(*layer.down, team, rank); });
        } else {
            linear(*layer.gate_up, normed, nullptr, nullptr, space.gate_up, team, rank);
            team.share(rank, num_rows, [&](std::int64_t row) {
                float* gate = space.gate_up + row * 2 * inner;
                kernels.silu_mul(gate, gate + inner, inner, gate);
                if (quantize) quantized.write(kernels, row, gate, 0, inner);
            });
        }
        if (quantize) return {quantized.bytes, 0};
        return {space.gate_up, 2 * inner * 4};
    }
};

class DecoderStack {
   public:
    // layers: tuples (input_norm, qkv, qkv_bias, q_norm, k_norm, output, output_bias, post_norm, gate_up, down, window).
    DecoderStack(const nb::list& layers, std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                 float eps)
        : eps_(eps) {
        sizes_.heads = {num_heads, num_kv_heads, head_dim};
        sizes_.heads.check_sizes();
        check(head_dim % 2 == 0, "rope needs an even head width.");
        check(layers.size() > 0, "a stack needs at least one layer.");
        for (nb::handle fields : layers) add_layer(nb::cast<nb::tuple>(fields));
    }

    void run(Matrix x, Ints positions, Matrix table, const nb::list& keys, const nb::list& values,
             const std::vector<std::int64_t>& lengths, const PendingRows& pending, std::int64_t first_layer,
             const std::vector<std::int64_t>& bounds, std::optional<Ints> parents, const std::vector<std::int64_t>& taps,
             const nb::list& tap_arrays, Out<float, nb::ndim<2>> out, int num_threads, std::optional<Matrix> read) const {
        check(read || layers_.front().input_norm != nullptr, "a layer lacks a norm.");
        check_equal("the width of what the first layer reads", read ? static_cast<std::int64_t>(read->shape(1)) : sizes_.hidden,
                    sizes_.read);
        if (read) check_equal("the number of rows that it reads", static_cast<std::int64_t>(read->shape(0)),
                              static_cast<std::int64_t>(x.shape(0)));
        Around around;
        around.read = read ? read->data() : nullptr;
        execute(x, positions, table, keys, values, lengths, pending, first_layer, bounds, parents, taps, tap_arrays, out,
                num_threads, around);
    }

    // `run` from token ids [R] on, whose rows of the embedding go in. Of the states behind the last layer come out those of the
    // rows `asked`, with `chosen` also the ids that they choose (see find_chosen_ids). Taps stand side by side, [R, T * H].
    void run_tokens(const PackedWeight& embedding, const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& positions,
                    Matrix table, const nb::list& keys, const nb::list& values, const std::vector<std::int64_t>& lengths,
                    const PendingRows& pending, std::int64_t first_layer, const std::vector<std::int64_t>& bounds,
                    const std::optional<std::vector<std::int32_t>>& parents, const std::vector<std::int64_t>& taps,
                    std::optional<Out<float, nb::ndim<2>>> tapped, const std::vector<std::int64_t>& asked, Out<float, nb::ndim<2>> out,
                    const PackedWeight* head, std::optional<Vector> norm, float eps, const std::optional<RowChoices>& choices,
                    std::optional<Out<std::int64_t, nb::ndim<1>>> chosen, int num_threads) const {
        const std::int64_t num_rows = static_cast<std::int64_t>(ids.size()), hidden = sizes_.hidden;
        const std::size_t width = static_cast<std::size_t>(hidden);
        check(layers_.front().input_norm != nullptr, "a layer lacks a norm.");
        check_equal("what the first layer reads", hidden, sizes_.read);
        check_equal("the width of the embedding", embedding.num_inputs, hidden);
        check_tokens(ids.data(), num_rows, embedding);
        check_positions(positions.data(), static_cast<std::int64_t>(positions.size()), table, num_rows);
        if (parents) check_equal("the number of parents", static_cast<std::int64_t>(parents->size()), num_rows);
        for (std::size_t i = 0; i < asked.size(); ++i)
            check(asked[i] >= (i == 0 ? 0 : asked[i - 1] + 1) && asked[i] < num_rows, "rows asked for must ascend below R.");
        check_equal("the number of rows of out", static_cast<std::int64_t>(out.shape(0)), static_cast<std::int64_t>(asked.size()));
        check_equal("the width of out", static_cast<std::int64_t>(out.shape(1)), hidden);
        std::vector<RowChoice> read;
        if (chosen) {
            check(head != nullptr && norm && choices, "chosen ids need a norm, a head and choices.");
            check_equal("the width of the head", head->num_inputs, hidden);
            check_equal("the length of the norm's weight", static_cast<std::int64_t>(norm->shape(0)), hidden);
            check_equal("the number of chosen ids", static_cast<std::int64_t>(chosen->shape(0)), static_cast<std::int64_t>(asked.size()));
            check_equal("the number of choices", static_cast<std::int64_t>(choices->size()), static_cast<std::int64_t>(asked.size()));
            read = read_choices(*choices);
        }
        const RowPlan plan = RowPlan::trees(bounds, parents ? parents->data() : nullptr, num_rows, pending);
        const Caches caches(keys, values, lengths, bounds, pending, sizes_.heads.num_kv_heads, sizes_.heads.head_dim);
        if (num_rows == 0) return;
        check_layers(caches, first_layer);
        const Taps kept = check_joined_taps(taps, tapped, num_rows);
        check_threads(num_threads, kMaxThreads);
        nb::gil_scoped_release released;
        std::vector<float> embedded(static_cast<std::size_t>(num_rows) * width), states;
        for (std::size_t row = 0; row < ids.size(); ++row) unpack_row(embedding, ids[row], embedded.data() + row * width);
        const bool are_all_asked = asked.size() == ids.size();
        if (!are_all_asked) states.resize(embedded.size());
        float* last = are_all_asked ? out.data() : states.data();
        execute_rows(num_rows, embedded.data(), positions.data(), table.data(), plan, caches, first_layer, kept, last, num_threads, {});
        for (std::size_t i = 0; i < asked.size() && !are_all_asked; ++i)
            std::memcpy(out.data() + i * width, last + asked[i] * hidden, width * sizeof(float));
        if (chosen) find_chosen_ids(out.data(), static_cast<std::int64_t>(asked.size()), *head, norm->data(), eps, read.data(), chosen->data(), num_threads);
    }

    // Several steps of decoding behind `last`, the last token of a text whose other ones stand in the cache, by rules
    // (`BurstRules` of ops/base.py), from `first_taps` [1, T * H], those of the position in front of `last`, or None. The taps of
    // the rows that stay go to `kept` [K, T * H], which bounds their number. Gives the fields of `BurstStep` for each step.
    nb::list run_burst(const PackedWeight& embedding, std::int32_t last, Matrix table, const nb::list& keys, const nb::list& values,
                       std::int64_t length, std::int64_t capacity, std::int64_t first_layer, const std::vector<std::int64_t>& taps,
                       std::optional<Matrix> first_taps, Out<float, nb::ndim<2>> kept, const nb::tuple& rules, const PackedWeight& head,
                       Vector norm, float eps, int num_threads) const {
        const std::int64_t hidden = sizes_.hidden, width = hidden * static_cast<std::int64_t>(taps.size());
        check(layers_.front().input_norm != nullptr, "a layer lacks a norm.");
        check_equal("what the first layer reads", hidden, sizes_.read);
        check_equal("the width of the embedding", embedding.num_inputs, hidden);
        check_equal("the width of the head", head.num_inputs, hidden);
        check_equal("the outputs of the head", head.num_outputs, embedding.num_outputs);
        check_equal("the length of the norm's weight", static_cast<std::int64_t>(norm.shape(0)), hidden);
        check_equal("the width of the table", static_cast<std::int64_t>(table.shape(1)), sizes_.heads.head_dim);
        check_equal("the width of kept", static_cast<std::int64_t>(kept.shape(1)), width);
        if (first_taps) check_equal("the width of first_taps", static_cast<std::int64_t>(first_taps->shape(1)), width);
        check(!first_taps || first_taps->shape(0) == 1, "first_taps must be one row.");
        check(length >= 0 && length <= capacity && capacity <= static_cast<std::int64_t>(table.shape(0)), "a position is outside the table.");
        check_tokens(&last, 1, embedding);
        check_tap_layers(taps);
        Burst burst(rules, width);
        const PendingRows pending(1);
        const Caches caches(keys, values, {length}, {0, capacity - length}, pending, sizes_.heads.num_kv_heads, sizes_.heads.head_dim);
        check_layers(caches, first_layer);
        BurstPass pass{*this, embedding, table.data(), caches, capacity, first_layer, taps, kept.data(), static_cast<std::int64_t>(kept.shape(0)),
                       width, head, norm.data(), eps, check_threads(num_threads, kMaxThreads)};
        {
            nb::gil_scoped_release released;
            burst.run(last, length + 1, first_taps ? first_taps->data() : nullptr, pass);
        }
        return give_steps(burst);
    }

    // A pass of a drafter's head over features [R, H] and the tokens beside them; see Ends.
    // ends: (embedding, embed_norm, feature_norm, norm_before_residual, final_norm, head).
    void run_head(Matrix features, Ints ids, const nb::tuple& ends, Ints positions, Matrix table, const nb::list& keys,
                  const nb::list& values, const std::vector<std::int64_t>& lengths, const PendingRows& pending,
                  std::int64_t first_layer, const std::vector<std::int64_t>& bounds, std::optional<Ints> parents,
                  Out<float, nb::ndim<2>> normed, Out<float, nb::ndim<2>> out, std::optional<Out<float, nb::ndim<2>>> logits,
                  int num_threads) const {
        const std::int64_t num_rows = static_cast<std::int64_t>(features.shape(0)), hidden = sizes_.hidden;
        const Ends around_it = read_ends(ends, ids, num_rows);
        check_equal("the number of rows of normed", static_cast<std::int64_t>(normed.shape(0)), num_rows);
        check_equal("the width of normed", static_cast<std::int64_t>(normed.shape(1)), hidden);
        Around around{nullptr, &around_it, features.data(), ids.data(), normed.data(), nullptr};
        if (logits) {
            check_equal("the number of rows of logits", static_cast<std::int64_t>(logits->shape(0)), num_rows);
            check_equal("the width of logits", static_cast<std::int64_t>(logits->shape(1)), around_it.head->num_outputs);
            around.logits = logits->data();
        }
        execute(features, positions, table, keys, values, lengths, pending, first_layer, bounds, parents, {}, nb::list(), out,
                num_threads, around);
    }

    // `run_head` of causal rows, at least one of each sequence, which stand at the positions behind the caches, with features
    // that `fuse` (norms, matrix) makes of the target's hidden states `taps` [R, A * Ht]; and behind them greedy chains that
    // grow a row at a time from the states fed back (the normed ones, if so wanted). The caches need room for the rows and
    // max_depth - 1 more.
    // Gives for each chain what GreedyTree::give does, or None where logits are damaged; and of each sequence's last given
    // row the logits and the state that is fed back.
    nb::list draft_chains(Matrix taps, const nb::tuple& fuse, Ints ids, const nb::tuple& ends, Matrix table, const nb::list& keys,
                          const nb::list& values, const std::vector<std::int64_t>& lengths, std::int64_t first_layer,
                          const std::vector<std::int64_t>& bounds, bool feeds_normed, In<std::int64_t, nb::ndim<1>> vocabulary,
                          float sharpness, double lowest, const nb::list& rooms,
                          Out<float, nb::ndim<2>> last_states, Out<float, nb::ndim<2>> last_logits, int num_threads) const {
        const std::int64_t num_rows = static_cast<std::int64_t>(taps.shape(0)), hidden = sizes_.hidden;
        const Fuse fuse_it = read_fuse(fuse, taps);
        const Ends around_it = read_ends(ends, ids, num_rows);
        const std::int64_t num_ids = around_it.head->num_outputs;
        check_ids(vocabulary, num_ids, around_it.embedding->num_outputs);
        std::vector<GreedyTree> trees = start_trees(static_cast<std::int64_t>(lengths.size()), rooms);
        const std::vector<std::int64_t> all_bounds = check_draft(num_rows, table, lengths, bounds, trees, num_ids, last_states, last_logits);
        const PendingRows pending(trees.size());
        RowPlan plan = RowPlan::trees(bounds, nullptr, num_rows, pending);
        Caches caches(keys, values, lengths, all_bounds, pending, sizes_.heads.num_kv_heads, sizes_.heads.head_dim);
        check_layers(caches, first_layer);
        const int wanted = check_threads(num_threads, kMaxThreads);
        std::vector<char> is_sound(trees.size(), 1);
        {
            nb::gil_scoped_release released;
            const std::size_t width = static_cast<std::size_t>(hidden), size = static_cast<std::size_t>(num_rows);
            std::vector<float> features(size * width), fed(trees.size() * width), normed(size * width), states(size * width);
            make_features(fuse_it, taps.data(), num_rows, features.data(), wanted);
            std::vector<float> logits(size * static_cast<std::size_t>(num_ids));
            std::vector<std::int32_t> next_ids(trees.size()), next_positions = positions_behind(lengths, bounds);
            std::vector<std::int64_t> counts(trees.size()), next_bounds = bounds;
            Ranking ranking;
            Around around{nullptr, &around_it, features.data(), ids.data(), normed.data(), logits.data()};
            const float* x = features.data();
            for (bool is_first = true; next_bounds.back() > 0; is_first = false) {
                execute_rows(next_bounds.back(), x, next_positions.data(), table.data(), plan, caches, first_layer, {},
                             states.data(), wanted, around);
                std::int64_t num_next = 0;
                for (std::size_t s = 0; s < trees.size(); ++s) {
                    GreedyTree& tree = trees[s];
                    counts[s] = next_bounds[s + 1] - next_bounds[s];
                    const std::size_t last = static_cast<std::size_t>(next_bounds[s + 1] - 1);
                    next_bounds[s] = num_next;
                    if (counts[s] == 0) continue;
                    float* row = logits.data() + last * static_cast<std::size_t>(num_ids);
                    const float* state = (feeds_normed ? normed : states).data() + last * width;
                    if (is_first) {
                        std::memcpy(last_states.data() + s * width, state, width * sizeof(float));
                        std::memcpy(last_logits.data() + static_cast<std::int64_t>(s) * num_ids, row, static_cast<std::size_t>(num_ids) * sizeof(float));
                    }
                    const std::size_t node = tree.nodes.size();
                    is_sound[s] = tree.add_best(tree.frontier[0], row, num_ids, vocabulary.data(), sharpness, 1, &ranking);
                    if (!is_sound[s]) continue;
                    tree.go_on(node, 1, lowest);
                    if (tree.frontier.empty()) continue;
                    std::memcpy(fed.data() + static_cast<std::size_t>(num_next) * width, state, width * sizeof(float));
                    next_ids[static_cast<std::size_t>(num_next)] = static_cast<std::int32_t>(tree.nodes.back().token);
                    next_positions[static_cast<std::size_t>(num_next)] = static_cast<std::int32_t>(caches.lengths()[s] + counts[s]);
                    ++num_next;
                }
                next_bounds.back() = num_next;
                caches.extend(counts);
                plan = RowPlan::trees(next_bounds, nullptr, num_next, pending);
                x = around.features = fed.data();
                around.ids = next_ids.data();
            }
        }
        return give_all(trees, is_sound, lowest);
    }

    // As `draft_chains`, but in one pass: behind the rows of a sequence stand max_depth - 1 rows with the features
    // `placeholder` and the token `mask_id`, and each guesses one place further on (P-EAGLE). Nodes of one depth have the same
    // candidates, so trees of any width grow.
    nb::list draft_places(Matrix taps, const nb::tuple& fuse, Ints ids, const nb::tuple& ends, Matrix table, const nb::list& keys,
                          const nb::list& values, const std::vector<std::int64_t>& lengths, std::int64_t first_layer,
                          const std::vector<std::int64_t>& bounds, bool feeds_normed, Vector placeholder, std::int32_t mask_id,
                          In<std::int64_t, nb::ndim<1>> vocabulary, float sharpness, std::int64_t width, double lowest,
                          const nb::list& rooms, Out<float, nb::ndim<2>> last_states, Out<float, nb::ndim<2>> last_logits,
                          int num_threads) const {
        const Fuse fuse_it = read_fuse(fuse, taps);
        const std::int64_t num_given = static_cast<std::int64_t>(taps.shape(0));
        const Ends around_it = read_ends(ends, ids, num_given);
        const std::int64_t num_ids = around_it.head->num_outputs;
        const std::size_t hidden = static_cast<std::size_t>(sizes_.hidden), logits_width = static_cast<std::size_t>(num_ids);
        check_ids(vocabulary, num_ids, around_it.embedding->num_outputs);
        check_equal("the width of placeholder", static_cast<std::int64_t>(placeholder.shape(0)), sizes_.hidden);
        check(mask_id >= 0 && mask_id < around_it.embedding->num_outputs, "the id of placeholders is out of range.");
        check(width > 0, "width must be positive.");
        std::vector<GreedyTree> trees = start_trees(static_cast<std::int64_t>(lengths.size()), rooms);
        const std::vector<std::int64_t> all_bounds = check_draft(num_given, table, lengths, bounds, trees, num_ids, last_states, last_logits);
        const std::int64_t num_rows = all_bounds.back();
        const PendingRows pending(trees.size());
        const RowPlan plan = RowPlan::trees(all_bounds, nullptr, num_rows, pending);
        const Caches caches(keys, values, lengths, all_bounds, pending, sizes_.heads.num_kv_heads, sizes_.heads.head_dim);
        check_layers(caches, first_layer);
        const int wanted = check_threads(num_threads, kMaxThreads);
        std::vector<char> is_sound(trees.size(), 1);
        {
            nb::gil_scoped_release released;
            const std::size_t size = static_cast<std::size_t>(num_rows);
            std::vector<float> features(static_cast<std::size_t>(num_given) * hidden), fed(size * hidden), normed(size * hidden);
            std::vector<float> states(size * hidden), logits(size * logits_width);
            make_features(fuse_it, taps.data(), num_given, features.data(), wanted);
            std::vector<std::int32_t> all_ids(size, mask_id);
            const std::vector<std::int32_t> positions = positions_behind(lengths, all_bounds);
            std::vector<std::size_t> asked;  // rows behind which something is drafted
            for (std::size_t s = 0; s < trees.size(); ++s) {
                const std::size_t given = static_cast<std::size_t>(bounds[s]), count = static_cast<std::size_t>(bounds[s + 1]) - given;
                const std::size_t first = static_cast<std::size_t>(all_bounds[s]), end = static_cast<std::size_t>(all_bounds[s + 1]);
                std::memcpy(fed.data() + first * hidden, features.data() + given * hidden, count * hidden * sizeof(float));
                std::copy_n(ids.data() + given, count, all_ids.begin() + static_cast<std::ptrdiff_t>(first));
                for (std::size_t row = first + count; row < end; ++row)
                    std::memcpy(fed.data() + row * hidden, placeholder.data(), hidden * sizeof(float));
                for (std::size_t row = first + count - 1; row < end; ++row) asked.push_back(row);
            }
            const Around around{nullptr, &around_it, fed.data(), all_ids.data(), normed.data(), logits.data()};
            execute_rows(num_rows, fed.data(), positions.data(), table.data(), plan, caches, first_layer, {}, states.data(),
                         wanted, around);
            std::vector<float*> rows;
            for (const std::size_t row : asked) rows.push_back(logits.data() + row * logits_width);
            for (std::size_t s = 0, at = 0; s < trees.size(); at += static_cast<std::size_t>(trees[s++].max_depth)) {
                const float* state = (feeds_normed ? normed : states).data() + asked[at] * hidden;
                std::memcpy(last_states.data() + s * hidden, state, hidden * sizeof(float));
                std::memcpy(last_logits.data() + s * logits_width, rows[at], logits_width * sizeof(float));
            }
            const std::vector<Ranking> rankings = rank_rows(rows, num_ids, sharpness, width, wanted);
            for (std::size_t s = 0, at = 0; s < trees.size(); at += static_cast<std::size_t>(trees[s++].max_depth))
                is_sound[s] = trees[s].grow_by_depth(width, lowest, vocabulary.data(), [&](std::size_t depth) -> const Ranking& {
                    return rankings[at + depth];
                });
        }
        return give_all(trees, is_sound, lowest);
    }

   private:
    // The passes of a burst.
    struct BurstPass {
        const DecoderStack& stack;
        const PackedWeight& embedding;
        const float* table;
        Caches caches;
        std::int64_t capacity, first_layer;
        const std::vector<std::int64_t>& tap_layers;
        float* kept;
        std::int64_t room, width;
        const PackedWeight& head;
        const float* norm;
        float eps;
        int num_threads;
        std::vector<std::int64_t> chosen = {};
        std::vector<float> embedded = {}, states = {}, tapped = {}, logits = {};
        bool has_logits = false;

        bool has_room(std::int64_t num_rows) const { return caches.lengths()[0] + num_rows <= capacity && num_rows <= room; }

        void run(std::int32_t last, const std::vector<DraftNode>& nodes, const Choice* choice) {
            const std::size_t num_rows = nodes.size() + 1, hidden = static_cast<std::size_t>(stack.sizes_.hidden);
            const std::int64_t count = static_cast<std::int64_t>(num_rows);
            std::vector<std::int32_t> positions{static_cast<std::int32_t>(caches.lengths()[0])}, parents{-1};
            embedded.resize(num_rows * hidden), states.resize(num_rows * hidden), chosen.resize(num_rows);
            tapped.resize(num_rows * static_cast<std::size_t>(width));
            unpack_row(embedding, last, embedded.data());
            for (std::size_t i = 0; i < nodes.size(); ++i) {
                parents.push_back(nodes[i].parent + 1);
                positions.push_back(positions[static_cast<std::size_t>(nodes[i].parent + 1)] + 1);
                unpack_row(embedding, nodes[i].token, embedded.data() + (i + 1) * hidden);
            }
            Taps taps{tap_layers, {}, width};
            for (std::size_t i = 0; i < tap_layers.size(); ++i) taps.rows.push_back(tapped.data() + i * hidden);
            const RowPlan plan = RowPlan::trees({0, count}, parents.data(), count, PendingRows(1));
            stack.execute_rows(count, embedded.data(), positions.data(), table, plan, caches, first_layer, taps, states.data(), num_threads, {});
            has_logits = false;
            if (choice == nullptr) {
                find_best_ids(states.data(), count, head, norm, eps, chosen.data(), num_threads, nullptr);
            } else if (is_bare(*choice, head.num_outputs)) {
                std::vector<RowChoice> choices;
                for (const std::int32_t position : positions)
                    choices.push_back({choice->seed, choice->temperature, static_cast<std::uint64_t>(position) + 1});
                find_chosen_ids(states.data(), count, head, norm, eps, choices.data(), chosen.data(), num_threads);
            } else {
                std::fill(chosen.begin(), chosen.end(), -1);
            }
        }

        std::int64_t choose(std::int64_t row, const Choice* choice, std::uint64_t position) {
            const std::int64_t found = chosen[static_cast<std::size_t>(row)];
            if (choice == nullptr || found >= 0) return found;
            if (!has_logits) {
                has_logits = true;
                logits.resize(chosen.size() * static_cast<std::size_t>(head.num_outputs));
                multiply_rows(states.data(), static_cast<std::int64_t>(chosen.size()), head, nullptr, logits.data(), num_threads, true, norm, eps);
            }
            return choose_id(logits.data() + row * head.num_outputs, head.num_outputs, *choice, position);
        }

        const float* keep(const std::vector<std::int64_t>& rows) {
            const std::int64_t length = caches.lengths()[0], count = static_cast<std::int64_t>(rows.size());
            std::vector<std::int64_t> source, target;
            for (std::int64_t i = 0; i < count; ++i) {
                const std::int64_t row = rows[static_cast<std::size_t>(i)];
                std::copy_n(tapped.data() + row * width, width, kept + i * width);
                if (row != i) source.push_back(length + row), target.push_back(length + i);
            }
            if (!source.empty()) caches.move(0, source, target);
            caches.extend({count});
            kept += count * width, room -= count;
            return width == 0 ? nullptr : kept - width;
        }
    };

    static nb::list give_steps(const Burst& burst) {
        nb::list steps;
        for (const Burst::Step& step : burst.steps) {
            nb::list asked;
            for (const Burst::Asked& one : step.asked)
                asked.append(nb::make_tuple(one.source, one.count, one.is_trial, one.seconds, NewDraft::of(one.nodes, true), one.gains, one.kinds));
            steps.append(nb::make_tuple(nb::tuple(nb::cast(step.tokens)), step.num_accepted, step.num_draft, step.num_tried, step.draft_s, step.pass_s, asked));
        }
        return steps;
    }

    Ends read_ends(const nb::tuple& ends, const Ints& ids, std::int64_t num_rows) const {
        const std::int64_t hidden = sizes_.hidden;
        check_equal("the number of ends", static_cast<std::int64_t>(ends.size()), 6);
        check_equal("the width of what the first layer reads", 2 * hidden, sizes_.read);
        const Ends around_it{nb::cast<const PackedWeight*>(ends[0]), vector(ends[1], "embed_norm", hidden, false),
                             vector(ends[2], "feature_norm", hidden, false), nb::cast<bool>(ends[3]),
                             vector(ends[4], "final_norm", hidden, false), nb::cast<const PackedWeight*>(ends[5])};
        check_equal("the width of the embedding", around_it.embedding->num_inputs, hidden);
        check_equal("the width of the head", around_it.head->num_inputs, hidden);
        check_equal("the number of ids", static_cast<std::int64_t>(ids.shape(0)), num_rows);
        check_tokens(ids.data(), num_rows, *around_it.embedding);
        return around_it;
    }

    Fuse read_fuse(const nb::tuple& fields, const Matrix& taps) const {
        check_equal("the number of fields of fuse", static_cast<std::int64_t>(fields.size()), 2);
        Fuse fuse{{}, nb::cast<const PackedWeight*>(fields[1])};
        const std::int64_t width = fuse.weight->num_inputs;
        check_equal("the width of taps", static_cast<std::int64_t>(taps.shape(1)), width);
        check_equal("the outputs of fuse", fuse.weight->num_outputs, sizes_.hidden);
        const nb::tuple norms = nb::cast<nb::tuple>(fields[0]);
        check(norms.size() == 0 || width % static_cast<std::int64_t>(norms.size()) == 0, "each norm must read an equal part.");
        for (nb::handle norm : norms)
            fuse.norms.push_back(vector(norm, "a norm in front of fuse", width / static_cast<std::int64_t>(norms.size()), false));
        return fuse;
    }

    void make_features(const Fuse& fuse, const float* taps, std::int64_t num_rows, float* features, int num_threads) const {
        const Kernels& kernel = kernels();
        const PackedWeight& weight = *fuse.weight;
        const std::int64_t width = weight.num_inputs, part = width / std::max<std::int64_t>(static_cast<std::int64_t>(fuse.norms.size()), 1);
        const std::int64_t float_bytes = (num_rows * width * 4 + 63) / 64 * 64;
        Pool::Lease lease(threads_for(num_threads, num_rows * width * sizes_.hidden / 8));
        std::byte* scratch = lease.scratch(static_cast<std::size_t>(float_bytes + (weight.is_quantized() ? QuantizedRows::num_bytes(width, num_rows) : 0)));
        float* normed = reinterpret_cast<float*>(scratch);
        const float* rows = fuse.norms.empty() ? taps : normed;
        const QuantizedRows quantized{reinterpret_cast<std::uint8_t*>(scratch + float_bytes), width, num_rows};
        const void* inputs = weight.is_quantized() ? static_cast<const void*>(quantized.bytes) : rows;
        const LinearJob job = linear_job(weight, inputs, width * 4, num_rows, nullptr, nullptr, features, sizes_.hidden);
        lease.run([&](Team& team, int rank) {
            team.share(rank, num_rows, [&](std::int64_t row) {
                for (std::size_t i = 0; i < fuse.norms.size(); ++i) {
                    const std::int64_t at = row * width + static_cast<std::int64_t>(i) * part;
                    kernel.rms_norm(taps + at, fuse.norms[i], eps_, part, normed + at);
                }
                if (weight.is_quantized()) quantized.write(kernel, row, rows + row * width, 0, width);
            });
            team.share(rank, num_shares(weight.num_blocks()), [&](std::int64_t share) { run_share(kernel, weight, job, share); });
        });
    }

    // What drafting needs beside the ends; gives the bounds of the rows that stand behind the caches in the end.
    std::vector<std::int64_t> check_draft(std::int64_t num_rows, const Matrix& table, const std::vector<std::int64_t>& lengths,
                                          const std::vector<std::int64_t>& bounds, const std::vector<GreedyTree>& trees,
                                          std::int64_t num_ids, const Out<float, nb::ndim<2>>& last_states,
                                          const Out<float, nb::ndim<2>>& last_logits) const {
        const std::int64_t num_sequences = static_cast<std::int64_t>(lengths.size());
        for (const auto* last : {&last_states, &last_logits})
            check_equal("the number of last rows", static_cast<std::int64_t>(last->shape(0)), num_sequences);
        check_equal("the width of last_states", static_cast<std::int64_t>(last_states.shape(1)), sizes_.hidden);
        check_equal("the width of last_logits", static_cast<std::int64_t>(last_logits.shape(1)), num_ids);
        check_equal("the width of the table", static_cast<std::int64_t>(table.shape(1)), sizes_.heads.head_dim);
        check_equal("the number of bounds", static_cast<std::int64_t>(bounds.size()), num_sequences + 1);
        check(bounds.front() == 0 && bounds.back() == num_rows, "bounds must run from 0 to R.");
        std::vector<std::int64_t> all_bounds{0};
        for (std::size_t s = 0; s < trees.size(); ++s) {
            check(bounds[s] < bounds[s + 1], "a draft needs a row to begin with.");
            const std::int64_t count = bounds[s + 1] - bounds[s] + trees[s].max_depth - 1;
            check(lengths[s] >= 0 && lengths[s] + count <= static_cast<std::int64_t>(table.shape(0)), "a position is outside the table.");
            all_bounds.push_back(all_bounds.back() + count);
        }
        return all_bounds;
    }

    void check_layers(const Caches& caches, std::int64_t first_layer) const {
        check(first_layer >= 0 && first_layer + static_cast<std::int64_t>(layers_.size()) <= caches.num_layers(),
              "the cache has too few layers.");
    }

    static std::vector<std::int32_t> positions_behind(const std::vector<std::int64_t>& lengths, const std::vector<std::int64_t>& bounds) {
        std::vector<std::int32_t> positions;
        for (std::size_t s = 0; s < lengths.size(); ++s)
            for (std::int64_t row = bounds[s]; row < bounds[s + 1]; ++row)
                positions.push_back(static_cast<std::int32_t>(lengths[s] + row - bounds[s]));
        return positions;
    }

    void check_rows(const Matrix& x, const Ints& positions, const Matrix& table, std::int64_t num_rows) const {
        check_equal("the width of x", static_cast<std::int64_t>(x.shape(1)), sizes_.hidden);
        check_positions(positions.data(), static_cast<std::int64_t>(positions.shape(0)), table, num_rows);
    }

    static void check_tokens(const std::int32_t* ids, std::int64_t count, const PackedWeight& embedding) {
        for (std::int64_t i = 0; i < count; ++i) check(ids[i] >= 0 && ids[i] < embedding.num_outputs, "an id is out of range.");
    }

    void check_positions(const std::int32_t* positions, std::int64_t count, const Matrix& table, std::int64_t num_rows) const {
        check_equal("the number of positions", count, num_rows);
        check_equal("the width of the table", static_cast<std::int64_t>(table.shape(1)), sizes_.heads.head_dim);
        for (std::int64_t row = 0; row < num_rows; ++row)
            check(positions[row] >= 0 && positions[row] < static_cast<std::int64_t>(table.shape(0)), "a position is outside the table.");
    }

    void execute(Matrix x, Ints positions, Matrix table, const nb::list& keys, const nb::list& values,
             const std::vector<std::int64_t>& lengths, const PendingRows& pending, std::int64_t first_layer,
             const std::vector<std::int64_t>& bounds, std::optional<Ints> parents, const std::vector<std::int64_t>& taps,
             const nb::list& tap_arrays, Out<float, nb::ndim<2>> out, int num_threads, const Around& around) const {
        const std::int64_t num_rows = static_cast<std::int64_t>(x.shape(0)), hidden = sizes_.hidden;
        const std::int64_t dim = sizes_.heads.head_dim;
        check_rows(x, positions, table, num_rows);
        check_equal("the width of out", static_cast<std::int64_t>(out.shape(1)), hidden);
        check_equal("the number of rows of out", static_cast<std::int64_t>(out.shape(0)), num_rows);
        if (parents) check_equal("the number of parents", static_cast<std::int64_t>(parents->shape(0)), num_rows);
        const RowPlan plan = RowPlan::trees(bounds, parents ? parents->data() : nullptr, num_rows, pending);
        const Caches caches(keys, values, lengths, bounds, pending, sizes_.heads.num_kv_heads, dim);
        if (num_rows == 0) return;
        check_layers(caches, first_layer);
        const Taps kept = check_taps(taps, tap_arrays, num_rows);
        check_threads(num_threads, kMaxThreads);
        nb::gil_scoped_release released;
        execute_rows(num_rows, x.data(), positions.data(), table.data(), plan, caches, first_layer, kept, out.data(),
                     num_threads, around);
    }

    // `execute` of what has been checked, without the GIL.
    void execute_rows(std::int64_t num_rows, const float* x, const std::int32_t* positions, const float* table,
                      const RowPlan& plan, const Caches& caches, std::int64_t first_layer, const Taps& kept, float* out,
                      int num_threads, const Around& around) const {
        const std::int64_t hidden = sizes_.hidden, dim = sizes_.heads.head_dim;
        const std::int64_t num_layers = static_cast<std::int64_t>(layers_.size());
        const Kernels& kernel = kernels();
        const int team_size = useful_threads(num_threads, num_rows);
        Pool::Lease lease(team_size);
        Workspace space;
        const std::int64_t copies = num_rows <= kMaxRepeatedRows ? team_size : 1;
        Attention attention{&kernel, &plan, sizes_.heads, caches.is_bytes(),
                            static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim))), nullptr, sizes_.qkv_width(),
                            nullptr, sizes_.attended_width()};
        attention.choose_items(team_size, caches.lengths());
        const std::size_t work = Workspace::layout(sizes_, num_rows, copies, team_size, nullptr, nullptr);
        std::byte* scratch = lease.scratch(work + static_cast<std::size_t>(attention.rounded_bytes() + attention.parts_bytes()));
        Workspace::layout(sizes_, num_rows, copies, team_size, scratch, &space);
        attention.queries = space.qkv;
        attention.outputs = space.attended;
        attention.rounded = reinterpret_cast<std::uint8_t*>(scratch + work);
        attention.parts = reinterpret_cast<float*>(scratch + work + attention.rounded_bytes());
        std::vector<KeyRows> views(caches.size() * static_cast<std::size_t>(team_size));
        if (around.ends != nullptr && around.ends->norm_before_residual)
            for (std::int64_t row = 0; row < num_rows; ++row)
                kernel.rms_norm(x + row * hidden, around.ends->feature_norm, eps_, hidden, out + row * hidden);
        else
            std::memcpy(out, x, static_cast<std::size_t>(num_rows * hidden) * sizeof(float));
        const Pass pass{kernel,           sizes_,       eps_,       num_rows, plan, caches,
                        positions,        table,        out,        space,    attention, around};
        lease.run([&](Team& team, int rank) {
            KeyRows* my_views = views.data() + caches.size() * static_cast<std::size_t>(rank);
            const Range mine = pass.my_rows(team, rank);
            std::size_t tap = 0;
            const std::vector<std::int64_t>& taps = kept.layers;
            for (std::int64_t layer = 0; layer <= num_layers; ++layer) {
                for (; tap < taps.size() && taps[tap] == layer; ++tap)
                    for (std::int64_t row = mine.begin; row < mine.end; ++row)
                        std::memcpy(kept.rows[tap] + row * kept.stride, pass.x + row * hidden, static_cast<std::size_t>(hidden) * sizeof(float));
                if (layer < num_layers)
                    pass.run_layer(layers_[static_cast<std::size_t>(layer)],
                                   layer + 1 < num_layers ? &layers_[static_cast<std::size_t>(layer + 1)] : nullptr,
                                   layer == 0, first_layer + layer, my_views, team, rank);
            }
            if (around.ends != nullptr) pass.finish(team, rank);
        });
    }

    void add_layer(const nb::tuple& fields) {
        check_equal("the number of fields of a layer", static_cast<std::int64_t>(fields.size()), 11);
        kept_.push_back(nb::borrow(fields));
        const auto weight = [&](std::size_t i) { return nb::cast<const PackedWeight*>(fields[i]); };
        Layer layer;
        layer.qkv = weight(1);
        layer.output = weight(5);
        layer.gate_up = weight(8);
        layer.down = weight(9);
        if (layers_.empty()) {
            sizes_.hidden = layer.output->num_outputs;
            sizes_.read = layer.qkv->num_inputs;
            sizes_.inner = layer.down->num_inputs;
        }
        check_matrix("qkv", *layer.qkv, sizes_.qkv_width(), layers_.empty() ? sizes_.read : sizes_.hidden);
        check_matrix("output", *layer.output, sizes_.hidden, sizes_.attended_width());
        check_matrix("gate_up", *layer.gate_up, 2 * sizes_.inner, sizes_.hidden);
        check_matrix("down", *layer.down, sizes_.hidden, sizes_.inner);
        layer.input_norm = vector(fields[0], "input_norm", sizes_.hidden, layers_.empty());
        layer.qkv_bias = vector(fields[2], "qkv_bias", sizes_.qkv_width(), true);
        layer.q_norm = vector(fields[3], "q_norm", sizes_.heads.head_dim, true);
        layer.k_norm = vector(fields[4], "k_norm", sizes_.heads.head_dim, true);
        layer.output_bias = vector(fields[6], "output_bias", sizes_.hidden, true);
        layer.post_norm = vector(fields[7], "post_norm", sizes_.hidden, false);
        layer.window = nb::cast<std::int64_t>(fields[10]);
        check(layer.window >= 0, "window must not be negative.");
        layers_.push_back(layer);
    }

    static void check_matrix(const char* name, const PackedWeight& weight, std::int64_t n, std::int64_t k) {
        if (weight.num_outputs == n && weight.num_inputs == k) return;
        throw std::invalid_argument(std::string(name) + " is [" + std::to_string(weight.num_outputs) + ", " +
                                    std::to_string(weight.num_inputs) + "] but must be [" + std::to_string(n) + ", " +
                                    std::to_string(k) + "].");
    }

    static const float* vector(nb::handle field, const char* name, std::int64_t size, bool is_optional) {
        if (field.is_none()) {
            check(is_optional, "a layer lacks a norm.");
            return nullptr;
        }
        const Vector array = nb::cast<Vector>(field, false);
        check_equal(name, static_cast<std::int64_t>(array.shape(0)), size);
        return array.data();
    }

    Taps check_taps(const std::vector<std::int64_t>& taps, const nb::list& arrays, std::int64_t num_rows) const {
        check(taps.size() == arrays.size(), "each tap needs an array.");
        check_tap_layers(taps);
        Taps kept{taps, {}, sizes_.hidden};
        for (nb::handle handle : arrays) {
            const auto array = nb::cast<Out<float, nb::ndim<2>>>(handle, false);
            check_equal("the number of rows of a tap", static_cast<std::int64_t>(array.shape(0)), num_rows);
            check_equal("the width of a tap", static_cast<std::int64_t>(array.shape(1)), sizes_.hidden);
            kept.rows.push_back(array.data());
        }
        return kept;
    }

    // Taps side by side, in one array [R, T * H].
    Taps check_joined_taps(const std::vector<std::int64_t>& taps, const std::optional<Out<float, nb::ndim<2>>>& array,
                           std::int64_t num_rows) const {
        check(taps.empty() || array, "taps need an array.");
        check_tap_layers(taps);
        Taps kept{taps, {}, sizes_.hidden * static_cast<std::int64_t>(taps.size())};
        if (taps.empty()) return kept;
        check_equal("the number of rows of taps", static_cast<std::int64_t>(array->shape(0)), num_rows);
        check_equal("the width of taps", static_cast<std::int64_t>(array->shape(1)), kept.stride);
        for (std::size_t i = 0; i < taps.size(); ++i)
            kept.rows.push_back(array->data() + static_cast<std::int64_t>(i) * sizes_.hidden);
        return kept;
    }

    void check_tap_layers(const std::vector<std::int64_t>& taps) const {
        for (std::size_t i = 0; i < taps.size(); ++i)
            check(taps[i] >= (i == 0 ? 0 : taps[i - 1]) && taps[i] <= static_cast<std::int64_t>(layers_.size()),
                  "taps must ascend and name layers of the stack.");
    }

    // Tiny networks are not worth the barriers.
    int useful_threads(int num_threads, std::int64_t num_rows) const {
        const Layer& first = layers_.front();
        std::int64_t weights = 0;
        for (const PackedWeight* w : {first.qkv, first.output, first.gate_up, first.down})
            weights += w->num_outputs * w->num_inputs;
        const std::int64_t useful = 1 + num_rows * weights / 16384;
        return useful < num_threads ? static_cast<int>(useful) : num_threads;
    }

    Sizes sizes_{};
    float eps_;
    std::vector<Layer> layers_;
    std::vector<nb::object> kept_;  // the weights and vectors that the layers point into
};

}  // namespace
}  // namespace sakiyomi

void bind_stack(nanobind::module_& m) {
    using namespace sakiyomi;
    using nb::arg;
    nb::class_<DraftSource>(m, "DraftSource");
    nb::class_<DecoderStack>(m, "DecoderStack")
        .def(nb::init<const nb::list&, std::int64_t, std::int64_t, std::int64_t, float>(), arg("layers"),
             arg("num_heads"), arg("num_kv_heads"), arg("head_dim"), arg("eps"))
        .def("run", &DecoderStack::run, arg("x").noconvert(), arg("positions").noconvert(), arg("table").noconvert(),
             arg("keys"), arg("values"), arg("lengths"), arg("pending"), arg("layer"), arg("bounds"), arg("parents").noconvert().none(),
             arg("taps"), arg("tap_arrays"), arg("out").noconvert(), arg("threads"), arg("read").noconvert().none() = nb::none())
        .def("run_tokens", &DecoderStack::run_tokens, arg("embedding"), arg("ids"), arg("positions"), arg("table").noconvert(),
             arg("keys"), arg("values"), arg("lengths"), arg("pending"), arg("layer"), arg("bounds"), arg("parents").none(), arg("taps"),
             arg("tapped").noconvert().none(), arg("asked"), arg("out").noconvert(), arg("head").none(), arg("norm").noconvert().none(),
             arg("eps"), arg("choices").none(), arg("chosen").noconvert().none(), arg("threads"))
        .def("run_burst", &DecoderStack::run_burst, arg("embedding"), arg("last"), arg("table").noconvert(), arg("keys"), arg("values"),
             arg("length"), arg("capacity"), arg("layer"), arg("taps"), arg("first_taps").noconvert().none(), arg("kept").noconvert(), arg("rules"),
             arg("head"), arg("norm").noconvert(), arg("eps"), arg("threads"))
        .def("run_head", &DecoderStack::run_head, arg("features").noconvert(), arg("ids").noconvert(), arg("ends"),
             arg("positions").noconvert(), arg("table").noconvert(), arg("keys"), arg("values"), arg("lengths"), arg("pending"),
             arg("layer"), arg("bounds"), arg("parents").noconvert().none(), arg("normed").noconvert(), arg("out").noconvert(),
             arg("logits").noconvert().none(), arg("threads"))
        .def("draft_chains", &DecoderStack::draft_chains, arg("taps").noconvert(), arg("fuse"), arg("ids").noconvert(), arg("ends"),
             arg("table").noconvert(), arg("keys"), arg("values"), arg("lengths"), arg("layer"), arg("bounds"),
             arg("feeds_normed"), arg("vocabulary").noconvert(), arg("sharpness"), arg("lowest"), arg("rooms"),
             arg("last_states").noconvert(), arg("last_logits").noconvert(), arg("threads"))
        .def("draft_places", &DecoderStack::draft_places, arg("taps").noconvert(), arg("fuse"), arg("ids").noconvert(), arg("ends"),
             arg("table").noconvert(), arg("keys"), arg("values"), arg("lengths"), arg("layer"), arg("bounds"),
             arg("feeds_normed"), arg("placeholder").noconvert(), arg("mask_id"), arg("vocabulary").noconvert(),
             arg("sharpness"), arg("width"), arg("lowest"), arg("rooms"),
             arg("last_states").noconvert(), arg("last_logits").noconvert(), arg("threads"));
}
