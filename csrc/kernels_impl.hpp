// The routines of kernels.hpp over the sixteen lanes of a simd_*.hpp included before. Internal linkage throughout, so
// that no wide instruction leaks into code that the linker shares. Tiling over rows and blocks never changes the
// sequence of operations that leads to one number.
#include "kernels.hpp"
#include "spans.hpp"

namespace {

using sakiyomi::AttendJob;
using sakiyomi::AttendRow;
using sakiyomi::kAttendRows;
using sakiyomi::kGroup;
using sakiyomi::first_run;
using sakiyomi::group_bytes;
using sakiyomi::GroupPlace;
using sakiyomi::input_group_bytes;
using sakiyomi::is_in_nibbles;
using sakiyomi::kKeyBlock;
using sakiyomi::kKeyChunk;
using sakiyomi::kPartHeader;
using sakiyomi::kSpanRun;
using sakiyomi::kSpansBytes;
using sakiyomi::part_floats;
using sakiyomi::place_of_group;
using sakiyomi::kLanes;
using sakiyomi::kMaxHeadDim;
using sakiyomi::LinearJob;
using sakiyomi::Storage;
using sakiyomi::value_bytes;

enum { kFarBytes = 7680 };  // of what the second cache fetches

// How tiles go over a run of blocks: how many at once for so many rows, and how far ahead the first cache fetches. Where
// `is_fetched_twice`, the second cache fetches further ahead.
struct NarrowTiles {
    enum { kRun = 1, kAheadBytes = kNarrowAheadBytes, kPrefersSpans = kNarrowPrefersSpans };
    static constexpr int blocks(int) { return 1; }
    static constexpr bool is_fetched_twice(int) { return false; }
};

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// ---------------------------------------------------------------------------------------------- linear

inline void store_outputs(const LinearJob& job, int64_t row, int64_t block, Vf value) {
    const int64_t n = block * kLanes;
    const int64_t width = min_of(kLanes, job.num_outputs - n);
    float* out = job.outputs + row * job.output_stride + n;
    const float* residual = job.residual ? job.residual + row * job.output_stride + n : nullptr;
    if (width == kLanes) {
        if (job.bias) value = add(value, load(job.bias + n));
        if (residual) value = add(load(residual), value);
        store(out, value);
    } else {
        if (job.bias) value = add(value, load_tail(job.bias + n, width));
        if (residual) value = add(load_tail(residual, width), value);
        store_tail(out, value, width);
    }
}

// Dot products of a group of weights with a group of each row; exact integers in whatever order.
template <Storage STORAGE, int ROWS, int BLOCKS>
inline __attribute__((always_inline)) void dot_group(const uint8_t* weights, int64_t block_bytes, const int8_t* values,
                                                     Vi (*sums)[BLOCKS]) {
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b)
            sums[r][b] = is_in_nibbles(STORAGE) ? fresh_zero() : add(fresh_zero(), start_sums(values + r * kGroup));
    Wq w[BLOCKS];
    if (is_in_nibbles(STORAGE) && BLOCKS == 1 && ROWS < kShiftedRows) {
        // Two chains of sums, since few rows wait for each product; there are registers for both.
        Vi high[ROWS];
        for (Vi& sum : high) sum = fresh_zero();
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const Wq upper = load_high(weights + k * 4 * kLanes), lower = load_low(weights + k * 4 * kLanes);
            for (int r = 0; r < ROWS; ++r) {
                high[r] = dot4(high[r], upper, load_inputs(values + r * kGroup + (k + 4) * 4));
                sums[r][0] = dot4(sums[r][0], lower, load_inputs(values + r * kGroup + k * 4));
            }
        }
        for (int r = 0; r < ROWS; ++r) sums[r][0] = add(sums[r][0], shift_high(high[r]));
    } else if (is_in_nibbles(STORAGE)) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            for (int b = 0; b < BLOCKS; ++b) {
                const uint8_t* four = weights + b * block_bytes + k * 4 * kLanes;
                w[b] = ROWS < kShiftedRows ? load_high(four) : load_shifted(four);
            }
            for (int r = 0; r < ROWS; ++r) {
                const Aq a = load_inputs(values + r * kGroup + (k + 4) * 4);
                for (int b = 0; b < BLOCKS; ++b) sums[r][b] = dot4(sums[r][b], w[b], a);
            }
        }
        for (int r = 0; r < ROWS && ROWS < kShiftedRows; ++r)
            for (int b = 0; b < BLOCKS; ++b) sums[r][b] = shift_high(sums[r][b]);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            for (int b = 0; b < BLOCKS; ++b) w[b] = load_low(weights + b * block_bytes + k * 4 * kLanes);
            for (int r = 0; r < ROWS; ++r) {
                const Aq a = load_inputs(values + r * kGroup + k * 4);
                for (int b = 0; b < BLOCKS; ++b) sums[r][b] = dot4(sums[r][b], w[b], a);
            }
        }
    } else {
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            for (int b = 0; b < BLOCKS; ++b) w[b] = load_weights(weights + b * block_bytes + k * 4 * kLanes);
            for (int r = 0; r < ROWS; ++r) {
                const Aq a = load_inputs(values + r * kGroup + k * 4);
                for (int b = 0; b < BLOCKS; ++b) sums[r][b] = dot4(sums[r][b], w[b], a);
            }
        }
    }
}

