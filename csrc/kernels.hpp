// What one instruction set offers: a table of routines over single rows, or over a range of output blocks.
//
// Every routine gives a row the same bits whatever rows or blocks are computed beside it. This header is included by
// translation units compiled for wide instructions, so it holds plain data only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace sakiyomi {

enum {
    kLanes = 16,      // outputs in a block of a packed weight
    kGroup = 32,      // inputs that share a scale and a min
    kKeyBlock = 32,   // positions in a block of the online softmax
    kKeyChunk = 128,  // positions whose attention is one part, so that threads may share long contexts
    kAttendRows = 8,  // rows that share the conversion of a block
    kScreenedRows = 8,  // rows whose best ids are sought in the coarse copy of a head first, at most 32
    kPartHeader = 16, // floats before the sums of a part: the largest score, the total of the weights
    kMaxHeadDim = 512,
    kChooseBlock = 64,  // logits whose largest is known, and which share the call of a routine
    kHalvesBytes = kLanes * 2 * 2,      // 16 scales and 16 mins in half precision, behind a group's values
    kSpansBytes = kLanes * 20 / 8,      // in place of these,
    kSpanBasesBytes = 8,                // with bases for each block,
    kSpanRun = 8,                       // of so many groups beside one another, which is whole lines
};

// How the numbers of a packed weight are stored; in blocks of 16 outputs, group after group of 32 inputs:
//   kBytes     [8 quads][16 outputs][4] unsigned bytes, then the halves
//   kNibbles   [4][16][4] bytes, quad k in the low and quad k + 4 in the high half of each, then the halves
//   kSpans     in runs of eight groups, of which the first may be shorter: their spans (spans.hpp), 20 bits for each output,
//              then their values as in kNibbles. Bases lie before the first span, and what is left of a line behind the last
//   kFloats    [inputs][16 outputs] floats, no groups
enum class Storage : uint8_t { kFloats, kBytes, kNibbles, kSpans };

constexpr bool is_in_nibbles(Storage storage) { return storage == Storage::kNibbles || storage == Storage::kSpans; }
constexpr int64_t value_bytes(Storage storage) { return is_in_nibbles(storage) ? kLanes * kGroup / 2 : kLanes * kGroup; }
constexpr int64_t group_bytes(Storage storage) { return value_bytes(storage) + kHalvesBytes; }  // of kBytes and kNibbles

// Where in a block a group's values lie, and its halves or span.
struct GroupPlace {
    int64_t values, halves;
};

// Groups of the first run; the others have kSpanRun.
inline int64_t first_run(Storage storage, int64_t num_groups) { return storage == Storage::kSpans ? (num_groups - 1) % kSpanRun + 1 : num_groups; }

inline GroupPlace place_of_group(Storage storage, int64_t group, int64_t num_groups) {
    if (storage != Storage::kSpans) return {group * group_bytes(storage), group * group_bytes(storage) + value_bytes(storage)};
    const int64_t first = first_run(storage, num_groups), size = (kSpanBasesBytes + first * kSpansBytes + 63) / 64 * 64;
    if (group < first) return {size + group * value_bytes(storage), kSpanBasesBytes + group * kSpansBytes};
    const int64_t begin = group - (group - first) % kSpanRun, bytes = size + begin * value_bytes(storage) + (begin - first) * kSpansBytes;
    return {bytes + kSpanRun * kSpansBytes + (group - begin) * value_bytes(storage), bytes + (group - begin) * kSpansBytes};
}

inline int64_t quantized_block_bytes(Storage storage, int64_t num_groups) {
    return storage == Storage::kSpans ? place_of_group(storage, num_groups - 1, num_groups).values + value_bytes(storage) : num_groups * group_bytes(storage);
}

// Quantized rows, group after group: for all rows 32 int8 values, then for all rows a scale, then scale * sum of values.
inline int64_t input_group_bytes(int64_t num_rows) { return (num_rows * (kGroup + 8) + 63) / 64 * 64; }

