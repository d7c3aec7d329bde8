// Which keys each row of a call sees, and the call's caches.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "kernels.hpp"
#include "kv_bytes.hpp"

namespace sakiyomi {

// Keys and values of one sequence at one layer.
struct KeyRows {
    void* keys;
    void* values;
    std::int64_t key_head_bytes, value_head_bytes;  // from head to head
    std::int64_t row_stride;                        // of floats: elements from row to row
    std::int64_t length;                            // rows before the call's own
};

struct RowView {
    std::int32_t sequence;
    std::int32_t index;     // within the sequence's tree: pending rows, then the call's own
    std::int64_t num_own;   // how many rows of that tree it sees, itself included
    std::int64_t chain;     // start in RowPlan::chains of those rows, or -1: rows 0 to num_own - 1
};

// For each sequence the parents of the rows of its tree that earlier calls have stored behind its length.
using PendingRows = std::vector<std::vector<std::int32_t>>;

// For every row of a call, the path of rows that it attends to beside its sequence's past.
struct RowPlan {
    std::vector<RowView> rows;
    std::vector<std::int32_t> chains;

    // bounds: row offsets of the segments; parents: [R] within the sequence's tree, or null for causal rows.
    static RowPlan trees(const std::vector<std::int64_t>& bounds, const std::int32_t* parents, std::int64_t num_rows,
                         const PendingRows& pending) {
        RowPlan plan;
        check(!bounds.empty() && bounds.front() == 0 && bounds.back() == num_rows, "bounds must run from 0 to R.");
        check_equal("the number of lists of pending rows, one for each pair of bounds,", static_cast<std::int64_t>(pending.size()),
                    static_cast<std::int64_t>(bounds.size()) - 1);
        plan.rows.reserve(static_cast<std::size_t>(num_rows));
        for (std::size_t s = 0; s + 1 < bounds.size(); ++s) {
            check(bounds[s] <= bounds[s + 1], "bounds must not decrease.");
            plan.add_tree(static_cast<std::int32_t>(s), pending[s], parents == nullptr ? nullptr : parents + bounds[s],
                          static_cast<std::int32_t>(bounds[s + 1] - bounds[s]));
        }
        return plan;
    }

   private:
    void add_tree(std::int32_t sequence, const std::vector<std::int32_t>& pending, const std::int32_t* parents,
                  std::int32_t count) {
        const std::int32_t num_pending = static_cast<std::int32_t>(pending.size());
        std::vector<RowView> tree;
        tree.reserve(static_cast<std::size_t>(num_pending + count));
        for (std::int32_t i = 0; i < num_pending + count; ++i) {
            const std::int32_t parent = i < num_pending      ? pending[static_cast<std::size_t>(i)]
                                        : parents == nullptr ? i - 1
                                                             : parents[i - num_pending];
            if (parent < -1 || parent >= i)
                throw std::invalid_argument("row " + std::to_string(i) + " has parent " + std::to_string(parent) +
                                            "; a parent comes before its children.");
            const RowView* above = parent < 0 ? nullptr : &tree[static_cast<std::size_t>(parent)];
            RowView row{sequence, i, above == nullptr ? 1 : above->num_own + 1, -1};
            const bool follows = parent == i - 1 && (above == nullptr || above->chain < 0);
            if (!follows) row.chain = copy_path(above, i);
            tree.push_back(row);
        }
        rows.insert(rows.end(), tree.begin() + num_pending, tree.end());
    }

    std::int64_t copy_path(const RowView* above, std::int32_t own) {
        const std::int64_t begin = static_cast<std::int64_t>(chains.size());
        for (std::int64_t i = 0; above != nullptr && i < above->num_own; ++i)
            chains.push_back(above->chain < 0 ? static_cast<std::int32_t>(i)
                                              : chains[static_cast<std::size_t>(above->chain + i)]);
        chains.push_back(own);
        return begin;
    }
};

struct Heads {
    std::int64_t num_heads, num_kv_heads, head_dim;
    std::int64_t group() const { return num_heads / num_kv_heads; }

