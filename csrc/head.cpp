// The id that each row chooses over a language model's head, the best one or one by noise, without its logits.
//
// The inputs of a quantized head are two terms of 8 bits. The first alone tells an output up to what the second can add,
// which is at most the product of the lengths of both vectors (Cauchy and Schwarz). So the first runs over all outputs;
// both run over the share of outputs that seems to hold the largest, and then over those few blocks of outputs that may
// hold a larger one. They do so by the same routines in the same order as `linear`: these are the very bits of the logits. Rounding a
// sum keeps order, hence what is below a bound exactly is so in its bits.
//
// Where there is a coarse copy of the head (screen.hpp), the best ids of a few rows are sought in that first: it takes the
// place of the first term, and what it has rounded away counts as what may be added.
//
// With noise an id may win whose score, at its most, does not stay below what another has for sure. These few ids, the
// largest logit and the noise are all that the choice needs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "head.hpp"
#include "noise.hpp"
#include "screen.hpp"
#include "two_terms.hpp"

static_assert(sakiyomi::kShareBlocks * sakiyomi::kLanes == sakiyomi::kChooseBlock, "noise is drawn for a share");

namespace sakiyomi {
namespace {

using Matrix = In<float, nb::ndim<2>>;

constexpr float kLargestInput = 1e20f;  // so that no product with halves comes near the end of the floats
constexpr double kRoundingSlack = 1e-6;  // of sums and quotients of doubles below kLargestScore
constexpr double kLargestScore = 1e4;    // up to which floats bound scores to a hundredth
constexpr float kUnderflow = 1e-30f;    // more than all results too small for a float can lose
constexpr std::int64_t kRunShares = 16;
static_assert(kShareOutputs == kChooseBlock, "a share is scanned as a block of logits");
constexpr std::int64_t kGatheredPart = 3;  // fewer than this part of the rows are copied beside one another
constexpr int kManyOutputs = 5;  // of a block, whose own logits take as long as those of the block
constexpr std::int64_t kGatheredCost = 3;  // of sixteen outputs from here and there, in blocks
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Sums over a group of 32 values of each of 16 outputs.
struct GroupSums {
    std::int32_t values[kLanes], squares[kLanes];
};

// Adds up bytes and their squares; 16 bits hold a square, and the sum of 8 bytes.
inline void add_bytes(const std::uint8_t* bytes, int shift, int mask, std::uint16_t* values, std::uint32_t* squares) {
    for (int i = 0; i < kLanes * 4; ++i) {
        const std::uint16_t value = static_cast<std::uint16_t>(bytes[i] >> shift & mask);
        values[i] = static_cast<std::uint16_t>(values[i] + value);
        squares[i] += static_cast<std::uint16_t>(value * value);
    }
}

GroupSums sum_group(Storage storage, const std::uint8_t* bytes) {
    std::uint16_t values[kLanes * 4] = {};
    std::uint32_t squares[kLanes * 4] = {};
    for (const std::uint8_t* end = bytes + value_bytes(storage); bytes < end; bytes += kLanes * 4) {
        if (is_in_nibbles(storage)) {
            add_bytes(bytes, 0, 15, values, squares);
            add_bytes(bytes, 4, 15, values, squares);
        } else {
            add_bytes(bytes, 0, 255, values, squares);
        }
    }
    GroupSums sums;
    for (int lane = 0; lane < kLanes; ++lane) {
        const int i = lane * 4;
        sums.values[lane] = values[i] + values[i + 1] + values[i + 2] + values[i + 3];
        sums.squares[lane] = static_cast<std::int32_t>(squares[i] + squares[i + 1] + squares[i + 2] + squares[i + 3]);
    }
    return sums;
}

// What the product with any output of a block is at most, rounding included, per length of the inputs. A weight is
// scale * value + min; rounding is relative to the sum of |scale| * value + |min|, by less than one 2^-23 per operation.
float norm_of_block(const PackedWeight& weight, std::int64_t block) {
    const std::int64_t num_groups = weight.num_groups();
    double squares[kLanes] = {}, sizes[kLanes] = {};
    for (std::int64_t group = 0; group < num_groups; ++group) {
        const GroupSums sums = sum_group(weight.storage, weight.block(block) + place_of_group(weight.storage, group, num_groups).values);
        for (int lane = 0; lane < kLanes; ++lane) {
            const GroupHalves halves = get_halves(weight, block * kLanes + lane, group);
            const double scale = half_to_float(halves.scale), low = half_to_float(halves.min);
            const double outer = scale * scale * sums.squares[lane] + kGroup * low * low;
            const double inner = 2.0 * scale * low * sums.values[lane];
            squares[lane] += outer + inner;
            sizes[lane] += outer + std::fabs(inner);
        }
    }
    const double rounding = 0x1p-23 * static_cast<double>(4 * num_groups + 8);
    float largest = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        const double square = squares[lane] > 0 ? squares[lane] : 0;
        const float norm = static_cast<float>((std::sqrt(square) + rounding * std::sqrt(sizes[lane])) * (1 + 1e-6));
        if (!(norm <= largest)) largest = norm <= std::numeric_limits<float>::max() ? norm : kInfinity;
    }
    return largest;
}

float norm_of_share(const PackedWeight& weight, std::int64_t share) {
    const std::int64_t first = share * kShareBlocks, end = first + kShareBlocks, last = weight.num_blocks();
    float largest = 0;
    for (std::int64_t block = first; block < (end < last ? end : last); ++block) {
        const float norm = norm_of_block(weight, block);
        largest = norm > largest ? norm : largest;
    }
    return largest;
}

// A length, rounded up.
float length_of(const float* x, std::int64_t count) {
    double square = 0;
    for (std::int64_t i = 0; i < count; ++i) square += static_cast<double>(x[i]) * x[i];
    return static_cast<float>(std::sqrt(square) * (1 + 1e-6));
}

// Adds a quantized row to `out`.
void add_row(const QuantizedRows& rows, std::int64_t row, float* out) {
    for (std::int64_t group = 0; group < rows.width / kGroup; ++group) {
        const std::uint8_t* record = rows.bytes + group * input_group_bytes(rows.num_rows);
        const std::int8_t* values = reinterpret_cast<const std::int8_t*>(record) + row * kGroup;
        const float scale = reinterpret_cast<const float*>(record + rows.num_rows * kGroup)[row];
        for (int i = 0; i < kGroup; ++i) out[group * kGroup + i] += scale * static_cast<float>(values[i]);
    }
}

// The length of a quantized row, rounded up; `room` has that of a row.
float norm_of_row(const QuantizedRows& rows, std::int64_t row, float* room) {
    std::fill_n(room, rows.width, 0.0f);
    add_row(rows, row, room);
    return length_of(room, rows.width);
}

// Rows as the coarse copy of a head reads them.
struct ScreenedRows {
    const HeadScreen* screen = nullptr;  // null: it is not asked
    QuantizedRows fine = {}, coarse = {};  // two rows for each of the columns that weigh most: its terms
    std::vector<float> fine_lengths = {}, coarse_lengths = {};
    std::vector<float> roundings = {};  // of sums over the head and over the copy, at most
    float* most = nullptr;              // [shares][rows][kShareOutputs], that outputs may be beside what the copy reads wrongly

