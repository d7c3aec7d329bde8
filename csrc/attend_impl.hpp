// Attention over a cache in 8 bits (kv_bytes.hpp), with the same dot products of bytes as the matrices: keys are read like
// the weights of a product of a query, values like those of a product of the softmax's weights, which keep 15 bits as two
// terms. Included by kernels_impl.hpp.
#include "kv_bytes.hpp"

namespace {

using sakiyomi::kKeyGroupBytes;
using sakiyomi::num_groups;
using sakiyomi::key_block_bytes;
using sakiyomi::value_block_bytes;
using sakiyomi::query_bytes;

enum { kChunkBlocks = kKeyChunk / kKeyBlock };
enum { kFetchSteps = 4 };  // products between two looks at what to fetch, which take instructions of their own
enum { kRowsTogether = 4 };  // rows whose softmax goes step by step together
enum { kEagerRows = 2 };  // up to so many ask for all of a chunk before its use, though the chunk before has asked for it

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

#ifndef SAKIYOMI_HAS_TERMS
// Two terms [2][32] of 8 bits of 32 numbers of 0 to 32512, 256 times the first and the second; returns total + numbers.
inline Vi store_terms(int8_t* out, Vi a, Vi b, Vi total) {
    const Vi halves[2] = {a, b};
    for (int i = 0; i < 2; ++i) {
        const Vi high = divide_256(halves[i]);
        store_int8(out + i * kLanes, high);
        store_int8(out + kKeyBlock + i * kLanes, sub(halves[i], times_256(high)));
    }
    return add(total, add(a, b));
}
#endif

// What takes back that bytes are 128 too large; it wraps, since what rounding makes of a nan is no small number.
inline int32_t start_for(int32_t sum) { return static_cast<int32_t>(static_cast<uint32_t>(sum) * 0xffffff80u); }

// What attention reads of a query that is rounded once, however many chunks see it.
struct RoundedQuery {
    const int8_t* values;   // [groups][32]
    const float* scales;    // [groups], times the scale of the scores
    const int32_t* starts;  // [groups]

    RoundedQuery(const void* record, int64_t dim)
        : values(static_cast<const int8_t*>(record)),
          scales(reinterpret_cast<const float*>(values + num_groups(dim) * kGroup)),
          starts(reinterpret_cast<const int32_t*>(scales + num_groups(dim))) {}
};

void round_query(const float* query, int64_t dim, float scale, void* record) {
    const RoundedQuery out(record, dim);
    for (int64_t group = 0; group < num_groups(dim); ++group) {
        const int64_t start = group * kGroup, count = min_of(kGroup, dim - start);
        int8_t* values = const_cast<int8_t*>(out.values) + start;
        if (count < kGroup) __builtin_memset(values, 0, kGroup);
        int32_t sum;
        const_cast<float*>(out.scales)[group] = scale * quantize_run(query + start, count, values, &sum);
        const_cast<int32_t*>(out.starts)[group] = start_for(sum);
    }
}

// Lines of the next chunk's keys and then of its values, fetched a few at a time between products: memory answers those of a
// burst one after another, and rests while there is none.
struct Fetcher {
    const uint8_t *next, *end, *values, *values_end;
    int64_t step;

