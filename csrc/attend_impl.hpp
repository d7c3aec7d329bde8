// Attention over a cache in 8 bits (kv_bytes.hpp), with the same dot products of bytes as the matrices: keys are read like
// the weights of a product of a query, values like those of a product of the softmax's weights, which keep 16 bits as two
// terms. Included by kernels_impl.hpp.
#include "kv_bytes.hpp"

namespace {

using sakiyomi::kKeyGroupBytes;
using sakiyomi::num_groups;
using sakiyomi::key_block_bytes;
using sakiyomi::value_block_bytes;

enum { kChunkBlocks = kKeyChunk / kKeyBlock, kMaxGroups = kMaxHeadDim / kGroup, kTermSteps = 254 };

// Symmetric 8-bit values of `count` numbers, padded with zeros to whole lanes; returns the scale, nan if a number is not
// finite.
float quantize_run(const float* x, int64_t count, int8_t* out, int32_t* sum) {
    const int64_t whole = count - count % kLanes, tail = count - whole;
    Vf largest = set1(0.0f), flaw = set1(0.0f);
    const auto see = [&](Vf v) {
        largest = max(abs(v), largest);
        flaw = fma(v, set1(0.0f), flaw);
    };
    for (int64_t i = 0; i < whole; i += kLanes) see(load(x + i));
    if (tail) see(load_tail(x + whole, tail));
    const float most = reduce_max(largest);
    const bool is_zero = most < 1e-30f;
    const Vf inverse = set1(is_zero ? 0.0f : 127.0f / most);
    Vi total = zero_int();
    const auto write = [&](int64_t at, Vf v) {
        const Vi rounded = round_to_int(mul(v, inverse));
        store_int8(out + at, rounded);
        total = add(total, rounded);
    };
    for (int64_t i = 0; i < whole; i += kLanes) write(i, load(x + i));
    if (tail) write(whole, load_tail(x + whole, tail));
    if (sum != nullptr) *sum = reduce_add(total);
    return (is_zero ? 0.0f : most / 127.0f) + reduce_add(flaw);
}

// What takes back that bytes are 128 too large; it wraps, since what rounding makes of a nan is no small number.
inline int32_t start_for(int32_t sum) { return static_cast<int32_t>(static_cast<uint32_t>(sum) * 0xffffff80u); }

template <int HEADS>
struct ByteQueries {
    alignas(64) int8_t values[HEADS][kMaxHeadDim];
    float scales[HEADS][kMaxGroups];    // times the scale of the scores
    int32_t starts[HEADS][kMaxGroups];

    ByteQueries(const float* queries, int64_t dim, float scale) {
        for (int h = 0; h < HEADS; ++h)
            for (int64_t group = 0; group < num_groups(dim); ++group) {
                const int64_t start = group * kGroup, count = min_of(kGroup, dim - start);
                if (count < kGroup) __builtin_memset(values[h] + start, 0, kGroup);
                scales[h][group] = scale * quantize_run(queries + h * dim + start, count, values[h] + start, &starts[h][group]);
                starts[h][group] = start_for(starts[h][group]);
            }
    }
};

// Scores of a block of 32 positions.
template <int HEADS>
inline void score_bytes(const uint8_t* keys, int64_t groups, const ByteQueries<HEADS>& queries, float (*scores)[kKeyChunk],
                        int64_t at) {
    Vf total[HEADS][2];
    for (int h = 0; h < HEADS; ++h) total[h][0] = total[h][1] = set1(0.0f);
    for (int64_t group = 0; group < groups; ++group) {
        const uint8_t* side[2] = {keys + group * kKeyGroupBytes, keys + (groups + group) * kKeyGroupBytes};
        Vi sums[HEADS][2];
        for (int h = 0; h < HEADS; ++h)
            sums[h][0] = sums[h][1] = add(start_sums(queries.values[h] + group * kGroup), set1_int(queries.starts[h][group]));
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            const Wq low = load_weights(side[0] + k * 64), high = load_weights(side[1] + k * 64);
            for (int h = 0; h < HEADS; ++h) {
                const Aq q = load_inputs(queries.values[h] + group * kGroup + k * 4);
                sums[h][0] = dot4(sums[h][0], low, q);
                sums[h][1] = dot4(sums[h][1], high, q);
            }
        }
        for (int s = 0; s < 2; ++s) {
            const Vf scale = load(reinterpret_cast<const float*>(side[s] + 8 * 64));
            for (int h = 0; h < HEADS; ++h) {
                const Vf factor = mul(scale, set1(queries.scales[h][group]));
                total[h][s] = fma(to_float(sums[h][s]), factor, total[h][s]);
            }
        }
    }
    for (int h = 0; h < HEADS; ++h)
        for (int s = 0; s < 2; ++s) store(scores[h] + at + s * kLanes, total[h][s]);
}

