// The fused chooser: one row of logits to one token, exactly as `choose_reference` of sakiyomi/sampling/choose.py.
//
// All filters keep a beginning of one order of the ids: logit descending, then id ascending. So the work is to find
// how long that beginning is without sorting the whole row, and to evaluate noise only where it can win: an id whose
// score plus the largest possible noise stays below the best so far is out before its noise is computed.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "choose.hpp"
#include "kernels.hpp"
#include "noise.hpp"

namespace nb = nanobind;
using namespace sakiyomi;

namespace {

constexpr std::int64_t kBlock = kChooseBlock;
constexpr int kSumLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kHopeless = -17.0;  // scores below are one in 2e7 of the best id, and drawing noise for them takes long
constexpr double kNoLowest = -std::numeric_limits<double>::infinity();

// Temperatures at which floats bound scores that are not relative to the largest one.
constexpr double kLeastBounded = 0.01, kMostBounded = 100.0;

constexpr std::int64_t kHasNan = -1;
constexpr std::int64_t kNothingLeft = -2;

struct Settings {
    std::uint64_t seed, position;
    double temperature, top_p, min_p;
    std::int64_t top_k;
};

// Calls visit(i) for every bit i, from the lowest.
template <class Visit>
void visit_bits(std::uint64_t bits, Visit visit) {
    for (; bits != 0; bits &= bits - 1) visit(__builtin_ctzll(bits));
}

// An id in the order of the filters: a smaller key comes first.
using Key = std::uint64_t;
constexpr Key kLastKey = std::numeric_limits<Key>::max();

// Buffers that a thread uses again and again.
struct Scratch {
    std::vector<float> row;
    std::vector<float> block_max;
    std::vector<float> order;
    std::vector<Key> keys, spare;
};

thread_local Scratch thread_scratch;

// A row of logits, its largest value in all and per block of 64 ids.
struct Row {
    const float* logits;
    std::int64_t size;
    const float* block_max;
    float max;

    std::int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
};

// ------------------------------------------------------------------------------------------- the largest logit

// The logits of a block, padded with -inf where the row ends inside it.
const float* padded_block(const float* logits, std::int64_t size, std::int64_t block, float buffer[kBlock]) {
    const float* first = logits + block * kBlock;
    const std::int64_t count = std::min(kBlock, size - block * kBlock);
    if (count == kBlock) return first;
    std::fill(std::copy(first, first + count, buffer), buffer + kBlock, -kInfinity);
    return buffer;
}

// Fills `block_max`; returns false where there is a nan.
bool scan(const float* logits, std::int64_t size, std::vector<float>& block_max, float* max) {
    block_max.resize((size + kBlock - 1) / kBlock);
    const std::int64_t num_full = size / kBlock;
    bool has_nan = kernels().scan_blocks(logits, num_full, block_max.data());
    if (size % kBlock != 0) {
        float padded[kBlock];
        has_nan |= kernels().scan_blocks(padded_block(logits, size, num_full, padded), 1, &block_max[num_full]);
    }
    if (has_nan) return false;
    *max = *std::max_element(block_max.begin(), block_max.end());
    return true;
}

std::int64_t first_largest(const Row& row) {
    const auto block = std::find(row.block_max, row.block_max + row.num_blocks(), row.max) - row.block_max;
    return std::find(row.logits + block * kBlock, row.logits + row.size, row.max) - row.logits;
}

// ------------------------------------------------------------------------------------------- the order of the ids

Key key_of(float logit, std::uint32_t id) {
    const float value = logit + 0.0f;  // -0 and 0 are equal
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const std::uint32_t descending = bits >> 31 ? bits : ~bits ^ 0x80000000u;
    return std::uint64_t{descending} << 32 | id;
}

float logit_of(Key key) {
    const auto descending = static_cast<std::uint32_t>(key >> 32);
    const std::uint32_t bits = descending >> 31 ? descending : ~descending ^ 0x80000000u;
    float logit;
    std::memcpy(&logit, &bits, sizeof logit);
    return logit;
}

std::uint32_t id_of(Key key) { return static_cast<std::uint32_t>(key); }

// Calls visit(id, logit) for the logits of a block in [low, high) that are above -inf, by ascending id.
template <class Visit>
void visit_block(const Row& row, std::int64_t block, float low, float high, Visit visit) {
    float buffer[kBlock];
    const float* logits = padded_block(row.logits, row.size, block, buffer);
    std::uint64_t bits = kernels().find_in_block(logits, low);
    if (high <= row.block_max[block]) bits &= ~kernels().find_in_block(logits, high);
    visit_bits(bits, [&](int i) { visit(static_cast<std::uint32_t>(block * kBlock + i), logits[i]); });
}

// The keys, by ascending id, of the logits in [low, high) that are above -inf.
void gather(const Row& row, float low, float high, std::vector<Key>& keys) {
    keys.clear();
    for (std::int64_t block = 0; block < row.num_blocks(); ++block) {
        if (row.block_max[block] < low) continue;
        visit_block(row, block, low, high, [&](std::uint32_t id, float logit) { keys.push_back(key_of(logit, id)); });
    }
}

// Sorts keys that stand by ascending id.
void sort_keys(std::vector<Key>& keys, std::vector<Key>& spare) {
    constexpr std::size_t kSmall = 1024;
    if (keys.size() <= kSmall) {
        std::sort(keys.begin(), keys.end());
        return;
    }
    constexpr int kDigit = 11;
    spare.resize(keys.size());
    for (int shift = 32; shift < 64; shift += kDigit) {
        std::uint32_t starts[(1 << kDigit) + 1] = {};
        for (const Key key : keys) ++starts[(key >> shift & ((1 << kDigit) - 1)) + 1];
        for (int digit = 0; digit < 1 << kDigit; ++digit) starts[digit + 1] += starts[digit];
        for (const Key key : keys) spare[starts[key >> shift & ((1 << kDigit) - 1)]++] = key;
        keys.swap(spare);
    }
}

// ------------------------------------------------------------------------------------------- scores and weights

// A token's logit over the temperature, 0 for the most probable.
double score_of(float logit, float max, double temperature) {
    return (static_cast<double>(logit) - static_cast<double>(max)) / temperature;
}

// A sum in the order of `_sum_by_lanes`.
struct LaneSum {
    double lanes[kSumLanes] = {};

