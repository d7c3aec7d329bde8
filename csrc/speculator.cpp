// One step of a recurrent MLP speculator in one call, and a whole greedy draft in one: the composed forms of ops/base.py
// (`mlp_step`) and sampling/growth.py with the same routines per row. A draft is a few such steps behind each other, so what
// matters is what stands around the matrices.
#include <algorithm>
#include <cstring>
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
using OutMatrix = Out<float, nb::ndim<2>>;
using Vector = In<float, nb::ndim<1>>;
using Ints = In<std::int32_t, nb::ndim<1>>;

// Rows as a weight wants them: a copy for each thread, since a few rows are cheaper to repeat than to wait for.
class Inputs {
   public:
    Inputs(const PackedWeight& weight, std::int64_t num_rows, std::int64_t copies)
        : weight_(&weight), num_rows_(num_rows), copies_(copies) {}

    std::size_t num_bytes() const { return static_cast<std::size_t>(copies_ * (float_bytes() + quantized_bytes())); }
    std::byte* place(std::byte* base) {
        base_ = base;
        return base + num_bytes();
    }
    float* floats(int rank, std::int64_t row) const {
        return reinterpret_cast<float*>(base_ + rank % copies_ * float_bytes()) + row * weight_->num_inputs;
    }
    // To be called when columns [begin, end) of a row are there.
    void finish(const Kernels& kernels, int rank, std::int64_t row, std::int64_t begin, std::int64_t end) const {
        if (weight_->is_quantized()) quantized(rank).write(kernels, row, floats(rank, row), begin, end);
    }
    LinearJob job(int rank, const float* bias, const float* residual, float* out) const {
        const void* data = weight_->is_quantized() ? static_cast<const void*>(quantized(rank).bytes) : floats(rank, 0);
        return linear_job(*weight_, data, weight_->num_inputs * 4, num_rows_, bias, residual, out, weight_->num_outputs);
    }

   private:
    std::int64_t float_bytes() const { return (num_rows_ * weight_->num_inputs * 4 + 63) / 64 * 64; }
    std::int64_t quantized_bytes() const {
        return weight_->is_quantized() ? (QuantizedRows::num_bytes(weight_->num_inputs, num_rows_) + 63) / 64 * 64 : 0;
    }
    QuantizedRows quantized(int rank) const {
        std::byte* start = base_ + copies_ * float_bytes() + rank % copies_ * quantized_bytes();
        return {reinterpret_cast<std::uint8_t*>(start), weight_->num_inputs, num_rows_};
    }

    const PackedWeight* weight_;
    std::int64_t num_rows_, copies_;
    std::byte* base_ = nullptr;
};

class MlpStep {
   public:
    // weights: (fuse, bias, inner_norm, gate_up, down, norm, ones); every object is kept alive.
    // tokens: what is added for a token, or None; token_rows: for each id its row there.
    MlpStep(const nb::tuple& weights, nb::object embedding, nb::object head, nb::object tokens, nb::object token_rows,
            float eps)
        : eps_(eps) {
        check_equal("the number of weights", static_cast<std::int64_t>(weights.size()), 7);
        kept_ = {weights, embedding, head, tokens, token_rows};
        const auto matrix = [&](std::size_t i) { return nb::cast<const PackedWeight*>(weights[i]); };
        fuse_ = matrix(0), gate_up_ = matrix(3), down_ = matrix(4);
        embedding_ = nb::cast<const PackedWeight*>(embedding), head_ = nb::cast<const PackedWeight*>(head);
        hidden_ = fuse_->num_outputs, inner_ = down_->num_inputs;
        check(fuse_->num_inputs % hidden_ == 0 && fuse_->num_inputs >= 2 * hidden_, "fuse must read whole states.");
        check(inner_ % kGroup == 0, "the inner width must be a multiple of 32.");
        check_equal("the width of the embedding", embedding_->num_inputs, hidden_);
        check_equal("the width of the head", head_->num_inputs, hidden_);
        check_equal("the outputs of gate_up", gate_up_->num_outputs, 2 * inner_);
        check_equal("the inputs of gate_up", gate_up_->num_inputs, hidden_);
        check_equal("the outputs of down", down_->num_outputs, hidden_);
        const auto vector = [&](std::size_t i) {
            const Vector array = nb::cast<Vector>(weights[i], false);
            check_equal("the length of a vector", static_cast<std::int64_t>(array.shape(0)), hidden_);
            return array.data();
        };
        if (!tokens.is_none()) add_tokens(tokens, token_rows);
        bias_ = vector(1), inner_norm_ = vector(2), norm_ = vector(5), ones_ = vector(6);
    }