// A head's weights over the blocks of a chunk in two terms; the second counts in steps of 1 / 254 of the first's.
struct ByteWeights {
    alignas(64) int8_t terms[2][kKeyChunk];
    int32_t starts[2];
    float scale;
};

// Blocks `begin` to `end` - 1 of a chunk, of whose positions `first` to `last` count.
struct Seen {
    int64_t begin, end, first, last;

    void fill_rest(float* x, float value) const {
        for (int64_t i = 0; i < first; ++i) x[i] = value;
        for (int64_t i = last + 1; i < kKeyChunk; ++i) x[i] = value;
    }
};

// e^x for x <= 0, to some 20 bits: a weight keeps 16.
inline Vf exp_weight(Vf x) {
    x = max(set1(-86.0f), x);
    const Vi n = round_to_int(mul(x, set1(1.44269504088896341f)));
    const Vf r = fma(to_float(n), set1(-0.693147180559945309f), x);
    Vf y = set1(1.0f / 120.0f);
    y = fma(y, r, set1(1.0f / 24.0f));
    y = fma(y, r, set1(1.0f / 6.0f));
    y = fma(y, r, set1(0.5f));
    y = fma(y, r, set1(1.0f));
    y = fma(y, r, set1(1.0f));
    return scale_by_power(y, n);
}

// Pages are small and chunks lie in two or three of them, so that what a machine fetches by itself comes late.
inline void fetch_blocks(const uint8_t* blocks, int64_t block_bytes, int64_t first, const Seen& seen) {
    for (int64_t at = (first + seen.begin) * block_bytes; at < (first + seen.end) * block_bytes; at += 64) prefetch(blocks + at);
}

// The softmax of one head's scores relative to their largest, times the scales of the values. What no position stands for
// weighs next to nothing in the total, and nothing in the sums.
inline void weigh_scores(const Seen& seen, const uint8_t* const* value_scales, float* scores, float* part, ByteWeights& weights) {
    enum { kParts = kKeyChunk / kLanes, kBlockParts = kKeyBlock / kLanes };
    const bool is_whole = seen.first == 0 && seen.last == kKeyChunk - 1;
    if (!is_whole) seen.fill_rest(scores, -__builtin_inff());
    Vf x[kParts];
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) x[i] = load(scores + i * kLanes);
    const Vf pairs[4] = {max(x[0], x[4]), max(x[1], x[5]), max(x[2], x[6]), max(x[3], x[7])};
    const float largest = reduce_max(max(max(pairs[0], pairs[2]), max(pairs[1], pairs[3])));
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) x[i] = exp_weight(sub(x[i], set1(largest)));
    const Vf sums[4] = {add(x[0], x[4]), add(x[1], x[5]), add(x[2], x[6]), add(x[3], x[7])};
    part[0] = largest;
    part[1] = reduce_add(add(add(sums[0], sums[2]), add(sums[1], sums[3])));
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i)
        if (i / kBlockParts >= seen.begin && i / kBlockParts < seen.end)
            x[i] = mul(x[i], load(reinterpret_cast<const float*>(value_scales[i / kBlockParts]) + i % kBlockParts * kLanes));
    if (!is_whole) {  // unused places of a cache may hold anything
#pragma GCC unroll 8
        for (int i = 0; i < kParts; ++i) store(scores + i * kLanes, x[i]);
        seen.fill_rest(scores, 0.0f);
#pragma GCC unroll 8
        for (int i = 0; i < kParts; ++i) x[i] = load(scores + i * kLanes);
    }
    const Vf most[4] = {max(x[0], x[4]), max(x[1], x[5]), max(x[2], x[6]), max(x[3], x[7])};
    const float highest = reduce_max(max(max(most[0], most[2]), max(most[1], most[3])));
    const Vf all[4] = {add(x[0], x[4]), add(x[1], x[5]), add(x[2], x[6]), add(x[3], x[7])};
    const float flaw = 0.0f * reduce_add(add(add(all[0], all[2]), add(all[1], all[3])));  // integers know no nan
    const bool is_zero = highest < 1e-30f;
    const Vf inverse = set1(is_zero ? 0.0f : 127.0f / highest);
    Vi totals[2] = {zero_int(), zero_int()};