    void fetch() {
        for (int64_t i = 0; i < step; ++i, next += 64) {
            if (next >= end) {
                next = values;
                end = values = values_end;
                if (next >= end) return;
            }
            prefetch(next);
        }
    }
};

// Scores of BLOCKS blocks of 32 positions, of which those of the first begin at `scores`. What is loaded of a query serves all.
template <int HEADS, int BLOCKS>
inline void score_blocks(const uint8_t* const* blocks, int64_t groups, const RoundedQuery* queries, float* scores, Fetcher& ahead) {
    enum { kSides = 2 * BLOCKS };
    for (int64_t group = 0; group < groups; ++group) {
        const uint8_t* sides[kSides];
        for (int s = 0; s < kSides; ++s) sides[s] = blocks[s / 2] + (s % 2 * groups + group) * kKeyGroupBytes;
        Vi sums[HEADS][kSides];
        for (int h = 0; h < HEADS; ++h) {
            const Vi start = add(start_sums(queries[h].values + group * kGroup), set1_int(queries[h].starts[group]));
            for (int s = 0; s < kSides; ++s) sums[h][s] = start;
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            if (k % kFetchSteps == 0) ahead.fetch();
            Wq keys[kSides];
            for (int s = 0; s < kSides; ++s) keys[s] = keep(load_weights(sides[s] + k * 64));
            for (int h = 0; h < HEADS; ++h) {
                const Aq q = load_inputs(queries[h].values + group * kGroup + k * 4);
                for (int s = 0; s < kSides; ++s) sums[h][s] = dot4(sums[h][s], keys[s], q);
            }
        }
        for (int h = 0; h < HEADS; ++h) {
            const Vf query_scale = set1(queries[h].scales[group]);
            for (int s = 0; s < kSides; ++s) {
                const Vf factor = mul(load(reinterpret_cast<const float*>(sides[s] + 8 * 64)), query_scale);
                float* out = scores + h * kKeyChunk + s * kLanes;
                store(out, fma(to_float(sums[h][s]), factor, group == 0 ? set1(0.0f) : load(out)));
            }
        }
    }
}

// Weights of heads over the blocks of a chunk: integers of 15 bits, 256 times the first term and the second.
struct ByteWeights {
    int8_t* terms;   // [block][head][2][32]
    int64_t step;    // from block to block
    int32_t* starts;
    float* scales;

    int8_t* at(int64_t block, int head, int term) const { return terms + block * step + (head * 2 + term) * kKeyBlock; }
};

// Minus infinity, infinity and minus infinity, a chunk of each.
struct Limits {
    float values[3 * kKeyChunk] = {};
    constexpr Limits() {
        for (int i = 0; i < 3 * kKeyChunk; ++i) values[i] = i / kKeyChunk == 1 ? __builtin_inff() : -__builtin_inff();
    }
};
constexpr Limits kAllLimits;
constexpr const float* kLimits = kAllLimits.values;

// Blocks `begin` to `end` - 1 of a chunk, of whose positions `first` to `last` count.
struct Seen {
    int64_t begin, end, first, last;

    bool is_whole() const { return first == begin * kKeyBlock && last == end * kKeyBlock - 1; }

    // The largest that the scores from position i on may be: infinity where they count.
    Vf limits(int64_t i) const {
        return min(load(kLimits + kKeyChunk + i - first), load(kLimits + 2 * kKeyChunk - 1 + i - last));
    }
};

// 2^x of COUNT vectors of x <= 0 to some 18 bits, where a weight keeps 15; what is below 2^-120 counts for that. Step by step,
// since their chains of dependent operations would wait one behind the other.
template <int COUNT>
inline void exp2_weights(Vf* x) {
    constexpr float kTerms[] = {0x1.3997cap-7f, 0x1.ca1440p-5f, 0x1.ec06dap-3f, 0x1.62e0dcp-1f, 0x1.ffffe8p-1f};
    Vi n[COUNT];
    Vf y[COUNT];
    for (int i = 0; i < COUNT; ++i) x[i] = max(set1(-120.0f), x[i]);
    for (int i = 0; i < COUNT; ++i) n[i] = round_to_int(x[i]);
    for (int i = 0; i < COUNT; ++i) x[i] = sub(x[i], to_float(n[i]));
    for (int i = 0; i < COUNT; ++i) y[i] = fma(set1(kTerms[0]), x[i], set1(kTerms[1]));
    for (int term = 2; term < 5; ++term)
        for (int i = 0; i < COUNT; ++i) y[i] = fma(y[i], x[i], set1(kTerms[term]));
    for (int i = 0; i < COUNT; ++i) x[i] = scale_by_power(y[i], n[i]);
}

// Pages are small and chunks lie in two or three of them, so that what a machine fetches by itself comes late.
inline void fetch_blocks(const uint8_t* blocks, int64_t block_bytes, int64_t first, const Seen& seen) {
    for (int64_t at = (first + seen.begin) * block_bytes; at < (first + seen.end) * block_bytes; at += 64) prefetch(blocks + at);
}

#ifndef SAKIYOMI_HAS_EACH
// The sum or maximum of each of COUNT vectors, in the order of reduce_add.
template <int COUNT>
inline void reduce_add_each(const Vf* v, float* out) {
    for (int i = 0; i < COUNT; ++i) out[i] = reduce_add(v[i]);
}
template <int COUNT>
inline void reduce_add_each(const Vi* v, int32_t* out) {
    for (int i = 0; i < COUNT; ++i) out[i] = reduce_add(v[i]);
}
template <int COUNT>
inline void reduce_max_each(const Vf* v, float* out) {
    for (int i = 0; i < COUNT; ++i) out[i] = reduce_max(v[i]);
}
#endif

// The softmax of the scores of a row's heads relative to their largest, times the scales of the values (0 where none
// counts). What no position stands for weighs next to nothing in the total, and nothing in the sums. Each step takes all
// heads, and several rows may take it one after another: their chains of dependent operations then run side by side.
template <int HEADS>
struct Softmax {
    Seen seen;
    const float* const* value_scales;
    float flaw;  // nan, or zero
    float (*scores)[kKeyChunk];
    float* part;
    int64_t part_step;
    ByteWeights weights;
    float highest[HEADS];  // of the scaled weights