    void add_tokens(nb::handle tokens, nb::handle token_rows) {
        tokens_ = nb::cast<const PackedWeight*>(tokens);
        check_equal("the width of the tokens", tokens_->num_inputs, hidden_);
        const Ints rows = nb::cast<Ints>(token_rows, false);
        check_equal("the number of token rows", static_cast<std::int64_t>(rows.shape(0)), embedding_->num_outputs);
        for (std::int64_t id = 0; id < embedding_->num_outputs; ++id)
            check(rows.data()[id] >= 0 && rows.data()[id] < tokens_->num_outputs, "a token row is out of range.");
        token_rows_ = rows.data();
    }

    void run(Matrix left, Ints ids, OutMatrix states, OutMatrix logits, int num_threads) const {
        const std::int64_t num_rows = check_inputs(left, ids);
        check_shape("states", states, num_rows, hidden_);
        check_shape("logits", logits, num_rows, head_->num_outputs);
        if (num_rows == 0) return;
        const int wanted = useful_threads(num_rows, num_threads);
        nb::gil_scoped_release released;
        Pool::Lease lease(wanted);
        const Space space(*this, num_rows, wanted, lease.scratch(Space(*this, num_rows, wanted, nullptr).num_bytes));
        const Rows rows{num_rows, left.data(), ids.data(), states.data(), logits.data()};
        add_own(rows, space);
        lease.run([&](Team& team, int rank) { run_rows(rows, space, team, rank); });
    }

    // Greedy drafts behind `ids`, one for each row: this is the first step of each, `advance` all further ones. Where the
    // logits are of `vocabulary` and are multiplied with `sharpness` before they are looked at. A level appends the `width`
    // best children to each node of the frontier, and the `width` best of them go on, while they are believed with `lowest`.
    // Gives for each row (tokens, parents, confidences or None where all are 1), or None where logits are damaged.
    nb::list draft(const MlpStep& advance, Matrix left, Ints ids, In<std::int64_t, nb::ndim<1>> vocabulary, float sharpness,
                   std::int64_t width, double lowest, const std::vector<std::int64_t>& max_depths,
                   const std::vector<std::int64_t>& max_nodes, const nb::list& end_ids, int num_threads) const {
        const std::int64_t num_trees = check_inputs(left, ids), num_ids = head_->num_outputs;
        check_equal("the hidden width of advance", advance.hidden_, hidden_);
        check_equal("the inputs of advance", advance.fuse_->num_inputs, 2 * hidden_);
        check_equal("the outputs of the head of advance", advance.head_->num_outputs, num_ids);
        check(width > 0, "width must be positive.");
        check_ids(vocabulary, num_ids, embedding_->num_outputs);
        std::vector<GreedyTree> trees = start_trees(num_trees, max_depths, max_nodes, end_ids);
        const bool is_sound = num_trees == 0 || grow(advance, left, ids, vocabulary.data(), sharpness, width, lowest, trees, num_threads);
        nb::list drafts;
        for (const GreedyTree& tree : trees) drafts.append(is_sound ? tree.give(lowest) : nb::object(nb::none()));
        return drafts;
    }

   private:
    // What a step over `num_rows` rows reads and writes.
    struct Rows {
        std::int64_t num_rows;
        const float* left;
        const std::int32_t* tokens;
        float* states;
        float* logits;
    };

    // The working memory of a step, laid out in one piece.
    struct Space {
        Inputs fuse, up, head, down;
        float *fused, *gates;
        std::size_t num_bytes;

        Space(const MlpStep& step, std::int64_t num_rows, int copies, std::byte* base)
            : fuse(*step.fuse_, num_rows, copies), up(*step.gate_up_, num_rows, copies), head(*step.head_, num_rows, copies),
              down(*step.down_, num_rows, 1) {
            const std::int64_t fused_floats = (num_rows * step.hidden_ + 15) / 16 * 16;
            num_bytes = static_cast<std::size_t>(fused_floats + num_rows * 2 * step.inner_ + 16) * 4;
            for (Inputs* inputs : {&fuse, &up, &head, &down}) {
                num_bytes += inputs->num_bytes();
                if (base != nullptr) base = inputs->place(base);
            }
            fused = reinterpret_cast<float*>(base);
            gates = base == nullptr ? nullptr : fused + fused_floats;
        }
    };