#pragma GCC unroll 8
    for (int i = 0; i < kParts; ++i) {
        const Vf wanted = mul(x[i], inverse);
        const Vi high = round_to_int(wanted);
        const Vi low = round_to_int(mul(sub(wanted, to_float(high)), set1(static_cast<float>(kTermSteps))));
        store_int8(weights.terms[0] + i * kLanes, high);
        store_int8(weights.terms[1] + i * kLanes, low);
        totals[0] = add(totals[0], high);
        totals[1] = add(totals[1], low);
    }
    for (int term = 0; term < 2; ++term) weights.starts[term] = start_for(reduce_add(totals[term]));
    weights.scale = (is_zero ? 0.0f : highest / (127.0f * kTermSteps)) + flaw;
}

// The weighted sums of PARTS vectors of the values.
template <int HEADS, int PARTS>
inline void sum_bytes(const Seen& seen, const uint8_t* const* values, int64_t offset, const ByteWeights* weights, float* part,
                      int64_t part_step) {
    Vi sums[HEADS][2][PARTS];
    for (int h = 0; h < HEADS; ++h)
        for (int term = 0; term < 2; ++term)
            for (int p = 0; p < PARTS; ++p) sums[h][term][p] = set1_int(weights[h].starts[term]);
    for (int64_t b = seen.begin; b < seen.end; ++b) {
        for (int h = 0; h < HEADS; ++h)
            for (int term = 0; term < 2; ++term) {
                const Vi start = start_sums(weights[h].terms[term] + b * kKeyBlock);
                for (int p = 0; p < PARTS; ++p) sums[h][term][p] = add(sums[h][term][p], start);
            }
        const uint8_t* block = values[b] + offset * kKeyBlock;
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            Wq w[PARTS];
            for (int p = 0; p < PARTS; ++p) w[p] = load_weights(block + p * kKeyBlock * kLanes + k * 64);
            for (int h = 0; h < HEADS; ++h)
                for (int term = 0; term < 2; ++term) {
                    const Aq a = load_inputs(weights[h].terms[term] + b * kKeyBlock + k * 4);
                    for (int p = 0; p < PARTS; ++p) sums[h][term][p] = dot4(sums[h][term][p], w[p], a);
                }
        }
    }
    for (int h = 0; h < HEADS; ++h)
        for (int p = 0; p < PARTS; ++p) {
            const Vf both = fma(to_float(sums[h][0][p]), set1(static_cast<float>(kTermSteps)), to_float(sums[h][1][p]));
            store(part + h * part_step + kPartHeader + offset + p * kLanes, mul(both, set1(weights[h].scale)));
        }
}

template <int HEADS>
inline void sum_heads(const Seen& seen, const uint8_t* const* values, int64_t dim, const ByteWeights* weights, float* part) {
    int64_t offset = 0;
    for (; offset + 4 * kLanes <= dim; offset += 4 * kLanes)
        sum_bytes<HEADS, 4>(seen, values, offset, weights, part, part_floats(dim));
    for (; offset < dim; offset += kLanes) sum_bytes<HEADS, 1>(seen, values, offset, weights, part, part_floats(dim));
}

