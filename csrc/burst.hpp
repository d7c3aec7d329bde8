// Several steps of decoding one sequence without Python between them: ask the sources of drafts, choose what to
// check, pass, follow, commit. The rules are those of engine/budget.py, tree.py (`merge_drafts`) and plan/speedup.py
// (`count_worthwhile`), with what is known when the burst begins; what it finds out is learnt from behind it.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "choose.hpp"

namespace sakiyomi {

// A node of a draft, behind its parent (-1: the root); the confidence is that the text passes through it.
struct DraftNode {
    std::int32_t token, parent;
    double confidence;
};

// What a draft may be: its size, the ids behind which nothing is drafted, and how the token at `position`, which follows, and
// those behind it are chosen (null: the most probable ones).
struct Room {
    std::int64_t max_depth, max_nodes;
    const std::vector<std::int64_t>* end_ids;
    const Choice* choice;
    std::uint64_t position;
};

// What drafts within a burst.
class DraftSource {
   public:
    virtual ~DraftSource() = default;
    // The nodes behind the last token of the text, given the taps of the position in front of it. False where only Python
    // can tell.
    virtual bool guess(std::int32_t last, const float* taps, const Room& room, std::vector<DraftNode>& nodes) = 0;
    // Tokens were committed.
    virtual void extend(const std::vector<std::int32_t>&) {}
    // Numbers of a row of taps that it reads.
    virtual std::int64_t tap_width() const { return 0; }
};

// Fields of `SourceRules` in ops/base.py, which tells what they are.
struct SourceRules {
    DraftSource* source;
    std::int64_t max_depth, max_nodes;
    std::vector<double> survivals, seconds;
    std::int64_t num_rested, rest;
    std::vector<double> offsets, slopes;
    bool is_coupled;

    bool is_free() const { return seconds.empty(); }
};

class Burst {
   public:
    struct Asked {
        std::int64_t source, count;
        bool is_trial;
        double seconds;
        std::vector<DraftNode> nodes;
        std::vector<double> gains;
        std::vector<std::int64_t> kinds;
    };

    struct Step {
        std::vector<std::int32_t> tokens;
        std::int64_t num_accepted, num_draft, num_tried;
        double draft_s, pass_s;
        std::vector<Asked> asked;
    };

    // rules: `BurstRules` of ops/base.py; width: of a row of taps.
    Burst(const nb::tuple& rules, std::int64_t width)
        : seconds_(nb::cast<std::vector<double>>(rules[1])), rate_(nb::cast<double>(rules[2])), least_(nb::cast<double>(rules[3])),
          edges_(nb::cast<std::vector<double>>(rules[4])), end_ids_(nb::cast<std::vector<std::int64_t>>(rules[5])),
          num_left_(nb::cast<std::int64_t>(rules[6])), max_steps_(nb::cast<std::int64_t>(rules[7])),
          max_seconds_(nb::cast<double>(rules[8])) {
        if (!rules[9].is_none()) {
            const nb::tuple fields = nb::cast<nb::tuple>(rules[9]);
            choice_ = {nb::cast<std::uint64_t>(fields[0]), nb::cast<double>(fields[1]), nb::cast<double>(fields[3]),
                       nb::cast<double>(fields[4]), nb::cast<std::int64_t>(fields[2])};
            check(choice_.temperature > 0, "noise needs a temperature above 0.");
            is_greedy_ = false;
        }
        num_unchecked_ = nb::cast<std::int64_t>(rules[10]), pause_ = nb::cast<std::int64_t>(rules[11]);
        check(seconds_.size() > 1, "the seconds of a pass are missing.");
        for (nb::handle fields : nb::cast<nb::tuple>(rules[0])) add_source(nb::cast<nb::tuple>(fields), width);
    }

    // What a step checks at most.
    std::int64_t max_draft() const { return static_cast<std::int64_t>(seconds_.size()) - 2; }

    // How tokens are chosen, or null: the most probable ones.
    const Choice* choice() const { return is_greedy_ ? nullptr : &choice_; }