    ScreenedRows() = default;
    ScreenedRows(const HeadScreen* copy, std::int64_t num_rows, std::uint8_t* bytes, float* room)
        : screen(copy), fine_lengths(static_cast<std::size_t>(num_rows)), coarse_lengths(fine_lengths), roundings(fine_lengths), most(room) {
        if (screen == nullptr) return;
        fine = {bytes, screen->num_fine(), 2 * num_rows};
        coarse = {bytes + QuantizedRows::num_bytes(fine.width, fine.num_rows), screen->num_coarse(), num_rows};
    }

    // Row `row` of numbers x; the head reads it as the sum of two terms. Returns how far from that lies what the copy reads.
    float write(const Kernels& kernel, std::int64_t row, const float* x, const QuantizedRows& first, const QuantizedRows& rest) {
        const std::int64_t num_fine = fine.width, width = first.width;
        const std::size_t at = static_cast<std::size_t>(row), size = static_cast<std::size_t>(width);
        std::vector<float> ordered(size), seen(size), whole(size);
        for (std::int64_t k = 0; k < width; ++k) ordered[static_cast<std::size_t>(k)] = x[screen->order()[k]];
        coarse.write(kernel, row, ordered.data() + num_fine, 0, coarse.width);
        fine.write(kernel, 2 * row, ordered.data(), 0, num_fine);
        add_row(fine, 2 * row, seen.data());
        for (std::int64_t k = 0; k < num_fine; ++k) ordered[static_cast<std::size_t>(k)] -= seen[static_cast<std::size_t>(k)];
        fine.write(kernel, 2 * row + 1, ordered.data(), 0, num_fine);
        add_row(fine, 2 * row + 1, seen.data());
        add_row(coarse, row, seen.data() + num_fine);
        add_row(first, row, whole.data());
        add_row(rest, row, whole.data());
        for (std::size_t k = 0; k < size; ++k) ordered[k] = whole[static_cast<std::size_t>(screen->order()[k])] - seen[k];
        fine_lengths[at] = length_of(seen.data(), num_fine);
        coarse_lengths[at] = length_of(seen.data() + num_fine, coarse.width);
        const float rounding = 0x1p-22f * static_cast<float>(4 * (width / kGroup) + 16);
        roundings[at] = rounding * screen->header().size * (length_of(seen.data(), width) + length_of(whole.data(), width));
        return length_of(ordered.data(), width);
    }

    float* most_of(std::int64_t share) const { return most + share * coarse.num_rows * kShareOutputs; }

