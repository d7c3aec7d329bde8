// Drafts of the most probable tokens, grown inside one call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "arrays.hpp"
#include "burst.hpp"
#include "choose.hpp"
#include "parallel.hpp"

namespace sakiyomi {

// `rank_row` of a row that is multiplied with `sharpness` first, and of at most all ids.
inline bool rank_sharp(float* logits, std::int64_t num_ids, float sharpness, std::int64_t width, Ranking* ranking) {
    if (sharpness != 1)
        for (std::int64_t i = 0; i < num_ids; ++i) logits[i] *= sharpness;
    return rank_row(logits, num_ids, std::min(width, num_ids), ranking);
}

// A `Draft` of tree.py with its fields written one by one, as the class itself does it, but without running Python, whose code
// has left the caches by then: it took 7 of the 10 microseconds of giving a draft. Fields that are left out have defaults.
struct NewDraft {
    nb::object object;

    // A draft of these nodes, with confidences where it has any.
    static nb::object of(const std::vector<DraftNode>& nodes, bool has_confidences) {
        const auto tuple_of = [&](auto&& value) {
            nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(nodes.size())));
            for (std::size_t i = 0; i < nodes.size(); ++i) PyTuple_SET_ITEM(tuple.ptr(), i, nb::cast(value(nodes[i])).release().ptr());
            return tuple;
        };
        NewDraft draft;
        draft.set("tokens", tuple_of([](const DraftNode& node) { return node.token; }));
        draft.set("parents", tuple_of([](const DraftNode& node) { return node.parent; }));
        if (has_confidences) draft.set("confidences", tuple_of([](const DraftNode& node) { return node.confidence; }));
        return draft.object;
    }

    NewDraft() {
        static PyObject* type = nullptr;  // set while the GIL is held; a guarded static could wait for a thread that needs it
        if (type == nullptr) type = nb::object(nb::module_::import_("sakiyomi.tree").attr("Draft")).release().ptr();
        object = nb::steal(PyBaseObject_Type.tp_new(reinterpret_cast<PyTypeObject*>(type), nb::tuple().ptr(), nullptr));
        if (!object.is_valid()) nb::raise_python_error();
    }

    void set(const char* field, const nb::object& value) {
        if (PyObject_GenericSetAttr(object.ptr(), nb::str(field).ptr(), value.ptr()) != 0) nb::raise_python_error();
    }
};

// A draft in the making of the tokens that come first, as `Growth` of sampling/growth.py over `TreeBuilder` of tree.py.
class GreedyTree {
   public:
    static constexpr std::int64_t kRoot = -1;

    struct Node {
        std::int64_t token, parent, depth;
        double confidence;  // a logarithm, the parents' included
    };

    std::int64_t max_depth = 0, max_nodes = 0;
    const Choice* choice = nullptr;  // the noise that the target's choices take, or null: the most probable tokens
    std::uint64_t position = 0;      // of the tokens behind the root
    std::vector<std::int64_t> end_ids;
    std::vector<std::int64_t> frontier;  // nodes whose children come next, ascending
    std::vector<Node> nodes;

    void add(std::int64_t parent, std::int64_t token, double confidence) {
        const bool is_top = parent == kRoot;
        const Node* above = is_top ? nullptr : &nodes[static_cast<std::size_t>(parent)];
        nodes.push_back({token, parent, is_top ? 1 : above->depth + 1,
                         (is_top ? 0.0 : above->confidence) + std::min(confidence, 0.0)});
    }

    // Appends the `width` best children of a node, given a row of logits [K] of the ids in `vocabulary`, which is multiplied
    // with `sharpness` first where no noise is taken. Returns false where logits are damaged.
    bool add_best(std::int64_t parent, float* logits, std::int64_t num_ids, const std::int64_t* vocabulary, float sharpness,
                  std::int64_t width, Ranking* ranking) {
        const bool is_sound = choice == nullptr ? rank_sharp(logits, num_ids, sharpness, width, ranking)
                                                : rank_noisy(logits, num_ids, vocabulary, std::min(width, num_ids), *choice, position + depth_of(parent), ranking);
        if (!is_sound) return false;
        add_ranked(parent, *ranking, vocabulary);
        return true;
    }

    std::uint64_t depth_of(std::int64_t node) const {
        return node == kRoot ? 0 : static_cast<std::uint64_t>(nodes[static_cast<std::size_t>(node)].depth);
    }

    void add_ranked(std::int64_t parent, const Ranking& ranking, const std::int64_t* vocabulary) {
        for (std::size_t i = 0; i < ranking.ids.size(); ++i) add(parent, vocabulary[ranking.ids[i]], ranking.confidences[i]);
    }

    // Chooses the next frontier among the nodes from `first` on, which are the deepest level.
    void go_on(std::size_t first, std::int64_t width, double lowest) {
        frontier.clear();
        if (nodes.back().depth >= max_depth) return;
        for (std::size_t node = first; node < nodes.size(); ++node)
            if (std::find(end_ids.begin(), end_ids.end(), nodes[node].token) == end_ids.end())
                frontier.push_back(static_cast<std::int64_t>(node));
        keep_best(frontier, width, lowest);
    }