    void check_sizes() const {
        check(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0,
              "the number of query heads must be a multiple of the number of key/value heads.");
        check(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim must be 1 to 512.");
    }
};

// Neighbouring rows of one sequence.
struct RowRun {
    std::int64_t first, count;
};

// All rows and heads of an attention, cut into items that threads may take in any way: a group (a run of rows and heads
// that share keys) is one item, or, where groups are few, one item per stretch of kJoinedChunks chunks of positions, or per
// chunk. The parts of a stretch's chunks are joined in their order, and then those of the stretches, so that neither the cut
// nor the threads change a bit.
struct Attention {
    static constexpr std::int64_t kJoinedChunks = 4;
    const Kernels* kernels;
    const RowPlan* plan;
    Heads heads;
    bool is_bytes;
    float scale;
    const float* queries;
    std::int64_t query_stride;
    float* outputs;
    std::int64_t output_stride;
    std::int64_t rows_per_item = 1, heads_per_item = 1;
    std::int64_t chunks_per_item = 0;  // 1 or kJoinedChunks, or 0: all
    std::uint8_t* rounded = nullptr;  // [key/value head][row][head][query_bytes], of caches in bytes
    float* parts = nullptr;  // [item][row][head][part_floats], where items are chunks or stretches
    std::vector<RowRun> runs = {};
    std::vector<std::int64_t> run_chunks = {};    // [run]: chunks of positions
    std::vector<std::int64_t> first_items = {};   // [run + 1]: items of one group of heads in the runs before it
    std::vector<std::int64_t> run_blocks = {};    // [run]: blocks of positions
    std::unique_ptr<std::atomic<std::int64_t>[]> num_done = {};  // [group]: chunks of all layers so far

    // lengths[sequence]: cached positions. How many rows of a sequence and heads that share keys go together: reading a
    // key has a price of its own, but too few items leave threads idle.
    void choose_items(int num_threads, const std::vector<std::int64_t>& lengths) {
        std::int64_t best = INT64_MAX, best_rows = 1, best_heads = 1, best_chunks = 0;
        for (rows_per_item = kAttendRows; rows_per_item >= 1; rows_per_item /= 2) {
            cut_runs(lengths);
            for (heads_per_item = heads.group() < 4 ? heads.group() : 4; heads_per_item >= 1; --heads_per_item)
                for (const std::int64_t chunks : {std::int64_t{0}, kJoinedChunks, std::int64_t{1}}) {
                    chunks_per_item = chunks;
                    if (chunks > 0 && !may_split(num_threads)) break;
                    const std::int64_t cost = estimate_cost(num_threads);
                    if (cost >= best) continue;
                    best = cost;
                    best_rows = rows_per_item;
                    best_heads = heads_per_item;
                    best_chunks = chunks;
                }
        }
        rows_per_item = best_rows;
        heads_per_item = best_heads;
        chunks_per_item = best_chunks;
        cut_runs(lengths);
        first_items.assign(1, 0);
        for (const std::int64_t chunks : run_chunks) first_items.push_back(first_items.back() + items_of(chunks));
        if (chunks_per_item == 0) return;
        num_done.reset(new std::atomic<std::int64_t>[static_cast<std::size_t>(num_groups())]);
        for (std::int64_t group = 0; group < num_groups(); ++group) num_done[static_cast<std::size_t>(group)] = 0;
    }
    std::int64_t items_per_group() const { return (heads.group() + heads_per_item - 1) / heads_per_item; }
    std::int64_t num_runs() const { return static_cast<std::int64_t>(runs.size()); }
    std::int64_t num_groups() const { return num_runs() * heads.num_kv_heads * items_per_group(); }
    std::int64_t num_items() const {
        return first_items.back() * heads.num_kv_heads * items_per_group();
    }
    // Bytes of `rounded`.
    std::int64_t rounded_bytes() const {
        const std::int64_t count = static_cast<std::int64_t>(plan->rows.size()) * heads.num_heads + kQueriesBehind;
        return is_bytes ? count * query_bytes(heads.head_dim) : 0;
    }
    // To be done for all rows and heads before the first item, where the cache is in bytes.
    void round_query(std::int64_t row, std::int64_t head) const {
        kernels->round_query(queries + row * query_stride + head * heads.head_dim, heads.head_dim, scale, rounded_at(row, head));
    }
    // Bytes of `parts`.
    std::int64_t parts_bytes() const { return chunks_per_item > 0 ? num_items() * part_stride() * 4 : 0; }

    struct Done {
        std::int64_t row, num_rows, first_head, num_heads;
    };

