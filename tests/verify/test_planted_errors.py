"""The bench can fail: known errors of rules, drafters and noise are planted, and each shows as a wrong law.

`ERRORS` names each error with the total variation from the target that the bench finds for it (the largest over the
tables tried); docs/losslessness.md repeats the list.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from enumeration import EXACT, WARM, MakeDrafter, MakeVerifier, Rekeyed, Table, TreeDrafter, deviation

from sakiyomi.noise import PURPOSE_ACCEPT, PURPOSE_CORRECT, PURPOSE_DRAFT, NoiseKey
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.distributions import Law, TargetLaws, accept_path, draft_law, is_accepted
from sakiyomi.tree import Draft
from sakiyomi.types import Output, Sequence, Verdict, Verifier
from sakiyomi.verify.block import BlockVerifier, joint_ratios
from sakiyomi.verify.rejection import RejectionVerifier
from sakiyomi.verify.traversal import TraversalVerifier
from sakiyomi.verify.tree import TreeVerifier

TABLES = range(5)
CHAIN = (1, 1)


@dataclass(frozen=True)
class Planted:
    """A drafter and a rule of which one is wrong.

    Attributes:
        found: total variation from the target's law, as documented.
    """

    found: float
    drafter: Callable[..., Any]
    verifier: Callable[..., Any]
    num_tokens: int = 3
    num_steps: int = 1
    new_sequence: Callable[..., Sequence] = Sequence
    params: SamplingParams = WARM
    size: int = 3

    def deviation(self) -> float:
        return max(self._deviation(seed) for seed in TABLES)

    def _deviation(self, seed: int) -> float:
        p, q = Table(self.size, seed), Table(self.size, seed + 100)
        drafter: MakeDrafter = lambda randomness: self.drafter(q, randomness)  # noqa: E731
        verifier: MakeVerifier = lambda randomness: self.verifier(randomness)  # noqa: E731
        return deviation(
            p,
            drafter,
            verifier,
            num_tokens=self.num_tokens,
            num_steps=self.num_steps,
            new_sequence=self.new_sequence,
            params=self.params,
        )


def draws(shape: Seq[int], kind: str) -> Callable[..., Any]:
    return lambda q, randomness: TreeDrafter(q, shape, kind, randomness)


def rule(cls: Callable[..., Verifier]) -> Callable[..., Any]:
    return lambda randomness: cls(randomness=randomness)


def rekeyed(cls: Callable[..., Verifier], change: Callable[[NoiseKey], Any]) -> Callable[..., Any]:
    return lambda randomness: cls(randomness=Rekeyed(randomness, change))


# ---------------------------------------------------------------------------------------------- wrong drafters


class SoftTopK(TreeDrafter):
    """Takes the most probable tokens and says that it has drawn them."""

    def draw_tokens(self, sequence: Sequence, node: int, law: Any, count: int) -> list[int]:
        return [int(token) for token in np.argsort(-law, kind="stable")[:count]]


class Dropping(TreeDrafter):
    """Leaves out the last token of a chain where its own probability is small."""

    def declare(self, draft: Draft, laws: list[Any], draws: tuple[int, ...]) -> Draft:
        draft = super().declare(draft, laws, draws)
        return draft.trim(len(draft) - 1, 99) if laws[-1][draft.tokens[-1]] < 0.4 else draft


class Deduplicating(TreeDrafter):
    """Does not tell of tokens that it has drawn again."""

    def declare(self, draft: Draft, laws: list[Any], draws: tuple[int, ...]) -> Draft:
        return replace(super().declare(draft, laws, draws), draws=None)


class Sorting(TreeDrafter):
    """Lists siblings by probability and not in the order of drawing."""

    def declare(self, draft: Draft, laws: list[Any], draws: tuple[int, ...]) -> Draft:
        draws = tuple(sorted(draws, key=lambda node: -laws[node][draft.tokens[node]]))
        return super().declare(draft, laws, draws)


class Unfiltered(TreeDrafter):
    """Draws from its two most probable tokens and reports the law of all."""

    def draw_tokens(self, sequence: Sequence, node: int, law: Any, count: int) -> list[int]:
        cut = np.where(law >= np.sort(law)[-2], law, 0)
        return super().draw_tokens(sequence, node, cut / cut.sum(), count)


def replace_key(key: Any, **changes: Any) -> Any:
    return key._replace(**changes) if isinstance(key, NoiseKey) else key


# ---------------------------------------------------------------------------------------------- wrong rules


class StaleTree(TreeVerifier):
    """Tests each sibling against the law of the first."""

    def _pick_child(self, draft: Draft, rest: Law, node: int, sequence: Sequence) -> tuple[int | None, Law]:
        return super()._pick_child(replace(draft, drawn="independent"), rest, node, sequence)


class UnscaledBlock(BlockVerifier):
    """Corrects from (p - q)+ without the factor of the joint ratio."""

    def _weigh(self, draft: Draft, laws: TargetLaws, length: int, ratio: float) -> tuple[Law, float, float]:
        rest, accept, reject = super()._weigh(draft, laws, length, ratio)
        if length < len(draft):
            p = laws.after(length - 1)
            rest, _ = p.residual(draft_law(draft, length, p.vocab_size))
        return rest, accept, reject


class BareBlock(BlockVerifier):
    """Accepts by the joint ratio alone."""

    def _weigh(self, draft: Draft, laws: TargetLaws, length: int, ratio: float) -> tuple[Law, float, float]:
        return super()._weigh(draft, laws, length, ratio)[0], ratio, 1 - ratio


class ContiguousBlock(BlockVerifier):
    """Stops at the first prefix that fails."""

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        laws = TargetLaws(draft, output, sequence)
        ratios = joint_ratios(draft, laws)
        length = 0
        while length + 1 < len(ratios):
            _, accept, reject = self._weigh(draft, laws, length + 1, ratios[length + 1])
            if not is_accepted(self.randomness, sequence, length, accept, accept + reject):
                break
            length += 1
        rest, _, _ = self._weigh(draft, laws, length, ratios[length])
        return accept_path(draft, tuple(range(length)), rest.draw(self.randomness, sequence, length - 1))


class UncorrectedRejection(RejectionVerifier):
    """Draws from p behind a rejection."""

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        verdict = super().verify(draft, output, sequence)
        last = len(verdict.path) - 1
        final = TargetLaws(draft, output, sequence).after(last)
        return accept_path(draft, verdict.path, final.draw(self.randomness, sequence, last))


class _Shifted:
    """Each node's row, where its parent's should be."""

    def __init__(self, output: Output, num_rows: int) -> None:
        self._output = output
        self._last = num_rows - 1
        self.choose = output.choose

    def row(self, i: int) -> Any:
        return self._output.row(min(i + 1, self._last))


class ShiftedRejection(RejectionVerifier):
    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        return super().verify(draft, _Shifted(output, len(draft) + 1), sequence)  # type: ignore[arg-type]


class FrozenPenalties(RejectionVerifier):
    """Counts what came before the draft for every row."""

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        frozen = _Frozen(**{field: getattr(sequence, field) for field in Sequence.__dataclass_fields__})
        return super().verify(draft, output, frozen)


class _Frozen(Sequence):
    def history(self, path: tuple[int, ...] = ()) -> Any:
        return super().history(())


class ByPosition(Sequence):
    """Keys noise by position, so that it comes back where a step was cut short."""

    def noise_key(self, node: int, purpose: int) -> NoiseKey:
        if purpose == PURPOSE_DRAFT:
            return NoiseKey(self.seed, 0, len(self.tokens) + node, purpose)
        return super().noise_key(node, purpose)


def one_stream(key: Any) -> Any:
    return replace_key(key, purpose=PURPOSE_DRAFT)


PENALTIES = SamplingParams(temperature=1, frequency_penalty=1.5, max_tokens=None)

ERRORS = {
    "stale q: siblings tested against the law before any was taken out": Planted(
        0.0955, draws((3,), "without_replacement"), rule(StaleTree), num_tokens=2
    ),
    "soft q on top-k children": Planted(
        0.3887, lambda q, r: SoftTopK(q, (2,), "without_replacement", r), rule(TreeVerifier), num_tokens=2
    ),
    "soft q on an argmax chain": Planted(
        0.4174, lambda q, r: SoftTopK(q, CHAIN, "independent", r), rule(RejectionVerifier)
    ),
    "a sampled token dropped for its own probability (rejection)": Planted(
        0.1014, lambda q, r: Dropping(q, CHAIN, "independent", r), rule(RejectionVerifier)
    ),
    "a sampled token dropped for its own probability (block)": Planted(
        0.1631, lambda q, r: Dropping(q, CHAIN, "independent", r), rule(BlockVerifier)
    ),
    "block: residual without the joint ratio": Planted(0.0269, draws(CHAIN, "independent"), rule(UnscaledBlock)),
    "block: joint ratio as the odds of every prefix": Planted(0.1490, draws(CHAIN, "independent"), rule(BareBlock)),
    "block: stopping at the first prefix that fails": Planted(
        0.2601, draws(CHAIN, "independent"), rule(ContiguousBlock)
    ),
    "block: one coin for all prefixes": Planted(
        0.0847,
        draws(CHAIN, "independent"),
        rekeyed(BlockVerifier, lambda key: replace_key(key, node=0) if key.purpose == PURPOSE_ACCEPT else key),
    ),
    "duplicate siblings skipped": Planted(
        0.0508, lambda q, r: Deduplicating(q, (3,), "independent", r), rule(TreeVerifier), num_tokens=2
    ),
    "siblings sorted by probability after drawing": Planted(
        0.3580, lambda q, r: Sorting(q, (2,), "without_replacement", r), rule(TreeVerifier), num_tokens=2
    ),
    "drawn from a filtered law, judged by the unfiltered one": Planted(
        0.1557, lambda q, r: Unfiltered(q, CHAIN, "independent", r), rule(RejectionVerifier)
    ),
    "rows off by one": Planted(0.6268, draws(CHAIN, "independent"), rule(ShiftedRejection)),
    "correction from p": Planted(0.2260, draws(CHAIN, "independent"), rule(UncorrectedRejection)),
    "penalties frozen in front of the draft": Planted(
        0.2092, draws(CHAIN, "independent"), rule(FrozenPenalties), params=PENALTIES
    ),
    "block: draft noise back at its position in the next step": Planted(
        0.0551, draws(CHAIN, "independent"), rule(BlockVerifier), num_steps=2, new_sequence=ByPosition
    ),
    "traversal: draft noise back at its position in the next step": Planted(
        0.0551, draws(CHAIN, "independent"), rule(TraversalVerifier), num_steps=2, new_sequence=ByPosition
    ),
    "one noise for drafting and correcting": Planted(
        0.0847,
        draws(CHAIN, "independent"),
        rekeyed(RejectionVerifier, lambda key: one_stream(key) if key.purpose == PURPOSE_CORRECT else key),
    ),
    "one noise for drafting and accepting": Planted(
        0.2291,
        draws(CHAIN, "independent"),
        rekeyed(
            RejectionVerifier,
            lambda key: (
                replace_key(key, purpose=PURPOSE_DRAFT, node=key.node - 1) if key.purpose == PURPOSE_ACCEPT else key
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_bench_finds_it(name: str) -> None:
    planted = ERRORS[name]
    assert planted.found > 1e-4 > EXACT
    assert planted.deviation() == pytest.approx(planted.found, rel=0.02)


if __name__ == "__main__":
    for name, planted in ERRORS.items():
        print(f"{planted.deviation():.4f}  {name}")