    void scan(const Kernels& kernel, std::int64_t share, std::int64_t num_outputs) const {
        ScreenJob job = screen->job_of_share(share, fine, coarse);
        job.coarse_lengths = coarse_lengths.data();
        job.fine_lengths = fine_lengths.data();
        job.outputs = most_of(share);
        job.output_stride = kShareOutputs;
        kernel.screen_blocks(&job, 0, (num_outputs + kLanes - 1) / kLanes);
    }
};

bool is_within(const float* x, std::int64_t count, float largest) {
    bool is = true;
    for (std::int64_t i = 0; i < count; ++i) is &= std::fabs(x[i]) <= largest;
    return is;
}

// Copies chosen rows of `source` to `target`, whose num_rows is their count.
void gather_rows(const QuantizedRows& source, const std::vector<std::int32_t>& chosen, const QuantizedRows& target) {
    const std::int64_t count = target.num_rows;
    for (std::int64_t group = 0; group < source.width / kGroup; ++group) {
        const std::uint8_t* from = source.bytes + group * input_group_bytes(source.num_rows);
        std::uint8_t* to = target.bytes + group * input_group_bytes(count);
        const float* scales = reinterpret_cast<const float*>(from + source.num_rows * kGroup);
        float* new_scales = reinterpret_cast<float*>(to + count * kGroup);
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t row = chosen[static_cast<std::size_t>(i)];
            std::memcpy(to + i * kGroup, from + row * kGroup, kGroup);
            new_scales[i] = scales[row];
            new_scales[count + i] = scales[source.num_rows + row];
        }
    }
}

// A block of outputs, one of which may win a row's race, and what that one has at most.
struct Rival {
    std::int64_t block = 0;
    std::int32_t row = 0;
    double most = -kInfinity;
};

// What one thread has found for one row.
struct Found {
    float value = -kInfinity;  // the largest logit so far
    std::int64_t id = -1;
    float peak = -kInfinity;   // the largest output of the first term, and its share
    std::int64_t peak_share = 0;
    bool has_nan = false;
    double lead = -kInfinity;  // what the winner of the race has at least: logit / temperature + noise
    Rival favourite;           // who has most
    std::vector<Candidate> candidates;

    void see_peak(float first, std::int64_t share) {
        if (!(first > peak)) return;
        peak = first;
        peak_share = share;
    }

    void see(const float* values, std::int64_t count, std::int64_t first_id) {
        for (std::int64_t i = 0; i < count; ++i) {
            has_nan |= std::isnan(values[i]);
            if (values[i] > value || (values[i] == value && id >= 0 && first_id + i < id)) {
                value = values[i];
                id = first_id + i;
            }
        }
    }

    void join(const Found& other) {
        has_nan |= other.has_nan;
        if (other.id >= 0) see(&other.value, 1, other.id);
        candidates.insert(candidates.end(), other.candidates.begin(), other.candidates.end());
    }
};

// An output whose logit is wanted of rows, a bit each.
struct Wanted {
    std::int32_t id;
    std::uint32_t rows;
};

// What one thread works with.
struct Desk {
    float* sums;  // [rows][kShareOutputs]
    std::uint8_t *first, *rest;  // rooms for all rows
    std::vector<Found> found;
    std::vector<std::int32_t> chosen;
    std::int64_t num_decided = 0, num_blocks = 0;  // pairs of a row and a share or block; what these cost, in blocks read
    std::vector<Rival> rivals = {};
    std::vector<Wanted> wanted = {};      // at most 16
    std::vector<std::uint8_t> block = {};  // room for these

    const Found& at(std::int64_t row) const { return found[static_cast<std::size_t>(row)]; }
    Found& at(std::int64_t row) { return found[static_cast<std::size_t>(row)]; }
};

// One search: what its threads share.
struct Search {
    const Kernels& kernel;
    const PackedWeight& weight;
    const float* norms;  // of shares
    std::int64_t num_rows;
    QuantizedRows first, rest;
    LinearJob job;
    std::vector<float> lengths;  // of what bounds leave out of the rows; below 0: a row that must be left out
    std::vector<float> maxima;   // [share][row], of the first term
    std::vector<float> block_maxima;  // [share][row][block]
    std::vector<std::int64_t> peak_shares;
    std::vector<float> surely;   // a logit of each row
    std::vector<Desk> desks;
    const RowChoice* choices;    // null: the best ids are wanted
    std::vector<NoiseKey> keys = {};
    std::vector<double> leads = {};  // what the winner of a row's race has at least, by all threads
    ScreenedRows screened = {};

    bool draws(std::int64_t row) const { return choices != nullptr && choices[row].temperature != 0; }

    bool is_left_out(std::int64_t row) const { return lengths[static_cast<std::size_t>(row)] < 0; }

    std::int64_t outputs_of_block(std::int64_t block) const { return std::min<std::int64_t>(kLanes, job.num_outputs - block * kLanes); }

    // What the second term, or what the copy has not seen of a row, adds to any output of a share at most.
    float bound(std::int64_t row, std::int64_t share) const {
        const std::size_t at = static_cast<std::size_t>(row);
        return lengths[at] * norms[share] + screened.roundings[at] + kUnderflow;
    }

    bool is_screened() const { return screened.screen != nullptr; }