// y[r, n] = residual[r, n] + (sum_k x[r, k] w[n, k] + bias[n]) for a range of blocks of 16 outputs n.
struct LinearJob {
    Storage storage;
    const uint8_t* weights;
    int64_t block_bytes;
    int64_t num_outputs;
    int64_t num_inputs;
    const uint8_t* inputs;  // quantized rows, or floats
    int64_t input_stride;   // of floats: bytes from row to row
    int64_t num_rows;
    const float* bias;      // or null
    const float* residual;  // or null; strided as `outputs`, which it may be
    float* outputs;
    int64_t output_stride;  // floats from row to row
};

// The most that outputs of a head may be, by its coarse copy (screen.hpp): y[r, n] = the copy's row n times x[r], and lengths
// of n times those of x[r]. The fine columns are read by two terms of each row.
struct ScreenJob {
    const uint8_t* blocks;        // each: fine groups, runs of coarse ones, then 16 lengths of coarse and 16 of fine columns
    int64_t block_bytes;
    int64_t num_fine_groups, num_coarse_groups;
    const uint8_t* fine_inputs;   // quantized rows, 2 * num_rows: row r's terms are rows 2 r and 2 r + 1
    const uint8_t* coarse_inputs; // quantized rows, num_rows
    int64_t num_rows;             // 1 to kScreenedRows
    const float* coarse_lengths;  // [num_rows]
    const float* fine_lengths;
    float* outputs;               // whole blocks
    int64_t output_stride;
};

// Coarse groups share halves, which lie before them; the last run may be shorter.
enum { kScreenRun = 4 };

// Attention of up to four query heads of each of a few rows over those keys of one key/value head that lie in one chunk:
// positions from `begin` (a multiple of kKeyChunk) to `begin` + kKeyChunk - 1.
// The key at position p is row p of the cache below `length`, and row length + chain[p - length] from there on.
// A part [head][part_floats] holds the largest score, the total of the weights relative to it, and behind the header the
// sums of weighted values; a row that sees nothing of the chunk gets a largest score of minus infinity.
struct AttendRow {
    const void* queries;   // head h at floats + h * head_dim, or rounded ones (round_query) at bytes + h * query_bytes
    float* part;
    const int32_t* chain;  // or null: row p everywhere
    int64_t first, last;   // positions seen, both included
};

struct AttendJob {
    const AttendRow* rows;
    int64_t num_rows;      // 1 to kAttendRows
    int64_t num_heads;     // 1 to 4
    int64_t head_dim;
    const void* keys;
    const void* values;
    int64_t key_stride;    // of floats: elements from row to row; bytes lie in blocks (kv_bytes.hpp)
    int64_t length;
    int64_t begin;
    float scale;           // of the scores of floats
    bool follows;          // on a call for the chunk before, which asked for the keys and values of this one
};

// A cache in 8 bits (kv_bytes.hpp).
enum { kKeyGroupBytes = (kGroup + 4) * kLanes };  // 32 dimensions of 16 keys, and their scales
constexpr int64_t num_groups(int64_t head_dim) { return (head_dim + kGroup - 1) / kGroup; }
constexpr int64_t key_block_bytes(int64_t head_dim) { return kKeyBlock / kLanes * num_groups(head_dim) * kKeyGroupBytes; }
constexpr int64_t value_block_bytes(int64_t head_dim) {
    return ((head_dim + kLanes - 1) / kLanes * kLanes + 4) * kKeyBlock;
}

// A rounded query: int8 values [groups][32], for each group a scale, and for each what sums start from. Behind the last one
// tiles may read up to kQueriesBehind more, whatever they hold.
enum { kQueriesBehind = 16 };
constexpr int64_t query_bytes(int64_t head_dim) { return (num_groups(head_dim) * (kGroup + 8) + 63) / 64 * 64; }

