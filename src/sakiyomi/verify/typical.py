"""typical: typical acceptance. It is lossy: it keeps neither the tokens nor the distribution.

A drafted token is accepted where the target finds it typical, p(x) > min(epsilon, delta * exp(-H(p))); of all paths
of a tree the longest accepted one is taken, among equals the most probable (Medusa; Cai et al., 2024, after Hewitt,
Manning and Liang, 2022). At temperature 0 it is exact matching.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

from sakiyomi.errors import ParameterError
from sakiyomi.sampling.distributions import Law, TargetLaws, accept_path, follow_choices, path_history
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import DrawMode, Lossless, Output, Sequence, Verdict, Verifier


class TypicalVerifier(Verifier):
    """Accepts what the target finds typical; no coin is used."""

    is_lossless: Lossless = "no"
    draw: DrawMode = "argmax"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `typical`.

        Args:
            lossy: consent to a text that the model alone would not write; must be true.
            epsilon: a token more probable than this is always accepted.
            delta: factor of the threshold that falls with the entropy H (nats) of the target's law.
        """

        lossy: bool = False
        epsilon: float = 0.09
        delta: float = 0.3

        def __post_init__(self) -> None:
            # With the two the wrong way round epsilon would never act; Medusa's own helpers have that default.
            if not 0 < self.epsilon <= self.delta <= 1:
                raise ParameterError(
                    f"epsilon={self.epsilon}, delta={self.delta} are not allowed; give 0 < epsilon <= delta <= 1."
                )

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        if sequence.params.is_greedy:
            return follow_choices(draft, output, sequence)
        laws = TargetLaws(draft, output, sequence)
        path = self._longest_path(draft, laws)
        choices = [
            output.choose(node + 1, path_history(draft, node, sequence)) for node in (ROOT, *path)
        ]  # of plain decoding
        lossy = tuple(i for i, node in enumerate(path) if choices[i] != draft.tokens[node])
        return accept_path(draft, path, choices[-1], lossy)

    def threshold(self, p: Law) -> float:
        """What a token's probability must be above."""
        return min(self.config.epsilon, self.config.delta * exp(-p.entropy()))

    def _longest_path(self, draft: Draft, laws: TargetLaws) -> tuple[int, ...]:
        reached = {ROOT: 0.0}
        """Accepted nodes with the log-probability of their paths."""
        for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            if parent in reached:
                p = laws.after(parent)
                probability = p.probability(token)
                if probability > self.threshold(p):
                    reached[node] = reached[parent] + log(probability)
        best = max(reached, key=lambda node: (0 if node == ROOT else draft.depths[node], reached[node]))
        return draft.path(best)
