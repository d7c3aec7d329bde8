// A suffix automaton over a growing text, with saturating counts, and trees of guesses drawn from it.
//
// The reference, which gives the same trees, is PythonAutomaton in sakiyomi/lookup/automaton.py; the words are
// explained there.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "burst.hpp"

namespace nb = nanobind;

namespace {

constexpr std::int32_t kNone = -1;
constexpr std::int32_t kListLimit = 8;   // followers that are searched one by one; above that they are hashed too
constexpr std::int32_t kMaxScanned = 64; // followers that a tree considers

struct State {
    std::int32_t length;      // of the longest string of the state
    std::int32_t link;        // the state of the longest suffix that occurs elsewhere too
    std::int32_t first;       // the newest of the edges, a list
    std::int32_t num_edges;
    std::int32_t count;       // occurrences, saturating
    std::int32_t last_end;    // tokens up to the end of the last occurrence, as long as the count is not saturated
};

struct Edge {
    std::int32_t token, target, next;
};

// Edges of the few states that have many, by (state, token). Open addressing; never shrinks.
class EdgeTable {
public:
    std::int32_t find(std::int32_t state, std::int32_t token) const {
        if (slots_.empty()) return kNone;
        const std::uint64_t key = key_of(state, token);
        for (std::size_t i = place_of(key);; i = (i + 1) & mask()) {
            if (slots_[i].edge == kNone) return kNone;
            if (slots_[i].key == key) return slots_[i].edge;
        }
    }

    void insert(std::int32_t state, std::int32_t token, std::int32_t edge) {
        if ((num_used_ + 1) * 4 > slots_.size() * 3) grow();
        place({key_of(state, token), edge});
        ++num_used_;
    }

    std::size_t num_bytes() const { return slots_.capacity() * sizeof(Slot); }

private:
    struct Slot {
        std::uint64_t key;
        std::int32_t edge;
    };

    static std::uint64_t key_of(std::int32_t state, std::int32_t token) {
        return static_cast<std::uint64_t>(static_cast<std::uint32_t>(state)) << 32 | static_cast<std::uint32_t>(token);
    }
    std::size_t mask() const { return slots_.size() - 1; }
    std::size_t place_of(std::uint64_t key) const {
        key = (key ^ key >> 32) * 0x9E3779B97F4A7C15ull;
        return static_cast<std::size_t>(key >> 20) & mask();
    }
    void place(Slot slot) {
        std::size_t i = place_of(slot.key);
        while (slots_[i].edge != kNone) i = (i + 1) & mask();
        slots_[i] = slot;
    }
    void grow() {
        std::vector<Slot> old(std::max<std::size_t>(16, slots_.size() * 2), Slot{0, kNone});
        old.swap(slots_);
        for (const Slot& slot : old)
            if (slot.edge != kNone) place(slot);
    }

    std::vector<Slot> slots_;
    std::size_t num_used_ = 0;
};

// A node of a tree that may be taken, with the match that its children continue.
struct Candidate {
    double confidence;
    std::int32_t order, token, parent, state, length, depth;
};

struct ByConfidence {  // the largest confidence on top, then the first found
    bool operator()(const Candidate& a, const Candidate& b) const {
        return a.confidence != b.confidence ? a.confidence < b.confidence : a.order > b.order;
    }
};

struct Limits {
    std::int32_t max_nodes, max_depth, width, min_match;
    double min_confidence, doubt;
};

struct Tree {
    std::vector<std::int32_t> tokens, parents;
    std::vector<double> confidences;
};

class Automaton {
public:
    explicit Automaton(std::int32_t max_count) : max_count_(max_count) {
        if (max_count < 1) throw std::invalid_argument("max_count must be at least 1.");
        states_.push_back({0, kNone, kNone, 0, 0, 0});
    }

    void extend(const std::vector<std::int32_t>& tokens) {
        for (const std::int32_t token : tokens) append(token);
    }