    double total() {
        for (int half = kSumLanes / 2; half > 0; half /= 2) {
            for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        }
        return lanes[0];
    }
};

// The sum of exp(score) over the scores of at least `lowest`.
double total_weight(const Row& row, double temperature, double lowest) {
    LaneSum sum;
    const ScoreRule rule{row.max, temperature, lowest};
    const std::int64_t num_full = row.size / kBlock;
    kernels().sum_blocks(row.logits, num_full, row.block_max, &rule, sum.lanes);
    if (num_full < row.num_blocks()) {
        float buffer[kBlock];
        const float* logits = padded_block(row.logits, row.size, num_full, buffer);
        kernels().sum_blocks(logits, 1, row.block_max + num_full, &rule, sum.lanes);
    }
    return sum.total();
}

// Calls visit(key, weight) for each key in turn until it returns true; returns whether it did.
template <class Visit>
bool visit_weights(const std::vector<Key>& keys, float max, double temperature, Visit visit) {
    float logits[kBlock];
    double weights[kBlock];
    const ScoreRule rule{max, temperature, kNoLowest};
    for (std::size_t start = 0; start < keys.size(); start += kBlock) {
        const std::size_t count = std::min<std::size_t>(kBlock, keys.size() - start);
        std::fill(logits, logits + kBlock, -kInfinity);
        for (std::size_t i = 0; i < count; ++i) logits[i] = logit_of(keys[start + i]);
        kernels().weigh_block(logits, &rule, weights);
        for (std::size_t i = 0; i < count; ++i) {
            if (visit(keys[start + i], weights[i])) return true;
        }
    }
    return false;
}

double total_weight(const std::vector<Key>& keys, float max, double temperature) {
    LaneSum sum;
    visit_weights(keys, max, temperature, [&](Key key, double weight) {
        sum.lanes[id_of(key) % kSumLanes] += weight;
        return false;
    });
    return sum.total();
}

// ------------------------------------------------------------------------------------------- top_k and top_p

// Leaves in scratch.keys, by ascending id, the `top_k` first ids; returns the last of them in order.
Key find_top_k(const Row& row, std::int64_t top_k, Scratch& scratch) {
    float low = -kInfinity;
    if (top_k <= row.num_blocks()) {  // the k-th largest block maximum has k logits at or above it
        scratch.order.assign(row.block_max, row.block_max + row.num_blocks());
        std::nth_element(scratch.order.begin(), scratch.order.begin() + (top_k - 1), scratch.order.end(),
                         [](float a, float b) { return a > b; });
        low = scratch.order[top_k - 1];
    }
    auto& keys = scratch.keys;
    gather(row, low, kInfinity, keys);
    if (static_cast<std::int64_t>(keys.size()) < top_k) return kLastKey;
    scratch.spare = keys;
    std::nth_element(scratch.spare.begin(), scratch.spare.begin() + (top_k - 1), scratch.spare.end());
    const Key last = scratch.spare[top_k - 1];
    keys.erase(std::remove_if(keys.begin(), keys.end(), [last](Key key) { return key > last; }), keys.end());
    return last;
}

// Adds sorted keys to the running sum until it reaches the goal; returns whether it did, and the key that did it.
bool reach(const std::vector<Key>& sorted, float max, double temperature, double goal, double* sum, Key* last) {
    return visit_weights(sorted, max, temperature, [&](Key key, double weight) {
        *sum += weight;
        *last = *sum >= goal ? key : kLastKey;
        return *sum >= goal;
    });
}

// Calls visit(low, high) for bands of logits from the largest down, until it returns true.
template <class Visit>
void visit_bands(const Row& row, double temperature, Visit visit) {
    float high = kInfinity;
    for (const double depth : {3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 24.0, std::numeric_limits<double>::infinity()}) {
        const double edge = static_cast<double>(row.max) - depth * temperature;
        const float low = edge > -std::numeric_limits<float>::max() ? static_cast<float>(edge) : -kInfinity;
        if (visit(low, high) || low == -kInfinity) return;
        high = low;
    }
}

// The last key of the nucleus.
Key find_top_p(const Row& row, const Settings& settings, double lowest, Scratch& scratch) {
    const double goal = settings.top_p * total_weight(row, settings.temperature, lowest);
    double sum = 0;
    Key last = kLastKey;
    visit_bands(row, settings.temperature, [&](float low, float high) {
        gather(row, low, high, scratch.keys);
        sort_keys(scratch.keys, scratch.spare);
        return reach(scratch.keys, row.max, settings.temperature, goal, &sum, &last);
    });
    return last;
}

// What single precision tells of a nucleus: keys up to `sure` are in, and keys behind `maybe` are not.
struct Nucleus {
    Key sure = 0, maybe = 0;

