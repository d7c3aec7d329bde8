// Quantized products of many rows with the matrix unit (AMX): it gives the sums of a group, which are exact integers, and
// what follows is add_group as for few rows, so the bits are the same. Included after kernels_impl.hpp.
namespace {

enum {
    kAmxRows = 16,    // rows of a tile
    kAmxLeast = 48,   // fewer rows are not faster
    kPassRows = 128,  // rows whose totals are kept while they go over the same weights
    kPassGroups = 48, // groups that are unpacked together
    kInFlight = 4,    // groups between a product and its use: stored tiles are not forwarded to loads
};

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t row_bytes[16] = {0};
    uint8_t rows[16] = {0};
};

// Tile 0 is sums [rows][16], 1 inputs [rows][32], 2 weights [8][64].
inline void configure_tiles(int64_t num_rows) {
    TileShapes shapes;
    for (int i = 0; i < 3; ++i) {
        shapes.rows[i] = static_cast<uint8_t>(i < 2 ? num_rows : kGroup / 4);
        shapes.row_bytes[i] = i == 1 ? kGroup : 64;
    }
    asm volatile("" : : "r"(&shapes) : "memory");  // without it a compiler was seen to drop the stores
    _tile_loadconfig(&shapes);
}

// Groups of a block of weights: `count` from `first` on, and where their values are as bytes, from group to group.
template <Storage STORAGE>
struct GroupRun {
    const uint8_t* block;
    int64_t first, count;
    const uint8_t* values;
    int64_t value_step;
    Scales<STORAGE> block_scales;
    const uint8_t* ahead;  // what to fetch meanwhile, or null
};

// A sum of a group as a float. Where the matrix unit is at work, one of the two units that convert and multiply rests, but
// adding goes on: the integer is placed in the last bits of 2^23 + 2^22, which is exact, as converting is.
inline Vf float_of_sum(const int32_t* sum) {
    const Vi placed = add(Vi(_mm512_load_si512(sum)), _mm512_set1_epi32(0x4b400000));
    return sub(_mm512_castsi512_ps(placed), set1(12582912.0f));
}

// Adds a run of groups to the totals [ROWS][16] of rows from `row` on. `inputs` is the first group's record.
template <Storage STORAGE, int ROWS>
__attribute__((noinline)) void amx_tile(const LinearJob& job, const GroupRun<STORAGE>& run, const uint8_t* inputs, int64_t row,
                                        float* totals) {
    enum { kSlots = 8, kTileBytes = kAmxRows * kLanes * 4 };
    alignas(4096) uint8_t sums[kSlots * kTileBytes];
    const int64_t input_bytes = input_group_bytes(job.num_rows), value_step = run.value_step, num_groups = job.num_inputs / kGroup;
    const Scales<STORAGE> block_scales = run.block_scales;
    const uint8_t* weights = run.values;
    const uint8_t* values = inputs + row * kGroup;
    int64_t group = run.first;  // to use next
    const uint8_t* scales = inputs + job.num_rows * kGroup + row * 4;
    const uint8_t* scaled_sums = scales + job.num_rows * 4;
    const uint8_t* ahead = run.ahead;
    uint32_t made = 0, used = 0;
    Vf total[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) total[r] = load(totals + r * kLanes);
    const auto make = [&]() __attribute__((always_inline)) {
        _tile_zero(0);
        _tile_loadd(1, values, kGroup);
        _tile_loadd(2, weights, 64);
        _tile_dpbsud(0, 1, 2);
        _tile_stored(0, sums + made, 64);
        if (ahead != nullptr) {
            for (int64_t line = 0; line < kFetchedBytes<STORAGE>; line += 64) prefetch_far(ahead + line);
            ahead += kFetchedBytes<STORAGE>;
        }
        made = (made + kTileBytes) % (kSlots * kTileBytes);
        weights += value_step;
        values += input_bytes;
    };
    const auto use = [&]() __attribute__((always_inline)) {
        Vf scale, low;
        block_scales.of_group(run.block + place_of_group(STORAGE, group, num_groups).halves, &scale, &low);
        const int32_t* sum = reinterpret_cast<const int32_t*>(sums + used);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
            total[r] = add_group(total[r], float_of_sum(sum + r * kLanes), scale, low,
                                 reinterpret_cast<const float*>(scales) + r, reinterpret_cast<const float*>(scaled_sums) + r);
        used = (used + kTileBytes) % (kSlots * kTileBytes);
        ++group;
        scales += input_bytes;
        scaled_sums += input_bytes;
    };
    const int64_t early = min_of(kInFlight, run.count);
    for (int64_t i = 0; i < early; ++i) make();
    for (int64_t i = early; i < run.count; ++i) {
        use();
        make();
    }
    for (int64_t i = 0; i < early; ++i) use();
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) store(totals + r * kLanes, total[r]);
}