    // The longest suffix of the text that occurs earlier too: (state, length).
    std::pair<std::int32_t, std::int32_t> match_suffix() const {
        const std::int32_t state = states_[last_].link;
        return state == kNone ? std::pair{0, 0} : std::pair{state, states_[state].length};
    }

    // From the longest suffix of another text that occurs here to that of the text with `tokens` behind it.
    std::pair<std::int32_t, std::int32_t> advance(std::int32_t state, std::int32_t length,
                                                  const std::vector<std::int32_t>& tokens) const {
        check_state(state);
        while (state != 0 && states_[states_[state].link].length >= length) state = states_[state].link;  // was split
        for (const std::int32_t token : tokens) {
            std::int32_t edge;
            while ((edge = find(state, token)) == kNone && state != 0) {
                state = states_[state].link;
                length = states_[state].length;
            }
            if (edge != kNone) {
                state = edges_[edge].target;
                ++length;
            }
        }
        return {state, length};
    }

    // What has followed a match, newest first: (token, count).
    std::vector<std::pair<std::int32_t, std::int32_t>> followers(std::int32_t state) const {
        check_state(state);
        std::vector<std::pair<std::int32_t, std::int32_t>> result;
        for (std::int32_t e = states_[state].first; e != kNone; e = edges_[e].next)
            result.emplace_back(edges_[e].token, states_[edges_[e].target].count);
        return result;
    }

    Tree grow_tree(std::int32_t state, std::int32_t length, const Limits& limits) const {
        check_state(state);
        Tree tree;
        std::vector<Candidate> heap;
        std::int32_t num_found = 0;
        add_children({1.0, 0, 0, kNone, state, length, 0}, kNone, limits, heap, num_found);
        while (!heap.empty() && static_cast<std::int32_t>(tree.tokens.size()) < limits.max_nodes) {
            std::pop_heap(heap.begin(), heap.end(), ByConfidence{});
            const Candidate best = heap.back();
            heap.pop_back();
            const auto node = static_cast<std::int32_t>(tree.tokens.size());
            tree.tokens.push_back(best.token);
            tree.parents.push_back(best.parent);
            tree.confidences.push_back(best.confidence);
            add_children(best, node, limits, heap, num_found);
        }
        return tree;
    }

    std::size_t num_tokens() const { return static_cast<std::size_t>(states_[last_].length); }
    std::size_t num_states() const { return states_.size(); }
    std::size_t num_edges() const { return edges_.size(); }
    std::size_t num_bytes() const {
        return states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) + table_.num_bytes();
    }
    std::size_t num_used_bytes() const {
        return states_.size() * sizeof(State) + edges_.size() * sizeof(Edge) + table_.num_bytes();
    }
    void shrink() {
        states_.shrink_to_fit();
        edges_.shrink_to_fit();
    }

private:
    void append(std::int32_t token) {
        const std::int32_t length = states_[last_].length + 1;
        const std::int32_t current = new_state({length, 0, kNone, 0, 0, 0});
        std::int32_t state = last_, edge = kNone;
        while (state != kNone && (edge = find(state, token)) == kNone) {
            add_edge(state, token, current);
            state = states_[state].link;
        }
        if (state != kNone) {
            const std::int32_t link = split(state, token, edges_[edge].target);
            states_[current].link = link;
        }
        last_ = current;
        for (state = current; state != 0 && states_[state].count < max_count_; state = states_[state].link) {
            ++states_[state].count;
            states_[state].last_end = length;
        }
    }

    // The state of exactly the string of `state` and `token`, which `target` may share with longer ones.
    std::int32_t split(std::int32_t state, std::int32_t token, std::int32_t target) {
        const std::int32_t length = states_[state].length + 1;
        if (states_[target].length == length) return target;
        State copy = states_[target];
        copy.length = length;
        copy.first = kNone;
        copy.num_edges = 0;
        const std::int32_t clone = new_state(copy);
        copy_edges(target, clone);
        for (std::int32_t edge; state != kNone; state = states_[state].link) {
            edge = find(state, token);
            if (edge == kNone || edges_[edge].target != target) break;
            edges_[edge].target = clone;
        }
        states_[target].link = clone;
        return clone;
    }