// The scales and mins of a block's groups.
template <Storage STORAGE>
struct Scales {
    void begin(const uint8_t*) {}
    void of_group(const uint8_t* halves, Vf* scale, Vf* low) const {
        *scale = load(reinterpret_cast<const uint16_t*>(halves));
        *low = load(reinterpret_cast<const uint16_t*>(halves) + kLanes);
    }
};

template <>
struct Scales<Storage::kSpans> {
    Vi low_base, high_base;
    void begin(const uint8_t* block) {
        SpanBases bases;
        __builtin_memcpy(&bases, block, sizeof bases);
        low_base = set1_int(static_cast<int32_t>(bases.low));
        high_base = set1_int(static_cast<int32_t>(bases.high));
    }
    void of_group(const uint8_t* place, Vf* scale, Vf* low) const {
        const Vi spans = load_spans(place);
        *low = low_ends(spans, low_base);
        const Vf length = sub(high_ends(spans, high_base), *low), large = mul(length, set1(kLargeStep));
        *scale = sub(large, sub(large, mul(length, set1(kSpanStep))));  // as scale_of_length
    }
};

// What a group adds to the totals of one row and block: the only rounding steps of a quantized product.
inline Vf add_group(Vf total, Vf sum, Vf scale, Vf low, const float* input_scale, const float* input_sum) {
    total = fma(sum, mul(scale, set1(*input_scale)), total);
    return fma(low, set1(*input_sum), total);
}

// What to fetch while a tile is computed: for each of its groups one of blocks first, first + step, ... at `next`; from
// `end` on those of the following tile. Null: nothing.
struct Ahead {
    const uint8_t* next;
    const uint8_t* end;
    int64_t first, step;
};

// Lines that are fetched for each group, as many as lie between one and the next or a few more.
template <Storage STORAGE>
constexpr int kFetchedBytes = is_in_nibbles(STORAGE) ? 320 : 576;

// From the group at `next` to that of the following tile, where it lies behind `end`.
template <int BLOCKS>
inline void wrap(Ahead& ahead, int64_t block_bytes) {
    if (ahead.next < ahead.end) return;
    ahead.next += (BLOCKS - 1) * block_bytes;
    ahead.end = ahead.next + BLOCKS * block_bytes;
}

template <Storage STORAGE, int BLOCKS>
inline void fetch_far_ahead(Ahead& ahead, int64_t block_bytes) {
    wrap<BLOCKS>(ahead, block_bytes);
    constexpr int kBytes = kFetchedBytes<STORAGE>;
    for (int b = 0; b < BLOCKS; ++b)
        for (int line = 0; line < kBytes; line += 64) prefetch_far(ahead.next + b * block_bytes + line);
    ahead.next += kBytes;
}

template <Storage STORAGE, int BLOCKS>
inline void fetch_ahead(Ahead& ahead, int64_t block_bytes) {
    if (ahead.next == nullptr) return;
    wrap<BLOCKS>(ahead, block_bytes);
    constexpr int kBytes = kFetchedBytes<STORAGE>;
    if (ahead.step == 1) {
        for (int b = 0; b < BLOCKS; ++b)
            for (int line = 0; line < kBytes; line += 64) prefetch(ahead.next + b * block_bytes + line);
    } else {
        for (int64_t b = ahead.first; b < BLOCKS; b += ahead.step)
            for (int line = 0; line < kBytes; line += 64) prefetch(ahead.next + b * block_bytes + line);
    }
    ahead.next += kBytes;
}

// The totals of a tile: in registers where they fit beside the integer sums, else in memory, so that those have the registers.
template <int ROWS, int BLOCKS, bool ARE_HELD>
struct Totals {
    Vf values[ROWS][BLOCKS];
    explicit Totals(float*) {}
    Vf get(int r, int b) const { return values[r][b]; }
    void set(int r, int b, Vf value) { values[r][b] = value; }
};

template <int ROWS, int BLOCKS>
struct Totals<ROWS, BLOCKS, false> {
    float* values;  // [ROWS][BLOCKS][16]
    explicit Totals(float* room) : values(room) {}
    Vf get(int r, int b) const { return load(values + (r * BLOCKS + b) * kLanes); }
    void set(int r, int b, Vf value) { store(values + (r * BLOCKS + b) * kLanes, value); }
};

