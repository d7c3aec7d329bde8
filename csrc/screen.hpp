// A coarse copy of a language model's head, which tells of most outputs that they cannot be the largest logit.
//
// Of a head in 8 bits that is read once per token, most is read for outputs that are far from the largest. The copy holds
// the columns that weigh most in 8 bits and the others in 4, half of the head's bytes; and for each output the length of what
// rounding took away, which bounds how far its logit may lie from what the copy says. Of the outputs that are left, a few
// dozen here and there, the logits themselves are computed; the head holds sixteen beside one another, so the copy has all of
// its rows once more, each by itself.
#pragma once

#include <cstdint>
#include <memory>

#include "weights.hpp"

namespace sakiyomi {

// Laid out as one piece: this struct, `order` [num_inputs], then for each block of 16 outputs the groups of the fine columns
// (kBytes); runs of four groups of the coarse ones (kNibbles) with one scale and min before them; and in half precision 16
// lengths of what was rounded away of the coarse columns and 16 of the fine ones. Behind the last block lie the head's rows:
// values [num_inputs], then a scale and a min for each 32 of them.
struct ScreenHeader {
    std::int64_t num_outputs, num_inputs, num_fine;
    // At most the length, over the columns, of |scale| * value + |min| of any output of head or copy: what the rounding of
    // sums is relative to, per length of the inputs.
    float size;
    std::int32_t unused[9];
};
static_assert(sizeof(ScreenHeader) == 64, "blocks start at multiples of 64");

class HeadScreen {
   public:
    // Whether a head can have one, and is large enough to be worth it.
    static bool fits(const PackedWeight& head);
    static std::int64_t num_bytes(std::int64_t num_outputs, std::int64_t num_inputs);
    // Fills `bytes` [num_bytes], at a multiple of 64, for rows that are multiplied by `norm` [num_inputs] before the head reads
    // them. Returns false where a weight is not finite or beyond half precision.
    static bool make(const PackedWeight& head, const float* norm, std::uint8_t* bytes, int num_threads);

    // Over bytes that somebody else keeps alive; they must be `make`'s.
    explicit HeadScreen(const std::uint8_t* bytes) : bytes_(bytes) {}

    // Whether bytes of the right number are those of such a head.
    bool matches(const PackedWeight& head) const;

    const ScreenHeader& header() const { return *reinterpret_cast<const ScreenHeader*>(bytes_); }
    std::int64_t num_fine() const { return header().num_fine; }
    std::int64_t num_coarse() const { return header().num_inputs - header().num_fine; }
    std::int64_t num_bytes() const { return num_bytes(header().num_outputs, header().num_inputs); }
    const std::int32_t* order() const { return reinterpret_cast<const std::int32_t*>(bytes_ + sizeof(ScreenHeader)); }

    std::int64_t block_bytes() const { return block_bytes(header().num_inputs, num_fine()); }
    const std::uint8_t* block(std::int64_t index) const { return bytes_ + head_bytes(header().num_inputs) + index * block_bytes(); }
    std::int64_t num_blocks() const { return (header().num_outputs + kLanes - 1) / kLanes; }
    static std::int64_t row_bytes(std::int64_t num_inputs) { return num_inputs + num_inputs / kGroup * static_cast<std::int64_t>(sizeof(GroupHalves)); }
    const std::uint8_t* row(std::int64_t n) const { return block(num_blocks()) + n * row_bytes(header().num_inputs); }
    // Rows ids[0] to ids[15] as a block of a head in 8 bits.
    void gather_block(const std::int32_t* ids, std::uint8_t* block) const;
    // Over the outputs of a share and the rows of these inputs.
    ScreenJob job_of_share(std::int64_t share, const QuantizedRows& fine, const QuantizedRows& coarse) const {
        return {block(share * kShareBlocks), block_bytes(), num_fine() / kGroup, num_coarse() / kGroup, fine.bytes, coarse.bytes,
                coarse.num_rows, nullptr, nullptr, nullptr, 0};
    }

   private:
    static constexpr std::int64_t kLengthsBytes = 2 * kLanes * 2;
    static constexpr std::int64_t kFinePart = 9;  // one of so many columns
    static std::int64_t head_bytes(std::int64_t num_inputs) {
        return (static_cast<std::int64_t>(sizeof(ScreenHeader)) + num_inputs * 4 + 63) / 64 * 64;
    }
    static std::int64_t fine_columns(std::int64_t num_inputs) { return (num_inputs / kFinePart + kGroup - 1) / kGroup * kGroup; }
    static std::int64_t block_bytes(std::int64_t num_inputs, std::int64_t num_fine) {
        const std::int64_t num_coarse = (num_inputs - num_fine) / kGroup, num_runs = (num_coarse + kScreenRun - 1) / kScreenRun;
        return num_fine / kGroup * group_bytes(Storage::kBytes) + num_coarse * value_bytes(Storage::kNibbles) + num_runs * kHalvesBytes + kLengthsBytes;
    }
    const std::uint8_t* bytes_;
};

}  // namespace sakiyomi