    // views[sequence]; a window of 0 sees all positions. Items run over rows first, so that neighbours read the same keys.
    // Returns the outputs that are ready now, maybe none.
    Done run_item(std::int64_t item, const KeyRows* views, std::int64_t window) const {
        return chunks_per_item == 0 ? run_group(item, views, window) : run_part(item, views, window);
    }

   private:
    struct Group {
        RowRun run;
        std::int64_t kv_head, first_head, num_heads;
        AttendRow rows[kAttendRows];
        AttendJob job;

        bool sees(std::int64_t begin) const {
            for (std::int64_t i = 0; i < run.count; ++i)
                if (rows[i].first < begin + kKeyChunk && rows[i].last >= begin) return true;
            return false;
        }
    };

    std::uint8_t* rounded_at(std::int64_t row, std::int64_t head) const {
        const std::int64_t num_rows = static_cast<std::int64_t>(plan->rows.size()), group = heads.group();
        return rounded + ((head / group * num_rows + row) * group + head % group) * query_bytes(heads.head_dim);
    }

    const void* queries_of(std::int64_t row, std::int64_t head) const {
        if (is_bytes) return rounded_at(row, head);
        return queries + row * query_stride + head * heads.head_dim;
    }

    std::int64_t items_of(std::int64_t chunks) const {
        return chunks_per_item == 0 ? 1 : (chunks + chunks_per_item - 1) / chunks_per_item;
    }

    std::int64_t part_stride() const { return rows_per_item * heads_per_item * part_floats(heads.head_dim); }

    void describe_group(std::int64_t run, std::int64_t part, const KeyRows* views, std::int64_t window, Group& group) const {
        group.run = runs[static_cast<std::size_t>(run)];
        group.kv_head = part / items_per_group();
        const std::int64_t offset = part % items_per_group() * heads_per_item, left = heads.group() - offset;
        group.num_heads = left < heads_per_item ? left : heads_per_item;
        group.first_head = group.kv_head * heads.group() + offset;
        const KeyRows& cache = views[plan->rows[static_cast<std::size_t>(group.run.first)].sequence];
        for (std::int64_t i = 0; i < group.run.count; ++i) {
            const std::int64_t row = group.run.first + i;
            const RowView& view = plan->rows[static_cast<std::size_t>(row)];
            const std::int64_t position = cache.length + view.num_own - 1;
            group.rows[i] = {queries_of(row, group.first_head), nullptr,
                             view.chain < 0 ? nullptr : plan->chains.data() + view.chain,
                             window > 0 && position >= window ? position - window + 1 : 0, position};
        }
        group.job = {group.rows, group.run.count, group.num_heads, heads.head_dim,
                     static_cast<const char*>(cache.keys) + group.kv_head * cache.key_head_bytes,
                     static_cast<const char*>(cache.values) + group.kv_head * cache.value_head_bytes, cache.row_stride,
                     cache.length, 0, scale, false};
    }

    void attend_chunk(Group& group, std::int64_t begin, float* part) const {
        const std::int64_t floats = part_floats(heads.head_dim), stride = group.num_heads * floats;
        if (!group.sees(begin)) {
            for (std::int64_t i = 0; i < group.run.count * group.num_heads; ++i) part[i * floats] = -__builtin_inff();
            return;
        }
        for (std::int64_t i = 0; i < group.run.count; ++i) group.rows[i].part = part + i * stride;
        group.job.begin = begin;
        (is_bytes ? kernels->attend_bytes : kernels->attend_float)(&group.job);
    }

    std::size_t bytes_of(const Group& group) const {
        return static_cast<std::size_t>(group.run.count * group.num_heads * part_floats(heads.head_dim)) * sizeof(float);
    }

    void clear(const Group& group, float* state) const {
        const std::int64_t floats = part_floats(heads.head_dim);
        __builtin_memset(state, 0, bytes_of(group));
        for (std::int64_t i = 0; i < group.run.count * group.num_heads; ++i) state[i * floats] = -__builtin_inff();
    }

    // Of pairs that saw nothing a part holds no more than that.
    void clear_unseen(const Group& group, float* state) const {
        const std::int64_t floats = part_floats(heads.head_dim);
        for (float* one = state; one < state + group.run.count * group.num_heads * floats; one += floats)
            if (one[0] == -__builtin_inff()) __builtin_memset(one + 1, 0, static_cast<std::size_t>(floats - 1) * sizeof(float));
    }

