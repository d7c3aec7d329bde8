"""What drafting is worth: expected tokens, speed-up, and how much of a draft to check.

Letters: a_j the survival of position j, that is the probability that a draft is accepted up to it; c the cost of
drafting and v(M) that of a forward pass over M rows, both in plain steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from itertools import accumulate, takewhile
from operator import mul

Cost = Callable[[int], float]
"""From a number (of rows, or of drafted tokens) to seconds or plain steps."""


def survivals(conditionals: Iterable[float], least: float = 0.0) -> list[float]:
    """a_j of a chain from the acceptance of each position given that of the ones before it.

    Args:
        least: positions from the first one on that survives less often are left out, and not asked for.
    """
    return list(takewhile(lambda a: a >= least, accumulate(conditionals, mul)))


def expected_tokens(a: Iterable[float]) -> float:
    """Tokens that a step emits on average: 1 + sum of a_j (Leviathan et al., 2023, for any a)."""
    return 1.0 + sum(a)


def geometric_tokens(acceptance: float, num_drafted: int) -> float:
    """`expected_tokens` where every position is accepted alike: (1 - r^(k+1)) / (1 - r) (Leviathan et al., 2023)."""
    return expected_tokens(acceptance**j for j in range(1, num_drafted + 1))


def speedup(a: Seq[float], verify_cost: float, draft_cost: float = 0.0, overhead: float = 0.0) -> float:
    """Speed over plain decoding: expected tokens per cost of a round, in plain steps.

    Args:
        verify_cost: v(1 + len(a)).
        draft_cost: of the whole draft: len(a) times a pass for an autoregressive drafter, one pass for a block drafter.
        overhead: what else a round costs.
    """
    return expected_tokens(a) / (draft_cost + verify_cost + overhead)


def best_length(a: Seq[float], draft_cost: Cost, verify_cost: Cost) -> int:
    """How many positions to draft so that the speed-up is largest; 0 where no length beats plain decoding.

    Args:
        draft_cost: of k drafted tokens; verify_cost: of 1 + k rows.
    """
    sums = [0.0, *accumulate(a)]
    speeds = [(1 + total) / (draft_cost(k) + verify_cost(1 + k)) for k, total in enumerate(sums)]
    return max(range(len(speeds)), key=speeds.__getitem__)


def count_worthwhile(gains: Seq[float], seconds: Seq[float], rate: float) -> int:
    """How many nodes to check, the best first, when time is worth `rate` tokens a second.

    A node is worth its survival and costs the time by which it makes the pass longer. Over a run of unequal steps,
    gain minus rate times cost is what to make large in each of them, with the run's own speed as the rate (the
    renewal-reward form of maximising a ratio; Dinkelbach, 1967). The scan goes over all counts, since the time of a
    pass may be a staircase.

    Args:
        gains: survivals, descending.
        seconds: of the pass with 0, 1, ..., len(gains) of the nodes.
    """
    best, best_value, value = 0, 0.0, 0.0
    for count, gain in enumerate(gains, 1):
        value += gain
        worth = value - rate * (seconds[count] - seconds[0])
        if worth > best_value:
            best, best_value = count, worth
    return best


def schedule(
    a: Seq[Seq[float]],
    seconds: Cost,
    *,
    draft_seconds: float = 0.0,
    num_base_rows: int | None = None,
    least: int = 0,
) -> list[int]:
    """How many positions of each request's draft to check so that tokens per second are most, over the whole batch.

    Taking the largest survivals first is exact for every number of rows, and yields prefixes, since a survival never
    exceeds the one before it; one scan over that number is then exact for any cost.

    Args:
        a: for each request the survivals of its draft, descending.
        seconds: of a pass over so many rows.
        draft_seconds: what drafting took.
        num_base_rows: rows without drafts; None is one per request.
        least: check at least so many of every draft.
    """
    base = len(a) if num_base_rows is None else num_base_rows
    heap = [(-own[0], 0, request) for request, own in enumerate(a) if own]
    heapify(heap)
    lengths = [0] * len(a)
    best, best_lengths = len(a) / (draft_seconds + seconds(base)), list(lengths)
    total, rows = float(len(a)), base
    while heap:
        negative, position, request = heappop(heap)
        lengths[request] = position + 1
        total -= negative
        rows += 1
        if position + 1 < len(a[request]):
            heappush(heap, (-a[request][position + 1], position + 1, request))
        speed = total / (draft_seconds + seconds(rows))
        if speed > best:
            best, best_lengths = speed, list(lengths)
    return [max(length, min(least, len(own))) for length, own in zip(best_lengths, a, strict=True)]