    // Steps behind `last`, the last token of a text of `length` tokens, with `taps` of the position in front of it, or null.
    // Ends before a step that only Python can make. `pass` has
    //   bool has_room(rows); void run(last, nodes, choice);
    //   std::int64_t choose(row, choice, position): the token that row chooses, the root's the first, below 0 where only Python
    //   can tell; and const float* keep(rows): commits rows and gives the taps of the last one.
    template <class Pass>
    void run(std::int32_t last, std::int64_t length, const float* taps, Pass& pass) {
        length_ = length;
        const double begun = now();
        bool is_over = false;
        while (!is_over && num_left_ > 0 && static_cast<std::int64_t>(steps.size()) < max_steps_ && now() - begun < max_seconds_) {
            Step step;
            const double started = now();
            if (!ask(last, taps, step.asked)) return;
            const std::vector<DraftNode> nodes = choose(step.asked);
            const double proposed = now();
            if (!pass.has_room(static_cast<std::int64_t>(nodes.size()) + 1)) return;
            pass.run(last, nodes, choice());
            std::vector<std::int64_t> rows;
            if (!follow(nodes, pass, step, rows, is_over)) return;
            taps = pass.keep(rows);
            last = step.tokens.back();
            num_left_ -= static_cast<std::int64_t>(step.tokens.size());
            length_ += static_cast<std::int64_t>(step.tokens.size());
            for (SourceRules& rules : sources_) {
                ++rules.num_rested;
                if (rules.source != nullptr) rules.source->extend(step.tokens);
            }
            for (const Asked& asked : step.asked) {
                sources_[static_cast<std::size_t>(asked.source)].num_rested = 1;
                is_over |= asked.is_trial;  // what it tells decides when the next one is due
            }
            step.num_draft = static_cast<std::int64_t>(nodes.size());
            num_unchecked_ = nodes.empty() ? num_unchecked_ + 1 : 0;
            step.draft_s = proposed - started;
            step.pass_s = now() - proposed;
            steps.push_back(std::move(step));
        }
    }

    std::vector<Step> steps;

   private:
    static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

    void add_source(const nb::tuple& fields, std::int64_t width) {
        SourceRules rules{fields[0].is_none() ? nullptr : nb::cast<DraftSource*>(fields[0]),
                          nb::cast<std::int64_t>(fields[1]),
                          nb::cast<std::int64_t>(fields[2]),
                          nb::cast<std::vector<double>>(fields[3]),
                          nb::cast<std::vector<double>>(fields[4]),
                          nb::cast<std::int64_t>(fields[5]),
                          nb::cast<std::int64_t>(fields[6]),
                          nb::cast<std::vector<double>>(fields[7]),
                          nb::cast<std::vector<double>>(fields[8]),
                          nb::cast<bool>(fields[9])};
        check(rules.survivals.size() == rules.seconds.size(), "each survival needs seconds.");
        const std::size_t num_kinds = 2 * (edges_.size() + 1);
        check(rules.offsets.size() == num_kinds && rules.slopes.size() == num_kinds, "a kind of nodes is missing.");
        if (rules.source != nullptr && rules.source->tap_width() > 0)
            check_equal("the width of the taps that a source reads", rules.source->tap_width(), width);
        sources_.push_back(std::move(rules));
    }

    // False where a step with Python is due.
    bool ask(std::int32_t last, const float* taps, std::vector<Asked>& all) const {
        double missing = 1.0;  // that none of what is drafted so far goes on with the right token
        for (std::size_t number = 0; number < sources_.size(); ++number) {
            const SourceRules& rules = sources_[number];
            const std::int64_t most = num_left_ - 1;
            if (rules.max_nodes <= 0 || rules.max_depth <= 0 || missing <= 0) continue;
            std::int64_t wanted = rules.is_free() ? rules.max_nodes : count(rules, missing);
            const bool is_trial = wanted == 0 && rules.num_rested >= rules.rest;
            wanted += is_trial;
            if (wanted == 0) continue;
            if (rules.source == nullptr) return false;
            Asked asked{static_cast<std::int64_t>(number), wanted, is_trial, 0.0, {}, {}, {}};
            const std::int64_t depth = std::min({wanted, rules.max_depth, most}), size = std::min({wanted, rules.max_nodes, most});
            const double started = now();
            if (size > 0 && (taps != nullptr || rules.source->tap_width() == 0) &&
                !rules.source->guess(last, taps, {depth, size, &end_ids_, rules.is_coupled ? choice() : nullptr, static_cast<std::uint64_t>(length_)},
                                     asked.nodes))
                return false;
            asked.seconds = now() - started;
            judge(rules, asked);
            for (std::size_t i = 0; i < asked.nodes.size(); ++i)
                if (asked.nodes[i].parent < 0) missing -= asked.gains[i];
            all.push_back(std::move(asked));
        }
        return true;
    }

    // For how many nodes to ask a source that has a price.
    std::int64_t count(const SourceRules& rules, double missing) const {
        std::int64_t best = 0;
        double best_worth = 0.0, gain = 0.0;
        for (std::size_t i = 0; i < rules.survivals.size() && rules.survivals[i] >= least_ / missing; ++i) {
            gain += rules.survivals[i] * missing;
            const double verify_s = seconds_[std::min(i + 2, seconds_.size() - 1)] - seconds_[1];
            const double worth = gain - rate_ * (rules.seconds[i] + verify_s);
            if (worth > best_worth) best = static_cast<std::int64_t>(i) + 1, best_worth = worth;
        }
        return best;
    }