template <Storage STORAGE, int ROWS, int BLOCKS, bool IS_FETCHED_TWICE>
__attribute__((noinline)) void quantized_tile(const LinearJob& job, int64_t row, int64_t block, float* room, Ahead ahead) {
    const int64_t num_groups = job.num_inputs / kGroup, input_bytes = input_group_bytes(job.num_rows);
    const int64_t num_rows = job.num_rows, block_bytes = job.block_bytes;  // stores must not make the loop read them again
    const uint8_t* weights = job.weights + block * block_bytes;
    const uint8_t* group_inputs = job.inputs;
    Totals<ROWS, BLOCKS, ROWS * BLOCKS <= kHeldTotals> totals(room);
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) totals.set(r, b, set1(0.0f));
    Ahead far{weights + kFarBytes, weights + block_bytes, 0, 1};
    Scales<STORAGE> block_scales;
    block_scales.begin(weights);
    const auto add_next = [&](const uint8_t* group, const uint8_t* halves) __attribute__((always_inline)) {
        fetch_ahead<STORAGE, BLOCKS>(ahead, block_bytes);
        if (IS_FETCHED_TWICE && ahead.step == 1) fetch_far_ahead<STORAGE, BLOCKS>(far, block_bytes);
        // One block's early: what waits for products must not keep them from the units. Those of several would lack registers.
        Vf scale, low;
        if (BLOCKS == 1) block_scales.of_group(halves, &scale, &low);
        Vi sums[ROWS][BLOCKS];
        dot_group<STORAGE, ROWS, BLOCKS>(group, block_bytes, reinterpret_cast<const int8_t*>(group_inputs) + row * kGroup, sums);
        const float* scales = reinterpret_cast<const float*>(group_inputs + num_rows * kGroup) + row;
        const float* scaled_sums = scales + num_rows;
        asm("" : "+r"(scaled_sums));  // one address, or each row's keeps a register
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; ++b) {
            if (BLOCKS > 1) {
                const uint8_t* block = weights + b * block_bytes;
                asm("" : "+r"(block));  // its bases are read again
                block_scales.begin(block);
                block_scales.of_group(halves + b * block_bytes, &scale, &low);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
                totals.set(r, b, add_group(totals.get(r, b), to_float(sums[r][b]), scale, low, scales + r, scaled_sums + r));
        }
        group_inputs += input_bytes;
    };
    constexpr bool kHasRuns = STORAGE == Storage::kSpans;
    for (int64_t first = 0, left = first_run(STORAGE, num_groups); first < num_groups; first += left, left = kSpanRun) {
        const GroupPlace place = place_of_group(STORAGE, first, num_groups);
        const uint8_t* group = weights + place.values;
        const uint8_t* halves = weights + place.halves;
        for (int64_t i = 0; i < left; ++i) {
            add_next(group, halves);
            group += kHasRuns ? value_bytes(STORAGE) : group_bytes(STORAGE);
            halves += kHasRuns ? int64_t{kSpansBytes} : group_bytes(STORAGE);
        }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) store_outputs(job, row + r, block + b, totals.get(r, b));
}

template <class Tiles, Storage STORAGE, int ROWS>
void run_tile(const LinearJob& job, int64_t row, int64_t block, int64_t num_blocks,
              float* totals, Ahead ahead) {
    constexpr int kMost = Tiles::blocks(ROWS);
    constexpr bool kTwice = Tiles::is_fetched_twice(ROWS);
    for (int64_t b = 0; b < num_blocks;) {
        const int64_t left = num_blocks - b;
        int64_t taken = 1;
        if (left >= kMost) {
            taken = kMost;
            quantized_tile<STORAGE, ROWS, kMost, kTwice>(job, row, block + b, totals, ahead);
        } else if (kMost > 2 && left >= 2) {
            taken = 2;
            quantized_tile<STORAGE, ROWS, (kMost > 2 ? 2 : 1), kTwice>(job, row, block + b, totals, ahead);
        } else {
            quantized_tile<STORAGE, ROWS, 1, kTwice>(job, row, block + b, totals, ahead);
        }
        if (ahead.next != nullptr) {
            ahead.next += taken * job.block_bytes;
            ahead.end += taken * job.block_bytes;
        }
        b += taken;
    }
}

template <class Tiles, Storage STORAGE>
void run_rows(const LinearJob& job, int64_t row, int64_t count, int64_t block,
              int64_t num_blocks, float* totals, Ahead ahead) {
#define SAKIYOMI_ROWS(n) \
    case n: return run_tile<Tiles, STORAGE, (n <= kTileRows ? n : 1)>(job, row, block, num_blocks, totals, ahead)
    switch (count) {
        SAKIYOMI_ROWS(1);
        SAKIYOMI_ROWS(2);
        SAKIYOMI_ROWS(3);
        SAKIYOMI_ROWS(4);
        SAKIYOMI_ROWS(5);
        SAKIYOMI_ROWS(6);
        SAKIYOMI_ROWS(7);
        SAKIYOMI_ROWS(8);
    }
#undef SAKIYOMI_ROWS
}

