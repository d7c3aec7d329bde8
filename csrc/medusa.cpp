// Greedy drafts of Medusa heads in one call: the composed form of nets/medusa.py and sampling/growth.py with the same
// routines per row. The heads do not see each other's guesses, so three phases serve all of them.
#include <algorithm>
#include <vector>

#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "greedy.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "weights.hpp"

namespace sakiyomi {
namespace {

using Matrix = In<float, nb::ndim<2>>;
using Vector = In<float, nb::ndim<1>>;

// A matrix, and what is added to its outputs, or null.
struct Part {
    const PackedWeight* weight;
    const float* bias;
};

// One for all heads, or one per head.
using Layer = std::vector<Part>;

// The rows of all heads, one head's behind another's, in the form that weights take. Each weight reads `per_weight` rows.
struct HeadRows {
    float* floats;         // [heads * rows, hidden]
    std::uint8_t* values;  // the same, quantized
    std::int64_t hidden, per_weight;

    static std::int64_t float_bytes(std::int64_t num_rows, std::int64_t hidden) { return (num_rows * hidden * 4 + 63) / 64 * 64; }
    static std::int64_t value_bytes(std::int64_t num_rows, std::int64_t hidden) {
        return (QuantizedRows::num_bytes(hidden, 1) + 63) / 64 * 64 * num_rows;
    }

    QuantizedRows quantized(std::int64_t weight) const { return {values + weight * value_bytes(per_weight, hidden), hidden, per_weight}; }

    // To be called when columns [begin, end) of a row are there.
    void finish(const Kernels& kernel, const Layer& next, std::int64_t row, std::int64_t begin, std::int64_t end) const {
        const std::int64_t weight = row / per_weight;
        if (next[static_cast<std::size_t>(weight)].weight->is_quantized())
            quantized(weight).write(kernel, row % per_weight, floats + row * hidden, begin, end);
    }

    LinearJob job(const Part& part, std::int64_t weight, float* out, std::int64_t stride) const {
        const void* data = part.weight->is_quantized() ? static_cast<const void*>(quantized(weight).bytes)
                                                       : floats + weight * per_weight * hidden;
        return linear_job(*part.weight, data, hidden * 4, per_weight, part.bias, nullptr, out, stride);
    }
};

class MedusaHeads {
   public:
    // blocks: for each layer (weight, bias or None) of all heads under one another in the first, one per head behind it.
    // heads: the language-model heads, one for all or one per head. norm, ones: [H]. Every object is kept alive.
    MedusaHeads(const nb::list& blocks, const nb::list& heads, nb::object norm, nb::object ones, float eps) : eps_(eps) {
        kept_ = {nb::borrow(blocks), nb::borrow(heads), norm, ones};
        check(heads.size() > 0, "a head needs a matrix to logits.");
        hidden_ = static_cast<std::int64_t>(nb::cast<Vector>(norm, false).shape(0));
        for (nb::handle layer : blocks) {
            layers_.emplace_back();
            for (nb::handle fields : layer) layers_.back().push_back(read_part(nb::cast<nb::tuple>(fields)));
        }
        check(!layers_.empty() && layers_[0].size() == 1, "the first layer is one matrix.");
        check(first().weight->num_outputs % hidden_ == 0, "the first layer must give whole states.");
        num_heads_ = first().weight->num_outputs / hidden_;
        for (std::size_t layer = 1; layer < layers_.size(); ++layer) {
            check_equal("the number of matrices of a layer", static_cast<std::int64_t>(layers_[layer].size()), num_heads_);
            for (const Part& part : layers_[layer]) check_equal("the outputs of a block", part.weight->num_outputs, hidden_);
        }
        check(heads.size() == 1 || static_cast<std::int64_t>(heads.size()) == num_heads_, "there must be a matrix to logits for each head, or one for all.");
        for (nb::handle head : heads) {
            heads_.push_back({nb::cast<const PackedWeight*>(head), nullptr});
            check_equal("the width of a head", heads_.back().weight->num_inputs, hidden_);
            check_equal("the outputs of a head", heads_.back().weight->num_outputs, heads_[0].weight->num_outputs);
        }
        norm_ = nb::cast<Vector>(norm, false).data();
        ones_ = read_vector(ones, hidden_);
    }