    std::int64_t check_inputs(const Matrix& left, const Ints& ids) const {
        const std::int64_t num_rows = static_cast<std::int64_t>(ids.shape(0));
        check_shape("left", left, num_rows, fuse_->num_inputs - hidden_);
        for (std::int64_t row = 0; row < num_rows; ++row)
            check(ids.data()[row] >= 0 && ids.data()[row] < embedding_->num_outputs, "an id is out of range.");
        return num_rows;
    }

    // Tiny nets are not worth barriers.
    int useful_threads(std::int64_t num_rows, int num_threads) const {
        const int wanted = check_threads(num_threads, kMaxThreads);
        const std::int64_t useful = 1 + num_rows * fuse_->num_inputs * hidden_ / 65536;
        return useful < wanted ? static_cast<int>(useful) : wanted;
    }

    // Puts what a token adds of its own where the first matrix is added to it.
    void add_own(const Rows& rows, const Space& space) const {
        if (tokens_ == nullptr) return;
        for (std::int64_t row = 0; row < rows.num_rows; ++row)
            unpack_row(*tokens_, token_rows_[rows.tokens[row]], space.fused + row * hidden_);
    }

    // Called by every thread of the team, behind `add_own`.
    void run_rows(const Rows& rows, const Space& space, Team& team, int rank) const {
        const Kernels& kernel = kernels();
        const std::int64_t num_rows = rows.num_rows, left_width = fuse_->num_inputs - hidden_;
        float* fused = space.fused;
        for (std::int64_t row = 0; row < num_rows; ++row) {
            float* out = space.fuse.floats(rank, row);
            unpack_row(*embedding_, rows.tokens[row], out + left_width);
            for (std::int64_t at = 0; at <= left_width; at += hidden_)
                kernel.rms_norm(at == left_width ? out + at : rows.left + row * left_width + at, ones_, eps_, hidden_, out + at);
            space.fuse.finish(kernel, rank, row, 0, fuse_->num_inputs);
        }
        multiply(kernel, *fuse_, space.fuse.job(rank, bias_, tokens_ == nullptr ? nullptr : fused, fused), team, rank);
        norm_rows(kernel, fused, inner_norm_, space.up, num_rows, rank);
        gate(kernel, space.up, space.down, space.gates, num_rows, team, rank);
        multiply(kernel, *down_, space.down.job(rank, nullptr, fused, rows.states), team, rank);
        norm_rows(kernel, rows.states, norm_, space.head, num_rows, rank);
        multiply(kernel, *head_, space.head.job(rank, nullptr, nullptr, rows.logits), team, rank);
    }

    // Grows the trees; returns false where logits are damaged.
    bool grow(const MlpStep& advance, const Matrix& left, const Ints& ids, const std::int64_t* vocabulary, float sharpness,
              std::int64_t width, double lowest, std::vector<GreedyTree>& trees, int num_threads) const {
        const std::int64_t num_trees = static_cast<std::int64_t>(trees.size()), num_ids = head_->num_outputs;
        const int team_size = useful_threads(num_trees, num_threads);
        const std::int64_t most = num_trees * std::min(width, num_ids);
        nb::gil_scoped_release released;
        Pool::Lease lease(team_size);
        const std::size_t room = std::max(Space(*this, num_trees, team_size, nullptr).num_bytes,
                                          Space(advance, most, team_size, nullptr).num_bytes);
        const std::size_t work = (room + 63) / 64 * 64, floats = static_cast<std::size_t>(most * (2 * hidden_ + num_ids)) * 4;
        std::byte* scratch = lease.scratch(work + floats);
        float* states = reinterpret_cast<float*>(scratch + work);
        float *fed = states + most * hidden_, *logits = fed + most * hidden_;
        std::vector<std::int32_t> tokens(static_cast<std::size_t>(most));
        Ranking ranking;
        bool is_sound = true;
        const MlpStep* step = this;
        Rows rows{num_trees, left.data(), ids.data(), states, logits};
        add_own(rows, Space(*this, num_trees, team_size, scratch));

        // The children of all frontiers, and the rows of the next step.
        const auto add_level = [&] {
            std::int64_t row = 0, num_next = 0;
            for (GreedyTree& tree : trees) {
                const std::int64_t first_row = row;
                const std::size_t first = tree.nodes.size();
                const std::vector<std::int64_t> parents = tree.frontier;
                for (const std::int64_t parent : parents) {
                    if (!tree.add_best(parent, logits + row++ * num_ids, num_ids, vocabulary, sharpness, width, &ranking))
                        return is_sound = false;
                }
                if (parents.empty()) continue;
                tree.go_on(first, width, lowest);
                for (const std::int64_t node : tree.frontier) {
                    const GreedyTree::Node& fresh = tree.nodes[static_cast<std::size_t>(node)];
                    const auto above = std::find(parents.begin(), parents.end(), fresh.parent) - parents.begin();
                    std::memcpy(fed + num_next * hidden_, states + (first_row + above) * hidden_,
                                static_cast<std::size_t>(hidden_) * sizeof(float));
                    tokens[static_cast<std::size_t>(num_next++)] = static_cast<std::int32_t>(fresh.token);
                }
            }
            step = &advance;
            rows = {num_next, fed, tokens.data(), states, logits};
            step->add_own(rows, Space(*step, num_next, team_size, scratch));
            return true;
        };
        lease.run([&](Team& team, int rank) {
            while (rows.num_rows > 0 && is_sound) {
                step->run_rows(rows, Space(*step, rows.num_rows, team_size, scratch), team, rank);
                if (rank == 0) add_level();
                team.barrier();
            }
        });
        return is_sound;
    }