    void find_largest() {
        const int64_t begin = seen.begin * kKeyBlock, end = seen.end * kKeyBlock;
        if (!seen.is_whole())
            for (int64_t i = begin; i < end; i += kLanes) {
                const Vf limits = seen.limits(i);
                for (int h = 0; h < HEADS; ++h) store(scores[h] + i, min(load(scores[h] + i), limits));
            }
        Vf most[HEADS];
        for (int h = 0; h < HEADS; ++h) most[h] = load(scores[h] + begin);
        for (int64_t i = begin + kLanes; i < end; i += kLanes)
            for (int h = 0; h < HEADS; ++h) most[h] = max(most[h], load(scores[h] + i));
        float largest[HEADS];
        reduce_max_each<HEADS>(most, largest);
        for (int h = 0; h < HEADS; ++h) part[h * part_step] = largest[h];
    }

    void weigh() {
        constexpr float kLog2E = 1.44269504088896341f;
        Vf shift[HEADS], total[HEADS], most[HEADS];
        for (int h = 0; h < HEADS; ++h) {
            shift[h] = set1(-kLog2E * part[h * part_step]);
            total[h] = most[h] = set1(0.0f);
        }
        for (int64_t b = seen.begin; b < seen.end; ++b)
            for (int64_t i = 0; i < kKeyBlock; i += kLanes) {
                const Vf scale = load(value_scales[b] + i);
                Vf weight[HEADS];
                for (int h = 0; h < HEADS; ++h) weight[h] = fma(load(scores[h] + b * kKeyBlock + i), set1(kLog2E), shift[h]);
                exp2_weights<HEADS>(weight);
                for (int h = 0; h < HEADS; ++h) {
                    const Vf scaled = mul(weight[h], scale);
                    total[h] = add(total[h], weight[h]);
                    most[h] = max(most[h], scaled);
                    store(scores[h] + b * kKeyBlock + i, scaled);
                }
            }
        float totals[HEADS];
        reduce_add_each<HEADS>(total, totals);
        reduce_max_each<HEADS>(most, highest);
        for (int h = 0; h < HEADS; ++h) part[h * part_step + 1] = totals[h];
    }

