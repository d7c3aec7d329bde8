"""lenient: the token rule with lenience. It is lossy: it keeps neither the tokens nor the distribution.

Accept with probability min(1, p(x) / (l q(x))), l in (0, 1]; no token becomes more than 1 / l times as probable as
under the target (Leviathan, Kalman and Matias, 2023, appendix). A rejection draws from (p - q)+ as in `rejection`,
which loses the least. At temperature 0 a token is accepted if its probability at temperature 1 is at least l times
the largest. With l = 1 it is `rejection`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sakiyomi.errors import ParameterError
from sakiyomi.noise import Randomness
from sakiyomi.sampling.distributions import (
    KeyedRandomness,
    Law,
    TargetLaws,
    accept_path,
    draft_law,
    follow_choices,
    is_accepted,
    is_decided_by_choice,
    law_of,
    path_history,
    require_chain,
)
from sakiyomi.tree import Draft
from sakiyomi.types import DrawMode, Lossless, Output, Sequence, Verdict, Verifier


class LenientVerifier(Verifier):
    """Judges the tokens of a chain one by one, generously."""

    is_lossless: Lossless = "no"
    draw: DrawMode = "independent"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `lenient`.

        Args:
            lossy: consent to a text that the model alone would not write; must be true.
            lenience: l, in (0, 1]; 1 is exact.
        """

        lossy: bool = False
        lenience: float = 0.5

        def __post_init__(self) -> None:
            if not 0 < self.lenience <= 1:
                raise ParameterError(f"lenience={self.lenience} is not allowed; give a number above 0 and at most 1.")

    def __init__(self, config: Config | None = None, randomness: Randomness | None = None) -> None:
        self.config = config or self.Config()
        self.randomness = randomness or KeyedRandomness()

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        is_fixed = is_decided_by_choice(draft, sequence, "lenient")
        if not draft.tokens or (is_fixed and self.config.lenience == 1):
            return follow_choices(draft, output, sequence)
        require_chain(draft, "lenient")
        if sequence.params.is_greedy:
            return self._verify_greedy(draft, output, sequence)
        laws = TargetLaws(draft, output, sequence)
        lossy: list[int] = []
        for node, token in enumerate(draft.tokens):
            p = laws.after(node - 1)
            q = Law.one_hot(token, p.vocab_size) if is_fixed else draft_law(draft, node, p.vocab_size)
            own, drawn = p.probability(token), q.probability(token)
            if not is_accepted(self.randomness, sequence, node, own, self.config.lenience * drawn):
                final = p.residual(q)[0].draw(self.randomness, sequence, node - 1)
                return accept_path(draft, tuple(range(node)), final, tuple(lossy))
            # The same coin again: would the exact rule have accepted?
            if not is_accepted(self.randomness, sequence, node, own, drawn):
                lossy.append(node)
        last = len(draft) - 1
        final = laws.after(last).draw(self.randomness, sequence, last)
        return accept_path(draft, tuple(range(len(draft))), final, tuple(lossy))

    def _verify_greedy(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        path: list[int] = []
        lossy: list[int] = []
        for node, token in enumerate(draft.tokens):
            history = path_history(draft, node - 1, sequence)
            p = law_of(output.row(node), replace(history, params=replace(history.params, temperature=1.0)))
            if p.probability(token) < self.config.lenience * p.probs.max():
                break
            if token != output.choose(node, history):
                lossy.append(node)
            path.append(node)
        final = output.choose(len(path), path_history(draft, len(path) - 1, sequence))
        return accept_path(draft, tuple(path), final, tuple(lossy))