    // The first term over a share, or the most that the copy leaves room for.
    void scan_share(std::int64_t share, Desk& desk) {
        float* sums = is_screened() ? screened.most_of(share) : desk.sums;
        const LinearJob here = job_of_share(job, share, sums);
        const std::int64_t width = outputs_of_share(here);
        if (is_screened())
            screened.scan(kernel, share, width);
        else
            run_share_job(kernel, weight, here);
        for (std::int64_t row = 0; row < num_rows; ++row)
            std::fill(sums + row * kShareOutputs + width, sums + (row + 1) * kShareOutputs, -kInfinity);
        float* largest = maxima.data() + share * num_rows;
        const bool has_nan = kernel.scan_blocks(sums, num_rows, largest);
        if (!is_screened()) kernel.scan_lanes(sums, num_rows * kShareBlocks, block_maxima.data() + share * num_rows * kShareBlocks);
        for (std::int64_t row = 0; row < num_rows; ++row) {
            desk.at(row).see_peak(largest[row], share);
            if (has_nan) desk.at(row).has_nan |= !is_within(sums + row * kShareOutputs, width, kInfinity);
            if (draws(row) && !is_left_out(row)) draw_share(share, row, largest[row], desk);
        }
    }

    // Who of a share may win the race of a row, going by the first term.
    void draw_share(std::int64_t share, std::int64_t row, float largest, Desk& desk) const {
        // Adding it to a float rounds as the logit is rounded; `kRoundingSlack` is for doubles.
        const double temperature = choices[row].temperature;
        const float slack = bound(row, share);
        double& lead = desk.at(row).lead;
        if ((largest + slack) / temperature + kGumbelMax < lead) return;
        const float* sums = desk.sums + row * kShareOutputs;
        const ScoreRule rule{-slack, temperature, -kInfinity};
        std::uint32_t words[kShareOutputs];
        kernel.draw_block(&keys[static_cast<std::size_t>(row)], static_cast<std::uint32_t>(share * kShareOutputs / 4), words);
        for (std::uint64_t bits = kernel.bound_block(sums, &rule, words, static_cast<float>(lead)); bits != 0; bits &= bits - 1) {
            const int i = __builtin_ctzll(bits);
            const double noise = gumbel_of(words[i]), most = (sums[i] + slack) / temperature + noise + kRoundingSlack;
            if (!(most >= lead) || sums[i] == -kInfinity) continue;
            lead = std::max(lead, (sums[i] - slack) / temperature + noise);
            desk.rivals.push_back({share * kShareBlocks + i / kLanes, static_cast<std::int32_t>(row), most});
            if (most > desk.at(row).favourite.most) desk.at(row).favourite = desk.rivals.back();
        }
    }

    // What a row's favourite really has: few can beat that, where many might have beaten the least that it can have.
    void decide_favourite(std::int64_t row, Desk& desk) {
        Rival favourite;
        double& lead = leads[static_cast<std::size_t>(row)];
        for (const Desk& one : desks) {
            lead = std::max(lead, one.at(row).lead);
            if (one.at(row).favourite.most > favourite.most) favourite = one.at(row).favourite;
        }
        if (favourite.most == -kInfinity) return;
        desk.chosen.assign(1, static_cast<std::int32_t>(row));
        const std::int64_t first = favourite.block * kLanes, width = outputs_of_block(favourite.block);
        decide_chosen(favourite.block, width, desk);
        for (std::int64_t i = 0; i < width; ++i) {
            const double noise = gumbel_of(random_word(keys[static_cast<std::size_t>(row)], static_cast<std::uint32_t>(first + i)));
            lead = std::max(lead, desk.sums[i] / choices[row].temperature + noise);
        }
    }

    // The blocks that this thread has found rivals in, each for the rows that these may win.
    void decide_rivals(Desk& desk) {
        const auto is_beaten = [&](const Rival& one) { return one.most < leads[static_cast<std::size_t>(one.row)]; };
        auto& rivals = desk.rivals;
        rivals.erase(std::remove_if(rivals.begin(), rivals.end(), is_beaten), rivals.end());
        // Those of a share stand together, and its blocks in the order in which rows found them.
        std::stable_sort(rivals.begin(), rivals.end(), [](const Rival& a, const Rival& b) { return a.block < b.block; });
        for (std::size_t i = 0; i < rivals.size();) {
            const std::int64_t block = rivals[i].block, width = outputs_of_block(block);
            desk.chosen.clear();
            for (; i < rivals.size() && rivals[i].block == block; ++i)
                if (desk.chosen.empty() || desk.chosen.back() != rivals[i].row) desk.chosen.push_back(rivals[i].row);
            decide_chosen(block, width, desk);
            for (std::size_t k = 0; k < desk.chosen.size(); ++k)
                for (std::int64_t id = 0; id < width; ++id)
                    desk.at(desk.chosen[k]).candidates.push_back({block * kLanes + id, desk.sums[static_cast<std::int64_t>(k) * kShareOutputs + id]});
        }
    }

    // A row's share with the largest output of the first term.
    void decide_peak(std::int64_t row, Desk& desk) {
        if (is_left_out(row)) return;
        Found all;
        for (const Desk& one : desks) all.see_peak(one.at(row).peak, one.at(row).peak_share);
        if (draws(row)) decide_favourite(row, desk);
        if (is_screened()) return decide_screened_peak(row, all.peak_share, desk);
        peak_shares[static_cast<std::size_t>(row)] = all.peak_share;
        desk.chosen.assign(1, static_cast<std::int32_t>(row));
        const std::int64_t width = outputs_of_share(job_of_share(job, all.peak_share, nullptr));
        decide_chosen(all.peak_share * kShareBlocks, width, desk);
        float largest = desk.sums[0];
        for (std::int64_t i = 1; i < width; ++i)
            largest = desk.sums[i] > largest ? desk.sums[i] : largest;
        surely[static_cast<std::size_t>(row)] = largest;
    }