    template <class Array>
    static void check_shape(const char* name, const Array& array, std::int64_t rows, std::int64_t width) {
        check_equal((std::string("the rows of ") + name).c_str(), static_cast<std::int64_t>(array.shape(0)), rows);
        check_equal((std::string("the width of ") + name).c_str(), static_cast<std::int64_t>(array.shape(1)), width);
    }

    static void multiply(const Kernels& kernel, const PackedWeight& weight, const LinearJob& job, Team& team, int rank) {
        team.share(rank, num_shares(weight.num_blocks()), [&](std::int64_t item) { run_share(kernel, weight, job, item); });
    }

    void norm_rows(const Kernels& kernel, const float* rows, const float* weight, const Inputs& inputs,
                   std::int64_t num_rows, int rank) const {
        for (std::int64_t row = 0; row < num_rows; ++row) {
            kernel.rms_norm(rows + row * hidden_, weight, eps_, hidden_, inputs.floats(rank, row));
            inputs.finish(kernel, rank, row, 0, hidden_);
        }
    }

    // silu(gate) * up by whoever computed the columns, as inputs of `down`.
    void gate(const Kernels& kernel, const Inputs& up, const Inputs& down, float* gates, std::int64_t num_rows, Team& team,
              int rank) const {
        const LinearJob job = up.job(rank, nullptr, nullptr, gates);
        const std::int64_t blocks = inner_ / kLanes;
        team.share(rank, num_shares(blocks), [&](std::int64_t item) {
            const std::int64_t begin = item * kShareBlocks;
            const std::int64_t end = begin + kShareBlocks < blocks ? begin + kShareBlocks : blocks;
            run_linear(kernel, *gate_up_, job, begin, end);
            run_linear(kernel, *gate_up_, job, blocks + begin, blocks + end);
            const std::int64_t first = begin * kLanes, last = end * kLanes;
            for (std::int64_t row = 0; row < num_rows; ++row) {
                const float* gate = gates + row * 2 * inner_;
                kernel.silu_mul(gate + first, gate + inner_ + first, last - first, down.floats(0, row) + first);
                down.finish(kernel, 0, row, first, last);
            }
        });
    }

    std::vector<nb::object> kept_;  // the weights and vectors that the pointers below point into
    const PackedWeight *fuse_, *gate_up_, *down_, *embedding_, *head_;
    const float *bias_, *inner_norm_, *norm_, *ones_;
    const PackedWeight* tokens_ = nullptr;
    const std::int32_t* token_rows_ = nullptr;
    std::int64_t hidden_, inner_;
    float eps_;
};

}  // namespace
}  // namespace sakiyomi

void bind_speculator(nanobind::module_& m) {
    using namespace sakiyomi;
    using nb::arg;
    nb::class_<MlpStep>(m, "MlpStep")
        .def(nb::init<const nb::tuple&, nb::object, nb::object, nb::object, nb::object, float>(), arg("weights"),
             arg("embedding"), arg("head"), arg("tokens").none(), arg("token_rows").none(), arg("eps"))
        .def("run", &MlpStep::run, arg("left").noconvert(), arg("ids").noconvert(), arg("states").noconvert(),
             arg("logits").noconvert(), arg("threads"))
        .def("draft", &MlpStep::draft, arg("advance"), arg("left").noconvert(), arg("ids").noconvert(),
             arg("vocabulary").noconvert(), arg("sharpness"), arg("width"), arg("lowest"), arg("max_depths"),
             arg("max_nodes"), arg("end_ids"), arg("threads"));
}
