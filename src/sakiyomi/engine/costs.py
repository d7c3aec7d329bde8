"""What forward passes and drafts cost here and now, learnt from those that are made anyway."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from statistics import median

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

WINDOW = 9
"""Times of one kind that count: their median ignores four disturbed ones."""

FIRST_REFRESH, LAST_REFRESH = 16, 128
"""Curves are computed anew behind every record up to the first number, then at doublings, then every so many records:
doing so takes a fifth of a step."""

NEAR = 0.12
"""Width, in logarithms of rows, within which a number of rows tells more of another than what all have in common."""

LOCAL_WEIGHT = 3.0
"""Times that must speak for it before a case of its own differs from what all cases have in common."""

SPREAD = 0.1
"""Of one time, in logarithms."""

FREEDOM = np.array([10.0, 0.3, 0.2, 0.1])
"""How far the terms of `_terms` may lie from 0, in logarithms: a machine differs from the prior by that much."""


def prior_cost(num_rows: int, context: float) -> float:
    """Cost of a pass before anything is known, in plain steps: our CPU kernels on a model of 135 M weights.

    Up to 8 rows go through one tile; attention reads the context for each row, though not from memory.
    """
    return 1 + 0.12 * (num_rows - 1) + 0.06 * max(num_rows - 8, 0) + 2.2e-4 * context * math.pow(num_rows, 0.8)


class PassCosts:
    """Seconds of a pass over M rows behind a context.

    Times are kept as ratios to `prior_cost`, by rows and doublings of the context, as medians of the last few. Their
    logarithms are a plane over rows and context, by ridge regression (Hoerl and Kennard, 1970), and what is
    left of them near the case at hand. So what is seen often tells what is seen seldom: a plain step, say, which a run
    that always drafts hardly makes.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], deque[float]] = {}
        self._curves: dict[int, list[float]] = {}
        self._num_records = 0

    def record(self, num_rows: int, context: float, seconds: float) -> None:
        """A pass over `num_rows` in sum, at `context` cached positions on average, took `seconds`."""
        key = (num_rows, _bin_context(context))
        ratios = self._ratios.get(key)
        if ratios is None:
            ratios = self._ratios[key] = deque(maxlen=WINDOW)
        ratios.append(seconds / prior_cost(num_rows, context))
        self._num_records += 1
        period = 1 if self._num_records < FIRST_REFRESH else 1 << self._num_records.bit_length() - 1
        if self._num_records % min(period, LAST_REFRESH) == 0:
            self._curves.clear()

    def curve(self, context: float, max_rows: int) -> Seq[float]:
        """Seconds of a pass over 0, 1, 2, ... rows, at least up to `max_rows`; ascending. Plain steps while unknown."""
        number = _bin_context(context)
        curve = self._curves.get(number)
        if curve is None or len(curve) <= max_rows:
            curve = self._curves[number] = self._estimate(number, max(max_rows, 32))
        return curve

    @property
    def is_known(self) -> bool:
        """Whether any pass was recorded; until then a plain step counts as 1."""
        return bool(self._ratios)

    def _estimate(self, context_bin: int, max_rows: int) -> list[float]:
        rows = [1, *range(1, max_rows + 1)]
        curve = np.array([prior_cost(number, _context_of(context_bin)) for number in rows])
        if self._ratios:
            curve *= np.exp(self._fit(np.log(rows), context_bin))
        ascending: list[float] = np.maximum.accumulate(curve).tolist()
        return ascending

    def _fit(self, log_rows: Array, context_bin: int) -> Array:
        """Logarithm of the ratio to the prior, for numbers of rows at one context."""
        seen = np.array(list(self._ratios), np.float64)
        own_rows, own_bins = np.log(seen[:, 0]), seen[:, 1]
        values = np.log([median(ratios) for ratios in self._ratios.values()])
        counts = np.array([len(ratios) for ratios in self._ratios.values()], np.float64)
        terms = _terms(own_rows, own_bins)
        weighted = terms * (counts / SPREAD**2)[:, None]
        plane = np.linalg.solve(weighted.T @ terms + np.diag(FREEDOM**-2), weighted.T @ values)
        near = np.exp(-((log_rows[:, None] - own_rows[None, :]) ** 2) / NEAR**2)
        near *= counts * np.exp(-((own_bins - context_bin) ** 2))
        left = near @ (values - terms @ plane) / (near.sum(axis=1) + LOCAL_WEIGHT)
        fitted: Array = _terms(log_rows, np.full(log_rows.shape, float(context_bin))) @ plane + left
        return fitted


def _terms(log_rows: Array, bins: Array) -> Array:
    """What a machine may differ in: its speed, the price of rows, that of context, and of both together."""
    terms: Array = np.stack([np.ones_like(bins), log_rows, bins, bins * log_rows], axis=1)
    return terms


def _bin_context(context: float) -> int:
    return int(context / 64 + 1).bit_length()


def _context_of(number: int) -> float:
    """The middle of a bin."""
    return 64.0 * (0.75 * (1 << number) - 1)


class DraftCosts:
    """Seconds that a drafter needs for a draft of at most K nodes for one sequence."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self.least = 0.0
        """Of all medians; 0 while nothing is known."""

    @property
    def is_known(self) -> bool:
        return bool(self._medians)

    def record(self, num_nodes: int, seconds: float) -> None:
        times = self._seconds.setdefault(num_nodes, deque(maxlen=WINDOW))
        times.append(seconds)
        self._medians[num_nodes] = median(times)
        self.least = min(self._medians.values())

    def seconds(self, num_nodes: int) -> float:
        """The median for as many nodes; else that of the nearest number, in proportion; 0 while nothing is known."""
        known = self._medians.get(num_nodes)
        if known is not None or not self._medians:
            return known or 0.0
        nearest = min(self._medians, key=lambda other: abs(other - num_nodes))
        return self._medians[nearest] * num_nodes / nearest