    // The output that may be the largest of all.
    void decide_screened_peak(std::int64_t row, std::int64_t share, Desk& desk) {
        const float* most = screened.most_of(share) + row * kShareOutputs;
        const std::int64_t id = share * kShareOutputs + kernel.argmax(most, kShareOutputs);
        desk.wanted.push_back({static_cast<std::int32_t>(id), 1u << row});
        decide_wanted(desk);
        surely[static_cast<std::size_t>(row)] = desk.at(row).value;
    }

    // Bits of the outputs of a share that may be the largest logit of a row.
    std::uint64_t find_outputs(std::int64_t share, std::int64_t row) const {
        if (!may_hold(row, share, maxima[static_cast<std::size_t>(share * num_rows + row)])) return 0;
        const float sure = surely[static_cast<std::size_t>(row)], slack = bound(row, share);
        const float least = sure - slack - 0x1p-22f * (std::fabs(sure) + slack);  // a little less than `may_hold` asks for
        return kernel.find_in_block(screened.most_of(share) + row * kShareOutputs, std::isnan(least) ? -kInfinity : least);
    }

    // Those of all rows: by themselves where they are few of a block, else by the head's block.
    void collect_share(std::int64_t share, Desk& desk) {
        constexpr std::uint64_t kBlock = (1u << kLanes) - 1;
        std::uint64_t found[kScreenedRows], all = 0;
        for (std::int64_t row = 0; row < num_rows; ++row) all |= found[row] = find_outputs(share, row);
        for (std::int64_t i = 0; i < kShareOutputs; i += kLanes) {
            const std::uint64_t here = all & kBlock << i;
            const bool are_many = __builtin_popcountll(here) >= kManyOutputs;
            if (are_many) decide_block(share * kShareBlocks + i / kLanes, found, here, desk);
            for (std::uint64_t bits = are_many ? 0 : here; bits != 0; bits &= bits - 1) {
                const int at = __builtin_ctzll(bits);
                std::uint32_t rows = 0;
                for (std::int64_t row = 0; row < num_rows; ++row) rows |= static_cast<std::uint32_t>(found[row] >> at & 1) << row;
                want(share * kShareOutputs + at, rows, desk);
            }
        }
    }

    // A block for the rows that have found any of these outputs.
    void decide_block(std::int64_t block, const std::uint64_t* found, std::uint64_t outputs, Desk& desk) {
        desk.chosen.clear();
        for (std::int32_t row = 0; row < num_rows; ++row)
            if ((found[row] & outputs) != 0) desk.chosen.push_back(row);
        choose_all(desk);
        decide_chosen(block, outputs_of_block(block), desk);
    }

    void want(std::int64_t id, std::uint32_t rows, Desk& desk) {
        if (desk.wanted.size() == kLanes) decide_wanted(desk);
        desk.wanted.push_back({static_cast<std::int32_t>(id), rows});
        const std::uint8_t* place = screened.screen->row(id);
        for (std::int64_t line = 0; line < HeadScreen::row_bytes(weight.num_inputs); line += 64) __builtin_prefetch(place + line);
    }

    // The logits that are wanted of any row, of all rows that want one.
    void decide_wanted(Desk& desk) {
        if (desk.wanted.empty()) return;
        std::uint32_t rows = 0;
        std::int32_t ids[kLanes];
        const std::int64_t width = static_cast<std::int64_t>(desk.wanted.size());
        for (std::int64_t i = 0; i < kLanes; ++i) {
            const Wanted& one = desk.wanted[static_cast<std::size_t>(std::min(i, width - 1))];
            rows |= one.rows;
            ids[i] = one.id;
        }
        desk.chosen.clear();
        for (std::int32_t row = 0; row < num_rows; ++row)
            if (rows >> row & 1) desk.chosen.push_back(row);
        choose_all(desk);
        desk.block.resize(static_cast<std::size_t>(weight.block_bytes()));
        screened.screen->gather_block(ids, desk.block.data());
        add_chosen(desk.block.data(), width, desk);
        desk.num_blocks += kGatheredCost - 1;
        for (std::size_t k = 0; k < desk.chosen.size(); ++k)
            for (std::int64_t i = 0; i < width; ++i) desk.at(desk.chosen[k]).see(desk.sums + static_cast<std::int64_t>(k) * kShareOutputs + i, 1, ids[i]);
        desk.wanted.clear();
    }

    // The blocks of a share, each for the rows whose largest logit it may hold.
    void decide_share(std::int64_t share, Desk& desk) {
        const float* largest = maxima.data() + share * num_rows;
        bool is_needed = false;
        for (std::int64_t row = 0; row < num_rows; ++row) is_needed |= may_hold(row, share, largest[row]);
        if (!is_needed) return;
        const std::int64_t first = share * kShareBlocks, end = std::min(first + kShareBlocks, weight.num_blocks());
        for (std::int64_t block = first; block < end; ++block) {
            desk.chosen.clear();
            for (std::int64_t row = 0; row < num_rows; ++row)
                if (may_hold(row, share, block_maxima[static_cast<std::size_t>((share * num_rows + row) * kShareBlocks + block - first)]))
                    desk.chosen.push_back(static_cast<std::int32_t>(row));
            if (desk.chosen.empty()) continue;
            choose_all(desk);
            decide_chosen(block, outputs_of_block(block), desk);
        }
    }

