// Attention over half-precision keys and values with the matrix unit (AMX), which multiplies bfloat16 numbers and adds
// in float. A number is taken as the sum of two such terms: halves are that exactly, floats to 16 bits; of the four
// products of terms the smallest is left out. Included after kernels_impl.hpp and simd_avx512.hpp.
#include <immintrin.h>

namespace {

enum {
    kTileRows16 = 16,
    kTileBytes = 1024,                          // 16 rows of 16 lanes, a lane being a float or a pair of bfloat16
    kPairs = 32,                                // bfloat16 numbers in a row of a tile
    kColumns = 16,                              // queries multiplied together
    kMaxColumns = kAttendRows * 4,
    kMatrixDim = 128,                           // the widest head
    kKeyTiles = kKeyChunk / kTileRows16,
    kValueBlocks = kKeyChunk / kPairs,
};

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t row_bytes[16] = {0};
    uint8_t rows[16] = {0};
};

// Tiles 0 to 5 get `rows` rows, 6 and 7 sixteen.
inline void configure_tiles(int rows) {
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
        shapes.rows[i] = static_cast<uint8_t>(i < 6 ? rows : kTileRows16);
        shapes.row_bytes[i] = 64;
    }
    asm volatile("" : : "r"(&shapes) : "memory");  // without it a compiler was seen to drop the stores
    _tile_loadconfig(&shapes);
}

// Two vectors as pairs of bfloat16, `a` in the lower half of each lane; what the larger term cuts off is in the other.
struct Terms {
    __m512i large, small;
};

inline Terms split_pair(Vf a, Vf b) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    const __m512i x_large = _mm512_and_si512(x, upper), y_large = _mm512_and_si512(y, upper);
    const __m512i x_small = _mm512_castps_si512(sub(a, _mm512_castsi512_ps(x_large)));
    const __m512i y_small = _mm512_castps_si512(sub(b, _mm512_castsi512_ps(y_large)));
    return {_mm512_or_si512(_mm512_srli_epi32(x, 16), y_large),
            _mm512_ternarylogic_epi32(_mm512_srli_epi32(x_small, 16), y_small, upper, 0xf8)};  // first | (second & third)
}

// Lanes i of four vectors of a row each: rows i, i + 4, i + 8 and i + 12 of column 4c to 4c + 3 of a matrix of floats.
inline void transpose_quad(const float* matrix, int64_t stride, Vf* columns) {
    Vf mixed[4];
    for (int i = 0; i < 4; ++i) {
        const float* row = matrix + i * stride;
        __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(row));
        four = _mm512_insertf32x4(four, _mm_loadu_ps(row + 4 * stride), 1);
        four = _mm512_insertf32x4(four, _mm_loadu_ps(row + 8 * stride), 2);
        mixed[i] = _mm512_insertf32x4(four, _mm_loadu_ps(row + 12 * stride), 3);
    }
    const __m512d ab_low = _mm512_castps_pd(_mm512_unpacklo_ps(mixed[0], mixed[1]));
    const __m512d ab_high = _mm512_castps_pd(_mm512_unpackhi_ps(mixed[0], mixed[1]));
    const __m512d cd_low = _mm512_castps_pd(_mm512_unpacklo_ps(mixed[2], mixed[3]));
    const __m512d cd_high = _mm512_castps_pd(_mm512_unpackhi_ps(mixed[2], mixed[3]));
    columns[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low));
    columns[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low));
    columns[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high));
    columns[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high));
}

// One query: a row and a head, and the positions of the chunk that it sees.
struct Column {
    const float* query;
    float* part;
    int low, high;
};

// The keys and values of a chunk as tiles; [2] are the terms.
struct ChunkTiles {
    alignas(64) uint8_t keys[kKeyTiles][kMatrixDim / kPairs][2][kTileBytes];       // a row is a position
    alignas(64) uint8_t values[kValueBlocks][kMatrixDim / kLanes][2][kTileBytes];  // a row is a pair of positions
    alignas(64) uint8_t queries[kMatrixDim / kPairs][2][kTileBytes];
    alignas(64) float scores[kKeyChunk][kColumns];
    alignas(64) float ordered[kColumns][kKeyChunk];
    alignas(64) uint8_t weights[kValueBlocks][2][kTileBytes];
    alignas(64) float sums[kColumns][kMatrixDim];
};