    void join(const Group& group, const float* part, float* state) const {
        kernels->join_parts(part, group.run.count * group.num_heads, heads.head_dim, state);
    }

    Done finish(const Group& group, const float* state) const {
        for (std::int64_t i = 0; i < group.run.count * group.num_heads; ++i) {
            const std::int64_t row = group.run.first + i / group.num_heads, head = group.first_head + i % group.num_heads;
            kernels->finish_attention(state + i * part_floats(heads.head_dim), heads.head_dim,
                                      outputs + row * output_stride + head * heads.head_dim);
        }
        return {group.run.first, group.run.count, group.first_head, group.num_heads};
    }

    static constexpr std::int64_t kMostFloats = kAttendRows * 4 * (kPartHeader + kMaxHeadDim);

    // The part of a stretch of chunks from `first` on, joined in their order. give(chunk, room) tells where a chunk's part is.
    template <class Give>
    void join_stretch(Group& group, std::int64_t first, std::int64_t end, float* state, Give&& give) const {
        alignas(64) float part[kMostFloats];
        bool is_empty = true;
        for (std::int64_t chunk = first; chunk < std::min(first + kJoinedChunks, end); ++chunk) {
            if (!group.sees(chunk * kKeyChunk)) continue;
            const float* given = give(chunk, is_empty ? state : part);
            if (!is_empty) {
                join(group, given, state);
                continue;
            }
            if (given != state) __builtin_memcpy(state, given, bytes_of(group));
            clear_unseen(group, state);
            is_empty = false;
        }
        if (is_empty) clear(group, state);
    }

    void attend_stretch(Group& group, std::int64_t first, std::int64_t end, float* state) const {
        join_stretch(group, first, end, state, [&](std::int64_t chunk, float* room) {
            group.job.follows = chunk > first;
            attend_chunk(group, chunk * kKeyChunk, room);
            return room;
        });
    }

    Done run_group(std::int64_t item, const KeyRows* views, std::int64_t window) const {
        Group group;
        const std::int64_t run = item % num_runs(), end = run_chunks[static_cast<std::size_t>(run)];
        describe_group(run, item / num_runs(), views, window, group);
        alignas(64) float stretch[kMostFloats], state[kMostFloats];
        attend_stretch(group, 0, end, state);
        for (std::int64_t first = kJoinedChunks; first < end; first += kJoinedChunks) {
            attend_stretch(group, first, end, stretch);
            join(group, stretch, state);
        }
        return finish(group, state);
    }

    // One chunk or stretch of a group; whoever does the last one joins them.
    Done run_part(std::int64_t item, const KeyRows* views, std::int64_t window) const {
        const std::int64_t all = first_items.back(), part = item / all, at = item % all;
        std::int64_t run = 0;
        while (first_items[static_cast<std::size_t>(run + 1)] <= at) ++run;
        const std::int64_t start = first_items[static_cast<std::size_t>(run)], count = first_items[static_cast<std::size_t>(run + 1)] - start;
        Group group;
        describe_group(run, part, views, window, group);
        float* own = parts + item * part_stride();
        if (chunks_per_item == 1)
            attend_chunk(group, (at - start) * kKeyChunk, own);
        else
            attend_stretch(group, (at - start) * kJoinedChunks, run_chunks[static_cast<std::size_t>(run)], own);
        auto& done = num_done[static_cast<std::size_t>(part * num_runs() + run)];
        if ((done.fetch_add(1, std::memory_order_acq_rel) + 1) % count != 0) return {0, 0, 0, 0};
        alignas(64) float stretch[kMostFloats], state[kMostFloats];
        const float* first = parts + (part * all + start) * part_stride();
        clear(group, state);
        for (std::int64_t i = 0; i < count; i += chunks_per_item == 1 ? kJoinedChunks : 1) {
            if (chunks_per_item == 1)
                join_stretch(group, i, count, stretch, [&](std::int64_t chunk, float*) { return first + chunk * part_stride(); });
            join(group, chunks_per_item == 1 ? stretch : first + i * part_stride(), state);
        }
        return finish(group, state);
    }