    // Whether the largest logit may be among outputs of a share whose first terms are at most `largest`.
    bool may_hold(std::int64_t row, std::int64_t share, float largest) const {
        const std::size_t at = static_cast<std::size_t>(row);
        return !is_left_out(row) && !(largest + bound(row, share) < surely[at]) && share != peak_shares[at];
    }

    // Both terms over `width` outputs from a block on, for the rows chosen.
    void decide_chosen(std::int64_t block, std::int64_t width, Desk& desk) {
        add_chosen(weight.block(block), width, desk);
        for (std::size_t k = 0; k < desk.chosen.size(); ++k)
            desk.at(desk.chosen[k]).see(desk.sums + static_cast<std::int64_t>(k) * kShareOutputs, width, block * kLanes);
    }

    // Chooses all rows where these are less work than copies of the chosen ones.
    void choose_all(Desk& desk) const {
        if (static_cast<std::int64_t>(desk.chosen.size()) * kGatheredPart < num_rows) return;
        desk.chosen.resize(static_cast<std::size_t>(num_rows));
        std::iota(desk.chosen.begin(), desk.chosen.end(), 0);
    }

    // The same to `sums` alone; the weights of these outputs are at `outputs`.
    void add_chosen(const std::uint8_t* outputs, std::int64_t width, Desk& desk) {
        const std::int64_t count = static_cast<std::int64_t>(desk.chosen.size());
        LinearJob needed = job;
        const std::uint8_t* second = rest.bytes;
        if (count < num_rows) {
            gather_rows(first, desk.chosen, {desk.first, first.width, count});
            gather_rows(rest, desk.chosen, {desk.rest, rest.width, count});
            needed.num_rows = count;
            needed.inputs = desk.first;
            second = desk.rest;
        }
        needed.weights = outputs;
        needed.num_outputs = width;
        add_both_terms(kernel, weight, needed, second, 0, desk.sums);
        desk.num_decided += count;
        ++desk.num_blocks;
    }

    // A float weight: its outputs are the logits.
    void see_share(std::int64_t share, Desk& desk) {
        const LinearJob here = job_of_share(job, share, desk.sums);
        run_share_job(kernel, weight, here);
        for (std::int64_t row = 0; row < num_rows; ++row)
            desk.at(row).see(desk.sums + row * kShareOutputs, outputs_of_share(here), share * kShareOutputs);
    }
};