inline void put_key(ChunkTiles& tiles, int at, int64_t dim, const uint16_t* key) {
    for (int64_t part = 0; part < dim / kPairs; ++part) {
        const Terms terms = split_pair(load(key + part * kPairs), load(key + part * kPairs + kLanes));
        uint8_t* row = tiles.keys[at / kTileRows16][part][0] + at % kTileRows16 * 64;
        _mm512_store_si512(row, terms.large);
        _mm512_store_si512(row + kTileBytes, terms.small);
    }
}

// Position `at` of a block goes with at + 16.
inline void put_value_pair(ChunkTiles& tiles, int block, int at, int64_t dim, const uint16_t* first, const uint16_t* second) {
    for (int64_t part = 0; part < dim / kLanes; ++part) {
        const Vf a = first ? load(first + part * kLanes) : set1(0.0f), b = second ? load(second + part * kLanes) : set1(0.0f);
        const Terms terms = split_pair(a, b);
        uint8_t* row = tiles.values[block][part][0] + at * 64;
        _mm512_store_si512(row, terms.large);
        _mm512_store_si512(row + kTileBytes, terms.small);
    }
}

inline void put_queries(ChunkTiles& tiles, const Column* columns, int count, int64_t dim) {
    alignas(64) float terms[2][kColumns][kLanes] = {};
    for (int64_t part = 0; part < dim / kPairs; ++part) {
        for (int i = 0; i < count; ++i) {
            const float* query = columns[i].query + part * kPairs;
            const Terms both = split_pair(load(query), load(query + kLanes));
            _mm512_store_si512(terms[0][i], both.large);
            _mm512_store_si512(terms[1][i], both.small);
        }
        for (int term = 0; term < 2; ++term)
            for (int quad = 0; quad < 4; ++quad) {
                Vf rows[4];
                transpose_quad(&terms[term][0][quad * 4], kLanes, rows);
                for (int i = 0; i < 4; ++i)
                    store(reinterpret_cast<float*>(tiles.queries[part][term] + (quad * 4 + i) * 64), rows[i]);
            }
    }
}

// scores[position][column] for two tiles of positions.
inline void multiply_keys(ChunkTiles& tiles, int tile, int64_t dim) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t part = 0; part < dim / kPairs; ++part) {
        _tile_loadd(2, tiles.queries[part][0], 64);
        _tile_loadd(4, tiles.keys[tile][part][0], 64);
        _tile_dpbf16ps(0, 4, 2);
        _tile_loadd(5, tiles.keys[tile + 1][part][0], 64);
        _tile_dpbf16ps(1, 5, 2);
        _tile_loadd(3, tiles.queries[part][1], 64);
        _tile_dpbf16ps(0, 4, 3);
        _tile_dpbf16ps(1, 5, 3);
        _tile_loadd(6, tiles.keys[tile][part][1], 64);
        _tile_dpbf16ps(0, 6, 2);
        _tile_loadd(7, tiles.keys[tile + 1][part][1], 64);
        _tile_dpbf16ps(1, 7, 2);
    }
    _tile_stored(0, tiles.scores[tile * kTileRows16], 64);
    _tile_stored(1, tiles.scores[(tile + 1) * kTileRows16], 64);
}

inline __mmask16 lanes_between(int low, int high) {
    const int first = low < 0 ? 0 : low, last = high > 15 ? 15 : high;
    return first > last ? 0 : static_cast<__mmask16>((0xffffu << first) & (0xffffu >> (15 - last)));
}

