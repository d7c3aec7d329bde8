"""combined: several drafters in order, cheap and sure ones first.

`suffix:min_match=2+ngram` asks suffix, and ngram where suffix expects little, as the hybrid of SuffixDecoding does
(Oliaro et al., 2024). With `combined:mode=merge,parts=suffix+ngram` all of them draft, and the most confident nodes of
their trees are checked together.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

from sakiyomi.errors import ParameterError
from sakiyomi.parts import PartsDrafter
from sakiyomi.plugins import MAX_DRAFT_TOKENS, check_bounds
from sakiyomi.tree import SAMPLED, Draft, expected_length, merge_drafts
from sakiyomi.types import DrafterContext, Sequence


class CombinedDrafter(PartsDrafter):
    """Asks its parts in order, or all of them."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `combined`.

        Args:
            parts: drafters joined by "+", each `name` or `name:key=value,...`; the last of the options.
            mode: "first" takes the first part that expects `min_expected` accepted tokens, or else the best of all;
                "merge" checks the most confident nodes of all parts.
            min_expected: how many accepted tokens a part must expect so that the parts behind it are not asked.
            num_speculative_tokens: nodes of a draft at most.
        """

        parts: str
        mode: Literal["first", "merge"] = "first"
        min_expected: float = 1.0
        num_speculative_tokens: int = 16

        def __post_init__(self) -> None:
            if self.mode not in ("first", "merge"):
                raise ParameterError(f"mode={self.mode!r} is not allowed; give first or merge.")
            check_bounds("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_DRAFT_TOKENS)
            if not self.min_expected >= 0:
                raise ParameterError(f"min_expected={self.min_expected}; give a number of at least 0.")

    def __init__(self, config: Config, context: DrafterContext) -> None:
        assert context.make_drafters is not None, "combined is built by assemble"
        self.config = config
        super().__init__(context.make_drafters(config.parts), context.target.info.hidden_size)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        budgets = [min(budget, self.config.num_speculative_tokens) for budget in budgets]
        if self.config.mode == "first":
            return self._propose_first(sequences, budgets)
        drafts = [self.ask(index, sequences, budgets) for index in range(len(self.parts))]
        return [_merge(several, budget) for *several, budget in zip(*drafts, budgets, strict=True)]

    def _propose_first(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = [Draft.empty() for _ in sequences]
        open_ones = [i for i, budget in enumerate(budgets) if budget > 0]
        for index in range(len(self.parts)):
            answers = self.ask(index, [sequences[i] for i in open_ones], [budgets[i] for i in open_ones])
            for i, draft in zip(open_ones, answers, strict=True):
                drafts[i] = _choose([drafts[i], draft])
            open_ones = [i for i in open_ones if not self._is_enough(drafts[i])]
            if not open_ones:
                break
        return drafts

    def _is_enough(self, draft: Draft) -> bool:
        return draft.drawn in SAMPLED or expected_length(draft) >= self.config.min_expected


def _choose(drafts: Seq[Draft]) -> Draft:
    # Whether a sampled draft is checked must not depend on what was drawn, so it is never weighed.
    chosen = next((d for d in drafts if d.drawn in SAMPLED), None) or max(drafts, key=expected_length)
    return _with_probes(chosen, drafts)


def _merge(drafts: Seq[Draft], max_nodes: int) -> Draft:
    if any(draft.drawn in SAMPLED for draft in drafts):
        return _choose(drafts)
    return _with_probes(merge_drafts(drafts, max_nodes), drafts)


def _with_probes(draft: Draft, drafts: Seq[Draft]) -> Draft:
    """The draft with the probes that one of the parts asked for, whosever draft it is."""
    probes = next((other.probes for other in drafts if other.probes is not None), None)
    return draft if probes is draft.probes else replace(draft, probes=probes)