    bool is_certain() const { return sure == maybe; }
};

// The scores that weigh something average less than log(vocabulary) below 0, so a guessed sum is off by less than
// 2e-7 (1 + log(2^20)) + 5e-7 of the whole; two such sums are compared.
constexpr double kGuessError = 1e-5;
constexpr std::int64_t kMostGuessed = std::int64_t{1} << 20;

bool can_guess(const Row& row, const Settings& settings) {
    const bool is_top_p_alone = settings.top_p < 1 && settings.min_p == 0 && !(settings.top_k > 0 && settings.top_k < row.size);
    return is_top_p_alone && row.size <= kMostGuessed && settings.temperature >= 1e-6 && settings.temperature <= 1e4;
}

// Finds the nucleus from guessed weights: whole buckets of logits are added while they are surely in, and only the keys
// of those around its end are sorted.
class NucleusSearch {
  public:
    NucleusSearch(const Row& row, const Settings& settings, Scratch& scratch)
        : row_(row), temperature_(settings.temperature), rule_{row.max, settings.temperature, kNoLowest}, scratch_(scratch) {
        const std::int64_t num_full = row.size / kBlock;
        double total = kernels().guess_total(row.logits, num_full, &rule_);
        if (num_full < row.num_blocks()) {
            float buffer[kBlock];
            total += kernels().guess_total(padded_block(row.logits, row.size, num_full, buffer), 1, &rule_);
        }
        sure_goal_ = (settings.top_p - kGuessError) * total;
        maybe_goal_ = (settings.top_p + kGuessError) * total;
        is_open_ = settings.top_p + 2 * kGuessError >= 1;  // that all ids together reach the goal is not sure
    }

    Nucleus run() {
        visit_bands(row_, temperature_, [&](float low, float high) {
            gather(row_, low, high, scratch_.keys);
            if (scratch_.keys.size() <= kBlock) {
                add_sorted(scratch_.keys);
            } else {
                add_buckets(low, std::min(high, row_.max));
            }
            return is_over();
        });
        if (is_open_ || !is_over()) found_.maybe = kLastKey;
        return found_;
    }

  private:
    static constexpr int kBuckets = 256;

    bool is_over() const { return sum_ >= (is_open_ ? sure_goal_ : maybe_goal_); }

    void add_sorted(std::vector<Key>& keys) {
        std::sort(keys.begin(), keys.end());
        visit_guesses(keys, [&](Key key, float weight) {
            if (sum_ < sure_goal_) found_.sure = key;
            if (sum_ < maybe_goal_) found_.maybe = key;
            sum_ += weight;
        });
    }

    void add_buckets(float low, float high) {
        const float scale = low == -kInfinity || low == high ? 0.0f : kBuckets / (high - low);
        const auto bucket_of = [&](Key key) {
            return scale == 0 ? 0 : std::min(kBuckets - 1, static_cast<int>((high - logit_of(key)) * scale));
        };
        double sums[kBuckets] = {};
        visit_guesses(scratch_.keys, [&](Key key, float weight) { sums[bucket_of(key)] += weight; });
        int first = 0;  // of the buckets that are looked into
        for (; first < kBuckets && sum_ + sums[first] < sure_goal_; ++first) sum_ += sums[first];
        int end = first;
        for (double reached = sum_; end < kBuckets && reached < maybe_goal_; ++end) reached += sums[end];
        Key before = 0;  // the last key of the buckets that were added whole
        auto& near = scratch_.spare;
        near.clear();
        for (const Key key : scratch_.keys) {
            const int bucket = bucket_of(key);
            if (bucket < first) before = std::max(before, key);
            if (bucket >= first && bucket < end) near.push_back(key);
        }
        if (before != 0) found_ = Nucleus{before, before};
        add_sorted(near);
    }