template <Storage STORAGE>
using AmxTile = void (*)(const LinearJob&, const GroupRun<STORAGE>&, const uint8_t*, int64_t, float*);
template <Storage S>
constexpr AmxTile<S> kAmxTiles[kAmxRows] = {
    amx_tile<S, 1>, amx_tile<S, 2>,  amx_tile<S, 3>,  amx_tile<S, 4>,  amx_tile<S, 5>,  amx_tile<S, 6>,  amx_tile<S, 7>,  amx_tile<S, 8>,
    amx_tile<S, 9>, amx_tile<S, 10>, amx_tile<S, 11>, amx_tile<S, 12>, amx_tile<S, 13>, amx_tile<S, 14>, amx_tile<S, 15>, amx_tile<S, 16>};

// The nibbles of a run's groups as bytes.
template <Storage STORAGE>
void unpack_groups(const GroupRun<STORAGE>& run, int64_t num_groups, uint8_t* out) {
    const __m512i mask = _mm512_set1_epi8(0x0f);
    for (int64_t group = run.first; group < run.first + run.count; ++group, out += kGroup * kLanes) {
        const uint8_t* source = run.block + place_of_group(STORAGE, group, num_groups).values;
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const __m512i both = _mm512_loadu_si512(source + k * 64);
            _mm512_store_si512(out + k * 64, _mm512_and_si512(both, mask));
            _mm512_store_si512(out + (k + 4) * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
        }
    }
}

// Rows [first_row, last_row) over one block, in tiles of nearly equal size.
template <Storage STORAGE>
void amx_block(const LinearJob& job, int64_t first_row, int64_t last_row, int64_t block, int64_t* configured) {
    alignas(64) uint8_t unpacked[is_in_nibbles(STORAGE) ? kPassGroups * kGroup * kLanes : 64];
    alignas(64) float totals[kPassRows * kLanes];
    const int64_t num_rows = last_row - first_row, num_groups = job.num_inputs / kGroup;
    const int64_t num_tiles = (num_rows + kAmxRows - 1) / kAmxRows;
    for (int64_t r = 0; r < num_rows; ++r) store(totals + r * kLanes, set1(0.0f));
    for (int64_t group = 0; group < num_groups; group += kPassGroups) {
        const uint8_t* weights = job.weights + block * job.block_bytes;
        const uint8_t* values = weights + place_of_group(STORAGE, group, num_groups).values;
        const uint8_t* ahead = (block + 1) * kLanes < job.num_outputs ? values + job.block_bytes : nullptr;
        GroupRun<STORAGE> run{weights, group, min_of(kPassGroups, num_groups - group), values, group_bytes(STORAGE), {}, ahead};
        run.block_scales.begin(weights);
        if (is_in_nibbles(STORAGE)) {
            unpack_groups(run, num_groups, unpacked);
            run.values = unpacked;
            run.value_step = kGroup * kLanes;
        }
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t begin = num_rows * tile / num_tiles, count = num_rows * (tile + 1) / num_tiles - begin;
            if (count != *configured) configure_tiles(count);
            *configured = count;
            kAmxTiles<STORAGE>[count - 1](job, run, job.inputs + group * input_group_bytes(job.num_rows), first_row + begin,
                                 totals + begin * kLanes);
            run.ahead = nullptr;
        }
    }
    for (int64_t r = 0; r < num_rows; ++r) store_outputs(job, first_row + r, block, load(totals + r * kLanes));
}

template <Storage STORAGE>
void run_amx(const LinearJob& job, int64_t first_block, int64_t last_block) {
    int64_t configured = 0;
    for (int64_t row = 0; row < job.num_rows; row += kPassRows)
        for (int64_t block = first_block; block < last_block; ++block)
            amx_block<STORAGE>(job, row, min_of(row + kPassRows, job.num_rows), block, &configured);
    _tile_release();
}

// Few rows, on the processors that have the unit: several streams of memory, which their hardware follows, and fewer loads of
// inputs.
struct WideTiles {
    enum { kRun = 4, kAheadBytes = 1920, kPrefersSpans = 0 };  // six groups of nibbles: far enough for memory to answer, near enough to stay in the first cache
    static constexpr int blocks(int rows) { return rows <= 3 ? 4 : 2; }
    // Products take about as long as memory there, whose answers come too unevenly for the first cache's few requests in flight.
    static constexpr bool is_fetched_twice(int rows) { return rows >= 4 && rows <= 6; }
};

void linear_amx(const LinearJob* job, int64_t first_block, int64_t last_block) {
    if (job->num_rows < kAmxLeast)
        linear_quantized<WideTiles>(job, first_block, last_block);
    else if (job->storage == Storage::kSpans)
        run_amx<Storage::kSpans>(*job, first_block, last_block);
    else if (job->storage == Storage::kNibbles)
        run_amx<Storage::kNibbles>(*job, first_block, last_block);
    else
        run_amx<Storage::kBytes>(*job, first_block, last_block);
}

}  // namespace
