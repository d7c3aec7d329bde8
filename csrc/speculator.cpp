// One step of a recurrent MLP speculator in one call: the composed form of ops/base.py (`mlp_step`) with the same routines
// per row. A draft is a few such steps behind each other, so what matters is what stands around the matrices.
#include <cstring>
#include <vector>

#include "arrays.hpp"
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
        const std::int64_t num_rows = static_cast<std::int64_t>(ids.shape(0)), left_width = fuse_->num_inputs - hidden_;
        check_shape("left", left, num_rows, left_width);
        check_shape("states", states, num_rows, hidden_);
        check_shape("logits", logits, num_rows, head_->num_outputs);
        for (std::int64_t row = 0; row < num_rows; ++row)
            check(ids.data()[row] >= 0 && ids.data()[row] < embedding_->num_outputs, "an id is out of range.");
        if (num_rows == 0) return;
        const Kernels& kernel = kernels();
        const int wanted = check_threads(num_threads, kMaxThreads);
        const std::int64_t useful = 1 + num_rows * fuse_->num_inputs * hidden_ / 65536;  // tiny nets are not worth barriers
        nb::gil_scoped_release released;
        Pool::Lease lease(useful < wanted ? static_cast<int>(useful) : wanted);
        const std::int64_t copies = useful < wanted ? useful : wanted;
        Inputs fuse(*fuse_, num_rows, copies), up(*gate_up_, num_rows, copies), head(*head_, num_rows, copies);
        Inputs down(*down_, num_rows, 1);
        const std::size_t floats = static_cast<std::size_t>(num_rows * (hidden_ + 2 * inner_) * 4 + 128);
        std::byte* scratch = lease.scratch(fuse.num_bytes() + up.num_bytes() + head.num_bytes() + down.num_bytes() + floats);
        for (Inputs* inputs : {&fuse, &up, &head, &down}) scratch = inputs->place(scratch);
        float* fused = reinterpret_cast<float*>(scratch);
        float* gates = fused + (num_rows * hidden_ + 15) / 16 * 16;
        const float* x = left.data();
        const std::int32_t* tokens = ids.data();
        float* state_rows = states.data();
        float* logit_rows = logits.data();
        if (tokens_ != nullptr)
            for (std::int64_t row = 0; row < num_rows; ++row)
                unpack_row(*tokens_, token_rows_[tokens[row]], fused + row * hidden_);
        lease.run([&](Team& team, int rank) {
            for (std::int64_t row = 0; row < num_rows; ++row) {
                float* out = fuse.floats(rank, row);
                unpack_row(*embedding_, tokens[row], out + left_width);
                for (std::int64_t at = 0; at <= left_width; at += hidden_)
                    kernel.rms_norm(at == left_width ? out + at : x + row * left_width + at, ones_, eps_, hidden_, out + at);
                fuse.finish(kernel, rank, row, 0, fuse_->num_inputs);
            }
            multiply(kernel, *fuse_, fuse.job(rank, bias_, tokens_ == nullptr ? nullptr : fused, fused), team, rank);
            norm_rows(kernel, fused, inner_norm_, up, num_rows, rank);
            gate(kernel, up, down, gates, num_rows, team, rank);
            multiply(kernel, *down_, down.job(rank, nullptr, fused, state_rows), team, rank);
            norm_rows(kernel, state_rows, norm_, head, num_rows, rank);
            multiply(kernel, *head_, head.job(rank, nullptr, nullptr, logit_rows), team, rank);
        });
    }

   private:
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
             arg("logits").noconvert(), arg("threads"));
}