// All rows over a few neighbouring blocks, in tiles of nearly equal size. The first one streams the blocks, or, where
// there are more, each fetches a share of the next blocks, so that memory works all the time.
template <class Tiles, Storage STORAGE>
void run_quantized(const LinearJob& job, int64_t first_block, int64_t last_block) {
    alignas(64) float totals[kTileRows * Tiles::kRun * kLanes];
    const int64_t num_tiles = (job.num_rows + kTileRows - 1) / kTileRows;
    for (int64_t block = first_block; block < last_block; block += Tiles::kRun) {
        const int64_t num_blocks = min_of(Tiles::kRun, last_block - block);
        const uint8_t* weights = job.weights + block * job.block_bytes;
        if (num_tiles == 1) {
            const Ahead near{weights + Tiles::kAheadBytes, weights + job.block_bytes, 0, 1};
            run_rows<Tiles, STORAGE>(job, 0, job.num_rows, block, num_blocks, totals, near);
            continue;
        }
        const uint8_t* next = (block + Tiles::kRun) * kLanes < job.num_outputs ? weights + Tiles::kRun * job.block_bytes : nullptr;
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t row = job.num_rows * tile / num_tiles, end = job.num_rows * (tile + 1) / num_tiles;
            const Ahead share{next, next + job.block_bytes, tile, num_tiles};
            run_rows<Tiles, STORAGE>(job, row, end - row, block, num_blocks, totals, share);
        }
    }
}

template <class Tiles>
void linear_quantized(const LinearJob* job, int64_t first_block, int64_t last_block) {
    switch (job->storage) {
        case Storage::kSpans: return run_quantized<Tiles, Storage::kSpans>(*job, first_block, last_block);
        case Storage::kNibbles: return run_quantized<Tiles, Storage::kNibbles>(*job, first_block, last_block);
        default: return run_quantized<Tiles, Storage::kBytes>(*job, first_block, last_block);
    }
}

enum { kDenseAheadBytes = 1920 };
enum { kDenseRun = 64 };  // products summed before they join the total: one long sum would round more

