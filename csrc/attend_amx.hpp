// Attention over a cache in 8 bits with the matrix unit (AMX), whose second operand the blocks of a cache are already. It
// gives the sums of bytes, which are exact integers; all else is as in attend_impl.hpp, so the bits are the same. Included
// after that and after linear_amx.hpp.
namespace {

enum {
    kAmxPairs = 20,           // fewer pairs of rows and heads are not faster
    kMostPairs = kAttendRows * 4,
    kTiledDims = 4 * kLanes,  // dimensions whose sums are four tiles
};
static_assert(int{kAmxRows} <= int{sakiyomi::kQueriesBehind});

// Tiles 0 to 3 are sums [rows][16], 4 and 5 queries or weights [rows][32], 6 and 7 keys or values [8][64].
inline void configure_pair_tiles(int64_t num_rows) {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
        shapes.rows[i] = static_cast<uint8_t>(i < 6 ? num_rows : kGroup / 4);
        shapes.row_bytes[i] = i / 2 == 2 ? kGroup : 64;
    }
    asm volatile("" : : "r"(&shapes) : "memory");  // without it a compiler was seen to drop the stores
    _tile_loadconfig(&shapes);
}

// Scores of all pairs, whose rounded queries lie one after another, in tiles of `tile_rows` of them; like score_blocks. A tile
// starts from what makes a float of 2^23 + 2^22 plus the sum, so that nothing has to be converted (see float_of_sum).
void score_pairs(const uint8_t* keys, const Seen& seen, const int8_t* queries, const AttendJob& job, int64_t tile_rows,
                 float (*scores)[kKeyChunk], Fetcher& ahead) {
    const int64_t num_pairs = job.num_rows * job.num_heads, groups = num_groups(job.head_dim), stride = query_bytes(job.head_dim);
    alignas(64) int32_t starts[2][kAmxRows][kLanes], sums[2][2][kAmxRows][kLanes];
    for (int64_t pair = 0; pair < num_pairs; pair += tile_rows)
        for (int64_t group = 0; group < groups; group += 2) {
            const int64_t rows = min_of(tile_rows, num_pairs - pair);
            const int8_t* tile_queries = queries + pair * stride + group * kGroup;
            const auto query = [&](int64_t row) { return RoundedQuery(queries + (pair + row) * stride, job.head_dim); };
            for (int64_t r = 0; r < rows; ++r)
                for (int g = 0; g < 2; ++g)
                    _mm512_store_si512(starts[g][r], add(set1_int(query(r).starts[group + g]), set1_int(0x4b400000)));
            const auto place = [&](int64_t side) { return keys + (side * groups + group) * kKeyGroupBytes; };
            const auto multiply = [&](int64_t side) __attribute__((always_inline)) {
                _tile_loadd(0, starts[0], 64);
                _tile_loadd(6, place(side), 64);
                _tile_dpbsud(0, 4, 6);
                ahead.fetch();
                _tile_loadd(1, starts[1], 64);
                _tile_loadd(7, place(side) + kKeyGroupBytes, 64);
                _tile_dpbsud(1, 5, 7);
                ahead.fetch();
            };
            const auto use = [&](int64_t side) __attribute__((always_inline)) {
                const float* key_scales = reinterpret_cast<const float*>(place(side) + 8 * 64);
                const Vf scales[2] = {load(key_scales), load(key_scales + kKeyGroupBytes / 4)};
                for (int64_t r = 0; r < rows; ++r) {
                    float* out = scores[pair + r] + side * kLanes;
                    Vf total = group == 0 ? set1(0.0f) : load(out);
                    for (int g = 0; g < 2; ++g) {
                        const Vf sum = sub(load(reinterpret_cast<const float*>(sums[side % 2][g][r])), set1(12582912.0f));
                        total = fma(sum, mul(scales[g], set1(query(r).scales[group + g])), total);
                    }
                    store(out, total);
                }
            };
            asm volatile("" : : : "memory");  // loads of tiles do not say that they read memory
            _tile_loadd(4, tile_queries, stride);
            _tile_loadd(5, tile_queries + kGroup, stride);
            for (int64_t side = 2 * seen.begin; side < 2 * seen.end; ++side) {
                multiply(side);
                if (side > 2 * seen.begin) use(side - 1);
                _tile_stored(0, sums[side % 2][0], 64);
                _tile_stored(1, sums[side % 2][1], 64);
            }
            use(2 * seen.end - 1);
        }
}

