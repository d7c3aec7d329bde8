// What the coarse copy of a head (screen.hpp) says of a few rows. Included by kernels_impl.hpp.
namespace {

using sakiyomi::ScreenJob;
using sakiyomi::kHalvesBytes;
using sakiyomi::kScreenRun;

// Fetches what the next tile reads where this one reads `num_bytes` at `here`.
inline void fetch_behind(const uint8_t* here, int64_t num_bytes) {
    for (int64_t line = 0; line < num_bytes; line += 64) prefetch(here + kNarrowAheadBytes + line);
}

// Adds a group of one block to the totals, each of which counts TERMS of the rows of inputs.
template <Storage STORAGE, int ROWS, int TERMS>
inline void add_screened(const uint8_t* weights, Vf scale, Vf low, const uint8_t* inputs, Vf* totals) {
    enum { kInputRows = ROWS * TERMS };
    fetch_behind(weights, value_bytes(STORAGE));
    Vi sums[kInputRows][1];
    dot_group<STORAGE, kInputRows, 1>(weights, 0, reinterpret_cast<const int8_t*>(inputs), sums);
    const float* scales = reinterpret_cast<const float*>(inputs + kInputRows * kGroup);
#pragma GCC unroll 16
    for (int r = 0; r < kInputRows; ++r)
        totals[r / TERMS] = add_group(totals[r / TERMS], to_float(sums[r][0]), scale, low, scales + r, scales + kInputRows + r);
}

// The scales and mins at `halves`.
inline void load_halves(const uint8_t* halves, Vf* scale, Vf* low) {
    fetch_behind(halves, kHalvesBytes);
    Scales<Storage::kNibbles>().of_group(halves, scale, low);
}

template <int ROWS>
void screen_tile(const ScreenJob& job, int64_t first_block, int64_t last_block) {
    enum { kTerms = 2 };
    for (int64_t block = first_block; block < last_block; ++block) {
        const uint8_t* weights = job.blocks + block * job.block_bytes;
        const uint8_t* inputs = job.fine_inputs;
        Vf totals[ROWS], scale = set1(0.0f), low = scale;
        for (Vf& total : totals) total = set1(0.0f);
        for (int64_t group = 0; group < job.num_fine_groups; ++group, weights += group_bytes(Storage::kBytes)) {
            load_halves(weights + value_bytes(Storage::kBytes), &scale, &low);
            add_screened<Storage::kBytes, ROWS, kTerms>(weights, scale, low, inputs, totals);
            inputs += input_group_bytes(ROWS * kTerms);
        }
        inputs = job.coarse_inputs;
        for (int64_t group = 0; group < job.num_coarse_groups; ++group, weights += value_bytes(Storage::kNibbles)) {
            if (group % kScreenRun == 0) {
                load_halves(weights, &scale, &low);
                weights += kHalvesBytes;
            }
            add_screened<Storage::kNibbles, ROWS, 1>(weights, scale, low, inputs, totals);
            inputs += input_group_bytes(ROWS);
        }
        fetch_behind(weights, 4 * kLanes);
        const uint16_t* lengths = reinterpret_cast<const uint16_t*>(weights);
        const Vf coarse = load(lengths), fine = load(lengths + kLanes);
        for (int r = 0; r < ROWS; ++r) {
            const Vf slack = fma(coarse, set1(job.coarse_lengths[r]), mul(fine, set1(job.fine_lengths[r])));
            store(job.outputs + r * job.output_stride + block * kLanes, add(totals[r], slack));
        }
    }
}

void screen_blocks(const ScreenJob* job, int64_t first_block, int64_t last_block) {
    switch (job->num_rows) {
        case 1: return screen_tile<1>(*job, first_block, last_block);
        case 2: return screen_tile<2>(*job, first_block, last_block);
        case 3: return screen_tile<3>(*job, first_block, last_block);
        case 4: return screen_tile<4>(*job, first_block, last_block);
        case 5: return screen_tile<5>(*job, first_block, last_block);
        case 6: return screen_tile<6>(*job, first_block, last_block);
        case 7: return screen_tile<7>(*job, first_block, last_block);
        default: return screen_tile<8>(*job, first_block, last_block);
    }
}

}  // namespace