// The softmax of one column over the chunk; its weights, as two terms, become a row of the weights' tiles.
inline void weigh_keys(ChunkTiles& tiles, Column& column, int index, int first_block, int last_block, float scale) {
    const float* scores = tiles.ordered[index];
    const Vf lowest = set1(-__builtin_inff());
    Vf values[kKeyTiles], largest = lowest;
    __mmask16 seen[kKeyTiles];
    for (int i = 2 * first_block; i < 2 * last_block + 2; ++i) {
        seen[i] = lanes_between(column.low - i * kLanes, column.high - i * kLanes);
        values[i] = _mm512_mask_mov_ps(lowest, seen[i], mul(load(scores + i * kLanes), set1(scale)));
        largest = max(largest, values[i]);
    }
    const float top = reduce_max(largest);
    Vf total = set1(0.0f);
    for (int block = first_block; block <= last_block; ++block) {
        Vf pair[2];
        for (int i = 0; i < 2; ++i) {
            const int at = 2 * block + i;
            pair[i] = _mm512_maskz_mov_ps(seen[at], exp_clamped(sub(values[at], set1(top))));
            total = add(total, pair[i]);
        }
        const Terms terms = split_pair(pair[0], pair[1]);
        _mm512_store_si512(tiles.weights[block][0] + index * 64, terms.large);
        _mm512_store_si512(tiles.weights[block][1] + index * 64, terms.small);
    }
    column.part[0] = top;
    column.part[1] = reduce_add(total);
}

// sums[column][dimension] for four vectors of dimensions from `part` on.
inline void multiply_values(ChunkTiles& tiles, int64_t part, int first_block, int last_block) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#define SAKIYOMI_ADD_VALUES(tile)                              \
    _tile_loadd(6, tiles.values[block][part + tile][0], 64);   \
    _tile_dpbf16ps(tile, 4, 6);                                \
    _tile_dpbf16ps(tile, 5, 6);                                \
    _tile_loadd(7, tiles.values[block][part + tile][1], 64);   \
    _tile_dpbf16ps(tile, 4, 7)
    for (int block = first_block; block <= last_block; ++block) {
        _tile_loadd(4, tiles.weights[block][0], 64);
        _tile_loadd(5, tiles.weights[block][1], 64);
        SAKIYOMI_ADD_VALUES(0);
        SAKIYOMI_ADD_VALUES(1);
        SAKIYOMI_ADD_VALUES(2);
        SAKIYOMI_ADD_VALUES(3);
    }
#undef SAKIYOMI_ADD_VALUES
    float* out = tiles.sums[0] + part * kLanes;
    _tile_stored(0, out, kMatrixDim * 4);
    _tile_stored(1, out + kLanes, kMatrixDim * 4);
    _tile_stored(2, out + 2 * kLanes, kMatrixDim * 4);
    _tile_stored(3, out + 3 * kLanes, kMatrixDim * 4);
}

// Up to 16 columns over the tiles as they are now.
inline void attend_columns(ChunkTiles& tiles, Column* columns, int count, int64_t dim, float scale) {
    int low = kKeyChunk, high = -1;
    for (int i = 0; i < count; ++i) {
        low = columns[i].low < low ? columns[i].low : low;
        high = columns[i].high > high ? columns[i].high : high;
    }
    const int first_block = low / kPairs, last_block = high / kPairs;
    put_queries(tiles, columns, count, dim);
    configure_tiles(kTileRows16);
    for (int block = first_block; block <= last_block; ++block) {
        multiply_keys(tiles, 2 * block, dim);
        for (int tile = 2 * block; tile < 2 * block + 2; ++tile)
            for (int quad = 0; quad * 4 < count; ++quad) {
                Vf rows[4];
                transpose_quad(&tiles.scores[tile * kTileRows16][quad * 4], kColumns, rows);
                for (int i = 0; i < 4; ++i) store(&tiles.ordered[quad * 4 + i][tile * kTileRows16], rows[i]);
            }
    }
    for (int i = 0; i < count; ++i) weigh_keys(tiles, columns[i], i, first_block, last_block, scale);
    configure_tiles(count);
    for (int64_t part = 0; part < dim / kLanes; part += 4) multiply_values(tiles, part, first_block, last_block);
    for (int i = 0; i < count; ++i)
        for (int64_t at = 0; at < dim; at += kLanes) store(columns[i].part + kPartHeader + at, load(tiles.sums[i] + at));
}

