// Matrices in the order in which `linear` reads them, and the rows that they are multiplied with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels.hpp"
#include "spans.hpp"

namespace sakiyomi {

// Zeroed memory that begins with a huge page, where the system has such: what is streamed once per pass would else spend a
// good part of the time on address translation.
std::shared_ptr<std::uint8_t> new_pages(std::size_t num_bytes);

// A piece of zeroed memory, cut from slabs of such pages.
class SlabBytes {
   public:
    SlabBytes() = default;
    explicit SlabBytes(std::size_t num_bytes);
    // Memory that belongs to somebody else, who must outlive this.
    static SlabBytes borrow(const std::uint8_t* bytes) {
        SlabBytes borrowed;
        borrowed.bytes_ = const_cast<std::uint8_t*>(bytes);
        return borrowed;
    }
    std::uint8_t* get() const { return bytes_; }

   private:
    std::shared_ptr<std::uint8_t> slab_;
    std::uint8_t* bytes_ = nullptr;
};

class HeadScreen;

// Searches that leave a coarse copy out since it decided too little, each time in a row twice as many as the last time.
struct ScreenPause {
    std::int64_t left = 0, next = 1;

    bool ask() {
        if (left == 0) return true;
        --left;
        return false;
    }
    void tell(bool was_worth_it) {
        left = was_worth_it ? 0 : next;
        next = was_worth_it ? 1 : next < kLongest ? 2 * next : next;
    }
    static constexpr std::int64_t kLongest = 64;
};

// An [N, K] matrix in blocks of 16 outputs; the last block is padded with zeros.
struct PackedWeight {
    Storage storage = Storage::kFloats;
    std::int64_t num_outputs = 0, num_inputs = 0;
    SlabBytes bytes;
    mutable std::unique_ptr<float[]> share_norms;  // head.cpp's; read and set by whoever has the pool
    std::shared_ptr<const HeadScreen> screen;      // of a language model's head, or null
    mutable ScreenPause screen_pauses[kScreenedRows + 1];  // by number of rows, as share_norms

    PackedWeight(Storage storage, std::int64_t n, std::int64_t k);                      // zeroed memory of its own
    PackedWeight(Storage storage, std::int64_t n, std::int64_t k, const std::uint8_t* packed);  // borrowed memory
    bool is_quantized() const { return storage != Storage::kFloats; }
    std::int64_t num_groups() const { return num_inputs / kGroup; }
    std::int64_t num_blocks() const { return (num_outputs + kLanes - 1) / kLanes; }
    std::int64_t block_bytes() const {
        return is_quantized() ? quantized_block_bytes(storage, num_groups()) : num_inputs * kLanes * 4;
    }
    const std::uint8_t* block(std::int64_t index) const { return bytes.get() + index * block_bytes(); }
    std::int64_t num_bytes() const { return num_blocks() * block_bytes(); }
};

// A quantized group of one output.
struct Group {
    std::uint8_t values[kGroup];
    GroupHalves halves;
};

// Puts the values, or the halves behind them, where kernels.hpp has them.
void put_group(const std::uint8_t* values, Storage storage, std::int64_t lane, std::uint8_t* group);
void put_halves(GroupHalves halves, std::int64_t lane, std::uint8_t* place);

// Group `index` of row n of a quantized weight; its halves alone.
Group get_group(const PackedWeight& weight, std::int64_t n, std::int64_t index);
GroupHalves get_halves(const PackedWeight& weight, std::int64_t n, std::int64_t index);

// Row n of a weight as floats [K].
void unpack_row(const PackedWeight& weight, std::int64_t n, float* out);

// Rows of `width` numbers as a weight wants them: quantized, or as they are.
struct QuantizedRows {
    std::uint8_t* bytes;
    std::int64_t width, num_rows;

    static std::int64_t num_bytes(std::int64_t width, std::int64_t num_rows) {
        return width / kGroup * input_group_bytes(num_rows);
    }

    // Quantize columns [begin, end), multiples of 32, of one row.
    void write(const Kernels& kernels, std::int64_t row, const float* x, std::int64_t begin, std::int64_t end) const {
        write_columns(kernels, row, x + begin, begin, end);
    }
    // The same; x is the number at column `begin`.
    void write_columns(const Kernels& kernels, std::int64_t row, const float* x, std::int64_t begin, std::int64_t end) const {
        kernels.quantize(x, (end - begin) / kGroup, bytes + begin / kGroup * input_group_bytes(num_rows), row, num_rows);
    }
};

inline LinearJob linear_job(const PackedWeight& weight, const void* inputs, std::int64_t input_stride,
                            std::int64_t num_rows, const float* bias, const float* residual, float* outputs,
                            std::int64_t output_stride) {
    return {weight.storage, weight.bytes.get(), weight.block_bytes(), weight.num_outputs, weight.num_inputs,
            static_cast<const std::uint8_t*>(inputs), input_stride, num_rows, bias, residual, outputs, output_stride};
}

inline void run_linear(const Kernels& kernels, const PackedWeight& weight, const LinearJob& job, std::int64_t begin,
                       std::int64_t end) {
    if (begin >= end || job.num_rows == 0) return;
    (weight.is_quantized() ? kernels.linear_quantized : kernels.linear_dense)(&job, begin, end);
}

// Threads take neighbouring blocks together: a tile of the widest kernel.
inline constexpr std::int64_t kShareBlocks = 4;

inline std::int64_t num_shares(std::int64_t num_blocks, std::int64_t unit = kShareBlocks) { return (num_blocks + unit - 1) / unit; }

// A share of `unit` blocks.
inline void run_share(const Kernels& kernels, const PackedWeight& weight, const LinearJob& job, std::int64_t share,
                      std::int64_t unit = kShareBlocks) {
    const std::int64_t begin = share * unit, end = begin + unit, last = weight.num_blocks();
    run_linear(kernels, weight, job, begin, end < last ? end : last);
}

}  // namespace sakiyomi
