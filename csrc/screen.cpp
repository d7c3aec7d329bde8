// Making the coarse copy of a head.
#include "screen.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "half.hpp"
#include "parallel.hpp"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace sakiyomi {
namespace {

constexpr std::int64_t kLeastInputs = 8 * kGroup;
constexpr double kUpwards = 1 + 1e-6;  // what sums of doubles and a rounding to single precision may lose

// `count` numbers as unsigned values of `bits` bits, a scale and a min. Returns the square of what rounding took away, or a
// nan where they do not fit.
double round_numbers(const float* x, std::int64_t count, int bits, std::uint8_t* values, GroupHalves* halves) {
    const auto [low, high] = std::minmax_element(x, x + count);
    const int most = (1 << bits) - 1;
    halves->min = float_to_half(*low);
    const float min = half_to_float(halves->min);
    halves->scale = float_to_half((*high - min) / static_cast<float>(most));
    const float scale = half_to_float(halves->scale), inverse = scale == 0 ? 0.0f : 1.0f / scale;
    if (!std::isfinite(scale) || !std::isfinite(min) || !std::isfinite(inverse)) return std::nan("");
    double square = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const float wanted = std::nearbyint((x[i] - min) * inverse);
        values[i] = static_cast<std::uint8_t>(std::min(std::max(wanted, 0.0f), static_cast<float>(most)));
        const double left = static_cast<double>(x[i]) - (static_cast<double>(scale) * values[i] + min);
        square += left * left;
    }
    return square;
}

// The square of the length of |scale| * value + |min|.
double size_of(const std::uint8_t* values, std::int64_t count, GroupHalves halves) {
    const double scale = std::fabs(half_to_float(halves.scale)), low = std::fabs(half_to_float(halves.min));
    double square = 0;
    for (std::int64_t i = 0; i < count; ++i) square += (scale * values[i] + low) * (scale * values[i] + low);
    return square;
}

// At least as large as x, in half precision; infinity where that is none.
std::uint16_t half_above(double x) {
    const std::uint16_t half = float_to_half(static_cast<float>(x * kUpwards));
    return half_to_float(half) < x * kUpwards ? static_cast<std::uint16_t>(half + 1) : half;
}

// Writes row n of the head by itself. Returns the square of the output's size.
double copy_row(const PackedWeight& head, std::int64_t n, std::uint8_t* row) {
    double square = 0;
    for (std::int64_t index = 0; index < head.num_groups(); ++index) {
        const Group group = get_group(head, n, index);
        std::memcpy(row + index * kGroup, group.values, kGroup);
        std::memcpy(row + head.num_inputs + index * sizeof group.halves, &group.halves, sizeof group.halves);
        square += size_of(group.values, kGroup, group.halves);
    }
    return square;
}

// What making the copy of an output found: squares of lengths.
struct Copied {
    double fine = 0, coarse = 0;  // of what rounding took away
    double size = 0;
};

// Writes lane `lane` of a block, whose columns are ordered.
Copied copy_output(const float* columns, std::int64_t num_columns, std::int64_t num_fine, std::int64_t lane, std::uint8_t* block) {
    Copied copied;
    std::uint8_t values[kScreenRun * kGroup];
    GroupHalves halves;
    for (std::int64_t k = 0; k < num_fine; k += kGroup, block += group_bytes(Storage::kBytes)) {
        copied.fine += round_numbers(columns + k, kGroup, 8, values, &halves);
        copied.size += size_of(values, kGroup, halves);
        put_group(values, Storage::kBytes, lane, block);
        put_halves(halves, lane, block + value_bytes(Storage::kBytes));
    }
    for (std::int64_t k = num_fine, count; k < num_columns; k += count) {
        count = std::min(num_columns - k, std::int64_t{kScreenRun} * kGroup);
        copied.coarse += round_numbers(columns + k, count, 4, values, &halves);
        copied.size += size_of(values, count, halves);
        put_halves(halves, lane, block);
        block += kHalvesBytes;
        for (std::int64_t i = 0; i < count; i += kGroup, block += value_bytes(Storage::kNibbles)) put_group(values + i, Storage::kNibbles, lane, block);
    }
    put_halves({half_above(std::sqrt(copied.coarse)), half_above(std::sqrt(copied.fine))}, lane, block);
    return copied;
}

// Columns in the order in which they weigh most in logits: as long as the norm makes their inputs, times their own length.
std::vector<std::int32_t> order_columns(const PackedWeight& head, const float* norm) {
    const std::size_t width = static_cast<std::size_t>(head.num_inputs);
    std::vector<double> squares(width);
    std::vector<float> row(width);
    for (std::int64_t n = 0; n < head.num_outputs; ++n) {
        unpack_row(head, n, row.data());
        for (std::size_t k = 0; k < width; ++k) squares[k] += static_cast<double>(row[k]) * row[k];
    }
    for (std::size_t k = 0; k < width; ++k) squares[k] *= static_cast<double>(norm[k]) * norm[k];
    std::vector<std::int32_t> order(width);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
        return squares[static_cast<std::size_t>(a)] > squares[static_cast<std::size_t>(b)];
    });
    return order;
}

}  // namespace

