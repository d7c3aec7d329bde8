// What others ask of choose.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace sakiyomi {

struct Ranking {
    std::vector<std::int64_t> ids;     // best first, the lower id first among equals
    std::vector<double> confidences;  // the logarithm of each one's softmax
};

// How tokens are chosen: at a temperature above 0 with the noise of a seed.
struct Choice {
    std::uint64_t seed;
    double temperature, top_p, min_p;
    std::int64_t top_k;
};

// The id that plain decoding chooses at a position from a row of logits that no parameter changes; below 0 where there is a
// nan or nothing is left. Any thread may call it.
std::int64_t choose_id(const float* logits, std::int64_t size, const Choice& choice, std::uint64_t position);

// How the token behind a row is chosen where no filter is on: the most probable one at temperature 0, or by the noise of a
// position.
struct RowChoice {
    std::uint64_t seed;
    double temperature;
    std::uint64_t position;
};

// Whether no filter is on for a row of `size` logits.
bool is_bare(const Choice& choice, std::int64_t size);

// Whether it is a temperature for which bounds in floats hold (`bound_block`).
bool is_bounded(double temperature);

struct Candidate {
    std::int64_t id;
    float logit;
};

// What `choose_id` chooses from a row whose largest logit is `max`, given every id that may win; below 0 from none.
std::int64_t choose_among(const std::vector<Candidate>& candidates, float max, const RowChoice& choice);

// The `count` ids (count <= size) that come first in the order by which `choose_id` takes one, among some ids [size] whose
// logits alone are there, and with what confidence the target takes each: as `rank` of sakiyomi/sampling/choose.py at a
// temperature above 0, but for ids that hardly ever win, and for rounding. Returns false as `rank_row` does.
bool rank_noisy(const float* logits, std::int64_t size, const std::int64_t* ids, std::int64_t count, const Choice& choice,
                std::uint64_t position, Ranking* ranking);

// The `count` largest logits of a row (count <= size) above -inf, as `rank` of sakiyomi/sampling/choose.py at temperature
// 0, bit for bit. Returns false where there is a nan or nothing above -inf.
bool rank_row(const float* logits, std::int64_t size, std::int64_t count, Ranking* ranking);

}  // namespace sakiyomi