    // The whole tree, where nodes of one depth have the same candidates: at(depth) is a `Ranking` of them, empty where logits
    // are damaged. Returns false at such a one.
    template <class At>
    bool grow_by_depth(std::int64_t width, double lowest, const std::int64_t* vocabulary, At&& at) {
        for (std::size_t depth = 0; !frontier.empty(); ++depth) {
            const Ranking& ranking = at(depth);
            if (ranking.ids.empty()) return false;
            const std::size_t first = nodes.size();
            for (const std::int64_t parent : frontier) add_ranked(parent, ranking, vocabulary);
            go_on(first, width, lowest);
        }
        return true;
    }

    // The nodes that are drafted, in order; with a node its parent is among them.
    std::vector<std::int64_t> select(double lowest) const {
        std::vector<std::int64_t> chosen(nodes.size());
        for (std::size_t node = 0; node < nodes.size(); ++node) chosen[node] = static_cast<std::int64_t>(node);
        keep_best(chosen, max_nodes, lowest);
        return chosen;
    }

    // The nodes that are drafted, as a draft holds them.
    std::vector<DraftNode> list(double lowest) const {
        const std::vector<std::int64_t> chosen = select(lowest);
        const auto place_of = [&](std::int64_t node) { return std::find(chosen.begin(), chosen.end(), node) - chosen.begin(); };
        std::vector<DraftNode> listed;
        for (const std::int64_t number : chosen) {
            const Node& node = nodes[static_cast<std::size_t>(number)];
            const std::int64_t parent = node.parent == kRoot ? kRoot : place_of(node.parent);
            listed.push_back({static_cast<std::int32_t>(node.token), static_cast<std::int32_t>(parent), std::exp(node.confidence)});
        }
        return listed;
    }

    // Their `Draft`; it has no confidences where all nodes that grew are certain.
    nb::object give(double lowest) const {
        const bool is_certain = std::all_of(nodes.begin(), nodes.end(), [](const Node& node) { return node.confidence == 0; });
        return NewDraft::of(list(lowest), !is_certain);
    }

   private:
    void keep_best(std::vector<std::int64_t>& some, std::int64_t count, double lowest) const {
        const auto at = [&](std::int64_t node) -> const Node& { return nodes[static_cast<std::size_t>(node)]; };
        if (static_cast<std::int64_t>(some.size()) > count) {
            // A parent comes before its equally confident children, since nodes are in the order of their depths.
            std::sort(some.begin(), some.end(), [&](std::int64_t a, std::int64_t b) {
                return at(a).confidence != at(b).confidence ? at(a).confidence > at(b).confidence : a < b;
            });
            some.resize(static_cast<std::size_t>(count));
            std::sort(some.begin(), some.end());
        }
        some.erase(std::remove_if(some.begin(), some.end(), [&](std::int64_t node) { return !(at(node).confidence >= lowest); }),
                   some.end());
    }
};

// Empty trees in rooms of (max_depth, max_nodes, the ids behind which nothing is drafted).
inline std::vector<GreedyTree> start_trees(std::int64_t count, const nb::list& rooms) {
    check_equal("the number of rooms", static_cast<std::int64_t>(rooms.size()), count);
    std::vector<GreedyTree> trees(rooms.size());
    for (std::size_t i = 0; i < trees.size(); ++i) {
        const nb::tuple room = nb::cast<nb::tuple>(rooms[i]);
        trees[i].max_depth = nb::cast<std::int64_t>(room[0]), trees[i].max_nodes = nb::cast<std::int64_t>(room[1]);
        check(trees[i].max_depth > 0 && trees[i].max_nodes > 0, "a draft needs room for a node.");
        for (nb::handle id : room[2]) trees[i].end_ids.push_back(nb::cast<std::int64_t>(id));
        trees[i].frontier = {GreedyTree::kRoot};
    }
    return trees;
}

// What `GreedyTree::give` gives of each, or None where logits are damaged.
inline nb::list give_all(const std::vector<GreedyTree>& trees, const std::vector<char>& is_sound, double lowest) {
    nb::list drafts;
    for (std::size_t i = 0; i < trees.size(); ++i) drafts.append(is_sound[i] ? trees[i].give(lowest) : nb::object(nb::none()));
    return drafts;
}

// `rank_sharp` of some rows by several threads; empty where logits are damaged.
inline std::vector<Ranking> rank_rows(const std::vector<float*>& rows, std::int64_t num_ids, float sharpness, std::int64_t width,
                                      int num_threads) {
    std::vector<Ranking> rankings(rows.size());
    const std::int64_t num_rows = static_cast<std::int64_t>(rows.size());
    Pool::Lease lease(threads_for(num_threads, num_rows * num_ids * 8));
    lease.run([&](Team& team, int rank) {
        team.share(rank, num_rows, [&](std::int64_t row) {
            Ranking& ranking = rankings[static_cast<std::size_t>(row)];
            if (!rank_sharp(rows[static_cast<std::size_t>(row)], num_ids, sharpness, width, &ranking)) ranking.ids.clear();
        });
    });
    return rankings;
}

// The ids, ascending, that columns of logits stand for.
inline void check_ids(const In<std::int64_t, nb::ndim<1>>& vocabulary, std::int64_t num_ids, std::int64_t vocab_size) {
    check_equal("the length of vocabulary", static_cast<std::int64_t>(vocabulary.shape(0)), num_ids);
    // All would have to be read for it in each step; ascending, they are in range where the ends are.
    if (num_ids > 0)
        check(vocabulary.data()[0] >= 0 && vocabulary.data()[num_ids - 1] < vocab_size, "a drafted id is out of range.");
}

}  // namespace sakiyomi
