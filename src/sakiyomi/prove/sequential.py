"""Sequential tests of draws against a law that is known exactly, with a bound on false alarms at every moment.

An e-process starts at 1, is never negative, and under the null hypothesis each draw multiplies it by a factor of mean
1. So it ever reaches 1 / alpha with probability at most alpha (Ville, 1939; Ramdas, Grunwald, Vovk and Shafer, 2023,
"Game-theoretic statistics and safe anytime-valid inference"): one may look after every draw, and nothing is
asymptotic. A weighted mean of e-processes is one again. Both tests here bet by a mixture over sizes of deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, log

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]

CONCENTRATIONS = (30.0, 100.0, 300.0, 1000.0, 3000.0)
TILTS = tuple(sign * size for size in (0.05, 0.1, 0.2, 0.4, 0.8) for sign in (-1.0, 1.0))
NUM_SIMULATIONS = 200


class CellTest:
    """Are the draws from `probs` [K]? It notices any deviation of them.

    The bet is Bayesian: the alternative's probabilities are Dirichlet around `probs`, with several concentrations.
    """

    def __init__(self, probs: Float64s) -> None:
        self.probs = probs
        self.counts = np.zeros(probs.size)
        self._logs = np.zeros(len(CONCENTRATIONS))

    @property
    def log_e(self) -> float:
        return log_mean_exp(self._logs)

    def add(self, cell: int) -> None:
        p, n = self.probs[cell], self.counts.sum()
        if p <= 0:
            self._logs[:] = inf
        else:
            c = np.array(CONCENTRATIONS)
            self._logs += np.log((c * p + self.counts[cell]) / (c + n) / p)
        self.counts[cell] += 1


class TiltTest:
    """Do draws land in a set more or less often than its probability says, which may differ from draw to draw?"""

    def __init__(self) -> None:
        self.probs: list[float] = []
        self._logs = np.zeros(len(TILTS))

    @property
    def log_e(self) -> float:
        return log_mean_exp(self._logs)

    def add(self, is_inside: bool, p: float) -> None:
        """One draw; p is the probability of being inside, above 0 and below 1."""
        self.probs.append(p)
        tilts = np.array(TILTS)
        self._logs += tilts * is_inside - np.log1p(p * np.expm1(tilts))


def log_mean_exp(logs: npt.ArrayLike, axis: int = -1) -> float:
    """Logarithm of the mean of exponentials."""
    return float(_log_means(np.asarray(logs, np.float64), axis))


def _log_means(logs: Float64s, axis: int = -1) -> Float64s:
    top = logs.max(axis=axis, keepdims=True)
    if np.isinf(top).any():
        return np.asarray(logs.max(axis=axis))
    means: Float64s = np.squeeze(top, axis) + np.log(np.exp(logs - top).mean(axis=axis))
    return means


# ---------------------------------------------------------------------------------------------- power


def least_cell_deviation(probs: Float64s, num_draws: int, log_threshold: float, power: float) -> float:
    """The total variation that a CellTest notices with probability `power`, in the direction that hides best.

    For a given total variation the chi-squared distance, which is what drives the test, is smallest where every cell
    of one half of the probability gains the same factor and every cell of the other half loses it. Found by
    simulation; the test is taken to look once, after the last draw. 1 if nothing is noticed.
    """
    half = _half(probs)
    tables = [np.concatenate([[0.0], np.cumsum(np.log(c * p + np.arange(num_draws)))]) for p, c in _grid(probs)]
    gains = np.array(tables).reshape(probs.size, len(CONCENTRATIONS), num_draws + 1)
    totals = np.array([np.log(c + np.arange(num_draws)).sum() for c in CONCENTRATIONS])
    rng = np.random.default_rng(0)

    def finds(size: float) -> bool:
        mass = probs[half].sum()
        moved = np.where(half, probs * (1 - size / mass), probs * (1 + size / (1 - mass)))
        counts = rng.multinomial(num_draws, moved / moved.sum(), NUM_SIMULATIONS)
        logs: Float64s = -totals - (counts @ np.log(probs))[:, None]
        for cell in range(probs.size):
            logs = logs + gains[cell].T[counts[:, cell]]
        return bool((_log_means(logs) >= log_threshold).mean() >= power)

    return _bisect(finds, float(probs[half].sum()))


def least_tilt(probs: npt.ArrayLike, log_threshold: float, power: float) -> float:
    """The shift of every probability that a TiltTest over these draws notices with probability `power`."""
    p = np.asarray(probs, np.float64)
    rng = np.random.default_rng(0)
    tilts = np.array(TILTS)
    base = np.array([np.log1p(p * np.expm1(tilt)).sum() for tilt in tilts])

    def finds(size: float) -> bool:
        moved = np.minimum(p + size, 1.0)
        inside = np.array([(rng.random(p.size) < moved).sum() for _ in range(NUM_SIMULATIONS)], np.float64)
        return bool((_log_means(inside[:, None] * tilts - base) >= log_threshold).mean() >= power)

    return _bisect(finds, 1.0)


def _grid(probs: Float64s) -> list[tuple[float, float]]:
    return [(float(p), c) for p in probs for c in CONCENTRATIONS]


def _half(probs: Float64s) -> npt.NDArray[np.bool_]:
    """Cells whose probabilities sum to about one half."""
    inside = np.zeros(probs.size, np.bool_)
    total = 0.0
    for cell in np.argsort(-probs):
        if total + probs[cell] <= max(0.5, float(probs.max())):
            inside[cell] = True
            total += float(probs[cell])
    return inside


def _bisect(finds: Callable[[float], bool], high: float) -> float:
    """The smallest size that is found, to within 1/256 of `high`; 1 where `high` is not."""
    low = 0.0
    if not finds(high):
        return 1.0
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if finds(middle) else (middle, high)
    return high


def e_to_text(log_e: float) -> str:
    """An e-value for people."""
    if log_e == inf:
        return "infinite"
    return f"{exp(log_e):.3g}" if log_e < 20 else f"10^{log_e / log(10):.0f}"