template <int ROWS, int BLOCKS, bool IS_FIRST_PASS>
void dense_tile(const LinearJob& job, int64_t row, int64_t block) {
    const uint8_t* bytes = job.weights + block * job.block_bytes;
    const float* inputs[ROWS];
    for (int r = 0; r < ROWS; ++r) inputs[r] = reinterpret_cast<const float*>(job.inputs + (row + r) * job.input_stride);
    Vf total[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) total[r][b] = set1(0.0f);
    for (int64_t start = 0; start < job.num_inputs; start += kDenseRun) {
        const int64_t end = min_of(start + kDenseRun, job.num_inputs);
        Vf part[ROWS][BLOCKS];
        for (int r = 0; r < ROWS; ++r)
            for (int b = 0; b < BLOCKS; ++b) part[r][b] = set1(0.0f);
        for (int64_t k = start; k < end; ++k) {
            const uint8_t* here = bytes + k * kLanes * 4;
            if (IS_FIRST_PASS)
                for (int b = 0; b < BLOCKS; ++b) prefetch(here + b * job.block_bytes + kDenseAheadBytes);
            Vf w[BLOCKS];
            for (int b = 0; b < BLOCKS; ++b) w[b] = load(reinterpret_cast<const float*>(here + b * job.block_bytes));
            for (int r = 0; r < ROWS; ++r) {
                const Vf x = set1(inputs[r][k]);
                for (int b = 0; b < BLOCKS; ++b) part[r][b] = fma(w[b], x, part[r][b]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            for (int b = 0; b < BLOCKS; ++b) total[r][b] = add(total[r][b], part[r][b]);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < BLOCKS; ++b) store_outputs(job, row + r, block + b, total[r][b]);
}

template <int BLOCKS, bool IS_FIRST_PASS>
void dense_rows(const LinearJob& job, int64_t row, int64_t count, int64_t block) {
    switch (count) {
        case 1: return dense_tile<1, BLOCKS, IS_FIRST_PASS>(job, row, block);
        case 2: return dense_tile<2, BLOCKS, IS_FIRST_PASS>(job, row, block);
        case 3: return dense_tile<3, BLOCKS, IS_FIRST_PASS>(job, row, block);
        default: return dense_tile<4, BLOCKS, IS_FIRST_PASS>(job, row, block);
    }
}

// All rows over a few neighbouring blocks: the first pass streams them, later passes find them in the cache.
template <int BLOCKS>
void dense_blocks(const LinearJob& job, int64_t block) {
    dense_rows<BLOCKS, true>(job, 0, min_of(kDenseRows, job.num_rows), block);
    for (int64_t row = kDenseRows; row < job.num_rows; row += kDenseRows)
        dense_rows<BLOCKS, false>(job, row, min_of(kDenseRows, job.num_rows - row), block);
}

void linear_dense(const LinearJob* job, int64_t first_block, int64_t last_block) {
    int64_t block = first_block;
    for (; block + kDenseBlocks <= last_block; block += kDenseBlocks) dense_blocks<kDenseBlocks>(*job, block);
    for (; block < last_block; ++block) dense_blocks<1>(*job, block);
}

// ---------------------------------------------------------------------------------------------- rows

// Symmetric 8-bit values in groups of 32: scale = largest magnitude / 127.
#ifdef SAKIYOMI_HAS_FOUR_GROUPS
void quantize(const float* x, int64_t num_groups, uint8_t* out, int64_t row, int64_t num_rows) {
    const int64_t step = input_group_bytes(num_rows);
    for (int64_t group = 0; group < num_groups; group += 4) {
        const float* numbers[4];
        int8_t* values[4];
        float* scales[4];
        for (int i = 0; i < 4; ++i) {
            const int64_t at = min_of(group + i, num_groups - 1);  // the last one again, where four are not left
            uint8_t* record = out + at * step;
            numbers[i] = x + at * kGroup;
            values[i] = reinterpret_cast<int8_t*>(record) + row * kGroup;
            scales[i] = reinterpret_cast<float*>(record + num_rows * kGroup) + row;
        }
        quantize_four(numbers, values, scales, num_rows);
    }
}
#else
void quantize(const float* x, int64_t num_groups, uint8_t* out, int64_t row, int64_t num_rows) {
    const int64_t step = input_group_bytes(num_rows);
    for (int64_t group = 0; group < num_groups; ++group, x += kGroup, out += step) {
        const Vf x0 = load(x), x1 = load(x + kLanes);
        const float largest = reduce_max(max(abs(x0), abs(x1)));
        const bool is_zero = largest < 1e-30f;  // below this 127 / largest could overflow
        const float scale = is_zero ? 0.0f : largest / 127.0f, inverse = is_zero ? 0.0f : 127.0f / largest;
        const Vi v0 = round_to_int(mul(x0, set1(inverse))), v1 = round_to_int(mul(x1, set1(inverse)));
        int8_t* values = reinterpret_cast<int8_t*>(out) + row * kGroup;
        store_int8(values, v0);
        store_int8(values + kLanes, v1);
        float* scales = reinterpret_cast<float*>(out + num_rows * kGroup) + row;
        scales[0] = scale;
        scales[num_rows] = scale * static_cast<float>(reduce_add(add(v0, v1)));
    }
}
#endif

void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* out) {
    const int64_t whole = width - width % kLanes, tail = width - whole;
    Vf squares[4];
    for (Vf& sum : squares) sum = set1(0.0f);
    const auto see = [](Vf v, Vf& sum) { sum = fma(v, v, sum); };
    int64_t at = 0;
    for (; at + 4 * kLanes <= whole; at += 4 * kLanes)
        for (int i = 0; i < 4; ++i) see(load(x + at + i * kLanes), squares[i]);
    for (; at < whole; at += kLanes) see(load(x + at), squares[0]);
    if (tail) see(load_tail(x + whole, tail), squares[1]);
    const float mean = reduce_add(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(width);
    const Vf inverse = set1(1.0f / sqrt_scalar(mean + eps));
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, mul(mul(load(x + i), inverse), load(weight + i)));
    if (tail) {
        const Vf v = mul(mul(load_tail(x + whole, tail), inverse), load_tail(weight + whole, tail));
        store_tail(out + whole, v, tail);
    }
}

inline void rotate(Vf x0, Vf x1, Vf cosine, Vf sine, Vf* y0, Vf* y1) {
    *y0 = sub(mul(x0, cosine), mul(x1, sine));
    *y1 = add(mul(x1, cosine), mul(x0, sine));
}

// One head: x and out [2 * half], which may be the same.
void rope(const float* x, const float* cosines, const float* sines, int64_t half, float* out) {
    const int64_t whole = half - half % kLanes, tail = half - whole;
    Vf y0, y1;
    for (int64_t i = 0; i < whole; i += kLanes) {
        rotate(load(x + i), load(x + half + i), load(cosines + i), load(sines + i), &y0, &y1);
        store(out + i, y0);
        store(out + half + i, y1);
    }
    if (tail) {
        rotate(load_tail(x + whole, tail), load_tail(x + half + whole, tail), load_tail(cosines + whole, tail),
               load_tail(sines + whole, tail), &y0, &y1);
        store_tail(out + whole, y0, tail);
        store_tail(out + half + whole, y1, tail);
    }
}

void from_half(const uint16_t* x, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += kLanes) store(out + i, load(x + i));
}

// e^x for x clamped to [-86, 88]: x = n log 2 + r, a Taylor polynomial in r (error below 6e-9), n into the exponent.
inline Vf exp_clamped(Vf x) {
    x = max(set1(-86.0f), min(set1(88.0f), x));
    const Vi n = round_to_int(mul(x, set1(1.44269504088896341f)));
    const Vf turns = to_float(n);
    Vf r = fma(turns, set1(-0.693359375f), x);
    r = fma(turns, set1(2.12194440054690583e-4f), r);
    Vf y = set1(1.0f / 5040.0f);
    y = fma(y, r, set1(1.0f / 720.0f));
    y = fma(y, r, set1(1.0f / 120.0f));
    y = fma(y, r, set1(1.0f / 24.0f));
    y = fma(y, r, set1(1.0f / 6.0f));
    y = fma(y, r, set1(0.5f));
    y = fma(y, r, set1(1.0f));
    y = fma(y, r, set1(1.0f));
    return scale_by_power(y, n);
}

inline Vf silu(Vf x) { return div(x, add(set1(1.0f), exp_clamped(sub(set1(0.0f), x)))); }

void silu_mul(const float* gate, const float* up, int64_t count, float* out) {
    const int64_t whole = count - count % kLanes, tail = count - whole;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, mul(silu(load(gate + i)), load(up + i)));
    if (tail) store_tail(out + whole, mul(silu(load_tail(gate + whole, tail)), load_tail(up + whole, tail)), tail);
}

