"""Several drafters as one: their order, merged trees, and state and taps that stay apart."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from sakiyomi.decode import prefill, step
from sakiyomi.drafters.combined import CombinedDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter, scatter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.models.toy import TokenCache, ToyModel, random_law
from sakiyomi.params import SamplingParams
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, Sequence
from sakiyomi.verify.match import MatchVerifier

VOCAB = 12
MODEL = ToyModel(random_law(VOCAB, 1), VOCAB)


def combine(parts: Seq[Drafter], **options: Any) -> CombinedDrafter:
    context = DrafterContext(MODEL, lambda name: MODEL, make_drafters=lambda text: list(parts))
    return CombinedDrafter(CombinedDrafter.Config(parts="", **options), context)


def sequence_of(tokens: Seq[int], name: str = "0") -> Sequence:
    return Sequence(name, list(tokens), len(tokens), SamplingParams(), 0, TokenCache())


@dataclass(eq=False)
class Scripted(Drafter):
    """Drafts what it is told, for each sequence by name, and notes what happens to it."""

    drafts: dict[str, Draft]
    taps: tuple[int, ...] = ()
    asked: list[tuple[list[str], list[int]]] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        self.asked.append(([sequence.id for sequence in sequences], list(budgets)))
        for sequence in sequences:
            sequence.memo = (sequence.memo or 0) + 1
        return [self.drafts.get(sequence.id, Draft.empty()) for sequence in sequences]

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Any) -> None:
        self.seen.append((start, list(tokens), None if taps is None else taps.tolist()))

    def rewind(self, sequence: Sequence, length: int) -> None:
        self.seen.append(("rewind", sequence.memo))

    def forget(self, sequence: Sequence) -> None:
        self.seen.append(("forget", sequence.memo))
        sequence.memo = None


def confident(tokens: Seq[int], *confidences: float) -> Draft:
    return Draft(tuple(tokens), tuple(range(-1, len(tokens) - 1)), confidences=confidences)


def test_later_parts_are_asked_only_where_earlier_ones_expect_little() -> None:
    first = Scripted({"a": confident([1, 2], 0.9, 0.8), "b": confident([3], 0.2)})
    second = Scripted({"b": confident([4, 5], 0.5, 0.3), "c": confident([6], 0.1)})
    drafter = combine([first, second])
    sequences = [sequence_of([1], name) for name in "abcd"]
    drafts = drafter.propose(sequences, [8, 8, 99, 0])
    assert [draft.tokens for draft in drafts] == [(1, 2), (4, 5), (6,), ()]
    assert first.asked == [(["a", "b", "c"], [8, 8, 16])]
    assert second.asked == [(["b", "c"], [8, 16])]
    assert drafter.propose(sequences[:1], [8])[0].tokens == (1, 2)
    assert len(second.asked) == 1


def test_the_better_of_two_weak_drafts_is_taken() -> None:
    drafter = combine([Scripted({"a": confident([1], 0.4)}), Scripted({"a": confident([2], 0.3)})])
    assert drafter.propose([sequence_of([1], "a")], [8])[0].tokens == (1,)


def test_trees_are_merged_under_one_budget() -> None:
    first = Scripted({"a": confident([1, 2, 3], 0.9, 0.5, 0.2)})
    second = Scripted({"a": confident([1, 4], 0.6, 0.4), "b": Draft.chain([7])})
    drafter = combine([first, second], mode="merge", num_speculative_tokens=3)
    drafts = drafter.propose([sequence_of([1], "a"), sequence_of([1], "b")], [64, 64])
    assert drafts[0] == Draft((1, 2, 4), (-1, 0, 0), confidences=(0.9, 0.5, 0.4))
    assert drafts[1].tokens == (7,)
    assert drafter.propose([sequence_of([1], "a")], [1])[0].tokens == (1,)


@pytest.mark.parametrize("mode", ["first", "merge"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_sampled_draft_is_taken_whatever_it_drew(mode: str, order: int) -> None:
    sampled = Draft((3,), (-1,), "independent", probs=[np.eye(VOCAB)[3]])
    drafter = combine([Scripted({"a": confident([1], 0.9)}), Scripted({"a": sampled})][::order], mode=mode)
    assert drafter.propose([sequence_of([1], "a")], [8])[0] is sampled


def test_each_part_has_its_own_memo() -> None:
    parts = [Scripted({}), Scripted({})]
    drafter = combine(parts)
    sequence = sequence_of([1], "a")
    drafter.propose([sequence], [8])
    drafter.propose([sequence], [8])
    other = sequence_of([1, 2])
    other.memo = sequence.memo
    drafter.rewind(other, 1)
    drafter.forget(other)
    assert other.memo is None
    assert parts[0].seen == parts[1].seen == [("rewind", 2), ("forget", 2)]


def test_a_part_that_raises_leaves_the_memos_in_place() -> None:
    class Broken(Scripted):
        def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
            raise RuntimeError("broken")

    first = Scripted({})
    drafter = combine([first, Broken({})])
    sequence = sequence_of([1], "a")
    for _ in range(2):
        with pytest.raises(RuntimeError):
            drafter.propose([sequence], [8])
    drafter.forget(sequence)
    assert first.seen == [("forget", 2)]


def test_each_part_sees_its_own_taps() -> None:
    parts = [Scripted({}, taps=(2,)), Scripted({}), Scripted({}, taps=(0, 1)), Scripted({}, taps=(0, 1, 2))]
    drafter = combine(parts)
    assert drafter.taps == (0, 1, 2)
    sequence = Sequence("0", [5, 6, 7], 3, SamplingParams(), 0, MODEL.new_cache())
    prefill(MODEL, drafter, sequence)
    of = {tap: [[tap, position, token] for position, token in enumerate([5, 6])] for tap in range(3)}
    assert parts[0].seen == [(0, [5, 6], of[2])]
    assert parts[1].seen == [(0, [5, 6], None)]
    assert parts[2].seen == [(0, [5, 6], [a + b for a, b in zip(of[0], of[1], strict=True)])]
    assert parts[3].seen[0][2] == [a + b + c for a, b, c in zip(of[0], of[1], of[2], strict=True)]


@pytest.mark.parametrize("mode", ["first", "merge"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_those_of_plain_decoding(mode: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=50)

    def answer(drafter: Drafter) -> tuple[list[int], int]:
        sequence = Sequence("0", [3, 1, 4], 3, params, 5, MODEL.new_cache())
        prefill(MODEL, drafter, sequence)
        accepted = 0
        while sequence.finish_reason is None:
            accepted += step(MODEL, drafter, MatchVerifier(), [sequence], [9])[0].num_accepted
        return sequence.tokens, accepted

    plain, _ = answer(NoneDrafter())
    trees = PlantedDrafter(PlantedDrafter.Config(script=scatter({(3, 1, 4): plain[3:]}, 6, VOCAB)))
    suffix = SuffixDrafter(SuffixDrafter.Config(min_confidence=0.02))
    tokens, accepted = answer(combine([suffix, trees], mode=mode, num_speculative_tokens=9))
    assert tokens == plain
    assert accepted > 0


@pytest.mark.parametrize("options", [{"mode": "all"}, {"num_speculative_tokens": 0}, {"min_expected": -1.0}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="give"):
        CombinedDrafter.Config(parts="suffix+ngram", **options)