    void copy_edges(std::int32_t from, std::int32_t to) {
        std::vector<std::int32_t>& order = scratch_;
        order.clear();
        for (std::int32_t e = states_[from].first; e != kNone; e = edges_[e].next) order.push_back(e);
        for (auto e = order.rbegin(); e != order.rend(); ++e) {
            const Edge edge = edges_[*e];
            add_edge(to, edge.token, edge.target);
        }
    }

    std::int32_t find(std::int32_t state, std::int32_t token) const {
        const State& s = states_[state];
        if (s.num_edges > kListLimit) return table_.find(state, token);
        std::int32_t e = s.first;
        while (e != kNone && edges_[e].token != token) e = edges_[e].next;
        return e;
    }

    void add_edge(std::int32_t state, std::int32_t token, std::int32_t target) {
        if (edges_.size() >= 0x7fffffff) throw std::length_error("a suffix automaton is full.");
        const auto added = static_cast<std::int32_t>(edges_.size());
        State& s = states_[state];
        edges_.push_back({token, target, s.first});
        s.first = added;
        if (++s.num_edges == kListLimit + 1) {
            for (std::int32_t e = added; e != kNone; e = edges_[e].next) table_.insert(state, edges_[e].token, e);
        } else if (s.num_edges > kListLimit) {
            table_.insert(state, token, added);
        }
    }

    std::int32_t new_state(State state) {
        if (states_.size() >= 0x7fffffff) throw std::length_error("a suffix automaton is full.");
        states_.push_back(state);
        return static_cast<std::int32_t>(states_.size()) - 1;
    }

    void add_children(const Candidate& node, std::int32_t index, const Limits& limits, std::vector<Candidate>& heap,
                      std::int32_t& num_found) const {
        if (node.depth >= limits.max_depth) return;
        std::int32_t state = node.state, length = node.length;
        while (state != 0 && states_[state].first == kNone) {  // the match runs into the end of the text
            state = states_[state].link;
            length = states_[state].length;
        }
        if (state == 0 || length < limits.min_match) return;
        struct Follower {
            std::int32_t token, target, count, last_end;
        } followers[kMaxScanned];
        std::int32_t size = 0;
        std::int64_t total = 0;
        for (std::int32_t e = states_[state].first; e != kNone && size < kMaxScanned; e = edges_[e].next) {
            const State& target = states_[edges_[e].target];
            followers[size++] = {edges_[e].token, edges_[e].target, target.count, target.last_end};
            total += target.count;
        }
        const auto is_better = [](const Follower& a, const Follower& b) {
            return a.count != b.count ? a.count > b.count : a.last_end > b.last_end;
        };
        const std::int32_t width = std::min(limits.width, size);
        for (std::int32_t rank = 0; rank < width; ++rank) {
            Follower* best = std::min_element(followers + rank, followers + size, is_better);
            std::rotate(followers + rank, best, best + 1);  // keeps the order of the others
            const double weight = static_cast<double>(total) + static_cast<double>(size) * limits.doubt / length;
            const double confidence = node.confidence * (followers[rank].count / weight);
            if (confidence < limits.min_confidence) return;
            if (followers[rank].token < 0) continue;  // the end of a text
            heap.push_back({confidence, num_found++, followers[rank].token, index, followers[rank].target, length + 1,
                            node.depth + 1});
            std::push_heap(heap.begin(), heap.end(), ByConfidence{});
        }
    }

    void check_state(std::int32_t state) const {
        if (state < 0 || static_cast<std::size_t>(state) >= states_.size())
            throw std::invalid_argument("the automaton has no such state.");
    }