void add_rows(const float* x, const float* y, int64_t count, float* out) {
    const int64_t whole = count - count % kLanes, tail = count - whole;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, add(load(x + i), load(y + i)));
    if (tail) store_tail(out + whole, add(load_tail(x + whole, tail), load_tail(y + whole, tail)), tail);
}

int64_t argmax(const float* x, int64_t count) {
    const int64_t whole = count - count % kLanes;
    float largest = x[0];
    if (whole) {
        Vf best = load(x);
        for (int64_t i = kLanes; i < whole; i += kLanes) best = max(load(x + i), best);
        largest = reduce_max(best);
    }
    for (int64_t i = whole; i < count; ++i) largest = largest > x[i] ? largest : x[i];
    for (int64_t i = 0; i < count; ++i)
        if (x[i] == largest) return i;
    return 0;
}

void scan_lanes(const float* x, int64_t count, float* maxima) {
    for (int64_t i = 0; i < count; ++i) maxima[i] = reduce_max(load(x + i * kLanes));
}

// ---------------------------------------------------------------------------------------------- attention

// One row's softmax in progress over HEADS heads; vectors are padded with zeros to whole lanes.
template <int HEADS>
struct RowState {
    float* queries;  // [HEADS][padded]
    float* sums;     // [HEADS][padded]
    float largest[HEADS], total[HEADS];
};

// The keys and values of a block of positions, one padded row per position from `low` to `high`.
struct KeyBlock {
    const float* keys;
    const float* values;
    int64_t padded;
    int low, high;  // of 0 to kKeyBlock - 1
};

// A row, its tail filled with zeros.
inline void copy_row(const float* row, int64_t dim, float* out) {
    const int64_t whole = dim - dim % kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, load(row + i));
    if (whole < dim) store(out + whole, load_tail(row + whole, dim - whole));
}

// sums[h] += weights[h][i] * value row i, in the order of i, for PARTS vectors of the head.
template <int HEADS, int PARTS>
inline void add_values(const KeyBlock& block, const float (*weights)[kKeyBlock], int64_t offset, float* sums) {
    Vf total[HEADS][PARTS];
    for (int h = 0; h < HEADS; ++h)
        for (int part = 0; part < PARTS; ++part) total[h][part] = load(sums + h * block.padded + offset + part * kLanes);
    for (int i = block.low; i <= block.high; ++i) {
        const float* row = block.values + i * block.padded + offset;
        Vf value[PARTS];
        for (int part = 0; part < PARTS; ++part) value[part] = keep(load(row + part * kLanes));
        for (int h = 0; h < HEADS; ++h) {
            const Vf weight = set1(weights[h][i]);
            for (int part = 0; part < PARTS; ++part) total[h][part] = fma(value[part], weight, total[h][part]);
        }
    }
    for (int h = 0; h < HEADS; ++h)
        for (int part = 0; part < PARTS; ++part) store(sums + h * block.padded + offset + part * kLanes, total[h][part]);
}

// scores[h][half + i] = scale * (query h . key half + i) for sixteen keys; those outside low..high repeat the nearest one.
// PARTS is the number of vectors of a head, or 0 for any.
template <int HEADS, int PARTS>
inline void score_keys(const KeyBlock& block, int half, float scale, const float* queries, float (*scores)[kKeyBlock]) {
    const int64_t padded = block.padded;
    Vf query[HEADS][PARTS ? PARTS : 1];
    for (int h = 0; h < HEADS; ++h)
        for (int part = 0; part < PARTS; ++part) query[h][part] = load(queries + h * padded + part * kLanes);
    Quad quads[HEADS][4];
    for (int quad = 0; quad < 4; ++quad) {
        Vf dots[HEADS][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const int wanted = half + quad * 4 + i;
            const float* key = block.keys + (wanted < block.low ? block.low : wanted > block.high ? block.high : wanted) * padded;
            for (int h = 0; h < HEADS; ++h) dots[h][i] = set1(0.0f);
            if constexpr (PARTS > 0) {
#pragma GCC unroll 8
                for (int part = 0; part < PARTS; ++part) {
                    const Vf k = load(key + part * kLanes);
                    for (int h = 0; h < HEADS; ++h) dots[h][i] = fma(k, query[h][part], dots[h][i]);
                }
            } else {
                for (int part = 0; part < static_cast<int>(padded / kLanes); ++part) {
                    const Vf k = load(key + part * kLanes);
                    for (int h = 0; h < HEADS; ++h)
                        dots[h][i] = fma(k, load(queries + h * padded + part * kLanes), dots[h][i]);
                }
            }
        }
        for (int h = 0; h < HEADS; ++h) quads[h][quad] = reduce_add_four(dots[h]);
    }
    for (int h = 0; h < HEADS; ++h) store(scores[h] + half, mul(join_quads(quads[h]), set1(scale)));
}

