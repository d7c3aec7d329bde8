// Making the coarse copy of a head.
#include "screen.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "half.hpp"
#include "parallel.hpp"

namespace sakiyomi {
namespace {

constexpr std::int64_t kLeastInputs = 8 * kGroup;
constexpr double kUpwards = 1 + 1e-6;  // what sums of doubles and a rounding to single precision may lose

// A group of 32 numbers as unsigned values of `bits` bits, a scale and a min. Returns the square of what rounding took
// away, or a nan where they do not fit.
double round_group(const float* x, int bits, std::uint8_t* values, std::uint16_t* halves) {
    const auto [low, high] = std::minmax_element(x, x + kGroup);
    const int most = (1 << bits) - 1;
    halves[1] = float_to_half(*low);
    const float min = half_to_float(halves[1]);
    halves[0] = float_to_half((*high - min) / static_cast<float>(most));
    const float scale = half_to_float(halves[0]), inverse = scale == 0 ? 0.0f : 1.0f / scale;
    if (!std::isfinite(scale) || !std::isfinite(min) || !std::isfinite(inverse)) return std::nan("");
    double square = 0;
    for (int i = 0; i < kGroup; ++i) {
        const float wanted = std::nearbyint((x[i] - min) * inverse);
        values[i] = static_cast<std::uint8_t>(std::min(std::max(wanted, 0.0f), static_cast<float>(most)));
        const double left = static_cast<double>(x[i]) - (static_cast<double>(scale) * values[i] + min);
        square += left * left;
    }
    return square;
}

// The square of the length of |scale| * value + |min|.
double size_of_group(const std::uint8_t* values, const std::uint16_t* halves) {
    const double scale = std::fabs(half_to_float(halves[0])), low = std::fabs(half_to_float(halves[1]));
    double square = 0;
    for (int i = 0; i < kGroup; ++i) square += (scale * values[i] + low) * (scale * values[i] + low);
    return square;
}

// At least as large as x, in half precision; infinity where that is none.
std::uint16_t half_above(double x) {
    const std::uint16_t half = float_to_half(static_cast<float>(x * kUpwards));
    return half_to_float(half) < x * kUpwards ? static_cast<std::uint16_t>(half + 1) : half;
}

// A group of an output, as kernels.hpp lays it out.
struct Group {
    std::uint8_t values[kGroup];
    std::uint16_t halves[2];

    static Group read(const std::uint8_t* bytes, std::int64_t lane) {
        Group group;
        for (int quad = 0; quad < kGroup / 4; ++quad) std::memcpy(group.values + quad * 4, bytes + (quad * kLanes + lane) * 4, 4);
        for (int i = 0; i < 2; ++i) std::memcpy(group.halves + i, bytes + value_bytes(Storage::kBytes) + (i * kLanes + lane) * 2, 2);
        return group;
    }

    void write(std::uint8_t* bytes, std::int64_t lane, Storage storage) const {
        for (int i = 0; storage == Storage::kNibbles && i < kGroup / 2; ++i)
            bytes[(i / 4 * kLanes + lane) * 4 + i % 4] = static_cast<std::uint8_t>(values[i] | values[i + kGroup / 2] << 4);
        for (int quad = 0; storage == Storage::kBytes && quad < kGroup / 4; ++quad) std::memcpy(bytes + (quad * kLanes + lane) * 4, values + quad * 4, 4);
        for (int i = 0; i < 2; ++i) std::memcpy(bytes + value_bytes(storage) + (i * kLanes + lane) * 2, halves + i, 2);
    }
};

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
    return head_bytes(num_inputs) + (num_outputs + kLanes - 1) / kLanes * block_bytes(num_inputs, fine_columns(num_inputs));
}

bool HeadScreen::make(const PackedWeight& head, const float* norm, std::uint8_t* bytes, int num_threads) {
    const std::int64_t width = head.num_inputs, num_fine = fine_columns(width), num_groups = width / kGroup;
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
            std::uint8_t* target = bytes + (screen.block(block) - bytes);
            std::uint16_t* lengths = reinterpret_cast<std::uint16_t*>(target + screen.block_bytes() - kLengthsBytes);
            double& size = sizes[static_cast<std::size_t>(block)];
            for (std::int64_t lane = 0; lane < kLanes && block * kLanes + lane < head.num_outputs; ++lane) {
                unpack_row(head, block * kLanes + lane, row.data());
                for (std::size_t k = 0; k < row.size(); ++k) ordered[k] = row[static_cast<std::size_t>(order[k])];
                double squares[2] = {}, own_size = 0, copy_size = 0;  // of coarse and fine columns
                std::uint8_t* place = target;
                for (std::int64_t g = 0; g < num_groups; ++g) {
                    const bool is_fine = g * kGroup < num_fine;
                    const Storage storage = is_fine ? Storage::kBytes : Storage::kNibbles;
                    Group group;
                    squares[is_fine] += round_group(ordered.data() + g * kGroup, is_fine ? 8 : 4, group.values, group.halves);
                    group.write(place, lane, storage);
                    place += group_bytes(storage);
                    copy_size += size_of_group(group.values, group.halves);
                    const Group own = Group::read(head.bytes.get() + block * head.block_bytes() + g * group_bytes(Storage::kBytes), lane);
                    own_size += size_of_group(own.values, own.halves);
                }
                for (int i = 0; i < 2; ++i) lengths[i * kLanes + lane] = half_above(std::sqrt(squares[i]));
                size = std::max(size, std::sqrt(std::max(own_size, copy_size)));
                if (!std::isfinite(squares[0] + squares[1] + own_size)) size = INFINITY;
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
