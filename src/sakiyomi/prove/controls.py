"""Verifiers that are wrong on purpose: a test that does not reject them has shown nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sakiyomi.sampling.distributions import accept_path
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import History, Output, Sequence, Verdict, Verifier


class Control(Verifier):
    """A planted error around a verifier.

    Attributes:
        name, error: what it is called, and what is wrong with it.
    """

    name: str
    error: str

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner
        self.is_lossless = inner.is_lossless
        self.draw = inner.draw


class RedrawControl(Control):
    """Draws from p where a draft was rejected, not from what the rejected tokens have left of it."""

    name = "redraw"
    error = "after a rejected draft the token is drawn from p afresh"

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        verdict = self.inner.verify(draft, output, sequence)
        node = verdict.path[-1] if verdict.path else ROOT
        if not draft.draws_below(node):
            return verdict
        history = replace(sequence.history(verdict.tokens[:-1]), seed=sequence.seed ^ 1)
        return accept_path(draft, verdict.path, output.choose(node + 1, history))


class AcceptControl(Control):
    """Accepts what was drafted first, whatever the target says."""

    name = "accept"
    error = "the first drafted token is accepted at every place, without a look at p"

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        path: list[int] = []
        while draft.draws_below(path[-1] if path else ROOT):
            path.append(draft.draws_below(path[-1] if path else ROOT)[0])
        tokens = tuple(draft.tokens[node] for node in path)
        final = output.choose(path[-1] + 1 if path else 0, sequence.history(tokens))
        return accept_path(draft, tuple(path), final)


class ShiftControl(Control):
    """Judges each drafted token by the row in front of the right one."""

    name = "shift"
    error = "each row of logits is read one place too early"

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        return self.inner.verify(draft, _Shifted(output), sequence)


CONTROLS: tuple[type[Control], ...] = (AcceptControl, RedrawControl, ShiftControl)


class _Shifted:
    def __init__(self, output: Output) -> None:
        self.taps = output.taps
        self.output = output

    def row(self, i: int) -> npt.NDArray[np.float32]:
        return self.output.row(max(i - 1, 0))

    def argmax(self) -> list[int]:
        best = self.output.argmax()
        return [best[max(i - 1, 0)] for i in range(len(best))]

    def choose(self, i: int, history: History) -> int:
        return self.output.choose(max(i - 1, 0), history)