    void round() {
        enum { kMost = 127 * 256 };
        Vf factor[HEADS];
        Vi sums[HEADS];
        for (int h = 0; h < HEADS; ++h) {
            const bool is_zero = highest[h] < 1e-30f;
            factor[h] = set1(is_zero ? 0.0f : kMost / highest[h]);
            weights.scales[h] = flaw + (is_zero ? 0.0f : highest[h] / kMost);
            sums[h] = zero_int();
        }
        for (int64_t b = seen.begin; b < seen.end; ++b)
            for (int h = 0; h < HEADS; ++h) {
                const float* x = scores[h] + b * kKeyBlock;
                const Vi first = round_to_int(mul(load(x), factor[h])), second = round_to_int(mul(load(x + kLanes), factor[h]));
                sums[h] = store_terms(weights.at(b, h, 0), first, second, sums[h]);
            }
        int32_t totals[HEADS];
        reduce_add_each<HEADS>(sums, totals);
        for (int h = 0; h < HEADS; ++h) weights.starts[h] = start_for(totals[h]);
    }
};

// The weighted sums of PARTS vectors of the values.
template <int HEADS, int PARTS>
inline void sum_bytes(const Seen& seen, const uint8_t* const* values, int64_t offset, const ByteWeights& weights, float* part,
                      int64_t part_step, Fetcher& ahead) {
    Vi sums[HEADS][2][PARTS];
    for (int h = 0; h < HEADS; ++h)
        for (int term = 0; term < 2; ++term)
            for (int p = 0; p < PARTS; ++p) sums[h][term][p] = zero_int();
    for (int64_t b = seen.begin; b < seen.end; ++b) {
        for (int h = 0; h < HEADS; ++h)
            for (int term = 0; term < 2; ++term) {
                const Vi start = start_sums(weights.at(b, h, term));
                for (int p = 0; p < PARTS; ++p) sums[h][term][p] = add(sums[h][term][p], start);
            }
        const uint8_t* block = values[b] + offset * kKeyBlock;
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            if (k % kFetchSteps == 0) ahead.fetch();
            Wq w[PARTS];
            for (int p = 0; p < PARTS; ++p) w[p] = keep(load_weights(block + p * kKeyBlock * kLanes + k * 64));
            for (int h = 0; h < HEADS; ++h)
                for (int term = 0; term < 2; ++term) {
                    const Aq a = load_inputs(weights.at(b, h, term) + k * 4);
                    for (int p = 0; p < PARTS; ++p) sums[h][term][p] = dot4(sums[h][term][p], w[p], a);
                }
        }
    }
    for (int h = 0; h < HEADS; ++h)
        for (int p = 0; p < PARTS; ++p) {
            const Vi both = add(add(times_256(sums[h][0][p]), sums[h][1][p]), set1_int(weights.starts[h]));
            store(part + h * part_step + kPartHeader + offset + p * kLanes, mul(to_float(both), set1(weights.scales[h])));
        }
}

// What one of the rows fetches of a chunk.
inline Fetcher share_of_next(const uint8_t* keys, const uint8_t* values, int64_t dim, int64_t row, int64_t num_rows) {
    // At least; about half of them are with the keys, half with the values.
    const int64_t calls = (kChunkBlocks / kScoreBlocks + kChunkBlocks) * (8 / kFetchSteps) * num_groups(dim);
    const int64_t key_lines = kChunkBlocks * key_block_bytes(dim) / 64, value_lines = kChunkBlocks * value_block_bytes(dim) / 64;
    const auto line = [&](const uint8_t* start, int64_t count, int64_t of) { return start + count * of / num_rows * 64; };
    return {line(keys, key_lines, row), line(keys, key_lines, row + 1), line(values, value_lines, row), line(values, value_lines, row + 1),
            (key_lines + value_lines) / num_rows / calls + 1};
}

// Blocks of a chunk as a row sees them.
struct RowBlocks {
    Seen seen;
    const uint8_t *keys[kChunkBlocks], *values[kChunkBlocks];
    const float* value_scales[kChunkBlocks];
    alignas(64) float edge_scales[kChunkBlocks][kKeyBlock];
    float flaw;  // nan if a scale of the values is one, which integers do not know; else zero