// The weighted sums of kTiledDims dimensions of the values, in tiles of `tile_pairs` pairs; like sum_bytes.
template <int HEADS>
void sum_pairs(const Seen& seen, const uint8_t* values, const ByteWeights& weights, const AttendJob& job, int64_t tile_pairs,
               int64_t offset, Fetcher& ahead) {
    alignas(64) int32_t sums[2][4][kAmxRows][kLanes];
    const int64_t num_pairs = job.num_rows * HEADS, block_bytes = value_block_bytes(job.head_dim);
    const auto use = [&](int64_t first, int64_t slot) __attribute__((always_inline)) {
        for (int64_t pair = first; pair < min_of(first + tile_pairs, num_pairs); ++pair) {
            float* part = job.rows[pair / HEADS].part + pair % HEADS * part_floats(job.head_dim) + kPartHeader + offset;
            const int64_t row = 2 * (pair - first);
            for (int t = 0; t < 4; ++t) {
                const Vi high = Vi(_mm512_load_si512(sums[slot][t][row])), low = Vi(_mm512_load_si512(sums[slot][t][row + 1]));
                const Vi both = add(add(times_256(high), low), set1_int(weights.starts[pair]));
                store(part + t * kLanes, mul(to_float(both), set1(weights.scales[pair])));
            }
        }
    };
    asm volatile("" : : : "memory");
    int64_t slot = 0, pair = 0;
    for (; pair < num_pairs; pair += tile_pairs, slot ^= 1) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t b = seen.begin; b < seen.end; ++b) {
            const uint8_t* block = values + b * block_bytes + offset * kKeyBlock;
            _tile_loadd(4, weights.at(b, pair, 0), kKeyBlock);
            _tile_loadd(6, block, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, block + kKeyBlock * kLanes, 64);
            _tile_dpbsud(1, 4, 7);
            _tile_loadd(6, block + 2 * kKeyBlock * kLanes, 64);
            _tile_dpbsud(2, 4, 6);
            _tile_loadd(7, block + 3 * kKeyBlock * kLanes, 64);
            _tile_dpbsud(3, 4, 7);
            ahead.fetch();
        }
        if (pair > 0) use(pair - tile_pairs, slot ^ 1);
        _tile_stored(0, sums[slot][0], 64);
        _tile_stored(1, sums[slot][1], 64);
        _tile_stored(2, sums[slot][2], 64);
        _tile_stored(3, sums[slot][3], 64);
    }
    use(pair - tile_pairs, slot ^ 1);
}

