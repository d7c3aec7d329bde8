"""relaxed: accept what is nearly the most probable token. It is lossy: it keeps neither tokens nor distribution.

A drafted token is accepted if it is the target's own choice, or among the `top_n` most probable tokens with a
probability of at least the largest minus `delta` (relaxed acceptance for thinking phases; NVIDIA, TensorRT-LLM, 2025).
Ids that end the answer or bound the thinking phase are accepted as the target's own choice alone. The probabilities
are those of the request's parameters, at temperature 0 those of temperature 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from sakiyomi.errors import ParameterError
from sakiyomi.sampling.distributions import accept_path, follow_choices, law_of, path_history
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import DrawMode, History, Lossless, Output, Sequence, Verdict, Verifier


class RelaxedVerifier(Verifier):
    """Walks down a tree along tokens that are good enough."""

    is_lossless: Lossless = "no"
    draw: DrawMode = "argmax"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `relaxed`.

        Args:
            lossy: consent to a text that the model alone would not write; must be true.
            top_n: how many of the most probable tokens are candidates.
            delta: largest gap to the most probable token, in probability; 0 is `match`.
            begin_id, end_id: ids around the thinking phase; relaxed is only what lies between. Without begin_id
                everything up to end_id is.
        """

        lossy: bool = False
        top_n: int = 10
        delta: float = 0.6
        begin_id: int | None = None
        end_id: int | None = None

        def __post_init__(self) -> None:
            if self.top_n < 1:
                raise ParameterError(f"top_n={self.top_n} is not allowed; give at least 1.")
            if not 0 <= self.delta <= 1:
                raise ParameterError(f"delta={self.delta} is not allowed; give a number from 0 to 1.")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        is_relaxed = self.config.delta > 0 and self._is_thinking(sequence.tokens)
        if not is_relaxed and self.config.begin_id is None:
            return follow_choices(draft, output, sequence)
        path: list[int] = []
        lossy: list[int] = []
        node = ROOT
        while True:
            history = path_history(draft, node, sequence)
            choice = output.choose(node + 1, history)
            child = draft.child(node, choice)
            if child is None and is_relaxed:
                child = self._candidate(draft, node, output, history)
                if child is not None:
                    lossy.append(len(path))
            if child is None:
                return accept_path(draft, tuple(path), choice, tuple(lossy))
            path.append(child)
            node = child
            if draft.tokens[node] in self._bounds:
                is_relaxed = self.config.delta > 0 and draft.tokens[node] == self.config.begin_id

    @property
    def _bounds(self) -> set[int]:
        return {token for token in (self.config.begin_id, self.config.end_id) if token is not None}

    def _is_thinking(self, tokens: Iterable[int]) -> bool:
        if not self._bounds:
            return True
        last = next((token for token in reversed(list(tokens)) if token in self._bounds), None)
        return last == self.config.begin_id

    def _candidate(self, draft: Draft, node: int, output: Output, history: History) -> int | None:
        """The most probable child that is good enough."""
        children = draft.draws_below(node)
        if not children:
            return None
        if history.params.is_greedy:
            history = replace(history, params=replace(history.params, temperature=1.0))
        p = law_of(output.row(node + 1), history)
        order = np.argsort(-p.probs, kind="stable")[: self.config.top_n]
        near = order[p.probs[order] >= p.probs[order[0]] - self.config.delta]
        strict = history.end_ids | self._bounds
        good = [child for child in children if draft.tokens[child] in p.ids[near] and draft.tokens[child] not in strict]
        return max(good, key=lambda child: p.probability(draft.tokens[child]), default=None)