    // Runs of rows of one sequence, of nearly equal length.
    void cut_runs(const std::vector<std::int64_t>& lengths) {
        runs.clear();
        run_blocks.clear();
        run_chunks.clear();
        const std::int64_t num_rows = static_cast<std::int64_t>(plan->rows.size());
        for (std::int64_t begin = 0, end; begin < num_rows; begin = end) {
            const std::int32_t sequence = plan->rows[static_cast<std::size_t>(begin)].sequence;
            for (end = begin; end < num_rows && plan->rows[static_cast<std::size_t>(end)].sequence == sequence;) ++end;
            const std::int64_t count = end - begin, parts = (count + rows_per_item - 1) / rows_per_item;
            for (std::int64_t part = 0; part < parts; ++part) {
                const std::int64_t first = begin + count * part / parts;
                add_run({first, begin + count * (part + 1) / parts - first}, lengths[static_cast<std::size_t>(sequence)]);
            }
        }
    }

    void add_run(RowRun run, std::int64_t length) {
        std::int64_t most = 0;
        for (std::int64_t row = run.first; row < run.first + run.count; ++row)
            most = std::max(most, length + plan->rows[static_cast<std::size_t>(row)].num_own);
        runs.push_back(run);
        run_blocks.push_back((most + kKeyBlock - 1) / kKeyBlock);
        run_chunks.push_back((most + kKeyChunk - 1) / kKeyChunk);
    }

    bool may_split(int num_threads) const { return num_threads > 1 && num_groups() < 8 * num_threads; }

    // The time of all threads at most, where each takes an item whenever it is done with one: all work, and the largest item
    // for every thread but one (Graham, 1969); or as many items as come to a thread, each of them the largest.
    std::int64_t estimate_cost(int num_threads) const {
        constexpr std::int64_t kChunkBlocks = kKeyChunk / kKeyBlock;
        std::int64_t all = 0, largest = 0, num_items = 0;
        for (std::size_t run = 0; run < runs.size(); ++run) {
            const std::int64_t block_cost = 2 * heads_per_item * runs[run].count, chunk_cost = kChunkBlocks * kernels->attend_setup;
            const std::int64_t longest = chunks_per_item == 0 ? run_chunks[run] : std::min(run_chunks[run], chunks_per_item);
            const std::int64_t joins = chunks_per_item == 0 ? 0 : block_cost;  // the item's part costs about what a block does
            num_items += items_of(run_chunks[run]);
            all += run_chunks[run] * chunk_cost + run_blocks[run] * block_cost + items_of(run_chunks[run]) * joins;
            largest = std::max(largest, longest * chunk_cost + std::min(run_blocks[run], longest * kChunkBlocks) * block_cost + joins);
        }
        const std::int64_t groups = heads.num_kv_heads * items_per_group();
        const std::int64_t most_items = (num_items * groups + num_threads - 1) / num_threads;
        return std::min(all * groups + largest * (num_threads - 1), most_items * largest * num_threads);
    }
};

// The caches of a call, checked against its rows.
class Caches {
   public:
    // keys, values: lists of arrays, float32 [L, G, C, D] or uint8 [L, G, C / 32, bytes of a block]; lengths: committed slots.
    Caches(const nb::list& keys, const nb::list& values, const std::vector<std::int64_t>& lengths,
           const std::vector<std::int64_t>& bounds, const PendingRows& pending, std::int64_t num_kv_heads,
           std::int64_t head_dim);

    bool is_bytes() const { return is_bytes_; }
    std::int64_t num_layers() const { return num_layers_; }
    std::size_t size() const { return entries_.size(); }
    std::vector<std::int64_t> lengths() const {
        std::vector<std::int64_t> lengths;
        for (const Entry& entry : entries_) lengths.push_back(entry.length);
        return lengths;
    }
    // Commits rows behind each length; the room for them was checked as part of the call's.
    void extend(const std::vector<std::int64_t>& counts) {
        for (std::size_t s = 0; s < entries_.size(); ++s) entries_[s].length += counts[s];
    }
    // Moves rows of a sequence to other slots at all layers, one after the other.
    void move(std::size_t sequence, const std::vector<std::int64_t>& source, const std::vector<std::int64_t>& target) const;
    KeyRows at(std::size_t sequence, std::int64_t layer) const {
        const Entry& e = entries_[sequence];
        const std::int64_t heads = layer * num_kv_heads_;
        const std::int64_t key_bytes = e.capacity / kKeyBlock * key_block_bytes(head_dim_);
        const std::int64_t value_bytes = e.capacity / kKeyBlock * value_block_bytes(head_dim_);
        const std::int64_t float_bytes = e.capacity * head_dim_ * 4;
        if (!is_bytes_) return {e.keys + heads * float_bytes, e.values + heads * float_bytes, float_bytes, float_bytes, head_dim_, e.length};
        return {e.keys + heads * key_bytes, e.values + heads * value_bytes, key_bytes, value_bytes, 0, e.length};
    }

