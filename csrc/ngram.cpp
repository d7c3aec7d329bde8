// Prompt lookup within a burst: where each n-gram of a growing text was last (or first) followed by something, and what
// followed it. The reference, which drafts the same, is sakiyomi/drafters/ngram.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "burst.hpp"

namespace nb = nanobind;

namespace {

class NgramSource : public sakiyomi::DraftSource {
   public:
    NgramSource(std::int64_t min_ngram, std::int64_t max_ngram, bool keeps_earliest, double doubt)
        : min_ngram_(min_ngram), keeps_earliest_(keeps_earliest), doubt_(doubt) {
        sakiyomi::check(min_ngram >= 1 && min_ngram <= max_ngram, "give 1 <= min_ngram <= max_ngram.");
        followers_.resize(static_cast<std::size_t>(max_ngram - min_ngram + 1));
    }

    void extend(const std::vector<std::int32_t>& tokens) override {
        for (const std::int32_t token : tokens) {
            const std::size_t position = text_.size();
            for (std::size_t i = 0; i < followers_.size() && length(i) <= position; ++i) {
                const auto [place, is_new] = followers_[i].try_emplace(text_.substr(position - length(i)), position);
                if (!is_new && !keeps_earliest_) place->second = position;
            }
            text_.push_back(static_cast<char32_t>(token));
        }
    }

    // The tokens that followed the longest known end of the text, each believed by the length of the match that it extends.
    bool guess(std::int32_t, const float*, const sakiyomi::Room& room, std::vector<sakiyomi::DraftNode>& nodes) override {
        const std::size_t most = static_cast<std::size_t>(std::min(room.max_depth, room.max_nodes));
        for (std::size_t i = followers_.size(); i-- > 0;) {
            if (length(i) > text_.size()) continue;
            const auto found = followers_[i].find(text_.substr(text_.size() - length(i)));
            if (found == followers_[i].end()) continue;
            double confidence = 1.0;
            for (std::size_t k = 0; k < most && found->second + k < text_.size(); ++k) {
                const double matched = static_cast<double>(length(i) + k);
                confidence *= matched / (matched + doubt_);
                nodes.push_back({static_cast<std::int32_t>(text_[found->second + k]), static_cast<std::int32_t>(k) - 1, confidence});
            }
            break;
        }
        return true;
    }

    std::size_t num_tokens() const { return text_.size(); }

   private:
    std::size_t length(std::size_t i) const { return static_cast<std::size_t>(min_ngram_) + i; }

    std::int64_t min_ngram_;
    bool keeps_earliest_;
    double doubt_;
    std::u32string text_;
    std::vector<std::unordered_map<std::u32string, std::size_t>> followers_;  // of each length: the place behind an n-gram
};

}  // namespace

void bind_ngram(nb::module_& m) {
    using nb::arg;
    nb::class_<NgramSource, sakiyomi::DraftSource>(m, "NgramSource")
        .def(nb::init<std::int64_t, std::int64_t, bool, double>(), arg("min_ngram"), arg("max_ngram"), arg("keeps_earliest"), arg("doubt"))
        .def("extend", &NgramSource::extend, arg("tokens"))
        .def("__len__", &NgramSource::num_tokens);
}