    template <class Visit>
    void visit_guesses(const std::vector<Key>& keys, Visit visit) {
        float logits[kBlock], weights[kBlock];
        for (std::size_t start = 0; start < keys.size(); start += kBlock) {
            const std::size_t count = std::min<std::size_t>(kBlock, keys.size() - start);
            std::fill(logits, logits + kBlock, -kInfinity);
            for (std::size_t i = 0; i < count; ++i) logits[i] = logit_of(keys[start + i]);
            kernels().guess_block(logits, &rule_, weights);
            for (std::size_t i = 0; i < count; ++i) visit(keys[start + i], weights[i]);
        }
    }

    const Row& row_;
    double temperature_;
    ScoreRule rule_;
    Scratch& scratch_;
    double sure_goal_, maybe_goal_, sum_ = 0;
    bool is_open_;
    Nucleus found_;
};

Nucleus guess_top_p(const Row& row, const Settings& settings, Scratch& scratch) {
    return NucleusSearch(row, settings, scratch).run();
}

// The same among the ids in scratch.keys.
Key find_top_p_among(const Row& row, const Settings& settings, double lowest, Scratch& scratch) {
    auto& keys = scratch.keys;
    const auto is_out = [&](Key key) { return score_of(logit_of(key), row.max, settings.temperature) < lowest; };
    keys.erase(std::remove_if(keys.begin(), keys.end(), is_out), keys.end());
    const double goal = settings.top_p * total_weight(keys, row.max, settings.temperature);
    sort_keys(keys, scratch.spare);
    double sum = 0;
    Key last = kLastKey;
    reach(keys, row.max, settings.temperature, goal, &sum, &last);
    return last;
}

// Where the filters end: an id with a score below `lowest`, or behind `last` in order, is out.
struct Cut {
    double lowest;
    Key last;
};

Cut find_exact_cut(const Row& row, const Settings& settings, Scratch& scratch) {
    Cut cut{settings.min_p > 0 ? exact_log(settings.min_p) : kNoLowest, kLastKey};
    const bool has_top_k = settings.top_k > 0 && settings.top_k < row.size;
    if (has_top_k) cut.last = find_top_k(row, settings.top_k, scratch);
    if (settings.top_p < 1) {
        const Key end = has_top_k ? find_top_p_among(row, settings, cut.lowest, scratch)
                                  : find_top_p(row, settings, cut.lowest, scratch);
        cut.last = std::min(cut.last, end);
    }
    return cut;
}

// The same, by a guess where it is as good.
Cut find_cut(const Row& row, const Settings& settings, Scratch& scratch) {
    if (can_guess(row, settings)) {
        const Nucleus nucleus = guess_top_p(row, settings, scratch);
        if (nucleus.is_certain()) return {kNoLowest, nucleus.sure};
    }
    return find_exact_cut(row, settings, scratch);
}

// ------------------------------------------------------------------------------------------- noise

// The running argmax of score + noise.
class Race {
  public:
    Race(const Row& row, const Settings& settings, const Cut& cut)
        : row_(row), rule_{row.max, settings.temperature, cut.lowest}, last_(cut.last),
          floor_(cut.last == kLastKey ? -kInfinity : logit_of(cut.last)), key_(settings.seed, settings.position),
          // Outside this range of temperatures a float could underflow where a double does not.
          has_bounds_(settings.temperature >= 1e-30 && settings.temperature <= 1e4) {}

    // Every id of the block that the filters leave.
    void enter_block(std::int64_t block) {
        if (row_.block_max[block] < floor_) return;
        const double score = score_of(row_.block_max[block], row_.max, rule_.temperature);
        if (score >= rule_.lowest && !(score + kGumbelMax < best_)) run_block(block);
    }

    std::int64_t winner() const { return winner_; }

  private:
    void run_block(std::int64_t block) {
        float buffer[kBlock];
        std::uint32_t words[kBlock];
        const auto first_id = static_cast<std::uint32_t>(block * kBlock);
        const float* logits = padded_block(row_.logits, row_.size, block, buffer);
        kernels().draw_block(&key_, first_id / 4, words);
        std::uint64_t bits = kernels().find_in_block(logits, floor_);
        if (has_bounds_) bits &= kernels().bound_block(logits, &rule_, words, static_cast<float>(best_));
        visit_bits(bits, [&](int i) { enter(logits[i], first_id + static_cast<std::uint32_t>(i), words[i]); });
    }

