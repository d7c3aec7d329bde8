// Inputs of a head in 16 bits: two terms of 8, the second being what the first's rounding leaves.
#pragma once

#include <cstring>

#include "weights.hpp"

namespace sakiyomi {

inline constexpr std::int64_t kShareOutputs = kShareBlocks * kLanes;

// What rounding row `row` to 8 bits left over, rounded again, as row `row` of `rest`. `left` has room for a row.
inline void quantize_rest(const Kernels& kernel, const QuantizedRows& rows, const QuantizedRows& rest, std::int64_t row,
                          const float* x, float* left) {
    const std::int64_t group_size = input_group_bytes(rows.num_rows);
    for (std::int64_t group = 0; group < rows.width / kGroup; ++group) {
        const std::uint8_t* record = rows.bytes + group * group_size;
        const std::int8_t* values = reinterpret_cast<const std::int8_t*>(record) + row * kGroup;
        const float scale = reinterpret_cast<const float*>(record + rows.num_rows * kGroup)[row];
        for (int i = 0; i < kGroup; ++i)
            left[group * kGroup + i] = x[group * kGroup + i] - scale * static_cast<float>(values[i]);
    }
    rest.write(kernel, row, left, 0, rows.width);
}

// The job of the outputs of one share, which go to `sums` [rows][kShareOutputs].
inline LinearJob job_of_share(LinearJob job, std::int64_t share, float* sums) {
    job.weights += share * kShareBlocks * job.block_bytes;
    job.num_outputs -= share * kShareOutputs;
    if (job.bias != nullptr) job.bias += share * kShareOutputs;
    job.outputs = sums;
    job.output_stride = kShareOutputs;
    return job;
}

inline std::int64_t outputs_of_share(const LinearJob& share_job) {
    return share_job.num_outputs < kShareOutputs ? share_job.num_outputs : kShareOutputs;
}

// All outputs of a `job_of_share`.
inline void run_share_job(const Kernels& kernel, const PackedWeight& weight, const LinearJob& share_job) {
    run_linear(kernel, weight, share_job, 0, (outputs_of_share(share_job) + kLanes - 1) / kLanes);
}

// Both terms of one share of a product, added up in `sums` [rows][kShareOutputs].
inline void add_both_terms(const Kernels& kernel, const PackedWeight& weight, const LinearJob& whole,
                           const std::uint8_t* rest, std::int64_t share, float* sums) {
    LinearJob job = job_of_share(whole, share, sums);
    run_share_job(kernel, weight, job);
    job.inputs = rest;
    job.bias = nullptr;
    job.residual = sums;
    run_share_job(kernel, weight, job);
}

// The same, written to the job's outputs. These lie a whole head apart from row to row, so that few sets of a cache and a
// page each would hold them: hence the sums, which are written once.
inline void run_both_terms(const Kernels& kernel, const PackedWeight& weight, const LinearJob& job,
                           const std::uint8_t* rest, std::int64_t share, float* sums) {
    add_both_terms(kernel, weight, job, rest, share, sums);
    const std::int64_t width = outputs_of_share(job_of_share(job, share, sums));
    for (std::int64_t row = 0; row < job.num_rows; ++row)
        std::memcpy(job.outputs + share * kShareOutputs + row * job.output_stride, sums + row * kShareOutputs,
                    static_cast<std::size_t>(width) * sizeof(float));
}

}  // namespace sakiyomi