    // For each of the target's last states [R, H], in front of its final norm, what GreedyTree::give gives of a draft, or None
    // where logits are damaged. See MlpStep::grow for the rules.
    nb::list draft(Matrix states, In<std::int64_t, nb::ndim<1>> vocabulary, float sharpness, std::int64_t width, double lowest,
                   const nb::list& rooms, int num_threads) const {
        const std::int64_t num_states = static_cast<std::int64_t>(states.shape(0));
        check_equal("the width of states", static_cast<std::int64_t>(states.shape(1)), hidden_);
        check_equal("the length of vocabulary", static_cast<std::int64_t>(vocabulary.shape(0)), heads_[0].weight->num_outputs);
        check(width > 0, "width must be positive.");
        const int wanted = check_threads(num_threads, kMaxThreads);
        std::vector<GreedyTree> trees = start_trees(num_states, rooms);
        std::vector<char> is_sound(trees.size(), 1);
        std::int64_t depth = 0;
        for (const GreedyTree& tree : trees) depth = std::max(depth, tree.max_depth);
        check(depth <= num_heads_, "a draft is deeper than there are heads.");
        if (depth > 0) {
            nb::gil_scoped_release released;
            const std::vector<Ranking> rankings = rank_places(states.data(), trees, depth, sharpness, width, wanted);
            for (std::size_t i = 0; i < trees.size(); ++i)
                is_sound[i] = trees[i].grow_by_depth(width, lowest, vocabulary.data(), [&](std::size_t place) -> const Ranking& {
                    return rankings[place * trees.size() + i];
                });
        }
        return give_all(trees, is_sound, lowest);
    }

   private:
    const Part& first() const { return layers_[0][0]; }

    Part read_part(const nb::tuple& fields) const {
        check_equal("the number of fields of a block", static_cast<std::int64_t>(fields.size()), 2);
        const auto* weight = nb::cast<const PackedWeight*>(fields[0]);
        check_equal("the inputs of a block", weight->num_inputs, hidden_);
        return {weight, fields[1].is_none() ? nullptr : read_vector(fields[1], weight->num_outputs)};
    }

    static const float* read_vector(nb::handle field, std::int64_t size) {
        const Vector array = nb::cast<Vector>(field, false);
        check_equal("the length of a vector", static_cast<std::int64_t>(array.shape(0)), size);
        return array.data();
    }

    // The best ids of the first `depth` heads for each state [depth, num_states]; empty where nobody asks, or logits are damaged.
    std::vector<Ranking> rank_places(const float* states, const std::vector<GreedyTree>& trees, std::int64_t depth,
                                     float sharpness, std::int64_t width, int num_threads) const {
        const Kernels& kernel = kernels();
        const std::int64_t num_states = static_cast<std::int64_t>(trees.size());
        const std::int64_t num_rows = depth * num_states, num_ids = heads_[0].weight->num_outputs, hidden = hidden_;
        const std::int64_t outputs = first().weight->num_outputs;
        const int team_size = threads_for(num_threads, num_rows * hidden * (hidden + num_ids) / 8);
        std::vector<Ranking> rankings(static_cast<std::size_t>(num_rows));
        Pool::Lease lease(team_size);
        const std::int64_t float_bytes = HeadRows::float_bytes(num_rows, hidden), value_bytes = HeadRows::value_bytes(num_rows, hidden);
        const std::int64_t read_bytes = HeadRows::float_bytes(num_states, hidden) + HeadRows::value_bytes(num_states, hidden);
        const std::int64_t linear_bytes = HeadRows::float_bytes(num_states, outputs);
        std::byte* at = lease.scratch(static_cast<std::size_t>(team_size * read_bytes + linear_bytes + 2 * (float_bytes + value_bytes) +
                                                               num_rows * num_ids * 4));
        const auto take = [&](std::int64_t bytes) {
            std::byte* place = at;
            at += bytes;
            return place;
        };
        std::byte* reads = take(team_size * read_bytes);  // a few rows are cheaper to repeat on every thread than to wait for
        float* linear = reinterpret_cast<float*>(take(linear_bytes));
        HeadRows rows[2];  // what a layer reads, and what it makes
        for (HeadRows& some : rows) {
            some = {reinterpret_cast<float*>(take(float_bytes)), nullptr, hidden, 0};
            some.values = reinterpret_cast<std::uint8_t*>(take(value_bytes));
        }
        float* logits = reinterpret_cast<float*>(at);

        lease.run([&](Team& team, int rank) {
            std::byte* own = reads + rank * read_bytes;
            const HeadRows read{reinterpret_cast<float*>(own), reinterpret_cast<std::uint8_t*>(own + HeadRows::float_bytes(num_states, hidden)),
                                hidden, num_states};
            for (std::int64_t row = 0; row < num_states; ++row) {
                kernel.rms_norm(states + row * hidden, norm_, eps_, hidden, read.floats + row * hidden);
                read.finish(kernel, layers_[0], row, 0, hidden);
            }
            const std::int64_t per_head = heads_.size() == 1 ? num_rows : num_states;
            for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
                const bool is_last = layer + 1 == layers_.size();
                const Layer& next = is_last ? heads_ : layers_[layer + 1];
                HeadRows made = rows[layer % 2];
                made.per_weight = is_last ? per_head : num_states;
                if (layer == 0) {
                    const std::int64_t blocks = (depth * hidden + kLanes - 1) / kLanes;
                    const LinearJob job = read.job(first(), 0, linear, outputs);
                    team.share(rank, num_shares(blocks), [&](std::int64_t share) {
                        const std::int64_t begin = share * kShareBlocks, end = std::min(begin + kShareBlocks, blocks);
                        run_linear(kernel, *first().weight, job, begin, end);
                        add_blocks(kernel, next, read, made, linear, begin * kLanes, std::min(end * kLanes, depth * hidden));
                    });
                } else {
                    HeadRows before = rows[(layer + 1) % 2];
                    before.per_weight = num_states;
                    run_layer(kernel, layers_[layer], next, before, made, linear, depth, team, rank);
                }
            }
            HeadRows last = rows[(layers_.size() + 1) % 2];
            last.per_weight = per_head;
            const std::int64_t shares = num_shares(heads_[0].weight->num_blocks());
            team.share(rank, shares * (num_rows / per_head), [&](std::int64_t item) {
                const std::int64_t head = item / shares;
                const Part& part = heads_[static_cast<std::size_t>(head)];
                run_share(kernel, *part.weight, last.job(part, head, logits + head * per_head * num_ids, num_ids), item % shares);
            });
            team.share(rank, num_rows, [&](std::int64_t row) {
                if (row / num_states >= trees[static_cast<std::size_t>(row % num_states)].max_depth) return;
                Ranking& ranking = rankings[static_cast<std::size_t>(row)];
                if (!rank_sharp(logits + row * num_ids, num_ids, sharpness, width, &ranking)) ranking.ids.clear();
            });
        });
        return rankings;
    }

