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
    // weights: (fuse, fuse_token, bias, inner_norm, gate_up, down, norm, ones); every object is kept alive.
    // token_sums: what a token adds, [M, H], or None; token_rows: for each id its row there, M for those that have none.
    MlpStep(const nb::tuple& weights, nb::object embedding, nb::object head, nb::object token_sums, nb::object token_rows,
            float eps)
        : eps_(eps) {
        check_equal("the number of weights", static_cast<std::int64_t>(weights.size()), 8);
        kept_ = {weights, embedding, head, token_sums, token_rows};
        const auto matrix = [&](std::size_t i) { return nb::cast<const PackedWeight*>(weights[i]); };
        fuse_ = matrix(0), fuse_token_ = matrix(1), gate_up_ = matrix(4), down_ = matrix(5);
        embedding_ = nb::cast<const PackedWeight*>(embedding), head_ = nb::cast<const PackedWeight*>(head);
        hidden_ = fuse_->num_outputs, inner_ = down_->num_inputs;
        check(fuse_->num_inputs % hidden_ == 0, "fuse must read whole states.");
        check(inner_ % kGroup == 0, "the inner width must be a multiple of 32.");
        check_equal("the outputs of fuse_token", fuse_token_->num_outputs, hidden_);
        check_equal("the inputs of fuse_token", fuse_token_->num_inputs, hidden_);
        check_equal("the width of the embedding", embedding_->num_inputs, hidden_);
        check_equal("the width of the head", head_->num_inputs, hidden_);
        check_equal("the outputs of gate_up", gate_up_->num_outputs, 2 * inner_);
        check_equal("the inputs of gate_up", gate_up_->num_inputs, hidden_);
        check_equal("the outputs of down", down_->num_outputs, hidden_);
        const auto vector = [&](std::size_t i) {
            const Vector values = nb::cast<Vector>(weights[i], false);
            check_equal("the length of a vector", static_cast<std::int64_t>(values.shape(0)), hidden_);
            return values.data();
        };
        bias_ = vector(2), inner_norm_ = vector(3), norm_ = vector(6), ones_ = vector(7);
        if (!token_sums.is_none()) keep_sums(nb::cast<Matrix>(token_sums, false), nb::cast<Ints>(token_rows, false));
    }

    std::int64_t num_ids() const { return head_->num_outputs; }
    std::int64_t left_width() const { return fuse_->num_inputs; }
    void check_left(const Matrix& left, std::int64_t num_rows) const { check_shape("left", left, num_rows, left_width()); }
    std::int64_t vocab_size() const { return embedding_->num_outputs; }

    // Whether another step can follow this one.
    void check_next(const MlpStep& advance) const {
        check_equal("the hidden width of advance", advance.hidden_, hidden_);
        check_equal("the inputs of advance", advance.fuse_->num_inputs, hidden_);
        check_equal("the outputs of the head of advance", advance.num_ids(), num_ids());
    }

    void run(Matrix left, Ints ids, OutMatrix states, OutMatrix logits, int num_threads) const {
        const std::int64_t num_rows = static_cast<std::int64_t>(ids.shape(0));
        check_left(left, num_rows);
        for (std::int64_t row = 0; row < num_rows; ++row) check_id(ids.data()[row]);
        check_shape("states", states, num_rows, hidden_);
        check_shape("logits", logits, num_rows, num_ids());
        if (num_rows == 0) return;
        const int wanted = useful_threads(num_rows, num_threads);
        nb::gil_scoped_release released;
        Pool::Lease lease(wanted);
        const std::size_t room = Space(*this, nullptr, num_rows, wanted, nullptr).num_bytes;
        std::byte* scratch = lease.scratch(room + static_cast<std::size_t>(num_rows * hidden_) * 4);
        const Space space(*this, nullptr, num_rows, wanted, scratch);
        float* raw = reinterpret_cast<float*>(scratch + room);
        const Rows rows{num_rows, ids.data(), nullptr};
        const Results results{raw, states.data(), logits.data(), 1};
        lease.run([&](Team& team, int rank) {
            fuse(left.data(), space, raw, team, rank);
            run_rows(rows, results, space, nullptr, team, rank);
        });
    }

    // Grows greedy trees behind `ids`, one for each row: this is the first step of each, `advance` all further ones. A level
    // appends the `width` best children to each node of the frontier, and the `width` best of them go on, while they are
    // believed with `lowest`. Returns false where logits are damaged. Call it without the GIL.
    bool grow(const MlpStep& advance, const float* left, const std::vector<std::int32_t>& ids, const std::int64_t* vocabulary,
              float sharpness, std::int64_t width, double lowest, std::vector<GreedyTree>& trees, int num_threads) const {
        const std::int64_t num_trees = static_cast<std::int64_t>(trees.size());
        for (const std::int32_t id : ids) check_id(id);
        if (num_trees == 0) return true;
        std::int64_t deepest = 0;
        for (const GreedyTree& tree : trees) deepest = std::max(deepest, tree.max_depth);
        const int team_size = useful_threads(num_trees, num_threads);
        const std::int64_t most = num_trees * std::min(width, num_ids());
        Pool::Lease lease(team_size);
        const std::size_t room = std::max(Space(*this, &advance, num_trees, team_size, nullptr).num_bytes,
                                          Space(advance, &advance, most, team_size, nullptr).num_bytes);
        const std::size_t floats = static_cast<std::size_t>(most * (2 * hidden_ + num_ids()) + 15) / 16 * 64;
        std::byte* scratch = lease.scratch(room + floats);
        float* raw = reinterpret_cast<float*>(scratch + room);
        const Results results{raw, raw + most * hidden_, raw + 2 * most * hidden_, sharpness};
        bool is_sound = true;
        lease.run([&](Team& team, int rank) {
            // Every thread does the same with trees of its own, which is cheaper than to wait for one that does.
            thread_local std::vector<GreedyTree> copies;
            if (rank != 0) copies = trees;
            std::vector<GreedyTree>& own = rank == 0 ? trees : copies;
            thread_local Frontier frontier;
            frontier.tokens = ids;
            frontier.above.clear();
            fuse(left, Space(*this, &advance, num_trees, team_size, scratch), raw, team, rank);
            const MlpStep* step = this;
            for (std::int64_t depth = 1; !frontier.tokens.empty(); ++depth) {
                const std::int64_t num_rows = static_cast<std::int64_t>(frontier.tokens.size());
                const Rows rows{num_rows, frontier.tokens.data(), frontier.above.empty() ? nullptr : frontier.above.data()};
                const MlpStep* next = depth < deepest ? &advance : nullptr;
                step->run_rows(rows, results, Space(*step, &advance, num_rows, team_size, scratch), next, team, rank);
                mark(Phase::kOther);
                if (!frontier.go_on(own, results.logits, num_ids(), vocabulary, width, lowest)) {
                    if (rank == 0) is_sound = false;
                    break;
                }
                step = &advance;
            }
            expect_next(advance, team_size, rank);
        });
        return is_sound;
    }

   private:
    // The rows of a step.
    struct Rows {
        std::int64_t num_rows;
        const std::int32_t* tokens;
        const std::int64_t* above;  // for each row the one that it reads of what `fuse_` made, or null: the same
    };

    // What a step reads and writes.
    struct Results {
        float* raw;  // what `fuse_` makes of the states in front of the tokens; behind the step, of this step's states
        float* states;
        float* logits;
        float sharpness;  // that logits are multiplied with
    };

    // The nodes that go on, as one thread sees them.
    struct Frontier {
        std::vector<std::int32_t> tokens;
        std::vector<std::int64_t> above;
        Ranking ranking;

        // The children of all frontiers, given a row of logits for each node, and the rows of the next step. Returns false
        // where logits are damaged.
        bool go_on(std::vector<GreedyTree>& trees, float* logits, std::int64_t num_ids, const std::int64_t* vocabulary,
                   std::int64_t width, double lowest) {
            tokens.clear();
            above.clear();
            std::int64_t row = 0;
            for (GreedyTree& tree : trees) {
                const std::int64_t first_row = row;
                const std::size_t first = tree.nodes.size();
                const std::vector<std::int64_t> parents = tree.frontier;
                for (const std::int64_t parent : parents)  // the logits are sharp already
                    if (!tree.add_best(parent, logits + row++ * num_ids, num_ids, vocabulary, 1, width, &ranking)) return false;
                if (parents.empty()) continue;
                tree.go_on(first, width, lowest);
                for (const std::int64_t node : tree.frontier) {
                    const GreedyTree::Node& fresh = tree.nodes[static_cast<std::size_t>(node)];
                    above.push_back(first_row + (std::find(parents.begin(), parents.end(), fresh.parent) - parents.begin()));
                    tokens.push_back(static_cast<std::int32_t>(fresh.token));
                }
            }
            return true;
        }
    };

    // The working memory of a step, laid out in one piece.
    struct Space {
        Inputs left, up, head, next, down;
        std::int64_t num_rows;
        int copies;
        std::byte* fresh;  // Inputs of fuse_token_
        float *fused, *gates, *token_sums;
        std::size_t num_bytes;

        Space(const MlpStep& step, const MlpStep* next_step, std::int64_t rows, int num_copies, std::byte* base)
            : left(*step.fuse_, rows, num_copies), up(*step.gate_up_, rows, num_copies), head(*step.head_, rows, num_copies),
              next(*(next_step == nullptr ? step : *next_step).fuse_, rows, num_copies), down(*step.down_, rows, 1),
              num_rows(rows), copies(num_copies) {
            std::size_t used = 0;
            const auto take = [&](std::size_t bytes) {
                std::byte* piece = base == nullptr ? nullptr : base + used;
                used += (bytes + 63) / 64 * 64;
                return piece;
            };
            for (Inputs* inputs : {&left, &up, &head, &next, &down}) {
                std::byte* piece = take(inputs->num_bytes());
                if (piece != nullptr) inputs->place(piece);
            }
            fresh = take(Inputs(*step.fuse_token_, rows, copies).num_bytes());
            const auto take_floats = [&](std::int64_t count) { return reinterpret_cast<float*>(take(static_cast<std::size_t>(count) * 4)); };
            fused = take_floats(copies * rows * step.hidden_);
            gates = take_floats(rows * 2 * step.inner_);
            token_sums = take_floats(rows * step.hidden_);
            num_bytes = used;
        }
        float* fused_of(int rank, std::int64_t hidden) const { return fused + rank % copies * num_rows * hidden; }
    };

    void keep_sums(const Matrix& sums, const Ints& rows) {
        num_sums_ = static_cast<std::int64_t>(sums.shape(0));
        check_shape("token_sums", sums, num_sums_, hidden_);
        check_equal("the number of token rows", static_cast<std::int64_t>(rows.shape(0)), vocab_size());
        for (std::int64_t id = 0; id < vocab_size(); ++id)
            check(rows.data()[id] >= 0 && rows.data()[id] <= num_sums_, "a token row is out of range.");
        sums_ = sums.data(), token_rows_ = rows.data();
    }

    void check_id(std::int32_t id) const { check(id >= 0 && id < vocab_size(), "an id is out of range."); }

    // Tiny nets are not worth barriers.
    int useful_threads(std::int64_t num_rows, int num_threads) const {
        const int wanted = check_threads(num_threads, kMaxThreads);
        const std::int64_t useful = 1 + num_rows * fuse_->num_inputs * hidden_ / 65536;
        return useful < wanted ? static_cast<int>(useful) : wanted;
    }

    // What a token adds, or null where it is not known beforehand.
    const float* find_sum(std::int32_t token) const {
        return sums_ == nullptr || token_rows_[token] == num_sums_ ? nullptr : sums_ + token_rows_[token] * hidden_;
    }

    // Called by every thread of the team, as all below.
    void fuse(const float* left, const Space& space, float* raw, Team& team, int rank) const {
        mark(Phase::kNorm);
        norm_states(left, space.left, space.num_rows, rank);
        mark(Phase::kQkv);
        multiply(kernels(), *fuse_, space.left.job(rank, bias_, nullptr, raw), team, rank);
    }

    // Behind `fuse`: the step, and `next->fuse` of its states.
    void run_rows(const Rows& rows, const Results& results, const Space& space, const MlpStep* next, Team& team,
                  int rank) const {
        const Kernels& kernel = kernels();
        float* fused = space.fused_of(rank, hidden_);
        mark(Phase::kNorm);
        add_tokens(rows, results.raw, space, fused, team, rank);
        norm_rows(kernel, fused, inner_norm_, space.up, rows.num_rows, rank);
        mark(Phase::kGateUp);
        gate(kernel, space.up, space.down, space.gates, rows.num_rows, team, rank);
        mark(Phase::kDown);
        multiply(kernel, *down_, space.down.job(rank, nullptr, fused, results.states), team, rank);
        mark(Phase::kNorm);
        norm_rows(kernel, results.states, norm_, space.head, rows.num_rows, rank);
        if (next != nullptr) next->norm_states(results.states, space.next, rows.num_rows, rank);
        const std::int64_t num_own = num_shares(head_->num_blocks());
        const std::int64_t num_further = next == nullptr ? 0 : num_shares(next->fuse_->num_blocks());
        const LinearJob own = space.head.job(rank, nullptr, nullptr, results.logits);
        const LinearJob further = space.next.job(rank, next == nullptr ? nullptr : next->bias_, nullptr, results.raw);
        mark(Phase::kHead);
        team.share(rank, num_own + num_further, [&](std::int64_t item) {
            if (item >= num_own) return run_share(kernel, *next->fuse_, further, item - num_own);
            run_share(kernel, *head_, own, item);
            if (results.sharpness == 1) return;
            // Not by who ranks them, since every thread does.
            const std::int64_t first = item * kShareBlocks * kLanes, end = std::min(num_ids(), first + kShareBlocks * kLanes);
            for (std::int64_t row = 0; row < rows.num_rows; ++row)
                for (std::int64_t id = first; id < end; ++id) results.logits[row * num_ids() + id] *= results.sharpness;
        });
    }

    // The first sum of each row, by each thread for itself.
    void add_tokens(const Rows& rows, const float* raw, const Space& space, float* fused, Team& team, int rank) const {
        const Kernels& kernel = kernels();
        std::int64_t num_fresh = 0;
        for (std::int64_t row = 0; row < rows.num_rows; ++row) num_fresh += find_sum(rows.tokens[row]) == nullptr;
        if (num_fresh > 0) {
            Inputs inputs(*fuse_token_, num_fresh, space.copies);
            inputs.place(space.fresh);
            std::int64_t at = 0;
            for (std::int64_t row = 0; row < rows.num_rows; ++row) {
                if (find_sum(rows.tokens[row]) != nullptr) continue;
                float* out = inputs.floats(rank, at);
                unpack_row(*embedding_, rows.tokens[row], out);
                kernel.rms_norm(out, ones_, eps_, hidden_, out);
                inputs.finish(kernel, rank, at++, 0, hidden_);
            }
            multiply(kernel, *fuse_token_, inputs.job(rank, nullptr, nullptr, space.token_sums), team, rank);
        }
        const float* fresh = space.token_sums;
        for (std::int64_t row = 0; row < rows.num_rows; ++row) {
            const float* sum = find_sum(rows.tokens[row]);
            if (sum == nullptr) sum = fresh, fresh += hidden_;
            kernel.add(sum, raw + (rows.above == nullptr ? row : rows.above[row]) * hidden_, hidden_, fused + row * hidden_);
        }
    }

    // The next draft reads the same: this thread's share of each matrix, and a part of the caller's, who has other things to do
    // between two drafts and so is late with it.
    void expect_next(const MlpStep& advance, int team_size, int rank) const {
        if (rank == 0) return;
        NextReads& reads = NextReads::of_thread();
        const auto add = [&](const PackedWeight& weight, std::int64_t first, std::int64_t count) {
            const Range own = split(count, rank, team_size, kShareBlocks);
            const Range late = split(split(count, 0, team_size, kShareBlocks).end, rank - 1, team_size - 1, kShareBlocks);
            for (const Range& blocks : {late, own})
                reads.add(weight.bytes.get() + (first + blocks.begin) * weight.block_bytes(),
                          (blocks.end - blocks.begin) * weight.block_bytes());
        };
        const std::int64_t half = inner_ / kLanes;  // of gate_up: a share is gates and the ups that belong to them
        reads.start();
        add(*fuse_, 0, fuse_->num_blocks());
        add(*gate_up_, 0, half);
        add(*gate_up_, half, half);
        add(*down_, 0, down_->num_blocks());
        add(*head_, 0, head_->num_blocks());
        add(*advance.fuse_, 0, advance.fuse_->num_blocks());
    }

    // Each state of the rows normed by itself, as inputs of `fuse_`.
    void norm_states(const float* rows, const Inputs& inputs, std::int64_t num_rows, int rank) const {
        const Kernels& kernel = kernels();
        const std::int64_t width = fuse_->num_inputs;
        for (std::int64_t row = 0; row < num_rows; ++row) {
            for (std::int64_t at = 0; at < width; at += hidden_)
                kernel.rms_norm(rows + row * width + at, ones_, eps_, hidden_, inputs.floats(rank, row) + at);
            inputs.finish(kernel, rank, row, 0, width);
        }
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
    const PackedWeight *fuse_, *fuse_token_, *gate_up_, *down_, *embedding_, *head_;
    const float *bias_, *inner_norm_, *norm_, *ones_;
    const float* sums_ = nullptr;
    const std::int32_t* token_rows_ = nullptr;
    std::int64_t num_sums_ = 0, hidden_, inner_;
    float eps_;
};