// `find_best_ids`, or `find_chosen_ids` where there are choices.
std::int64_t find_ids(const float* x, std::int64_t num_rows, const PackedWeight& weight, const float* norm, float eps,
                      const RowChoice* choices, std::int64_t* ids, int num_threads, float* bounds) {
    const std::int64_t width = weight.num_inputs, num_shares = sakiyomi::num_shares(weight.num_blocks());
    if (num_rows == 0) return 0;
    const bool is_quantized = weight.is_quantized();
    const Kernels& kernel = kernels();
    const int team_size = threads_for(num_threads, num_rows * width * weight.num_outputs / 8);
    const std::size_t rows_size = static_cast<std::size_t>(num_rows);
    Pool::Lease lease(team_size);
    std::unique_ptr<float[]> new_norms;
    if (is_quantized && !weight.share_norms) new_norms.reset(new float[static_cast<std::size_t>(num_shares)]);

    const bool draws = choices != nullptr && std::any_of(choices, choices + num_rows, [](const RowChoice& one) { return one.temperature != 0; });
    const HeadScreen* screen = num_rows <= kScreenedRows && bounds == nullptr && !draws ? weight.screen.get() : nullptr;
    if (screen != nullptr && !weight.screen_pauses[num_rows].ask()) screen = nullptr;
    const std::int64_t term_bytes = is_quantized ? QuantizedRows::num_bytes(width, num_rows) : 0;
    const std::int64_t normed_bytes = (num_rows * width * 4 + 63) / 64 * 64, sums_bytes = num_rows * kShareOutputs * 4;
    const std::int64_t rank_bytes = sums_bytes + 2 * term_bytes;
    const std::int64_t most_bytes = screen == nullptr ? 0 : num_shares * sums_bytes;
    std::uint8_t* scratch = reinterpret_cast<std::uint8_t*>(
        lease.scratch(static_cast<std::size_t>(4 * term_bytes + 2 * normed_bytes + team_size * rank_bytes + most_bytes)));
    const QuantizedRows first{scratch, width, num_rows}, rest{scratch + term_bytes, width, num_rows};
    float* normed = reinterpret_cast<float*>(scratch + 2 * term_bytes);
    float* left = reinterpret_cast<float*>(scratch + 2 * term_bytes + normed_bytes);
    std::uint8_t* of_ranks = scratch + 2 * term_bytes + 2 * normed_bytes;
    float* most = reinterpret_cast<float*>(of_ranks + team_size * rank_bytes);
    std::uint8_t* of_screen = of_ranks + team_size * rank_bytes + most_bytes;

    const void* inputs = is_quantized ? static_cast<const void*>(first.bytes) : normed;
    Search search{kernel, weight, new_norms ? new_norms.get() : weight.share_norms.get(), num_rows, first, rest,
                  linear_job(weight, inputs, width * 4, num_rows, nullptr, nullptr, nullptr, 0),
                  std::vector<float>(rows_size), {}, {}, std::vector<std::int64_t>(rows_size, -1), std::vector<float>(rows_size), {}, choices};
    search.screened = ScreenedRows(screen, num_rows, of_screen, most);
    if (choices != nullptr) search.leads.assign(rows_size, -kInfinity);
    for (std::int64_t row = 0; choices != nullptr && row < num_rows; ++row) search.keys.emplace_back(choices[row].seed, choices[row].position);
    if (is_quantized) search.maxima.resize(rows_size * static_cast<std::size_t>(num_shares));
    if (is_quantized && screen == nullptr) search.block_maxima.resize(search.maxima.size() * kShareBlocks);
    for (int rank = 0; rank < team_size; ++rank) {
        std::uint8_t* own = of_ranks + rank * rank_bytes;
        search.desks.push_back({reinterpret_cast<float*>(own), own + sums_bytes, own + sums_bytes + term_bytes,
                                std::vector<Found>(rows_size), {}});
        search.desks.back().chosen.reserve(rows_size);
    }

    lease.run([&](Team& team, int rank) {
        mark(Phase::kHead);
        Desk& desk = search.desks[static_cast<std::size_t>(rank)];
        if (new_norms)
            team.share(rank, num_shares, [&](std::int64_t share) {
                new_norms[static_cast<std::size_t>(share)] = norm_of_share(weight, share);
            });
        team.share(rank, num_rows, [&](std::int64_t row) {
            float* values = normed + row * width;
            kernel.rms_norm(x + row * width, norm, eps, width, values);
            if (!is_quantized) return;
            first.write(kernel, row, values, 0, width);
            quantize_rest(kernel, first, rest, row, values, left + row * width);
            const bool is_sound = is_within(values, width, kLargestInput);
            const float missed = screen == nullptr ? norm_of_row(rest, row, left + row * width) : search.screened.write(kernel, row, values, first, rest);
            search.lengths[static_cast<std::size_t>(row)] = is_sound ? missed : -1.0f;
        });
        if (!is_quantized) {
            team.share(rank, num_shares, [&](std::int64_t share) { search.see_share(share, desk); });
            return;
        }
        team.share(rank, num_shares, [&](std::int64_t share) { search.scan_share(share, desk); });
        team.share(rank, num_rows, [&](std::int64_t row) { search.decide_peak(row, desk); });
        if (choices != nullptr) search.decide_rivals(desk);
        team.share(rank, (num_shares + kRunShares - 1) / kRunShares, [&](std::int64_t run) {
            for (std::int64_t share = run * kRunShares; share < num_shares && share < (run + 1) * kRunShares; ++share)
                search.is_screened() ? search.collect_share(share, desk) : search.decide_share(share, desk);
        });
        search.decide_wanted(desk);
    });

    if (bounds != nullptr)
        for (std::int64_t row = 0; row < num_rows; ++row)
            for (std::int64_t share = 0; share < num_shares; ++share)
                bounds[row * num_shares + share] = is_quantized ? search.bound(row, share) : 0;
    if (new_norms) weight.share_norms = std::move(new_norms);
    for (std::size_t row = 0; row < rows_size; ++row) {
        Found best;
        for (const Desk& desk : search.desks) best.join(desk.found[row]);
        ids[row] = best.has_nan || search.lengths[row] < 0 ? -1 : best.id;
        if (ids[row] < 0 || !search.draws(static_cast<std::int64_t>(row))) continue;
        const RowChoice& choice = choices[row];
        const bool is_sure = std::fabs(best.value) <= kLargestScore * choice.temperature;
        ids[row] = is_sure ? choose_among(best.candidates, best.value, choice) : -1;
    }
    std::int64_t num_decided = 0, num_blocks = 0;
    for (const Desk& desk : search.desks) {
        num_decided += desk.num_decided;
        num_blocks += desk.num_blocks;
    }
    if (screen != nullptr) {
        const std::int64_t spared = weight.num_bytes() - screen->num_blocks() * screen->block_bytes();
        weight.screen_pauses[num_rows].tell(num_blocks * weight.block_bytes() <= spared * 3 / 4);
    }
    return num_decided;
}

}  // namespace

std::int64_t find_best_ids(const float* x, std::int64_t num_rows, const PackedWeight& weight, const float* norm, float eps,
                           std::int64_t* ids, int num_threads, float* bounds) {
    return find_ids(x, num_rows, weight, norm, eps, nullptr, ids, num_threads, bounds);
}

std::vector<RowChoice> read_choices(const RowChoices& choices) {
    std::vector<RowChoice> read;
    for (const auto& [seed, temperature, position] : choices) {
        check(temperature >= 0, "a temperature must not be below 0.");
        read.push_back({seed, temperature, position});
    }
    return read;
}

