// Keys and values of one head at one layer in 8 bits, in the order in which attention reads them (sizes: kernels.hpp).
// Included by translation units compiled for wide instructions, so everything here has internal linkage.
//
//   keys    of 16 positions after another: for each group of 32 dimensions [8 quads][16 positions][4] bytes, then the
//           positions' scales [16]
//   values  of 32 positions after another: for each 16 dimensions [8 quads of positions][16 dimensions][4] bytes, then the
//           positions' scales [32]
//
// A byte is the signed value plus 128. Dimensions are padded with zeros.
#pragma once

#include <string.h>

#include "kernels.hpp"

namespace {

[[maybe_unused]] inline int64_t key_place(int64_t slot, int64_t head_dim) {
    return slot / sakiyomi::kLanes * (sakiyomi::key_block_bytes(head_dim) / 2) + slot % sakiyomi::kLanes * 4;
}

[[maybe_unused]] inline int64_t value_place(int64_t slot, int64_t dimension, int64_t head_dim) {
    return slot / sakiyomi::kKeyBlock * sakiyomi::value_block_bytes(head_dim) +
           dimension / sakiyomi::kLanes * (sakiyomi::kKeyBlock * sakiyomi::kLanes) + slot % sakiyomi::kKeyBlock / 4 * 64 +
           dimension % sakiyomi::kLanes * 4 + slot % 4;
}

[[maybe_unused]] inline int64_t value_scale_place(int64_t slot, int64_t head_dim) {
    return (slot / sakiyomi::kKeyBlock + 1) * sakiyomi::value_block_bytes(head_dim) -
           (sakiyomi::kKeyBlock - slot % sakiyomi::kKeyBlock) * 4;
}

// `values`: int8 [groups][32].
[[maybe_unused]] inline void put_key(uint8_t* keys, int64_t slot, int64_t head_dim, const int8_t* values, const float* scales) {
    uint8_t* place = keys + key_place(slot, head_dim);
    for (int64_t group = 0; group < sakiyomi::num_groups(head_dim); ++group, place += sakiyomi::kKeyGroupBytes) {
        for (int64_t quad = 0; quad < 8; ++quad) {
            uint32_t four;
            memcpy(&four, values + group * sakiyomi::kGroup + quad * 4, 4);
            four ^= 0x80808080u;
            memcpy(place + quad * 64, &four, 4);
        }
        memcpy(place + 8 * 64, scales + group, 4);
    }
}

// `values`: int8 [padded to whole lanes].
[[maybe_unused]] inline void put_value(uint8_t* all, int64_t slot, int64_t head_dim, const int8_t* values, float scale) {
    for (int64_t start = 0; start < head_dim; start += sakiyomi::kLanes) {
        uint8_t* place = all + value_place(slot, start, head_dim);
        for (int64_t i = 0; i < sakiyomi::kLanes; ++i) place[i * 4] = static_cast<uint8_t>(values[start + i]) ^ 0x80;
    }
    memcpy(all + value_scale_place(slot, head_dim), &scale, 4);
}

[[maybe_unused]] inline void copy_key(const uint8_t* from, int64_t source, uint8_t* to, int64_t target, int64_t head_dim) {
    from += key_place(source, head_dim);
    to += key_place(target, head_dim);
    for (int64_t line = 0; line < sakiyomi::num_groups(head_dim) * sakiyomi::kKeyGroupBytes; line += 64) memcpy(to + line, from + line, 4);
}

[[maybe_unused]] inline void copy_value(const uint8_t* from, int64_t source, uint8_t* to, int64_t target, int64_t head_dim) {
    for (int64_t start = 0; start < head_dim; start += sakiyomi::kLanes) {
        const uint8_t* left = from + value_place(source, start, head_dim);
        uint8_t* right = to + value_place(target, start, head_dim);
        for (int64_t i = 0; i < sakiyomi::kLanes; ++i) right[i * 4] = left[i * 4];
    }
    memcpy(to + value_scale_place(target, head_dim), from + value_scale_place(source, head_dim), 4);
}

}  // namespace