// Greedy drafts of an MLP speculator.
class MlpDrafts : public DraftSource {
   public:
    // start: the first step of each draft, advance: all further ones; logits are of `vocabulary`, and are multiplied with
    // `sharpness` before they are looked at. For width and lowest see MlpStep::grow.
    MlpDrafts(nb::object start, nb::object advance, nb::object vocabulary, float sharpness, std::int64_t width, double lowest,
              int num_threads)
        : kept_{start, advance, vocabulary}, start_(nb::cast<const MlpStep*>(start)),
          advance_(nb::cast<const MlpStep*>(advance)), sharpness_(sharpness), width_(width), lowest_(lowest), num_threads_(num_threads) {
        start_->check_next(*advance_);
        check(width > 0, "width must be positive.");
        const auto ids = nb::cast<In<std::int64_t, nb::ndim<1>>>(vocabulary, false);
        check_ids(ids, start_->num_ids(), start_->vocab_size());
        vocabulary_ = ids.data();
    }

    // For each row what GreedyTree::give gives of a draft in its room, or None where logits are damaged.
    nb::list draft(Matrix left, const nb::list& ids, const nb::list& rooms) const {
        std::vector<std::int32_t> tokens;
        for (nb::handle id : ids) tokens.push_back(nb::cast<std::int32_t>(id));
        std::vector<GreedyTree> trees = start_trees(static_cast<std::int64_t>(tokens.size()), rooms);
        start_->check_left(left, static_cast<std::int64_t>(trees.size()));
        const bool is_sound = [&] {
            nb::gil_scoped_release released;
            return start_->grow(*advance_, left.data(), tokens, vocabulary_, sharpness_, width_, lowest_, trees, num_threads_);
        }();
        return give_all(trees, std::vector<char>(trees.size(), is_sound), lowest_);
    }