inline int64_t part_floats(int64_t head_dim) { return kPartHeader + (head_dim + kLanes - 1) / kLanes * kLanes; }

struct NoiseKey;

// The score of a logit: (logit - max) / temperature; those below `lowest` have no weight.
struct ScoreRule {
    float max;
    double temperature, lowest;
};

struct Kernels {
    const char* name;
    int64_t attend_setup;  // what reading a key costs attention, in halves of what using it for a row and head costs
    int64_t num_streams;   // blocks of a quantized weight that one row reads side by side
    bool prefers_spans;    // what reading less saves was measured to be more than what taking spans apart costs
    void (*linear_quantized)(const LinearJob* job, int64_t first_block, int64_t last_block);
    void (*linear_dense)(const LinearJob* job, int64_t first_block, int64_t last_block);
    // Row `row` of `num_rows` quantized rows, from the group at `out` on.
    void (*quantize)(const float* x, int64_t num_groups, uint8_t* out, int64_t row, int64_t num_rows);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t width, float* out);
    void (*rope)(const float* x, const float* cosines, const float* sines, int64_t half, float* out);
    void (*from_half)(const uint16_t* x, int64_t count, float* out);  // whole lanes
    // Symmetric 8-bit values of a run of numbers, padded to whole lanes; returns their scale.
    float (*quantize_run)(const float* x, int64_t count, int8_t* out, int32_t* sum);
    void (*round_query)(const float* query, int64_t head_dim, float scale, void* record);
    void (*attend_bytes)(const AttendJob* job);
    void (*attend_float)(const AttendJob* job);
    // Joins `count` parts, one behind the other, each with what the parts before it gave, in the same form; the order in which
    // parts are joined to one state decides the bits.
    void (*join_parts)(const float* parts, int64_t count, int64_t head_dim, float* states);
    void (*finish_attention)(const float* state, int64_t head_dim, float* out);
    void (*silu_mul)(const float* gate, const float* up, int64_t count, float* out);
    void (*add)(const float* x, const float* y, int64_t count, float* out);
    int64_t (*argmax)(const float* x, int64_t count);
    void (*scan_lanes)(const float* x, int64_t count, float* maxima);  // the largest of each kLanes
    void (*screen_blocks)(const ScreenJob* job, int64_t first_block, int64_t last_block);
    // What choosing a token does with rows of logits, in blocks of kChooseBlock (choose_impl.hpp).
    // The largest of each block; returns whether there is a nan.
    bool (*scan_blocks)(const float* x, int64_t num_blocks, float* maxima);
    // Bits of the logits of a block that are at least `bound` and above -inf.
    uint64_t (*find_in_block)(const float* x, float bound);
    // exp(score) of a block, 0 for scores below `lowest`; and the sums of blocks by id % 16, added to `lanes`.
    void (*weigh_block)(const float* x, const ScoreRule* rule, double* weights);
    void (*sum_blocks)(const float* x, int64_t num_blocks, const float* maxima, const ScoreRule* rule, double* lanes);
    // The same to single precision: a weight is off by less than 2e-7 (1 + |score|) of it.
    void (*guess_block)(const float* x, const ScoreRule* rule, float* weights);
    double (*guess_total)(const float* x, int64_t num_blocks, const ScoreRule* rule);
    // The random words of a block of ids from 4 * first_group on.
    void (*draw_block)(const NoiseKey* key, uint32_t first_group, uint32_t* words);
    // Bits of the ids of a block whose score + noise may reach `hurdle`.
    uint64_t (*bound_block)(const float* x, const ScoreRule* rule, const uint32_t* words, float hurdle);
};

extern const Kernels kPortableKernels;
#ifdef SAKIYOMI_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAmxKernels;
#endif
#ifdef SAKIYOMI_NEON
extern const Kernels kNeonKernels;
#endif

// The table in use: the widest that the machine runs, or the one that SAKIYOMI_ISA names. Throws std::invalid_argument.
const Kernels& kernels();

}  // namespace sakiyomi