template <int HEADS>
void attend_pairs(const AttendJob& job) {
    const int64_t dim = job.head_dim, num_pairs = job.num_rows * HEADS;
    const int64_t key_bytes = key_block_bytes(dim), value_bytes = value_block_bytes(dim), first = job.begin / kKeyBlock;
    const uint8_t* keys = static_cast<const uint8_t*>(job.keys) + first * key_bytes;
    const uint8_t* values = static_cast<const uint8_t*>(job.values) + first * value_bytes;
    RowBlocks blocks[kAttendRows];
    const RowBlocks* found[kAttendRows];
    Seen all{kChunkBlocks, 0, 0, 0};
    for (int64_t r = 0; r < job.num_rows; ++r) {
        found[r] = r > 0 && sees_same(job, r) ? found[r - 1] : blocks[r].find(job, job.rows[r], nullptr) ? &blocks[r] : nullptr;
        if (found[r] == nullptr) continue;
        all.begin = min_of(all.begin, found[r]->seen.begin);
        all.end = max_of(all.end, found[r]->seen.end);
    }
    const int64_t num_tiles = (num_pairs + kAmxRows - 1) / kAmxRows;
    const int64_t tile_rows = ((num_pairs + num_tiles - 1) / num_tiles + 1) / 2 * 2;  // the last tile may go beyond the last pair
    configure_pair_tiles(tile_rows);
    Fetcher ahead = share_of_next(keys + kChunkBlocks * key_bytes, values + kChunkBlocks * value_bytes, dim, 0, 1);
    const int64_t num_calls = num_tiles * kChunkBlocks * (2 * num_groups(dim) + 2 * dim / kTiledDims) + 3 * job.num_rows;
    ahead.step = kChunkBlocks * (key_bytes + value_bytes) / 64 / num_calls + 1;
    if (job.rows[job.num_rows - 1].last < job.begin + kKeyChunk) ahead.step = 0;

    alignas(64) float scores[kMostPairs][kKeyChunk];
    score_pairs(keys, all, static_cast<const int8_t*>(job.rows[0].queries), job, tile_rows, scores, ahead);
    alignas(64) int8_t terms[kChunkBlocks][kMostPairs + kAmxRows / 2][2][kKeyBlock];
    int32_t starts[kMostPairs];
    float scales[kMostPairs];
    Softmax<HEADS> steps[kAttendRows];
    const auto each_row = [&](auto&& step) __attribute__((always_inline)) {
        for (int64_t r = 0; r < job.num_rows; ++r) {
            if (found[r] != nullptr) step(steps[r]);
            ahead.fetch();
        }
    };
    for (int64_t r = 0; r < job.num_rows; ++r) {
        const Seen seen = found[r] == nullptr ? Seen{0, 0, 0, 0} : found[r]->seen;
        for (int64_t b = all.begin; b < all.end; ++b)  // the sums run over what any row sees
            if (b < seen.begin || b >= seen.end) __builtin_memset(terms[b][r * HEADS], 0, sizeof terms[b][0] * HEADS);
        if (found[r] == nullptr) {
            for (int64_t pair = r * HEADS; pair < (r + 1) * HEADS; ++pair) starts[pair] = 0, scales[pair] = 0.0f;
            continue;
        }
        const ByteWeights weights{terms[0][r * HEADS][0], sizeof terms[0], starts + r * HEADS, scales + r * HEADS};
        steps[r] = {seen, found[r]->value_scales, found[r]->flaw, scores + r * HEADS, job.rows[r].part, part_floats(dim), weights, {}};
    }
    each_row([](Softmax<HEADS>& softmax) { softmax.find_largest(); });
    each_row([](Softmax<HEADS>& softmax) { softmax.weigh(); });
    each_row([](Softmax<HEADS>& softmax) { softmax.round(); });
    const ByteWeights weights{terms[0][0][0], sizeof terms[0], starts, scales};
    for (int64_t offset = 0; offset < dim; offset += kTiledDims)
        sum_pairs<HEADS>(all, values, weights, job, tile_rows / 2, offset, ahead);
    _tile_release();
    for (int64_t r = 0; r < job.num_rows; ++r)
        for (int h = 0; found[r] == nullptr && h < HEADS; ++h) job.rows[r].part[h * part_floats(dim)] = -__builtin_inff();
}

// Whether tiles may take all rows of the job: they see the chunk's blocks as these lie in the cache, and their queries lie one
// after another.
bool fits_tiles(const AttendJob& job) {
    const int64_t row_bytes = job.num_heads * query_bytes(job.head_dim);
    if (job.num_rows * job.num_heads < kAmxPairs || job.head_dim % kTiledDims != 0) return false;
    bool sees_any = false;
    for (int64_t r = 0; r < job.num_rows; ++r) {
        const AttendRow& row = job.rows[r];
        if (has_own_blocks(job, r)) return false;
        if (row.queries != static_cast<const char*>(job.rows[0].queries) + r * row_bytes) return false;
        sees_any |= row.first < job.begin + kKeyChunk && row.last >= job.begin;
    }
    return sees_any;
}

void attend_bytes_amx(const AttendJob* job) {
    if (!fits_tiles(*job)) return attend_bytes(job);
    static_assert(2 * kAttendRows < int{kAmxPairs});  // so there are three heads or four
    job->num_heads == 3 ? attend_pairs<3>(*job) : attend_pairs<4>(*job);
}

}  // namespace