    // x + silu(y) for columns [begin, end) of the heads side by side, where x is the same for all of them.
    void add_blocks(const Kernels& kernel, const Layer& next, const HeadRows& read, const HeadRows& made, float* linear,
                    std::int64_t begin, std::int64_t end) const {
        const std::int64_t num_states = read.per_weight, outputs = first().weight->num_outputs;
        for (std::int64_t last; begin < end; begin = last) {
            const std::int64_t head = begin / hidden_, column = begin % hidden_;
            last = std::min(end, (head + 1) * hidden_);
            for (std::int64_t row = 0; row < num_states; ++row) {
                float* out = made.floats + (head * num_states + row) * hidden_;
                add_silu(kernel, read.floats + row * hidden_ + column, linear + row * outputs + begin, last - begin, out + column);
                made.finish(kernel, next, head * num_states + row, column, column + last - begin);
            }
        }
    }

    // A further layer, whose heads have matrices and inputs of their own.
    void run_layer(const Kernels& kernel, const Layer& layer, const Layer& next, const HeadRows& before,
                   const HeadRows& made, float* linear, std::int64_t depth, Team& team, int rank) const {
        const std::int64_t blocks = (hidden_ + kLanes - 1) / kLanes, shares = num_shares(blocks), num_states = before.per_weight;
        const std::int64_t outputs = first().weight->num_outputs;
        team.share(rank, shares * depth, [&](std::int64_t item) {
            const std::int64_t head = item / shares, begin = item % shares * kShareBlocks, end = std::min(begin + kShareBlocks, blocks);
            const Part& part = layer[static_cast<std::size_t>(head)];
            run_linear(kernel, *part.weight, before.job(part, head, linear + head * hidden_, outputs), begin, end);
            const std::int64_t first_column = begin * kLanes, last_column = std::min(end * kLanes, hidden_);
            for (std::int64_t row = head * num_states; row < (head + 1) * num_states; ++row) {
                const float* y = linear + (row - head * num_states) * outputs + head * hidden_ + first_column;
                add_silu(kernel, before.floats + row * hidden_ + first_column, y, last_column - first_column,
                         made.floats + row * hidden_ + first_column);
                made.finish(kernel, next, row, first_column, last_column);
            }
        });
    }

    void add_silu(const Kernels& kernel, const float* x, const float* y, std::int64_t count, float* out) const {
        kernel.silu_mul(y, ones_, count, out);
        kernel.add(x, out, count, out);
    }

    std::vector<nb::object> kept_;  // the weights and vectors that the pointers below point into
    std::vector<Layer> layers_;
    Layer heads_;
    const float *norm_, *ones_;
    std::int64_t hidden_, num_heads_;
    float eps_;
};

}  // namespace
}  // namespace sakiyomi

void bind_medusa(nanobind::module_& m) {
    using namespace sakiyomi;
    using nb::arg;
    nb::class_<MedusaHeads>(m, "MedusaHeads")
        .def(nb::init<const nb::list&, const nb::list&, nb::object, nb::object, float>(), arg("blocks"), arg("heads"), arg("norm"),
             arg("ones"), arg("eps"))
        .def("draft", &MedusaHeads::draft, arg("states").noconvert(), arg("vocabulary").noconvert(), arg("sharpness"), arg("width"),
             arg("lowest"), arg("rooms"), arg("threads"));
}
