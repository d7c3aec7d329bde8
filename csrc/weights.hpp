// Matrices in the order in which `linear` reads them, and the rows that they are multiplied with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels.hpp"

namespace sakiyomi {

// A piece of zeroed memory, cut from slabs that the system may back with huge pages: weights are streamed once per pass,
// and address translation would cost a good part of the bandwidth.
class SlabBytes {
   public:
    SlabBytes() = default;
    explicit SlabBytes(std::size_t num_bytes);
    std::uint8_t* get() const { return bytes_; }

   private:
    std::shared_ptr<void> slab_;
    std::uint8_t* bytes_ = nullptr;
};

// An [N, K] matrix in blocks of 16 outputs; the last block is padded with zeros.
struct PackedWeight {
    bool is_quantized = false;
    std::int64_t num_outputs = 0, num_inputs = 0;
    SlabBytes bytes;

    PackedWeight(bool quantized, std::int64_t n, std::int64_t k);
    std::int64_t num_blocks() const { return (num_outputs + kLanes - 1) / kLanes; }
    std::int64_t block_bytes() const {
        return is_quantized ? num_inputs / kGroup * kGroupBytes : num_inputs * kLanes * 4;
    }
    std::int64_t num_bytes() const { return num_blocks() * block_bytes(); }
};

// How a row of `width` numbers is laid out when it is quantized: int8 values, scales, scaled sums.
struct QuantizedRows {
    std::uint8_t* bytes;
    std::int64_t width;

    static std::int64_t stride(std::int64_t width) { return (width + width / kGroup * 8 + 63) / 64 * 64; }

    // Quantize columns [begin, end), multiples of 32, of one row.
    void write(const Kernels& kernels, std::int64_t row, const float* x, std::int64_t begin, std::int64_t end) const {
        std::uint8_t* base = bytes + row * stride(width);
        float* scales = reinterpret_cast<float*>(base + width);
        kernels.quantize(x + begin, (end - begin) / kGroup, reinterpret_cast<std::int8_t*>(base) + begin,
                         scales + begin / kGroup, scales + width / kGroup + begin / kGroup);
    }
};

inline LinearJob linear_job(const PackedWeight& weight, const void* inputs, std::int64_t input_stride,
                            std::int64_t num_rows, const float* bias, const float* residual, float* outputs,
                            std::int64_t output_stride) {
    return {weight.bytes.get(), weight.block_bytes(), weight.num_outputs, weight.num_inputs,
            static_cast<const std::uint8_t*>(inputs), input_stride, num_rows, bias, residual, outputs, output_stride};
}

inline void run_linear(const Kernels& kernels, const PackedWeight& weight, const LinearJob& job, std::int64_t begin,
                       std::int64_t end) {
    if (begin >= end || job.num_rows == 0) return;
    (weight.is_quantized ? kernels.linear_quantized : kernels.linear_dense)(&job, begin, end);
}

}  // namespace sakiyomi