    bool guess(std::int32_t last, const float* taps, const Room& room, std::vector<DraftNode>& nodes) override {
        std::vector<GreedyTree> trees(1);
        trees[0].max_depth = room.max_depth, trees[0].max_nodes = room.max_nodes, trees[0].end_ids = *room.end_ids;
        trees[0].frontier = {GreedyTree::kRoot};
        trees[0].choice = room.choice, trees[0].position = room.position;
        const float sharpness = room.choice == nullptr ? sharpness_ : 1.0f;
        if (!start_->grow(*advance_, taps, {last}, vocabulary_, sharpness, width_, lowest_, trees, num_threads_)) return false;
        nodes = trees[0].list(lowest_);
        return true;
    }

    std::int64_t tap_width() const override { return start_->left_width(); }

   private:
    std::vector<nb::object> kept_;
    const MlpStep *start_, *advance_;
    const std::int64_t* vocabulary_;
    float sharpness_;
    std::int64_t width_;
    double lowest_;
    int num_threads_;
};

}  // namespace
}  // namespace sakiyomi

void bind_speculator(nanobind::module_& m) {
    using namespace sakiyomi;
    using nb::arg;
    nb::class_<MlpStep>(m, "MlpStep")
        .def(nb::init<const nb::tuple&, nb::object, nb::object, nb::object, nb::object, float>(), arg("weights"),
             arg("embedding"), arg("head"), arg("token_sums").none(), arg("token_rows").none(), arg("eps"))
        .def("run", &MlpStep::run, arg("left").noconvert(), arg("ids").noconvert(), arg("states").noconvert(),
             arg("logits").noconvert(), arg("threads"));
    nb::class_<MlpDrafts, DraftSource>(m, "MlpDrafts")
        .def(nb::init<nb::object, nb::object, nb::object, float, std::int64_t, double, int>(), arg("start"), arg("advance"),
             arg("vocabulary"), arg("sharpness"), arg("width"), arg("lowest"), arg("threads"))
        .def("__call__", &MlpDrafts::draft, arg("left").noconvert(), arg("ids"), arg("rooms"));
}