// One step of the online softmax (Milakov and Gimelshein, 2018).
template <int HEADS, int PARTS>
void attend_block(const KeyBlock& block, float scale, RowState<HEADS>& state) {
    const int64_t padded = block.padded, num_parts = PARTS ? PARTS : padded / kLanes;
    const int low = block.low, high = block.high;
    alignas(64) float scores[HEADS][kKeyBlock];
    alignas(64) float rescale[kLanes] = {0.0f};
    for (int half = 0; half < kKeyBlock; half += kLanes) {
        if (half > high || half + kLanes <= low) {
            for (int h = 0; h < HEADS; ++h) store(scores[h] + half, set1(-__builtin_inff()));
            continue;
        }
        score_keys<HEADS, PARTS>(block, half, scale, state.queries, scores);
    }
    for (int h = 0; h < HEADS; ++h) {
        for (int i = 0; i < low; ++i) scores[h][i] = -__builtin_inff();
        for (int i = high + 1; i < kKeyBlock; ++i) scores[h][i] = -__builtin_inff();
        const float block_largest = reduce_max(max(load(scores[h]), load(scores[h] + kLanes)));
        const float now = state.largest[h] > block_largest ? state.largest[h] : block_largest;
        rescale[h] = state.largest[h] - now;
        state.largest[h] = now;
    }
    store(rescale, exp_clamped(load(rescale)));
    for (int h = 0; h < HEADS; ++h) {
        const Vf now = set1(state.largest[h]);
        store(scores[h], exp_clamped(sub(load(scores[h]), now)));
        store(scores[h] + kLanes, exp_clamped(sub(load(scores[h] + kLanes), now)));
        for (int i = 0; i < low; ++i) scores[h][i] = 0.0f;
        for (int i = high + 1; i < kKeyBlock; ++i) scores[h][i] = 0.0f;
        const float sum = reduce_add(add(load(scores[h]), load(scores[h] + kLanes)));
        state.total[h] = state.total[h] * rescale[h] + sum;
        const Vf factor = set1(rescale[h]);
        float* sums = state.sums + h * padded;
        for (int64_t part = 0; part < num_parts; ++part)
            store(sums + part * kLanes, mul(load(sums + part * kLanes), factor));
    }
    int64_t at = 0;
    for (; at + 4 * kLanes <= padded; at += 4 * kLanes) add_values<HEADS, 4>(block, scores, at, state.sums);
    if constexpr (PARTS == 0)
        for (; at < padded; at += kLanes) add_values<HEADS, 1>(block, scores, at, state.sums);
}

inline int position_in_block(int64_t position, int64_t start) {
    return static_cast<int>(max_of(min_of(position - start, kKeyBlock - 1), 0));
}

// Blocks of positions start at multiples of kKeyBlock. One is copied once for all rows that see the same keys in it.
template <int HEADS>
void attend_heads(const AttendJob& job) {
    const int64_t dim = job.head_dim, padded = (dim + kLanes - 1) / kLanes * kLanes;
    const float* keys = static_cast<const float*>(job.keys);
    const float* values = static_cast<const float*>(job.values);
    alignas(64) float vectors[kAttendRows * HEADS * 2 * kMaxHeadDim];
    alignas(64) float block_keys[kKeyBlock * kMaxHeadDim], block_values[kKeyBlock * kMaxHeadDim];
    RowState<HEADS> states[kAttendRows];
    const int64_t stop = job.begin + kKeyChunk - 1;
    int64_t first = stop + 1, last = job.begin - 1, furthest = 0;
    for (int64_t r = 0; r < job.num_rows; ++r) {
        RowState<HEADS>& state = states[r];
        state.queries = vectors + r * HEADS * 2 * padded;
        state.sums = state.queries + HEADS * padded;
        for (int h = 0; h < HEADS; ++h) {
            copy_row(static_cast<const float*>(job.rows[r].queries) + h * dim, dim, state.queries + h * padded);
            for (int64_t i = 0; i < padded; i += kLanes) store(state.sums + h * padded + i, set1(0.0f));
            state.largest[h] = -__builtin_inff();
            state.total[h] = 0.0f;
        }
        first = min_of(first, max_of(job.rows[r].first, job.begin));
        last = max_of(last, min_of(job.rows[r].last, stop));
        furthest = max_of(furthest, job.rows[r].last);
    }
    for (int64_t start = first - first % kKeyBlock; start <= last; start += kKeyBlock) {
        const int64_t end = start + kKeyBlock - 1;
        const auto sees = [&](const AttendRow& row) { return row.first <= end && row.last >= start; };
        const auto is_plain = [&](const AttendRow& row) { return row.chain == nullptr || min_of(row.last, end) < job.length; };
        int low = kKeyBlock, high = -1;
        for (int64_t r = 0; r < job.num_rows; ++r) {
            const AttendRow& row = job.rows[r];
            if (!sees(row) || !is_plain(row)) continue;
            low = static_cast<int>(min_of(low, position_in_block(row.first, start)));
            high = static_cast<int>(max_of(high, position_in_block(row.last, start)));
        }
        for (int i = low; i <= high; ++i) {
            const int64_t at = (start + i) * job.key_stride, next = at + kKeyBlock * job.key_stride;
            for (int64_t line = 0; start + kKeyBlock + i <= furthest && line < dim; line += 16) {
                prefetch(keys + next + line);
                prefetch(values + next + line);
            }
            copy_row(keys + at, dim, block_keys + i * padded);
            copy_row(values + at, dim, block_values + i * padded);
        }
        for (int pass = 0; pass < 2; ++pass) {  // rows with keys of their own overwrite the common ones
            for (int64_t r = 0; r < job.num_rows; ++r) {
                const AttendRow& row = job.rows[r];
                if (!sees(row) || is_plain(row) != (pass == 0)) continue;
                const KeyBlock block{block_keys, block_values, padded, position_in_block(row.first, start),
                                     position_in_block(row.last, start)};
                for (int i = block.low; pass == 1 && i <= block.high; ++i) {
                    const int64_t p = start + i, at = p < job.length ? p : job.length + row.chain[p - job.length];
                    copy_row(keys + at * job.key_stride, dim, block_keys + i * padded);
                    copy_row(values + at * job.key_stride, dim, block_values + i * padded);
                }
                if (padded == 4 * kLanes)
                    attend_block<HEADS, 4>(block, job.scale, states[r]);
                else if (padded == 8 * kLanes)
                    attend_block<HEADS, 8>(block, job.scale, states[r]);
                else
                    attend_block<HEADS, 0>(block, job.scale, states[r]);
            }
        }
    }
    for (int64_t r = 0; r < job.num_rows; ++r)
        for (int h = 0; h < HEADS; ++h) {
            float* part = job.rows[r].part + h * part_floats(dim);
            part[0] = states[r].largest[h];
            part[1] = states[r].total[h];
            for (int64_t i = 0; i < padded; i += kLanes)
                store(part + kPartHeader + i, load(states[r].sums + h * padded + i));
        }
}

