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

#include "noise.hpp"

namespace nb = nanobind;
using namespace sakiyomi;

namespace {

constexpr std::int64_t kBlock = 64;
constexpr int kLanes = 16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr std::int64_t kHasNan = -1;
constexpr std::int64_t kNothingLeft = -2;

struct Settings {
    std::uint64_t seed, position;
    double temperature, top_p, min_p;
    std::int64_t top_k;
};

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
    std::int64_t block_end(std::int64_t block) const { return std::min(size, (block + 1) * kBlock); }
};

// ------------------------------------------------------------------------------------------- the largest logit

// The larger of the two halves, elementwise.
template <int kHalf>
SAKIYOMI_INLINE void fold(const float* x, float* larger) {
    for (int i = 0; i < kHalf; ++i) larger[i] = x[i] > x[i + kHalf] ? x[i] : x[i + kHalf];
}

// The largest of one full block; sets the flag where there is a nan.
float scan_block(const float* x, std::int32_t* has_nan) {
    float a[kBlock / 2], b[kBlock / 4];
    fold<32>(x, a);
    fold<16>(a, b);
    fold<8>(b, a);
    fold<4>(a, b);
    fold<2>(b, a);
    fold<1>(a, b);
    std::int32_t bad = 0;
    for (int i = 0; i < kBlock; ++i) bad |= x[i] != x[i];
    *has_nan |= bad;
    return b[0];
}

