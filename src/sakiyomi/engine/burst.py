"""Bursts: several steps of one sequence in one call of the model (`Ops.run_burst`), where no Python runs.

Beside a small model Python is a large share of a step: each pass drives its code and objects out of the caches. A burst
goes by what is known when it begins; what it found out is learnt behind it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol, TypeGuard, runtime_checkable

from sakiyomi.decode import Step, commit_burst, observe_burst
from sakiyomi.engine.budget import Budget
from sakiyomi.ops.base import BurstRules, BurstStep
from sakiyomi.sampling.choose import takes_logits_as_they_are
from sakiyomi.types import Array, Drafter, Model, ModelInfo, Sequence, Verifier

BURST_SECONDS = 0.04
"""Of a burst whose tokens somebody waits for: a stream then moves 25 times a second."""

LONG_BURST_SECONDS = 0.06
"""Of one whose answer is wanted as a whole. Longer ones would learn too late what pays."""


@runtime_checkable
class BurstModel(Protocol):
    """A model that may make bursts."""

    info: ModelInfo
    has_bursts: bool

    def burst(
        self, cache: Any, last: int, taps: Seq[int], first_taps: Array | None, rules: BurstRules
    ) -> tuple[list[BurstStep], Array]:
        """As `Ops.run_burst`."""
        ...


def makes_bursts(model: Model, verifier: Verifier) -> TypeGuard[BurstModel]:
    """Whether a model and a rule may go through bursts at all."""
    return verifier.follows_choices and isinstance(model, BurstModel) and model.has_bursts


def run_burst(
    model: BurstModel, drafter: Drafter, budget: Budget, sequence: Sequence, cap: int, max_seconds: float
) -> list[tuple[Step, BurstStep]]:
    """Advance a sequence by some steps in one call; none where the next one has to be made by itself.

    Args:
        cap: nodes of a draft at most.
        max_seconds: a step that ends later is the last one.
    """
    if not takes_logits_as_they_are(sequence.history()):
        return []
    plan = budget.plan_burst(sequence, cap, max_seconds, model.info)
    if plan is None:
        return []
    start = context = sequence.cache.length
    found, taps = model.burst(sequence.cache, sequence.tokens[-1], drafter.taps, plan.first_taps, plan.rules)
    steps = []
    for one in found:
        steps.append((commit_burst(sequence, one, model.info), one))
        budget.record_burst(sequence, plan, one, context)
        context += len(one.tokens)
        if sequence.finish_reason is not None:
            break
    observe_burst(drafter, sequence, start, taps if drafter.taps else None)
    return steps