template <int HEADS>
struct HeadCount {
    enum { value = HEADS };
};

// use(HeadCount<n>()) with the number of heads of a job.
template <class Use>
inline void with_heads(const AttendJob& job, Use&& use) {
    switch (job.num_heads) {
        case 1: return use(HeadCount<1>());
        case 2: return use(HeadCount<2>());
        case 3: return use(HeadCount<3>());
        default: return use(HeadCount<4>());
    }
}

void attend_float(const AttendJob* job) {
    with_heads(*job, [&](auto heads) { attend_heads<decltype(heads)::value>(*job); });
}

void join_parts(const float* parts, int64_t count, int64_t head_dim, float* states) {
    const int64_t step = part_floats(head_dim);
    for (int64_t first = 0; first < count; first += kLanes) {
        const int64_t end = min_of(first + kLanes, count);
        // e to the power of what each is below the larger of both; one of them is 1. No branches: which, is hard to foretell.
        alignas(64) float kept[kLanes] = {}, added[kLanes] = {};
        for (int64_t i = first; i < end; ++i) {
            const float before = states[i * step], now = parts[i * step], largest = now > before ? now : before;
            kept[i - first] = before - largest;
            added[i - first] = now - largest;
        }
        store(kept, exp_clamped(load(kept)));
        store(added, exp_clamped(load(added)));
        for (int64_t i = first; i < end; ++i) {
            const float* part = parts + i * step;
            float* state = states + i * step;
            if (part[0] == -__builtin_inff()) continue;
            state[0] = part[0] > state[0] ? part[0] : state[0];
            state[1] = state[1] * kept[i - first] + part[1] * added[i - first];
            const Vf before = set1(kept[i - first]), now = set1(added[i - first]);
            for (int64_t at = kPartHeader; at < step; at += kLanes) store(state + at, fma(load(part + at), now, mul(load(state + at), before)));
        }
    }
}

void finish_attention(const float* state, int64_t head_dim, float* out) {
    const int64_t whole = head_dim - head_dim % kLanes;
    const Vf denominator = set1(state[1]);
    const float* sums = state + kPartHeader;
    for (int64_t i = 0; i < whole; i += kLanes) store(out + i, div(load(sums + i), denominator));
    if (whole < head_dim) store_tail(out + whole, div(load(sums + whole), denominator), head_dim - whole);
}

}  // namespace

#include "attend_impl.hpp"
#include "screen_impl.hpp"
#include "choose_impl.hpp"

#define SAKIYOMI_KERNELS(name, attend_setup, tiles, linear_quantized, attend_bytes)                                \
    {                                                                                                              \
        name, attend_setup, tiles::blocks(1), tiles::kPrefersSpans, linear_quantized, linear_dense, quantize, rms_norm, rope, from_half, quantize_run,      \
            round_query, attend_bytes, attend_float, join_parts, finish_attention, silu_mul, add_rows, argmax, scan_lanes, screen_blocks, scan_blocks,      \
            find_in_block, weigh_block, sum_blocks, guess_block, guess_total, draw_block, bound_block                             \
    }