// Fills `block_max`; returns false where there is a nan.
bool scan(const float* logits, std::int64_t size, std::vector<float>& block_max, float* max) {
    block_max.resize((size + kBlock - 1) / kBlock);
    std::int32_t has_nan = 0;
    const std::int64_t num_full = size / kBlock;
    for (std::int64_t block = 0; block < num_full; ++block) {
        block_max[block] = scan_block(logits + block * kBlock, &has_nan);
    }
    if (size % kBlock != 0) {
        float padded[kBlock];
        std::fill(std::copy(logits + num_full * kBlock, logits + size, padded), padded + kBlock, -kInfinity);
        block_max[num_full] = scan_block(padded, &has_nan);
    }
    *max = *std::max_element(block_max.begin(), block_max.end());
    return has_nan == 0;
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

// The keys, by ascending id, of the logits in [low, high) that are above -inf.
void gather(const Row& row, float low, float high, std::vector<Key>& keys) {
    std::size_t count = 0;
    for (std::int64_t block = 0; block < row.num_blocks(); ++block) {
        if (row.block_max[block] < low) continue;
        if (keys.size() < count + kBlock) keys.resize(2 * count + kBlock);
        for (std::int64_t id = block * kBlock; id < row.block_end(block); ++id) {
            const float logit = row.logits[id];
            keys[count] = key_of(logit, static_cast<std::uint32_t>(id));
            count += (logit >= low) & (logit < high) & (logit > -kInfinity);
        }
    }
    keys.resize(count);
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

// Compiled for wider vectors too, picked when the program is loaded. The operations and their order are the same, and
// none is contracted, so every variant gives the same bits.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) \
    && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SAKIYOMI_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define SAKIYOMI_CLONES
#endif

// A token's logit over the temperature, 0 for the most probable.
double score_of(float logit, float max, double temperature) {
    return (static_cast<double>(logit) - static_cast<double>(max)) / temperature;
}

// exp(score) of 64 logits; 0 for scores below `lowest`.
SAKIYOMI_CLONES void compute_weights(const float* logits, float max, double temperature, double lowest, double* weights) {
    double scores[kBlock];
    for (int i = 0; i < kBlock; ++i) scores[i] = score_of(logits[i], max, temperature);
    for (int i = 0; i < kBlock; ++i) weights[i] = scores[i] > kExpLowest ? scores[i] : kExpLowest;
    for (int i = 0; i < kBlock; ++i) weights[i] = exp_inside(weights[i]);
    if (lowest == -std::numeric_limits<double>::infinity()) return;
    for (int i = 0; i < kBlock; ++i) weights[i] = scores[i] >= lowest ? weights[i] : 0.0;
}

// A sum in the order of `_sum_by_lanes`.
struct LaneSum {
    double lanes[kLanes] = {};

    double total() {
        for (int half = kLanes / 2; half > 0; half /= 2) {
            for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
        }
        return lanes[0];
    }
};

// The logits of a block, padded with -inf where the row ends inside it.
const float* padded_block(const Row& row, std::int64_t block, float buffer[kBlock]) {
    const float* logits = row.logits + block * kBlock;
    const std::int64_t count = row.block_end(block) - block * kBlock;
    if (count == kBlock) return logits;
    std::fill(std::copy(logits, logits + count, buffer), buffer + kBlock, -kInfinity);
    return buffer;
}

// The sum of exp(score) over the scores of at least `lowest`.
double total_weight(const Row& row, double temperature, double lowest) {
    LaneSum sum;
    float buffer[kBlock];
    double weights[kBlock];
    for (std::int64_t block = 0; block < row.num_blocks(); ++block) {
        if (score_of(row.block_max[block], row.max, temperature) < lowest) continue;
        compute_weights(padded_block(row, block, buffer), row.max, temperature, lowest, weights);
        for (int start = 0; start < kBlock; start += kLanes) {
            for (int lane = 0; lane < kLanes; ++lane) sum.lanes[lane] += weights[start + lane];
        }
    }
    return sum.total();
}

// Calls visit(key, weight) for each key in turn until it returns true; returns whether it did.
template <class Visit>
bool visit_weights(const std::vector<Key>& keys, float max, double temperature, Visit visit) {
    float logits[kBlock];
    double weights[kBlock];
    for (std::size_t start = 0; start < keys.size(); start += kBlock) {
        const std::size_t count = std::min<std::size_t>(kBlock, keys.size() - start);
        std::fill(logits, logits + kBlock, -kInfinity);
        for (std::size_t i = 0; i < count; ++i) logits[i] = logit_of(keys[start + i]);
        compute_weights(logits, max, temperature, -std::numeric_limits<double>::infinity(), weights);
        for (std::size_t i = 0; i < count; ++i) {
            if (visit(keys[start + i], weights[i])) return true;
        }
    }
    return false;
}

double total_weight(const std::vector<Key>& keys, float max, double temperature) {
    LaneSum sum;
    visit_weights(keys, max, temperature, [&](Key key, double weight) {
        sum.lanes[id_of(key) % kLanes] += weight;
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

// The last key of the nucleus, searched band by band from the largest logit down.
Key find_top_p(const Row& row, const Settings& settings, double lowest, Scratch& scratch) {
    const double goal = settings.top_p * total_weight(row, settings.temperature, lowest);
    double sum = 0;
    Key last = kLastKey;
    float high = kInfinity;
    for (const double depth : {3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 24.0, std::numeric_limits<double>::infinity()}) {
        const double edge = static_cast<double>(row.max) - depth * settings.temperature;
        const float low = edge > -std::numeric_limits<float>::max() ? static_cast<float>(edge) : -kInfinity;
        gather(row, low, high, scratch.keys);
        sort_keys(scratch.keys, scratch.spare);
        if (reach(scratch.keys, row.max, settings.temperature, goal, &sum, &last)) return last;
        if (low == -kInfinity) break;
        high = low;
    }
    return kLastKey;
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

Cut find_cut(const Row& row, const Settings& settings, Scratch& scratch) {
    Cut cut{settings.min_p > 0 ? exact_log(settings.min_p) : -std::numeric_limits<double>::infinity(), kLastKey};
    const bool has_top_k = settings.top_k > 0 && settings.top_k < row.size;
    if (has_top_k) cut.last = find_top_k(row, settings.top_k, scratch);
    if (settings.top_p < 1) {
        const Key end = has_top_k ? find_top_p_among(row, settings, cut.lowest, scratch)
                                  : find_top_p(row, settings, cut.lowest, scratch);
        cut.last = std::min(cut.last, end);
    }
    return cut;
}

// ------------------------------------------------------------------------------------------- noise

// The running argmax of score + noise.
class Race {
  public:
    Race(const Row& row, const Settings& settings, double lowest, Key last)
        : row_(row), temperature_(settings.temperature), lowest_(lowest), last_(last),
          key_(settings.seed, settings.position) {}

    // Every id of the block that the filters leave.
    void enter_block(std::int64_t block) {
        if (may_win(block)) run_block(block);
    }

    std::int64_t winner() const { return winner_; }

  private:
    bool may_win(std::int64_t block) const {
        const double score = score_of(row_.block_max[block], row_.max, temperature_);
        return score >= lowest_ && !(score + kGumbelMax < best_) && key_of(row_.block_max[block], 0) <= last_;
    }

    void run_block(std::int64_t block);
    void enter(float logit, std::uint32_t id, std::uint32_t word);

    const Row& row_;
    double temperature_;
    double lowest_;
    Key last_;
    NoiseKey key_;
    double best_ = -std::numeric_limits<double>::infinity();
    std::int64_t winner_ = kNothingLeft;
};

// Upper bounds, in float, of score + noise for 64 ids. The noise -log(-log(1 - u)) is below -log(u), and log2(u) is
// above what the bits of a float say when read as a fixed-point number.
void bound_scores(const float* logits, const std::uint32_t* words, float max, float inverse_temperature,
                  float* bounds) {
    constexpr float kLn2 = 0.69314718f, kSlack = 0.01f;
    for (int i = 0; i < kBlock; ++i) {
        const auto half = static_cast<float>(static_cast<std::int32_t>(words[i] >> 1));  // at most 2^31 u
        std::int32_t bits;
        std::memcpy(&bits, &half, sizeof bits);
        const float log2_u = static_cast<float>(bits) * 0x1p-23f - (127.0f + 31.0f);
        bounds[i] = (logits[i] - max) * inverse_temperature + (kSlack - kLn2 * log2_u);
    }
}

void Race::run_block(std::int64_t block) {
    const auto first_id = static_cast<std::uint32_t>(block * kBlock);
    float buffer[kBlock], bounds[kBlock];
    std::uint32_t words[kBlock];
    const float* logits = padded_block(row_, block, buffer);
    for (std::uint32_t group = 0; group < kBlock / 4; ++group) {
        philox_words(key_, first_id / 4 + group, words + 4 * group);
    }
    // Outside this range of temperatures a float could underflow where a double does not.
    if (temperature_ >= 1e-30 && temperature_ <= 1e4) {
        bound_scores(logits, words, row_.max, static_cast<float>(1.0 / temperature_), bounds);
    } else {
        std::fill(bounds, bounds + kBlock, kInfinity);
    }
    const auto hurdle = static_cast<float>(best_);
    std::int32_t any_open = 0;
    for (int i = 0; i < kBlock; ++i) any_open |= bounds[i] >= hurdle;
    if (!any_open) return;
    for (int i = 0; i < kBlock; ++i) {
        if (bounds[i] >= hurdle) enter(logits[i], first_id + static_cast<std::uint32_t>(i), words[i]);
    }
}

void Race::enter(float logit, std::uint32_t id, std::uint32_t word) {
    const double score = score_of(logit, row_.max, temperature_);
    if (logit == -kInfinity || score < lowest_ || key_of(logit, id) > last_) return;
    const double noisy = score + gumbel_of(word);
    if (noisy > best_ || (noisy == best_ && id < winner_)) {
        best_ = noisy;
        winner_ = id;
    }
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

    const Cut cut = find_cut(row, settings, scratch);
    Race race(row, settings, cut.lowest, cut.last);
    race.enter_block(best / kBlock);
    for (std::int64_t block = 0; block < row.num_blocks(); ++block) {
        if (block != best / kBlock) race.enter_block(block);
    }
    return race.winner();
}

// ------------------------------------------------------------------------------------------- laws

// The ids that the filters leave, ascending, and exp(score) of each.
void weigh_row(const Row& row, const Settings& settings, Scratch& scratch, std::vector<std::int64_t>& ids,
               std::vector<double>& weights) {
    const Cut cut = find_cut(row, settings, scratch);
    float buffer[kBlock];
    double block_weights[kBlock];
    for (std::int64_t block = 0; block < row.num_blocks(); ++block) {
        if (score_of(row.block_max[block], row.max, settings.temperature) < cut.lowest) continue;
        if (key_of(row.block_max[block], 0) > cut.last) continue;
        const float* logits = padded_block(row, block, buffer);
        compute_weights(logits, row.max, settings.temperature, cut.lowest, block_weights);
        for (int i = 0; i < kBlock; ++i) {
            const std::int64_t id = block * kBlock + i;
            if (logits[i] == -kInfinity || key_of(logits[i], static_cast<std::uint32_t>(id)) > cut.last) continue;
            if (score_of(logits[i], row.max, settings.temperature) < cut.lowest) continue;
            ids.push_back(id);
            weights.push_back(block_weights[i]);
        }
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
        for (std::size_t i = 0; i < length;) {
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
            log_total = exact_log(total_weight(row, 1.0, -std::numeric_limits<double>::infinity()));
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

NewDoubles gumbel(std::uint64_t seed, std::uint64_t t, Ids ids) {
    const NoiseKey key(seed, t);
    return map(ids, [&](std::int64_t id) { return gumbel_of(random_word(key, static_cast<std::uint32_t>(id))); });
}

}  // namespace

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
    m.def("gumbel", &gumbel, nb::arg("seed"), nb::arg("t"), nb::arg("ids"), "Keyed Gumbel noise, float64 [N].");
    m.def("exact_exp", [](Doubles x) { return map(x, [](double value) { return exact_exp(value); }); }, nb::arg("x"));
    m.def("exact_log", [](Doubles x) { return map(x, [](double value) { return exact_log(value); }); }, nb::arg("x"));
}
