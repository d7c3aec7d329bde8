"""The one timed loop: several ways of doing the same work, taken in turns, with medians and bootstrap bounds.

A machine is never quite quiet, so ways are compared within a round, in which each does the same piece of work once,
and the order changes from round to round. Noise that lasts longer than a round then meets all ways alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sakiyomi.engine.engine import Prefix
from sakiyomi.llm import LLM
from sakiyomi.params import SamplingParams
from sakiyomi.results import RequestOutput

Case = TypeVar("Case")

NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Trial:
    """One piece of work, done once.

    Attributes:
        seconds: how long it took.
        amount: how much was done, say tokens; speeds are amount / seconds.
        output: what came out, whatever the way gives.
    """

    seconds: float
    amount: float = 1.0
    output: Any = None

    @property
    def speed(self) -> float:
        return self.amount / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure with the bounds between which it lies in 95 % of the bootstrap's samples."""

    value: float
    low: float
    high: float


Way = Callable[[Case], Trial]
Trials = list[list[Trial]]
"""Of one way: for each case its trials, round by round."""
Report = Callable[[str, int, int], None]
"""Told what is being done, how many trials are done, and how many there are."""


class Comparison(Generic[Case]):
    """Runs several ways over the same cases, in turns.

    Args:
        ways: by name; the first is the base of comparisons.
        num_rounds: how often each case is repeated.
        num_warm_ups: untimed runs of every way before the first case.
    """

    def __init__(
        self,
        ways: Mapping[str, Way[Case]],
        *,
        num_rounds: int,
        num_warm_ups: int = 1,
        report: Report = lambda what, done, total: None,
    ) -> None:
        assert ways, "nothing to compare"
        assert num_rounds > 0, "no rounds"
        self._ways = dict(ways)
        self._num_rounds = num_rounds
        self._num_warm_ups = num_warm_ups
        self._report = report

    def run(self, cases: Seq[Case]) -> dict[str, Trials]:
        """The trials of every way over every case."""
        names = list(self._ways)
        trials: dict[str, Trials] = {name: [[] for _ in cases] for name in names}
        total = len(cases) * self._num_rounds * len(names)
        self._report("warming up", 0, total)
        for name in names * (self._num_warm_ups if cases else 0):
            self._ways[name](cases[0])
        done = 0
        for index, case in enumerate(cases):
            for number in range(self._num_rounds):
                for name in rotate(names, number):
                    self._report(name, done, total)
                    trials[name][index].append(self._ways[name](case))
                    done += 1
        self._report("done", total, total)
        return trials


def rotate(names: Seq[str], number: int) -> list[str]:
    """The order of round `number`: each way comes first in turn, and every other round runs backwards."""
    start = number // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order if number % 2 == 0 else order[::-1]


def compare_speeds(base: Trials, other: Trials, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Spread:
    """How much faster `other` does all cases together than `base`.

    Of each case the median over the rounds of the ratio within a round counts; cases weigh by the time that the base
    needs for them. Bounds are those of a bootstrap over cases and, within them, rounds (Efron, 1979).
    """
    ratios = np.array(
        [[o.speed / b.speed for b, o in zip(*pair, strict=True)] for pair in zip(base, other, strict=True)]
    )
    seconds = np.array([statistics.median(trial.seconds for trial in rounds) for rounds in base])
    num_cases, num_rounds = ratios.shape
    rng = np.random.default_rng(seed)
    drawn_cases = rng.integers(0, num_cases, (num_resamples, num_cases))
    drawn_rounds = rng.integers(0, num_rounds, (num_resamples, num_cases, num_rounds))
    resampled = np.median(ratios[drawn_cases[:, :, None], drawn_rounds], axis=2)
    low, high = np.quantile(_together(resampled, seconds[drawn_cases]), (0.025, 0.975))
    return Spread(float(_together(np.median(ratios, axis=1), seconds)), float(low), float(high))


def _ratios(base: Seq[Trial], other: Seq[Trial]) -> list[float]:
    return [theirs.speed / ours.speed for ours, theirs in zip(base, other, strict=True)]


def _together(ratios: npt.NDArray[Any], seconds: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The ratio of whole sums of time: what the base needs over what the other needs."""
    total: npt.NDArray[Any] = seconds.sum(axis=-1) / (seconds / ratios).sum(axis=-1)
    return total


def median_speed(trials: Trials) -> float:
    """Amount per second over all cases, each at the median of its rounds."""
    amount = sum(rounds[0].amount for rounds in trials)
    return amount / sum(statistics.median(trial.seconds for trial in rounds) for rounds in trials)


class SharedPrompt:
    """The computed prompt of the case at hand, for all ways over one model; drafters that read taps have their own."""

    def __init__(self) -> None:
        self._prompt: tuple[int, ...] = ()
        self._prefix = Prefix()

    def of(self, prompt: Seq[int]) -> Prefix:
        """What the ways share for this prompt; that of the prompt before is dropped."""
        if self._prompt != tuple(prompt):
            self._prompt, self._prefix = tuple(prompt), Prefix()
        return self._prefix


def answer_with(llm: LLM, params: SamplingParams, shared: SharedPrompt | None = None) -> Way[Seq[int]]:
    """A way to answer prompts, given as ids: the time of decoding counts, that of the prompt does not.

    Args:
        shared: given to several ways, lets them compute each prompt only once.
    """

    def answer(prompt: Seq[int]) -> Trial:
        request = llm.requests.build(prompt, params)
        if shared is not None:
            request.jobs[0].prefix = shared.of(prompt)
        llm.run([request])
        (job,) = request.jobs
        if job.error is not None:
            raise job.error
        output = llm.requests.result(request)
        return Trial(output.timing.decode_s, len(output.outputs[0].token_ids), output)

    return answer


def outputs_of(trials: Trials) -> list[RequestOutput]:
    """What came out of the trials of `answer_with`."""
    return [trial.output for rounds in trials for trial in rounds]