    // Returns whether it sees anything. `own` has room for blocks that the row puts together for itself.
    bool find(const AttendJob& job, const AttendRow& row, uint8_t* own) {
        const int64_t dim = job.head_dim, key_bytes = key_block_bytes(dim), value_bytes = value_block_bytes(dim);
        const int64_t first = max_of(row.first - job.begin, 0), last = min_of(row.last - job.begin, kKeyChunk - 1);
        if (first > last) return false;
        seen = {first / kKeyBlock, last / kKeyBlock + 1, first, last};
        Vf flaws = set1(0.0f);
        const uint8_t* all_keys = static_cast<const uint8_t*>(job.keys);
        const uint8_t* all_values = static_cast<const uint8_t*>(job.values);
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
            value_scales[b] = reinterpret_cast<const float*>(values[b] + value_bytes - kKeyBlock * 4);
            const int64_t low = max_of(first - b * kKeyBlock, 0), high = min_of(last - b * kKeyBlock, kKeyBlock - 1);
            if (low > 0 || high < kKeyBlock - 1) {  // unused places of a cache may hold anything
                __builtin_memset(edge_scales[b], 0, sizeof edge_scales[b]);
                __builtin_memcpy(edge_scales[b] + low, value_scales[b] + low, static_cast<size_t>(high - low + 1) * sizeof(float));
                value_scales[b] = edge_scales[b];
            }
            for (int64_t i = 0; i < kKeyBlock; i += kLanes) flaws = fma(load(value_scales[b] + i), set1(0.0f), flaws);
        }
        flaw = reduce_add(flaws);
        return true;
    }
};

template <int HEADS>
inline void sum_heads(const RowBlocks& blocks, int64_t dim, const ByteWeights& weights, float* part, Fetcher& ahead) {
    if constexpr (HEADS > 3) {  // their sums would not fit the registers
        sum_heads<2>(blocks, dim, weights, part, ahead);
        const ByteWeights others{weights.at(0, 2, 0), weights.step, weights.starts + 2, weights.scales + 2};
        sum_heads<HEADS - 2>(blocks, dim, others, part + 2 * part_floats(dim), ahead);
        return;
    }
    int64_t offset = 0;
    for (; offset + 2 * kLanes <= dim; offset += 2 * kLanes)  // four vectors at once have fewer loads and are slower
        sum_bytes<HEADS, 2>(blocks.seen, blocks.values, offset, weights, part, part_floats(dim), ahead);
    for (; offset < dim; offset += kLanes)
        sum_bytes<HEADS, 1>(blocks.seen, blocks.values, offset, weights, part, part_floats(dim), ahead);
}

// Whether a row sees the same of the chunk as the row before.
inline bool sees_same(const AttendJob& job, int64_t row) {
    const AttendRow &a = job.rows[row], &b = job.rows[row - 1];
    const int64_t last = job.begin + kKeyChunk - 1;
    return max_of(a.first, job.begin) == max_of(b.first, job.begin) && min_of(a.last, last) == min_of(b.last, last);
}

// Whether a row sees drafted positions in the chunk, so that it puts together blocks of its own.
inline bool has_own_blocks(const AttendJob& job, int64_t row) {
    return job.rows[row].chain != nullptr && min_of(job.rows[row].last, job.begin + kKeyChunk - 1) >= job.length;
}

// Scores of the blocks that a row sees.
template <int HEADS>
void score_row(const AttendJob& job, const AttendRow& row, const RowBlocks& blocks, float (*scores)[kKeyChunk], Fetcher& ahead) {
    const int64_t dim = job.head_dim, groups = num_groups(dim);
    const auto query = [&](int h) { return RoundedQuery(static_cast<const int8_t*>(row.queries) + h * query_bytes(dim), dim); };
    const RoundedQuery queries[4] = {query(0), query(HEADS > 1 ? 1 : 0), query(HEADS > 2 ? 2 : 0), query(HEADS > 3 ? 3 : 0)};
    int64_t b = blocks.seen.begin;
    for (; b + kScoreBlocks <= blocks.seen.end; b += kScoreBlocks)
        score_blocks<HEADS, kScoreBlocks>(blocks.keys + b, groups, queries, scores[0] + b * kKeyBlock, ahead);
    for (; b < blocks.seen.end; ++b) score_blocks<HEADS, 1>(blocks.keys + b, groups, queries, scores[0] + b * kKeyBlock, ahead);
}

