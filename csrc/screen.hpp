// A coarse copy of a language model's head, which tells of most outputs that they cannot be the largest logit.
//
// Of a head in 8 bits that is read once per token, most is read for outputs that are far from the largest. The copy holds
// part of the columns that weighs most in 8 bits and the others in 4, some three fifths of the head's bytes; and for each
// output the length of what rounding took away, which bounds how far its logit may lie from what the copy says. The head
// itself decides what is left.
#pragma once

#include <cstdint>
#include <memory>

#include "weights.hpp"

namespace sakiyomi {

// Laid out as one piece: this struct, `order` [num_inputs], then for each block of 16 outputs the groups of the fine columns
// (kBytes); pairs of groups of the coarse ones (kNibbles) with one scale and min behind both; and in half precision 16 lengths
// of what was rounded away of the coarse columns and 16 of the fine ones.
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
    // Over the outputs of a share and the rows of these inputs.
    ScreenJob job_of_share(std::int64_t share, const QuantizedRows& fine, const QuantizedRows& coarse) const {
        return {block(share * kShareBlocks), block_bytes(), num_fine() / kGroup, num_coarse() / (2 * kGroup), fine.bytes, coarse.bytes,
                coarse.num_rows, nullptr, nullptr, nullptr, 0};
    }

   private:
    static constexpr std::int64_t kLengthsBytes = 2 * kLanes * 2;
    static std::int64_t head_bytes(std::int64_t num_inputs) {
        return (static_cast<std::int64_t>(sizeof(ScreenHeader)) + num_inputs * 4 + 63) / 64 * 64;
    }
    // Two ninths and more, so that pairs of groups are left.
    static std::int64_t fine_columns(std::int64_t num_inputs) {
        const std::int64_t least = (2 * num_inputs / 9 + kGroup - 1) / kGroup * kGroup;
        return least + (num_inputs - least) % (2 * kGroup);
    }
    static std::int64_t block_bytes(std::int64_t num_inputs, std::int64_t num_fine) {
        return num_fine / kGroup * group_bytes(Storage::kBytes) + (num_inputs - num_fine) / (2 * kGroup) * kScreenPairBytes + kLengthsBytes;
    }
    const std::uint8_t* bytes_;
};

}  // namespace sakiyomi