    std::int32_t max_count_;
    std::int32_t last_ = 0;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    EdgeTable table_;
    std::vector<std::int32_t> scratch_;
};

template <class Number, class Convert>
nb::object to_tuple(const std::vector<Number>& values, Convert convert) {
    nb::object result = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    if (!result.is_valid()) throw nb::python_error();
    for (std::size_t i = 0; i < values.size(); ++i)
        PyTuple_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), convert(values[i]));
    return result;
}

nb::tuple grow_tree(const Automaton& automaton, std::int32_t state, std::int32_t length, std::int32_t max_nodes,
                    std::int32_t max_depth, std::int32_t width, std::int32_t min_match, double min_confidence,
                    double doubt) {
    const Tree tree =
        automaton.grow_tree(state, length, {max_nodes, max_depth, width, min_match, min_confidence, doubt});
    return nb::make_tuple(to_tuple(tree.tokens, [](std::int32_t x) { return PyLong_FromLong(x); }),
                          to_tuple(tree.parents, [](std::int32_t x) { return PyLong_FromLong(x); }),
                          to_tuple(tree.confidences, [](double x) { return PyFloat_FromDouble(x); }));
}

// Drafts from an automaton over the text itself, of which each token that is committed becomes a part.
class SuffixSource : public sakiyomi::DraftSource {
public:
    SuffixSource(nb::object automaton, std::int32_t width, std::int32_t min_match, double min_confidence, double doubt)
        : kept_(automaton), automaton_(nb::cast<Automaton*>(automaton)), limits_{0, 0, width, min_match, min_confidence, doubt} {}

    bool guess(std::int32_t, const float*, const sakiyomi::Room& room, std::vector<sakiyomi::DraftNode>& nodes) override {
        Limits limits = limits_;
        limits.max_nodes = static_cast<std::int32_t>(room.max_nodes);
        limits.max_depth = static_cast<std::int32_t>(room.max_depth);
        const auto [state, length] = automaton_->match_suffix();
        const Tree tree = automaton_->grow_tree(state, length, limits);
        for (std::size_t i = 0; i < tree.tokens.size(); ++i) nodes.push_back({tree.tokens[i], tree.parents[i], tree.confidences[i]});
        return true;
    }

    void extend(const std::vector<std::int32_t>& tokens) override { automaton_->extend(tokens); }

private:
    nb::object kept_;
    Automaton* automaton_;
    Limits limits_;
};

}  // namespace

void bind_suffix(nb::module_& m) {
    using nb::arg;
    nb::class_<Automaton>(m, "SuffixAutomaton", "Every substring of a growing text with its count and its followers.")
        .def(nb::init<std::int32_t>(), arg("max_count"))
        .def("extend", &Automaton::extend, arg("tokens"))
        .def("match_suffix", &Automaton::match_suffix)
        .def("advance", &Automaton::advance, arg("state"), arg("length"), arg("tokens"))
        .def("followers", &Automaton::followers, arg("state"))
        .def("grow_tree", &grow_tree, arg("state"), arg("length"), arg("max_nodes"), arg("max_depth"), arg("width"),
             arg("min_match"), arg("min_confidence"), arg("doubt"))
        .def("shrink", &Automaton::shrink)
        .def("__len__", &Automaton::num_tokens)
        .def_prop_ro("num_states", &Automaton::num_states)
        .def_prop_ro("num_edges", &Automaton::num_edges)
        .def_prop_ro("num_bytes", &Automaton::num_bytes)
        .def_prop_ro("num_used_bytes", &Automaton::num_used_bytes);
    nb::class_<SuffixSource, sakiyomi::DraftSource>(m, "SuffixSource")
        .def(nb::init<nb::object, std::int32_t, std::int32_t, double, double>(), arg("automaton"), arg("width"), arg("min_match"),
             arg("min_confidence"), arg("doubt"));
}
