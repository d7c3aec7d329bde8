// What others ask of choose.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace sakiyomi {

struct Ranking {
    std::vector<std::int64_t> ids;     // best first, the lower id first among equals
    std::vector<double> confidences;  // the logarithm of each one's softmax
};

// The `count` largest logits of a row (count <= size) above -inf, as `rank` of sakiyomi/sampling/choose.py at temperature
// 0, bit for bit. Returns false where there is a nan or nothing above -inf.
bool rank_row(const float* logits, std::int64_t size, std::int64_t count, Ranking* ranking);

}  // namespace sakiyomi