   private:
    struct Entry {
        char* keys;
        char* values;
        std::int64_t capacity, length;
    };
    bool is_bytes_ = true;
    std::int64_t num_layers_ = INT64_MAX, num_kv_heads_, head_dim_;
    std::vector<Entry> entries_;
};

// Keys or values of one head at one layer, as caches hold them.
struct HeadSlots {
    void* start;
    std::int64_t head_dim;
    bool is_bytes, is_value;

    // Write a row in the cache's precision.
    void put(const Kernels& kernels, std::int64_t slot, const float* x) const {
        if (!is_bytes) {
            __builtin_memcpy(static_cast<float*>(start) + slot * head_dim, x, static_cast<std::size_t>(head_dim) * sizeof(float));
            return;
        }
        alignas(64) std::int8_t values[kMaxHeadDim];
        std::uint8_t* bytes = static_cast<std::uint8_t*>(start);
        if (is_value) {
            const float scale = kernels.quantize_run(x, head_dim, values, nullptr);
            put_value(bytes, slot, head_dim, values, scale);
            return;
        }
        float scales[kMaxHeadDim / kGroup];
        for (std::int64_t group = 0; group < num_groups(head_dim); ++group) {
            const std::int64_t first = group * kGroup, count = std::min<std::int64_t>(kGroup, head_dim - first);
            if (count < kGroup) __builtin_memset(values + first, 0, kGroup);
            scales[group] = kernels.quantize_run(x + first, count, values + first, nullptr);
        }
        put_key(bytes, slot, head_dim, values, scales);
    }

    void move(std::int64_t source, std::int64_t target) const {
        if (!is_bytes) {
            float* rows = static_cast<float*>(start);
            __builtin_memmove(rows + target * head_dim, rows + source * head_dim, static_cast<std::size_t>(head_dim) * sizeof(float));
            return;
        }
        std::uint8_t* bytes = static_cast<std::uint8_t*>(start);
        (is_value ? copy_value : copy_key)(bytes, source, bytes, target, head_dim);
    }

    // The row as floats.
    void get(std::int64_t slot, float* out) const {
        if (!is_bytes) {
            __builtin_memcpy(out, static_cast<const float*>(start) + slot * head_dim, static_cast<std::size_t>(head_dim) * sizeof(float));
            return;
        }
        const std::uint8_t* bytes = static_cast<const std::uint8_t*>(start);
        for (std::int64_t i = 0; i < head_dim; ++i) {
            const std::int64_t group = i / kGroup * kKeyGroupBytes + key_place(slot, head_dim);
            const std::int64_t at = is_value ? value_place(slot, i, head_dim) : group + i % kGroup / 4 * 64 + i % 4;
            float scale;
            __builtin_memcpy(&scale, bytes + (is_value ? value_scale_place(slot, head_dim) : group + 8 * 64), sizeof scale);
            out[i] = scale * static_cast<float>(bytes[at] - 128);
        }
    }
};

inline HeadSlots head_slots(const KeyRows& cache, std::int64_t kv_head, std::int64_t head_dim, bool is_bytes, bool is_value) {
    char* start = is_value ? static_cast<char*>(cache.values) + kv_head * cache.value_head_bytes
                           : static_cast<char*>(cache.keys) + kv_head * cache.key_head_bytes;
    return {start, head_dim, is_bytes, is_value};
}

inline void Caches::move(std::size_t sequence, const std::vector<std::int64_t>& source, const std::vector<std::int64_t>& target) const {
    for (std::int64_t layer = 0; layer < num_layers_; ++layer)
        for (std::int64_t head = 0; head < num_kv_heads_; ++head)
            for (const bool is_value : {false, true}) {
                const HeadSlots slots = head_slots(at(sequence, layer), head, head_dim_, is_bytes_, is_value);
                for (std::size_t i = 0; i < source.size(); ++i) slots.move(source[i], target[i]);
            }
}

}  // namespace sakiyomi