template <int HEADS>
void attend_bytes_row(const AttendJob& job, const AttendRow& row, bool is_first) {
    const int64_t dim = job.head_dim, key_bytes = key_block_bytes(dim), value_bytes = value_block_bytes(dim);
    const int64_t first = max_of(row.first - job.begin, 0), last = min_of(row.last - job.begin, kKeyChunk - 1);
    if (first > last) {
        for (int h = 0; h < HEADS; ++h) row.part[h * part_floats(dim)] = -__builtin_inff();
        return;
    }
    const Seen seen{first / kKeyBlock, last / kKeyBlock + 1, first, last};
    const uint8_t* all_keys = static_cast<const uint8_t*>(job.keys);
    const uint8_t* all_values = static_cast<const uint8_t*>(job.values);
    alignas(64) uint8_t own[kChunkBlocks * (key_block_bytes(kMaxHeadDim) + value_block_bytes(kMaxHeadDim))];
    const uint8_t *keys[kChunkBlocks], *values[kChunkBlocks], *value_scales[kChunkBlocks] = {};
    for (int64_t b = seen.begin; b < seen.end; ++b) {
        const int64_t start = job.begin + b * kKeyBlock, end = min_of(row.last, start + kKeyBlock - 1);
        keys[b] = all_keys + start / kKeyBlock * key_bytes;
        values[b] = all_values + start / kKeyBlock * value_bytes;
        if (row.chain != nullptr && end >= job.length) {  // positions of a drafted path lie anywhere behind the length
            uint8_t* own_keys = own + b * (key_bytes + value_bytes);
            uint8_t* own_values = own_keys + key_bytes;
            if (start < job.length) {
                __builtin_memcpy(own_keys, keys[b], static_cast<size_t>(key_bytes));
                __builtin_memcpy(own_values, values[b], static_cast<size_t>(value_bytes));
            }
            for (int64_t p = max_of(start, job.length); p <= end; ++p) {
                copy_key(all_keys, job.length + row.chain[p - job.length], own_keys, p - start, dim);
                copy_value(all_values, job.length + row.chain[p - job.length], own_values, p - start, dim);
            }
            keys[b] = own_keys;
            values[b] = own_values;
        }
        value_scales[b] = values[b] + value_bytes - kKeyBlock * 4;
    }
    if (is_first) fetch_blocks(all_keys, key_bytes, job.begin / kKeyBlock, seen);
    const ByteQueries<HEADS> queries(row.queries, dim, job.scale);
    alignas(64) float scores[HEADS][kKeyChunk];
    for (int64_t b = seen.begin; b < seen.end; ++b)
        score_bytes<HEADS>(keys[b], num_groups(dim), queries, scores, b * kKeyBlock);
    if (is_first) fetch_blocks(all_values, value_bytes, job.begin / kKeyBlock, seen);
    ByteWeights weights[HEADS];
    for (int h = 0; h < HEADS; ++h) weigh_scores(seen, value_scales, scores[h], row.part + h * part_floats(dim), weights[h]);
    if constexpr (HEADS == 4) {  // their sums would not fit the registers
        sum_heads<2>(seen, values, dim, weights, row.part);
        sum_heads<2>(seen, values, dim, weights + 2, row.part + 2 * part_floats(dim));
    } else {
        sum_heads<HEADS>(seen, values, dim, weights, row.part);
    }
}

void attend_bytes(const AttendJob* job) {
    for (int64_t r = 0; r < job->num_rows; ++r) switch (job->num_heads) {
            case 1: attend_bytes_row<1>(*job, job->rows[r], r == 0); break;
            case 2: attend_bytes_row<2>(*job, job->rows[r], r == 0); break;
            case 3: attend_bytes_row<3>(*job, job->rows[r], r == 0); break;
            default: attend_bytes_row<4>(*job, job->rows[r], r == 0); break;
        }
}

}  // namespace
