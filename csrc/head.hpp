// The id that each row chooses over a language model's head, without its logits.
#pragma once

#include <tuple>
#include <vector>

#include "arrays.hpp"
#include "choose.hpp"
#include "parallel.hpp"
#include "weights.hpp"

namespace sakiyomi {

// ids [R]: the lowest id of the largest logit of each row of x [R, K], normed first; -1 where a row has none or may hold a
// nan, which only its logits can tell. Returns how many pairs of a row and a share or block were computed with both terms.
// `bounds` [R, shares], or null, gets what the second term adds at most. Call it without the GIL.
std::int64_t find_best_ids(const float* x, std::int64_t num_rows, const PackedWeight& weight, const float* norm, float eps,
                           std::int64_t* ids, int num_threads, float* bounds);

// `RowChoice` of ops/base.py, as it comes from Python.
using RowChoices = std::vector<std::tuple<std::uint64_t, double, std::uint64_t>>;
std::vector<RowChoice> read_choices(const RowChoices& choices);

// ids [R]: what each row chooses, as `choose_id` from its logits; -1 also for all rows where noise decides one of them over a
// float weight or at a temperature without bounds, so that logits are needed anyway.
void find_chosen_ids(const float* x, std::int64_t num_rows, const PackedWeight& weight, const float* norm, float eps,
                     const RowChoice* choices, std::int64_t* ids, int num_threads);

// y [R, N] of x [R, K], normed first where there is a norm. `is_fine`: inputs of a quantized weight keep 16 bits, as two terms of
// 8; the second adds to the first's outputs while the weights are still in the cache. Call it without the GIL.
void multiply_rows(const float* x, std::int64_t num_rows, const PackedWeight& weight, const float* bias, float* y, int num_threads,
                   bool is_fine, const float* norm, float eps);

}  // namespace sakiyomi