// Rows `first_row` to `first_row` + `num_rows` - 1; one that has blocks of its own comes alone.
template <int HEADS>
void attend_rows(const AttendJob& job, int64_t first_row, int64_t num_rows) {
    const int64_t dim = job.head_dim, key_bytes = key_block_bytes(dim), value_bytes = value_block_bytes(dim);
    const int64_t first = job.begin / kKeyBlock, after = first + kChunkBlocks;
    const uint8_t* keys = static_cast<const uint8_t*>(job.keys);
    const uint8_t* values = static_cast<const uint8_t*>(job.values);
    alignas(64) uint8_t own[kChunkBlocks * (key_block_bytes(kMaxHeadDim) + value_block_bytes(kMaxHeadDim))];
    RowBlocks blocks[kRowsTogether];
    const RowBlocks* found[kRowsTogether];
    alignas(64) float scores[kRowsTogether][HEADS][kKeyChunk];
    alignas(64) int8_t terms[kRowsTogether][kChunkBlocks][HEADS][2][kKeyBlock];
    int32_t starts[kRowsTogether][HEADS];
    float scales[kRowsTogether][HEADS];
    Softmax<HEADS> steps[kRowsTogether];
    Fetcher ahead[kRowsTogether];
    const bool fetches = first_row == 0 && (!job.follows || job.num_rows <= kEagerRows);
    const auto each_row = [&](auto&& step) __attribute__((always_inline)) {
        for (int64_t i = 0; i < num_rows; ++i)
            if (found[i] != nullptr) step(i);
    };
    for (int64_t i = 0; i < num_rows; ++i) {
        const AttendRow& row = job.rows[first_row + i];
        found[i] = i > 0 && sees_same(job, first_row + i) ? found[i - 1] : blocks[i].find(job, row, own) ? &blocks[i] : nullptr;
        if (found[i] == nullptr) {
            for (int h = 0; h < HEADS; ++h) row.part[h * part_floats(dim)] = -__builtin_inff();
            continue;
        }
        if (fetches && i == 0) fetch_blocks(keys, key_bytes, first, found[i]->seen);
        ahead[i] = share_of_next(keys + after * key_bytes, values + after * value_bytes, dim, first_row + i, job.num_rows);
        if (row.last < job.begin + kKeyChunk) ahead[i].step = 0;
        score_row<HEADS>(job, row, *found[i], scores[i], ahead[i]);
        if (fetches && i == 0) fetch_blocks(values, value_bytes, first, found[i]->seen);
        const ByteWeights weights{terms[i][0][0][0], sizeof terms[i][0], starts[i], scales[i]};
        steps[i] = {found[i]->seen, found[i]->value_scales, found[i]->flaw, scores[i], row.part, part_floats(dim), weights, {}};
    }
    each_row([&](int64_t i) { steps[i].find_largest(); });
    each_row([&](int64_t i) { steps[i].weigh(); });
    each_row([&](int64_t i) { steps[i].round(); });
    each_row([&](int64_t i) { sum_heads<HEADS>(*found[i], dim, steps[i].weights, steps[i].part, ahead[i]); });
}

template <int HEADS>
void attend_all(const AttendJob& job) {
    for (int64_t row = 0, count; row < job.num_rows; row += count) {
        count = 1;
        while (count < kRowsTogether && row + count < job.num_rows && !has_own_blocks(job, row) && !has_own_blocks(job, row + count)) ++count;
        attend_rows<HEADS>(job, row, count);
    }
}

void attend_bytes(const AttendJob* job) {
    with_heads(*job, [&](auto heads) { attend_all<decltype(heads)::value>(*job); });
}

}  // namespace