    void enter(float logit, std::uint32_t id, std::uint32_t word) {
        const double score = score_of(logit, row_.max, rule_.temperature);
        if (score < rule_.lowest || key_of(logit, id) > last_) return;
        const double noisy = score + gumbel_of(word);
        if (noisy > best_ || (noisy == best_ && id < winner_)) {
            best_ = noisy;
            winner_ = id;
        }
    }

    const Row& row_;
    ScoreRule rule_;
    Key last_;
    float floor_;  // the smallest logit that may be in
    NoiseKey key_;
    bool has_bounds_;
    double best_ = kNoLowest;
    std::int64_t winner_ = kNothingLeft;
};

// The id with the largest score + noise of those that the cut leaves; `best` is the id with the largest score.
std::int64_t run_race(const Row& row, const Settings& settings, const Cut& cut, std::int64_t best) {
    Race race(row, settings, cut);
    race.enter_block(best / kBlock);
    for (std::int64_t block = 0; block < row.num_blocks(); ++block) {
        if (block != best / kBlock) race.enter_block(block);
    }
    return race.winner();
}

// ------------------------------------------------------------------------------------------- choosing

// Reads a row whose largest logit is above -inf and no nan; infinite logits become 0 and all others -inf.
Row read_row(const float* logits, std::int64_t size, float max, Scratch& scratch) {
    if (max == kInfinity) {
        scratch.row.resize(size);
        std::transform(logits, logits + size, scratch.row.begin(),
                       [](float logit) { return logit == kInfinity ? 0.0f : -kInfinity; });
        logits = scratch.row.data();
        scan(logits, size, scratch.block_max, &max);
    }
    return Row{logits, size, scratch.block_max.data(), max};
}

// The chosen id, or kHasNan, or kNothingLeft.
std::int64_t choose_row(const float* logits, std::int64_t size, const Settings& settings, Scratch& scratch) {
    float max;
    if (!scan(logits, size, scratch.block_max, &max)) return kHasNan;
    if (max == -kInfinity) return kNothingLeft;
    const Row row = read_row(logits, size, max, scratch);
    const std::int64_t best = first_largest(row);
    if (settings.temperature == 0) return best;

    if (can_guess(row, settings)) {  // most often it is enough to know that the winner is in
        const Nucleus nucleus = guess_top_p(row, settings, scratch);
        const std::int64_t winner = run_race(row, settings, {kNoLowest, nucleus.maybe}, best);
        if (key_of(row.logits[winner], static_cast<std::uint32_t>(winner)) <= nucleus.sure) return winner;
    }
    return run_race(row, settings, find_exact_cut(row, settings, scratch), best);
}

// ------------------------------------------------------------------------------------------- laws

// The ids that the filters leave, ascending, and exp(score) of each.
void weigh_row(const Row& row, const Settings& settings, Scratch& scratch, std::vector<std::int64_t>& ids,
               std::vector<double>& weights) {
    const Cut cut = find_cut(row, settings, scratch);
    const float floor = cut.last == kLastKey ? -kInfinity : logit_of(cut.last);
    const ScoreRule rule{row.max, settings.temperature, kNoLowest};
    float buffer[kBlock];
    double block_weights[kBlock];
    for (std::int64_t block = 0; block < row.num_blocks(); ++block) {
        if (row.block_max[block] < floor || row.block_max[block] == -kInfinity) continue;
        if (score_of(row.block_max[block], row.max, settings.temperature) < cut.lowest) continue;
        const float* logits = padded_block(row.logits, row.size, block, buffer);
        kernels().weigh_block(logits, &rule, block_weights);
        const std::uint64_t bits = kernels().find_in_block(logits, floor);
        if (floor == -kInfinity && cut.lowest == kNoLowest && ~bits == 0) {  // nothing of the block is filtered out
            for (int i = 0; i < kBlock; ++i) ids.push_back(block * kBlock + i);
            weights.insert(weights.end(), block_weights, block_weights + kBlock);
            continue;
        }
        visit_bits(bits, [&](int i) {
            const std::int64_t id = block * kBlock + i;
            if (key_of(logits[i], static_cast<std::uint32_t>(id)) > cut.last) return;
            if (score_of(logits[i], row.max, settings.temperature) < cut.lowest) return;
            ids.push_back(id);
            weights.push_back(block_weights[i]);
        });
    }
}

struct Runner {
    double noisy;
    std::int64_t id;