    // `Acceptance.judge`.
    void judge(const SourceRules& rules, Asked& asked) const {
        for (const DraftNode& node : asked.nodes) {
            const bool is_top = node.parent < 0;
            const std::size_t parent = static_cast<std::size_t>(is_top ? 0 : node.parent);
            const double above = is_top ? 1.0 : asked.gains[parent];
            const double believed = is_top ? 1.0 : asked.nodes[parent].confidence;
            const double share = node.confidence / (believed == 0 ? 1.0 : believed);
            const std::size_t bin = static_cast<std::size_t>(std::upper_bound(edges_.begin(), edges_.end(), share) - edges_.begin());
            const std::size_t kind = is_top ? bin : edges_.size() + 1 + bin;
            asked.gains.push_back(above * (rules.offsets[kind] + rules.slopes[kind] * share));
            asked.kinds.push_back(static_cast<std::int64_t>(kind));
        }
    }

    // One tree of the nodes that are worth their time, the most probable first; the first one alone where none has been for long.
    std::vector<DraftNode> choose(const std::vector<Asked>& all) const {
        std::vector<DraftNode> merged;
        for (const Asked& asked : all) merge(asked, merged);
        std::vector<std::int32_t> order(merged.size()), place(merged.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
        const auto at = [&](std::int32_t node) -> const DraftNode& { return merged[static_cast<std::size_t>(node)]; };
        std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) { return at(a).confidence > at(b).confidence; });
        if (static_cast<std::int64_t>(order.size()) > max_draft()) order.resize(static_cast<std::size_t>(max_draft()));
        std::size_t best = 0;
        double best_worth = 0.0, value = 0.0;
        for (std::size_t i = 0; i < order.size(); ++i) {
            value += at(order[i]).confidence;
            const double worth = value - rate_ * (seconds_[i + 2] - seconds_[1]);
            if (worth > best_worth) best = i + 1, best_worth = worth;
        }
        if (best == 0 && num_unchecked_ >= pause_ && !order.empty()) best = 1;
        order.resize(best);
        std::vector<DraftNode> chosen;
        for (const std::int32_t node : order) {
            const DraftNode& found = at(node);
            place[static_cast<std::size_t>(node)] = static_cast<std::int32_t>(chosen.size());
            chosen.push_back({found.token, found.parent < 0 ? -1 : place[static_cast<std::size_t>(found.parent)], found.confidence});
        }
        return chosen;
    }

    static std::int32_t find_child(const std::vector<DraftNode>& nodes, std::int32_t parent, std::int64_t token) {
        for (std::size_t i = 0; i < nodes.size(); ++i)
            if (nodes[i].parent == parent && nodes[i].token == token) return static_cast<std::int32_t>(i);
        return -1;
    }

    static void merge(const Asked& asked, std::vector<DraftNode>& merged) {
        std::vector<std::int32_t> index;
        for (std::size_t i = 0; i < asked.nodes.size(); ++i) {
            const DraftNode& node = asked.nodes[i];
            const std::int32_t parent = node.parent < 0 ? -1 : index[static_cast<std::size_t>(node.parent)];
            std::int32_t found = find_child(merged, parent, node.token);
            if (found < 0) {
                found = static_cast<std::int32_t>(merged.size());
                merged.push_back({node.token, parent, 0.0});
            }
            index.push_back(found);
            const double limit = parent < 0 ? 1.0 : merged[static_cast<std::size_t>(parent)].confidence;
            double& confidence = merged[static_cast<std::size_t>(found)].confidence;
            confidence = std::max(confidence, std::min(asked.gains[i], limit));
        }
    }

    // The tokens that the step emits, and the rows to keep: the root's and those of all tokens but the last. False where a
    // token is unknown.
    template <class Pass>
    bool follow(const std::vector<DraftNode>& nodes, Pass& pass, Step& step, std::vector<std::int64_t>& rows, bool& is_over) const {
        std::int32_t node = -1;
        step.num_accepted = 0;
        for (bool goes_on = true; goes_on;) {
            const std::int64_t token = pass.choose(node + 1, choice(), static_cast<std::uint64_t>(length_) + step.tokens.size());
            if (token < 0) return false;
            rows.push_back(node + 1);
            step.tokens.push_back(static_cast<std::int32_t>(token));
            is_over = std::find(end_ids_.begin(), end_ids_.end(), token) != end_ids_.end();
            const std::int32_t child = find_child(nodes, node, token);
            step.num_accepted += child >= 0;
            const bool is_last = is_over || static_cast<std::int64_t>(step.tokens.size()) >= num_left_;
            if (child < 0) {
                const bool was_tried = std::any_of(nodes.begin(), nodes.end(), [&](const DraftNode& other) { return other.parent == node; });
                step.num_tried = step.num_accepted + was_tried;
            } else if (is_last) {
                step.num_tried = step.num_accepted;
            }
            goes_on = child >= 0 && !is_last;
            node = child;
        }
        return true;
    }

    std::vector<double> seconds_;
    double rate_, least_;
    std::vector<double> edges_;
    std::vector<std::int64_t> end_ids_;
    std::int64_t num_left_, max_steps_, num_unchecked_, pause_;
    double max_seconds_;
    Choice choice_{};
    bool is_greedy_ = true;
    std::int64_t length_ = 0;
    std::vector<SourceRules> sources_;
};

}  // namespace sakiyomi