void find_chosen_ids(const float* x, std::int64_t num_rows, const PackedWeight& weight, const float* norm, float eps,
                     const RowChoice* choices, std::int64_t* ids, int num_threads) {
    const auto needs_logits = [&](const RowChoice& one) { return one.temperature != 0 && !(weight.is_quantized() && is_bounded(one.temperature)); };
    if (std::any_of(choices, choices + num_rows, needs_logits)) {
        std::fill_n(ids, num_rows, -1);
        return;
    }
    find_ids(x, num_rows, weight, norm, eps, choices, ids, num_threads, nullptr);
}

namespace {

using Vector = In<float, nb::ndim<1>>;
using Ids = Out<std::int64_t, nb::ndim<1>>;

void check_rows(const Matrix& x, const PackedWeight& weight, const Vector& norm, const Ids& ids) {
    check_equal("the width of x", static_cast<std::int64_t>(x.shape(1)), weight.num_inputs);
    check_equal("the length of the norm's weight", static_cast<std::int64_t>(norm.shape(0)), weight.num_inputs);
    check_equal("the length of ids", static_cast<std::int64_t>(ids.shape(0)), static_cast<std::int64_t>(x.shape(0)));
}

// See find_best_ids. `bounds` [R, shares], if given, gets what the second term adds at most.
std::int64_t best_ids(Matrix x, const PackedWeight& weight, Vector norm, float eps, Ids ids, int num_threads,
                      std::optional<Out<float, nb::ndim<2>>> bounds) {
    const std::int64_t num_rows = static_cast<std::int64_t>(x.shape(0));
    check_rows(x, weight, norm, ids);
    if (bounds) {
        check_equal("the number of rows of bounds", static_cast<std::int64_t>(bounds->shape(0)), num_rows);
        check_equal("the width of bounds", static_cast<std::int64_t>(bounds->shape(1)), num_shares(weight.num_blocks()));
    }
    check_threads(num_threads, kMaxThreads);
    nb::gil_scoped_release released;
    return find_best_ids(x.data(), num_rows, weight, norm.data(), eps, ids.data(), num_threads, bounds ? bounds->data() : nullptr);
}

// See find_chosen_ids. x [R, K], ids [R].
void chosen_ids(Matrix x, const PackedWeight& weight, Vector norm, float eps, const RowChoices& choices, Ids ids, int num_threads) {
    const std::int64_t num_rows = static_cast<std::int64_t>(x.shape(0));
    check_rows(x, weight, norm, ids);
    check_equal("the number of choices", static_cast<std::int64_t>(choices.size()), num_rows);
    const std::vector<RowChoice> read = read_choices(choices);
    check_threads(num_threads, kMaxThreads);
    nb::gil_scoped_release released;
    find_chosen_ids(x.data(), num_rows, weight, norm.data(), eps, read.data(), ids.data(), num_threads);
}

// The coarse copy of a head whose rows are normed with `norm`, as bytes, or none where it has none.
std::optional<NewBytes> make_screen(const PackedWeight& head, Vector norm, int num_threads) {
    check_equal("the length of the norm's weight", static_cast<std::int64_t>(norm.shape(0)), head.num_inputs);
    check_threads(num_threads, kMaxThreads);
    if (!HeadScreen::fits(head)) return std::nullopt;
    NewBytes bytes = new_bytes(static_cast<std::size_t>(HeadScreen::num_bytes(head.num_outputs, head.num_inputs)));
    bool is_made;
    {
        nb::gil_scoped_release released;
        is_made = HeadScreen::make(head, norm.data(), bytes.data(), num_threads);
    }
    if (!is_made) return std::nullopt;
    return bytes;
}

// The caller keeps `bytes`, which are `make_screen`'s of this head, alive (nb::keep_alive).
void set_screen(PackedWeight& head, In<std::uint8_t, nb::ndim<1>> bytes) {
    check(HeadScreen::fits(head), "this weight can have no coarse copy.");
    check_equal("the number of bytes of a coarse copy", static_cast<std::int64_t>(bytes.shape(0)),
                HeadScreen::num_bytes(head.num_outputs, head.num_inputs));
    check(reinterpret_cast<std::uintptr_t>(bytes.data()) % 64 == 0, "the bytes of a coarse copy must start at a multiple of 64.");
    auto screen = std::make_shared<const HeadScreen>(bytes.data());
    check(screen->matches(head), "these are no bytes of a coarse copy of this head.");
    head.screen = std::move(screen);
}

}  // namespace
}  // namespace sakiyomi

void bind_head(nanobind::module_& m) {
    using namespace sakiyomi;
    using nb::arg;
    m.def("best_ids", &best_ids, arg("x").noconvert(), arg("weight"), arg("norm").noconvert(), arg("eps"),
          arg("ids").noconvert(), arg("threads"), arg("bounds").noconvert().none() = nb::none());
    m.def("make_screen", &make_screen, arg("head"), arg("norm").noconvert(), arg("threads"));
    m.def("set_screen", &set_screen, arg("head"), arg("bytes").noconvert(), nb::keep_alive<1, 2>());
    m.def("chosen_ids", &chosen_ids, arg("x").noconvert(), arg("weight"), arg("norm").noconvert(), arg("eps"), arg("choices"),
          arg("ids").noconvert(), arg("threads"));
}