    bool before(const Runner& other) const { return noisy > other.noisy || (noisy == other.noisy && id < other.id); }
};

// An upper bound, in float, of log(x) for a float x: log2 is below its chord by less than 0.0861.
float bound_log(float x) {
    constexpr float kLn2 = 0.69314718f, kSlack = 0.07f;
    std::int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (static_cast<float>(bits) * 0x1p-23f - 127.0f) * kLn2 + kSlack;
}

// The `count` ids with the largest log(prob) + noise, in order. As in Race, noise that cannot win is not evaluated.
std::vector<Runner> race_among(const std::int64_t* ids, const double* probs, std::size_t size, const NoiseKey& key,
                               std::size_t count) {
    std::vector<Runner> best;
    std::uint32_t words[kBlock];
    float bounds[kBlock];
    for (std::size_t start = 0; start < size; start += kBlock) {
        const std::size_t length = std::min<std::size_t>(kBlock, size - start);
        const bool is_run = length == kBlock && ids[start] % 4 == 0 && ids[start + kBlock - 1] == ids[start] + kBlock - 1;
        if (is_run) kernels().draw_block(&key, static_cast<std::uint32_t>(ids[start] / 4), words);
        for (std::size_t i = is_run ? length : 0; i < length;) {
            const auto id = static_cast<std::uint32_t>(ids[start + i]);
            if (id % 4 == 0 && i + 4 <= length && ids[start + i + 3] == ids[start + i] + 3) {
                philox_words(key, id / 4, words + i);
                i += 4;
            } else {
                words[i++] = random_word(key, id);
            }
        }
        for (std::size_t i = 0; i < length; ++i) {
            // -log(u) is above the noise; half is at most 2^31 u, and at least 1/2 so that its logarithm is finite.
            const float half = static_cast<float>(static_cast<std::int32_t>(words[i] >> 1)) + 0.5f;
            std::int32_t bits;
            std::memcpy(&bits, &half, sizeof bits);
            const float log2_u = static_cast<float>(bits) * 0x1p-23f - (127.0f + 31.0f);
            // Where a float underflows, its bound is still above the logarithm of the smallest double that counts.
            bounds[i] = bound_log(static_cast<float>(probs[start + i]) + 0x1p-126f) - 0.69314718f * log2_u + 0.75f;
        }
        for (std::size_t i = 0; i < length; ++i) {
            const double prob = probs[start + i];
            if (!(prob > 0)) continue;
            if (best.size() == count && bounds[i] < static_cast<float>(best.back().noisy)) continue;
            const Runner runner{exact_log(prob) + gumbel_of(words[i]), ids[start + i]};
            if (best.size() == count) {
                if (!runner.before(best.back())) continue;
                best.pop_back();
            }
            const auto place = std::find_if(best.begin(), best.end(), [&](const Runner& r) { return runner.before(r); });
            best.insert(place, runner);
        }
    }
    return best;
}

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NewDoubles = nb::ndarray<nb::numpy, double, nb::ndim<1>>;

std::int64_t choose(Logits logits, std::uint64_t seed, std::uint64_t position, double temperature, std::int64_t top_k,
                    double top_p, double min_p) {
    if (logits.size() == 0) throw std::invalid_argument("a row of logits is empty");
    const nb::gil_scoped_release unlocked;
    return choose_row(logits.data(), static_cast<std::int64_t>(logits.size()),
                      Settings{seed, position, temperature, top_p, min_p, top_k}, thread_scratch);
}

// The largest logit (nan where there is one), log(sum of exp(logit - largest)), and the ids of the `top` largest, in
// order and only those above -inf.
nb::tuple summarize(Logits logits, std::int64_t top) {
    Scratch& scratch = thread_scratch;
    const auto size = static_cast<std::int64_t>(logits.size());
    if (size == 0 || top < 0 || top > size) throw std::invalid_argument("top does not fit the logits");
    float max;
    double log_total = std::numeric_limits<double>::quiet_NaN();
    scratch.keys.clear();
    {
        const nb::gil_scoped_release unlocked;
        if (!scan(logits.data(), size, scratch.block_max, &max)) max = std::numeric_limits<float>::quiet_NaN();
        if (max > -kInfinity) {
            const Row row = read_row(logits.data(), size, max, scratch);
            log_total = exact_log(total_weight(row, 1.0, kNoLowest));
            if (top > 0) find_top_k(row, top, scratch);
            sort_keys(scratch.keys, scratch.spare);
        }
    }
    nb::list ids;
    for (const Key key : scratch.keys) ids.append(id_of(key));
    return nb::make_tuple(max, log_total, ids);
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> give(std::vector<T>&& values) {
    auto* held = new std::vector<T>(std::move(values));
    const nb::capsule owner(held, [](void* data) noexcept { delete static_cast<std::vector<T>*>(data); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(held->data(), {held->size()}, owner);
}

nb::tuple weigh(Logits logits, double temperature, std::int64_t top_k, double top_p, double min_p) {
    std::vector<std::int64_t> ids;
    std::vector<double> weights;
    {
        const nb::gil_scoped_release unlocked;
        Scratch& scratch = thread_scratch;
        const auto size = static_cast<std::int64_t>(logits.size());
        float max;
        if (size > 0 && scan(logits.data(), size, scratch.block_max, &max) && max > -kInfinity) {
            const Row row = read_row(logits.data(), size, max, scratch);
            weigh_row(row, Settings{0, 0, temperature, top_p, min_p, top_k}, scratch, ids, weights);
        }
    }
    return nb::make_tuple(give(std::move(ids)), give(std::move(weights)));
}

std::vector<std::int64_t> race(Ids ids, Doubles probs, std::uint64_t seed, std::uint64_t t, std::uint32_t purpose,
                               std::size_t count) {
    if (ids.size() != probs.size() || count == 0) throw std::invalid_argument("ids, probs and count do not fit");
    std::vector<std::int64_t> drawn;
    const nb::gil_scoped_release unlocked;
    for (const Runner& runner : race_among(ids.data(), probs.data(), ids.size(), NoiseKey(seed, t, purpose), count)) {
        drawn.push_back(runner.id);
    }
    return drawn;
}

// max(0, scale * p - q) over the ids of p, and its sum by position in the order of `_sum_by_lanes`.
nb::tuple subtract(Ids p_ids, Doubles p, Ids q_ids, Doubles q, double scale) {
    if (p_ids.size() != p.size() || q_ids.size() != q.size()) throw std::invalid_argument("ids and probs do not fit");
    std::vector<double> rest(p.size());
    LaneSum sum;
    {
        const nb::gil_scoped_release unlocked;
        const std::int64_t* ids = q_ids.data();
        const std::size_t size = q_ids.size();
        const bool is_aligned = p.size() == size && std::equal(ids, ids + size, p_ids.data());
        std::size_t j = 0;
        for (std::size_t i = 0; i < rest.size(); ++i) {
            double other = 0;
            if (is_aligned) {
                other = q.data()[i];
            } else {
                while (j < size && ids[j] < p_ids.data()[i]) ++j;
                if (j < size && ids[j] == p_ids.data()[i]) other = q.data()[j];
            }
            const double left = scale * p.data()[i] - other;
            rest[i] = left > 0 ? left : 0.0;
            sum.lanes[i % kSumLanes] += rest[i];
        }
    }
    return nb::make_tuple(give(std::move(rest)), sum.total());
}

double uniform(std::uint64_t seed, std::uint64_t t, std::uint32_t purpose) {
    std::uint32_t words[4];
    philox_words(NoiseKey(seed, t, purpose), 0, words);
    return static_cast<double>((std::uint64_t{words[0] >> 5} << 26) + (words[1] >> 6)) * 0x1p-53;
}

template <class Input, class Function>
NewDoubles map(const Input& input, Function function) {
    const std::size_t size = input.size();
    auto* result = new double[size];
    const nb::capsule owner(result, [](void* data) noexcept { delete[] static_cast<double*>(data); });
    {
        const nb::gil_scoped_release unlocked;
        for (std::size_t i = 0; i < size; ++i) result[i] = function(input.data()[i]);
    }
    return NewDoubles(result, {size}, owner);
}

// Empties the ranking and reads the row; returns false where there is a nan or nothing above -inf.
bool start_ranking(const float* logits, std::int64_t size, Scratch& scratch, Ranking* ranking, Row* row) {
    ranking->ids.clear();
    ranking->confidences.clear();
    float max;
    if (size == 0 || !scan(logits, size, scratch.block_max, &max) || !(max > -kInfinity)) return false;
    *row = read_row(logits, size, max, scratch);
    return true;
}

NewDoubles gumbel(std::uint64_t seed, std::uint64_t t, Ids ids) {
    const NoiseKey key(seed, t);
    return map(ids, [&](std::int64_t id) { return gumbel_of(random_word(key, static_cast<std::uint32_t>(id))); });
}

}  // namespace

bool sakiyomi::rank_row(const float* logits, std::int64_t size, std::int64_t count, Ranking* ranking) {
    Scratch& scratch = thread_scratch;
    Row row;
    if (!start_ranking(logits, size, scratch, ranking, &row)) return false;
    const double log_total = exact_log(total_weight(row, 1.0, kNoLowest));
    if (count == 1) {
        scratch.keys.assign(1, key_of(row.max, static_cast<std::uint32_t>(first_largest(row))));
    } else {
        find_top_k(row, count, scratch);
        sort_keys(scratch.keys, scratch.spare);
    }
    for (const Key key : scratch.keys) {
        ranking->ids.push_back(id_of(key));
        ranking->confidences.push_back(score_of(logit_of(key), row.max, 1.0) - log_total);
    }
    return true;
}

std::int64_t sakiyomi::choose_id(const float* logits, std::int64_t size, const Choice& choice, std::uint64_t position) {
    const Settings settings{choice.seed, position, choice.temperature, choice.top_p, choice.min_p, std::min(choice.top_k, size)};
    return choose_row(logits, size, settings, thread_scratch);
}

bool sakiyomi::is_bare(const Choice& choice, std::int64_t size) {
    return !(choice.top_k > 0 && choice.top_k < size) && choice.top_p >= 1 && choice.min_p <= 0;
}

bool sakiyomi::is_bounded(double temperature) { return temperature >= kLeastBounded && temperature <= kMostBounded; }

std::int64_t sakiyomi::choose_among(const std::vector<Candidate>& candidates, float max, const RowChoice& choice) {
    const NoiseKey key(choice.seed, choice.position);
    Runner best{kNoLowest, kNothingLeft};
    for (const Candidate& one : candidates) {
        const double score = score_of(one.logit, max, choice.temperature);
        const Runner runner{score + gumbel_of(random_word(key, static_cast<std::uint32_t>(one.id))), one.id};
        if (runner.before(best)) best = runner;
    }
    return best.id;
}

bool sakiyomi::rank_noisy(const float* logits, std::int64_t size, const std::int64_t* ids, std::int64_t count, const Choice& choice,
                          std::uint64_t position, Ranking* ranking) {
    Scratch& scratch = thread_scratch;
    Row row;
    if (!start_ranking(logits, size, scratch, ranking, &row)) return false;
    const Settings settings{choice.seed, position, choice.temperature, choice.top_p, choice.min_p, std::min(choice.top_k, size)};
    const Cut cut = find_cut(row, settings, scratch);
    const NoiseKey key(choice.seed, position);
    std::vector<Runner> runners;  // exp(score + noise) is exp(score) / e with e = -log(u)
    double total = 0;
    std::uint32_t group = 0, words[4];
    bool has_words = false;
    for (std::int64_t i = 0; i < size; ++i) {
        const double score = score_of(row.logits[i], row.max, choice.temperature);
        if (!(score >= std::max(cut.lowest, kHopeless))) continue;
        if (key_of(row.logits[i], static_cast<std::uint32_t>(i)) > cut.last) continue;
        const auto id = static_cast<std::uint32_t>(ids[i]);
        if (!has_words || id / 4 != group) philox_words(key, group = id / 4, words);
        has_words = true;
        const double exponential = -log_normal(1.0 - (static_cast<double>(words[id % 4]) + 0.5) * 0x1p-32);
        const Runner runner{exp_inside(score) / exponential, i};
        total += runner.noisy;
        if (static_cast<std::int64_t>(runners.size()) == count) {
            if (!runner.before(runners.back())) continue;
            runners.pop_back();
        }
        runners.insert(std::find_if(runners.begin(), runners.end(), [&](const Runner& r) { return runner.before(r); }), runner);
    }
    if (runners.empty()) return false;
    for (const Runner& runner : runners) {
        ranking->ids.push_back(runner.id);
        ranking->confidences.push_back(exact_log(runner.noisy / total));
    }
    return true;
}

void bind_choose(nb::module_& m) {
    m.def("choose", &choose, nb::arg("logits"), nb::arg("seed"), nb::arg("position"),
          nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("min_p"),
          "The id chosen from processed logits [V]; -1 where they hold nan, -2 if nothing is left to choose.");
    m.def("summarize", &summarize, nb::arg("logits"), nb::arg("top"),
          "The largest logit, log(sum of exp(logit - largest)), and the ids of the `top` largest.");
    m.def("weigh", &weigh, nb::arg("logits"), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
          nb::arg("min_p"), "The ids [K] that the filters leave, ascending, and exp(score) of each; none for damaged rows.");
    m.def("race", &race, nb::arg("ids"), nb::arg("probs"), nb::arg("seed"), nb::arg("t"), nb::arg("purpose"),
          nb::arg("count"), "The `count` ids with the largest log(prob) + keyed Gumbel noise, in order.");
    m.def("subtract", &subtract, nb::arg("p_ids"), nb::arg("p"), nb::arg("q_ids"), nb::arg("q"), nb::arg("scale"),
          "max(0, scale * p - q) over the ids of p, and its sum.");
    m.def("uniform", &uniform, nb::arg("seed"), nb::arg("t"), nb::arg("purpose"), "A uniform number in [0, 1) with 53 bits.");
    m.def("gumbel", &gumbel, nb::arg("seed"), nb::arg("t"), nb::arg("ids"), "Keyed Gumbel noise, float64 [N].");
    m.def("exact_exp", [](Doubles x) { return map(x, [](double value) { return exact_exp(value); }); }, nb::arg("x"));
    m.def("exact_log", [](Doubles x) { return map(x, [](double value) { return exact_log(value); }); }, nb::arg("x"));
}