bool HeadScreen::fits(const PackedWeight& head) {
    return head.storage == Storage::kBytes && head.num_inputs >= kLeastInputs;
}

std::int64_t HeadScreen::num_bytes(std::int64_t num_outputs, std::int64_t num_inputs) {
    const std::int64_t num_blocks = (num_outputs + kLanes - 1) / kLanes;
    const std::int64_t size = head_bytes(num_inputs) + num_blocks * block_bytes(num_inputs, fine_columns(num_inputs)) + num_outputs * row_bytes(num_inputs);
    return (size + 63) / 64 * 64;
}

namespace {

// Groups of four rows in 8 bits as `put_group` puts them, from `lane` on.
void put_four(const std::uint8_t* const* values, std::int64_t lane, std::uint8_t* group) {
#ifdef __SSE2__
    for (std::int64_t at = 0; at < kGroup; at += 16) {
        __m128i rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values[i] + at));
        const __m128i low01 = _mm_unpacklo_epi32(rows[0], rows[1]), low23 = _mm_unpacklo_epi32(rows[2], rows[3]);
        const __m128i high01 = _mm_unpackhi_epi32(rows[0], rows[1]), high23 = _mm_unpackhi_epi32(rows[2], rows[3]);
        const __m128i quads[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23), _mm_unpacklo_epi64(high01, high23),
                                  _mm_unpackhi_epi64(high01, high23)};
        for (int quad = 0; quad < 4; ++quad) _mm_storeu_si128(reinterpret_cast<__m128i*>(group + ((at / 4 + quad) * kLanes + lane) * 4), quads[quad]);
    }
#else
    for (int i = 0; i < 4; ++i) put_group(values[i], Storage::kBytes, lane + i, group);
#endif
}

}  // namespace

void HeadScreen::gather_block(const std::int32_t* ids, std::uint8_t* block) const {
    const std::int64_t num_inputs = header().num_inputs, num_groups = num_inputs / kGroup;
    for (std::int64_t lane = 0; lane < kLanes; lane += 4) {
        const std::uint8_t *values[4], *all_halves[4];
        for (int i = 0; i < 4; ++i) {
            values[i] = row(ids[lane + i]);
            all_halves[i] = values[i] + num_inputs;
        }
        std::uint8_t* group = block;
        for (std::int64_t index = 0; index < num_groups; ++index, group += group_bytes(Storage::kBytes)) {
            put_four(values, lane, group);
            for (int i = 0; i < 4; ++i) {
                GroupHalves halves;
                std::memcpy(&halves, all_halves[i] + index * sizeof halves, sizeof halves);
                put_halves(halves, lane + i, group + value_bytes(Storage::kBytes));
                values[i] += kGroup;
            }
        }
    }
}

bool HeadScreen::make(const PackedWeight& head, const float* norm, std::uint8_t* bytes, int num_threads) {
    const std::int64_t width = head.num_inputs, num_fine = fine_columns(width);
    const std::vector<std::int32_t> order = order_columns(head, norm);
    std::memset(bytes, 0, static_cast<std::size_t>(num_bytes(head.num_outputs, width)));
    ScreenHeader* header = reinterpret_cast<ScreenHeader*>(bytes);
    header->num_outputs = head.num_outputs;
    header->num_inputs = width;
    header->num_fine = num_fine;
    std::memcpy(bytes + sizeof(ScreenHeader), order.data(), order.size() * sizeof order[0]);
    const HeadScreen screen(bytes);
    std::vector<double> sizes(static_cast<std::size_t>(head.num_blocks()));
    Pool::Lease lease(num_threads);
    lease.run([&](Team& team, int rank) {
        std::vector<float> row(static_cast<std::size_t>(width)), ordered(row.size());
        team.share(rank, head.num_blocks(), [&](std::int64_t block) {
            double& size = sizes[static_cast<std::size_t>(block)];
            for (std::int64_t n = block * kLanes; n < std::min((block + 1) * kLanes, head.num_outputs); ++n) {
                const double head_size = copy_row(head, n, bytes + (screen.row(n) - bytes));
                unpack_row(head, n, row.data());
                for (std::size_t k = 0; k < row.size(); ++k) ordered[k] = row[static_cast<std::size_t>(order[k])];
                const Copied copied = copy_output(ordered.data(), width, num_fine, n % kLanes, bytes + (screen.block(block) - bytes));
                const double largest = std::sqrt(std::max(head_size, copied.size));
                size = std::isfinite(largest + copied.fine + copied.coarse) ? std::max(size, largest) : INFINITY;
            }
        });
    });
    header->size = static_cast<float>(*std::max_element(sizes.begin(), sizes.end()) * kUpwards);
    return std::isfinite(header->size);
}

bool HeadScreen::matches(const PackedWeight& head) const {
    const ScreenHeader& own = header();
    if (own.num_outputs != head.num_outputs || own.num_inputs != head.num_inputs || own.num_fine != fine_columns(own.num_inputs)) return false;
    return std::all_of(order(), order() + own.num_inputs, [&](std::int32_t column) { return column >= 0 && column < own.num_inputs; });
}

}  // namespace sakiyomi