// Adds the heads of a row to the columns.
inline int add_columns(const AttendJob& job, const AttendRow& row, int low, int high, Column* columns, int count) {
    for (int64_t h = 0; h < job.num_heads; ++h)
        columns[count++] = {row.queries + h * job.head_dim, row.part + h * part_floats(job.head_dim), low, high};
    return count;
}

void attend_matrix(const AttendJob* call) {
    const AttendJob& job = *call;
    const int64_t dim = job.head_dim, begin = job.begin, stride = job.key_stride;
    if (dim % (4 * kLanes) != 0 || dim > kMatrixDim) return attend<uint16_t>(call);
    const uint16_t* keys = static_cast<const uint16_t*>(job.keys) + begin * stride;
    const uint16_t* values = static_cast<const uint16_t*>(job.values) + begin * stride;
    ChunkTiles tiles;
    Column columns[kMaxColumns];
    int count = 0, low = kKeyChunk, high = -1, last = -1;  // of the common positions; the last that any row sees
    int64_t furthest = 0;
    struct Seen {
        int low, high;
        bool is_plain;
    } seen[kAttendRows];
    for (int64_t r = 0; r < job.num_rows; ++r) {
        const AttendRow& row = job.rows[r];
        Seen& mine = seen[r];
        mine.low = static_cast<int>(max_of(row.first - begin, 0));
        mine.high = static_cast<int>(min_of(row.last - begin, kKeyChunk - 1));
        if (mine.low > mine.high) {
            for (int64_t h = 0; h < job.num_heads; ++h) row.part[h * part_floats(dim)] = -__builtin_inff();
            continue;
        }
        mine.is_plain = row.chain == nullptr || begin + mine.high < job.length;
        const int common = mine.is_plain ? mine.high : static_cast<int>(min_of(mine.high, job.length - 1 - begin));
        low = mine.low < low ? mine.low : low;
        high = common > high ? common : high;
        last = mine.high > last ? mine.high : last;
        furthest = max_of(furthest, row.last - begin);
        if (mine.is_plain) count = add_columns(job, row, mine.low, mine.high, columns, count);
    }
    if (last < 0) return;
    for (int i = low; i <= high; ++i) {
        for (int64_t line = 0; line < dim; line += 32) _mm_prefetch(values + i * stride + line, _MM_HINT_T0);
        put_key(tiles, i, dim, keys + i * stride);
    }
    const auto value_at = [&](int i) { return i >= low && i <= high ? values + i * stride : nullptr; };
    for (int block = low / kPairs; block <= last / kPairs; ++block)
        for (int i = 0; i < kTileRows16; ++i) {
            const int first = block * kPairs + i, second = first + kTileRows16;
            for (int64_t next = first + kKeyChunk; next <= min_of(furthest, second + kKeyChunk); next += kTileRows16)
                for (int64_t line = 0; line < dim; line += 32) _mm_prefetch(keys + next * stride + line, _MM_HINT_T0);
            put_value_pair(tiles, block, i, dim, value_at(first), value_at(second));
        }
    for (int start = 0; start < count; start += kColumns)
        attend_columns(tiles, columns + start, static_cast<int>(min_of(kColumns, count - start)), dim, job.scale);
    for (int64_t r = 0; r < job.num_rows; ++r) {  // rows with keys of their own put them over the common ones
        const AttendRow& row = job.rows[r];
        const Seen& mine = seen[r];
        if (mine.low > mine.high || mine.is_plain) continue;
        const auto own = [&](const uint16_t* rows, int i) {
            const int64_t p = begin + i;
            return i < mine.low || i > mine.high ? nullptr : p < job.length ? rows + i * stride
                   : rows + (job.length + row.chain[p - job.length] - begin) * stride;
        };
        for (int i = static_cast<int>(max_of(job.length - begin, mine.low)); i <= mine.high; ++i) {
            put_key(tiles, i, dim, own(keys, i));
            const int block = i / kPairs, at = i % kTileRows16, first = block * kPairs + at;
            put_value_pair(tiles, block, at, dim, own(values, first), own(values, first + kTileRows16));
        }
        count = add_columns(job, row, mine.low, mine.high, columns, 0);
        attend_columns(tiles, columns, count, dim, job.scale);
    }
    _tile_release();
}

}  // namespace
