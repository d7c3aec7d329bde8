"""From logits to a token: the only place where the sampling parameters act on a row of logits.

    logits -> min_tokens -> logit_bias -> repetition, frequency, presence penalty        float32   process_logits
           -> temperature -> min_p -> top_k -> top_p                                      float64   filter_scores
           -> argmax of score + noise(seed, position, id), ties to the lowest id                    choose

The order and the formulas are vLLM's. Where vLLM leaves ties open, the larger logit comes first and then the lower id.
Every sum has a fixed order, so that the C++ chooser (csrc/choose.cpp) decides each row exactly as `choose_reference`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import ParameterError, SakiyomiError
from sakiyomi.noise import NoiseKey, exact_exp, exact_log, gumbel, uniform
from sakiyomi.params import SamplingParams
from sakiyomi.types import THE_BEST, BareChoice, History

_native: ModuleType | None
try:
    _native = import_module("sakiyomi._native")
except ImportError:  # built without a compiler
    _native = None

Float32s: TypeAlias = npt.NDArray[np.float32]
Float64s: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]

SUM_LANES = 16
HAS_NAN = -1  # what the C++ chooser returns instead of an id
FLOAT32 = np.finfo(np.float32)
NO_IDS: Ids = np.empty(0, np.int64)
CONFIDENCE_SLACK = 1e-6


def choose(logits: Float32s, history: History) -> int:
    """The token that follows `history`, given the logits [V] of its row.

    A pure function of the logits, the tokens before (committed or drafted makes no difference), the parameters and
    the seed. Temperature 0 takes the largest logit; otherwise the Gumbel-max rule draws from the filtered softmax.

    Raises:
        ParameterError: `logit_bias` names an id outside the vocabulary.
        SakiyomiError: the logits hold nan, or no token is left to choose.
    """
    if _native is None:
        return choose_reference(logits, history)
    row, params = process_logits(logits, history), history.params
    token: int = _native.choose(
        row,
        history.seed,
        history.position,
        params.temperature,
        min(params.top_k, row.size),
        params.top_p,
        params.min_p,
    )
    if token < 0:
        raise _nan_error(history) if token == HAS_NAN else _nothing_left_error(history)
    return token


def choose_reference(logits: Float32s, history: History) -> int:
    """`choose`, in numpy."""
    row = process_logits(logits, history)
    best = row.max()
    if np.isnan(best):
        raise _nan_error(history)
    if best == -np.inf:
        raise _nothing_left_error(history)
    if history.params.is_greedy:
        return int(np.argmax(row))
    scores = filter_scores(row, history.params)
    ids = np.flatnonzero(scores > -np.inf)
    return int(ids[np.argmax(scores[ids] + gumbel(history.seed, history.position, ids))])


def rank(logits: Float32s, history: History, count: int, subset: Ids | None = None) -> tuple[list[int], list[float]]:
    """The `count` tokens that come first in the order by which `choose` takes one: candidates for a drafted tree.

    Args:
        subset: the ascending ids that `logits` are of, where they are not all; not for a history whose parameters
            tell ids apart (`depends_on_ids`).

    Returns:
        Ids, best first, the first one that of `choose`; and the log-softmax of what they were ordered by (score +
        noise, or the logits at temperature 0), as the confidence that the target takes this very token.
    """
    row = process_logits(logits, history)
    if history.params.is_greedy:
        best, log_total, order = _summarize(row, min(count, row.size))
        if not best > -np.inf:
            raise _nan_error(history) if np.isnan(best) else _nothing_left_error(history)
        if len(order) == 1:  # nothing to subtract from itself; a drafter asks this for every token of a chain
            return (order if subset is None else [int(subset[order[0]])]), [-float(log_total)]
        confidences = _shift(row[order], best) - log_total
        return (order if subset is None else subset[order].tolist()), confidences.tolist()
    best = row.max()
    if not best > -np.inf:
        raise _nan_error(history) if np.isnan(best) else _nothing_left_error(history)
    scores = filter_scores(row, history.params)
    columns = np.flatnonzero(scores > -np.inf)
    ids = columns if subset is None else subset[columns]
    noise = (gumbel if _native is None else _native.gumbel)(history.seed, history.position, ids)
    keys = scores[columns] + noise
    chosen = _largest(keys, min(count, keys.size))
    shifted = (keys - keys[chosen[0]]).astype(np.float32)
    _, log_total, _ = _summarize(shifted, 1)
    # Rounded down: the sum over all ids, which is of single precision, may not come out above 1.
    return ids[chosen].tolist(), (shifted[chosen] - (log_total + CONFIDENCE_SLACK)).tolist()


def weigh(logits: Float32s, history: History) -> tuple[Ids, Float64s]:
    """The ids [K], ascending, that may follow `history` at a temperature above 0, and weights to draw them by."""
    row, params = process_logits(logits, history), history.params
    if _native is None:
        ids, weights = weigh_reference(row, params)
    else:
        ids, weights = _native.weigh(row, params.temperature, min(params.top_k, row.size), params.top_p, params.min_p)
    if not ids.size:
        raise _nan_error(history) if np.isnan(row.max()) else _nothing_left_error(history)
    return ids, weights


def weigh_reference(row: Float32s, params: SamplingParams) -> tuple[Ids, Float64s]:
    """`weigh` of processed logits, in numpy; no ids for a damaged row."""
    if not row.max() > -np.inf:
        return NO_IDS, np.empty(0)
    scores = filter_scores(row, params)
    ids = np.flatnonzero(scores > -np.inf)
    return ids, exact_exp(scores[ids])


def race(ids: Ids, probs: Float64s, key: NoiseKey, count: int = 1) -> list[int]:
    """The `count` ids with the largest log(prob) + noise, largest first; ids of probability 0 do not take part.

    Their order is that of drawing without replacement (the Gumbel top-k trick).
    """
    if _native is None:
        return race_reference(ids, probs, key, count)
    drawn: list[int] = _native.race(
        np.ascontiguousarray(ids), np.ascontiguousarray(probs), key.seed, key.counter, key.purpose, count
    )
    return drawn


def race_reference(ids: Ids, probs: Float64s, key: NoiseKey, count: int = 1) -> list[int]:
    """`race`, in numpy."""
    possible = np.flatnonzero(probs > 0)
    ids = ids[possible]
    noisy = exact_log(probs[possible]) + gumbel(key.seed, key.counter, ids, key.purpose)
    return [int(token) for token in ids[np.argsort(-noisy, kind="stable")[:count]]]


def subtract(p_ids: Ids, p: Float64s, q_ids: Ids, q: Float64s, scale: float) -> tuple[Float64s, float]:
    """max(0, scale * p - q) over the ascending ids of p, and its sum; ids that q does not name have q = 0."""
    if _native is None:
        return subtract_reference(p_ids, p, q_ids, q, scale)
    rest, mass = _native.subtract(p_ids, p, q_ids, q, scale)
    return rest, mass


def subtract_reference(p_ids: Ids, p: Float64s, q_ids: Ids, q: Float64s, scale: float) -> tuple[Float64s, float]:
    """`subtract`, in numpy."""
    places = np.minimum(np.searchsorted(q_ids, p_ids), q_ids.size - 1)
    rest = np.maximum(scale * p - np.where(q_ids[places] == p_ids, q[places], 0.0), 0.0)
    return rest, float(_sum_by_lanes(rest))


def toss(key: NoiseKey) -> float:
    """`noise.uniform` of the key."""
    if _native is None:
        return uniform(key)
    number: float = _native.uniform(key.seed, key.counter, key.purpose)
    return number


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position.

    Attributes:
        logprob: of the chosen token.
        rank: how many tokens are at least as probable as the chosen one, itself included.
        top: the most probable (id, log-probability), best first.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]


def log_probs(logits: Float32s, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities under the softmax of the raw logits, before any parameter acts (vLLM's `raw_logprobs`).

    Args:
        logits: float32 [V].
        token: the chosen id.
        top: how many of the most probable tokens to report, the lower id first among equals.

    Returns:
        `top` of the result leaves ids of probability 0 out.
    """
    row = _row(logits)
    if not 0 <= token < row.size:
        raise ParameterError(f"token {token} is not in the vocabulary; ids are 0 to {row.size - 1}.")
    top = min(top, row.size)
    best, log_total, ids = _summarize(row, top)
    if not best > -np.inf:
        raise SakiyomiError(f"no log-probabilities: the largest logit is {best}; the model's output is damaged.")
    values = (_shift(row[[*ids, token]], best) - log_total).tolist()
    rank = int(np.count_nonzero(row >= row[token]))
    return TokenLogprobs(values[-1], rank, list(zip(ids, values[:-1], strict=True)))


def _summarize(row: Float32s, top: int) -> tuple[float, float, list[int]]:
    """`summarize_reference`, in C++ where it is built."""
    if _native is None:
        return summarize_reference(row, top)
    best, log_total, ids = _native.summarize(row, top)
    return best, log_total, list(ids)


def summarize_reference(row: Float32s, top: int) -> tuple[float, float, list[int]]:
    """The largest logit, the log of the sum of exp(logit - largest), and the ids of the `top` largest above -inf."""
    best = float(row.max())
    if not best > -np.inf:
        return best, np.nan, []
    shifted = _shift(row, best)
    log_total = float(exact_log(_sum_by_lanes(exact_exp(shifted))))
    return best, log_total, [int(i) for i in _largest(row, top) if shifted[i] > -np.inf]


# ---------------------------------------------------------------------------------------------- logits to logits


def process_logits(logits: Float32s, history: History) -> Float32s:
    """The logits [V] after min_tokens, logit_bias and the penalties, in float32; `logits` itself stays as it is.

    The penalties in turn: repetition (each token of prompt, answer and path, once), frequency (times its count in
    answer and path) and presence.
    """
    row, params = _row(logits), history.params
    if not depends_on_ids(history):
        return row
    row = row.copy()
    if _is_too_short(history):
        row[_banned_ids(history, row.size)] = -np.inf
    if params.logit_bias:
        row[_biased_ids(params.logit_bias, row.size)] += np.fromiter(params.logit_bias.values(), np.float32)
    if params.has_penalties:
        _penalize(row, history)
    return row


def depends_on_ids(history: History) -> bool:
    """Whether the parameters treat some ids unlike others at this place."""
    return treats_ids_unalike(history.params, history.position - history.num_prompt)


def treats_ids_unalike(params: SamplingParams, num_new: int) -> bool:
    """`depends_on_ids` where `num_new` tokens have been answered before."""
    return num_new < params.min_tokens or bool(params.logit_bias) or params.has_penalties


def bare_choice(history: History) -> BareChoice | None:
    """How `choose` chooses, where it takes the logits as they are, no filter is on and nobody asks for more of them."""
    params = history.params
    if not takes_logits_as_they_are(history):
        return None
    if params.is_greedy:
        return THE_BEST
    has_filter = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return None if has_filter else BareChoice(history.seed, params.temperature)


def takes_logits_as_they_are(history: History) -> bool:
    """Whether `choose` changes no logits here or later, and nobody asks for more of them than what it chooses."""
    return history.params.logprobs is None and not depends_on_ids(history)


def _is_too_short(history: History) -> bool:
    return history.position - history.num_prompt < history.params.min_tokens


def _penalize(row: Float32s, history: History) -> None:
    params = history.params
    past = np.concatenate([np.asarray(history.tokens, np.int64), np.asarray(history.path, np.int64)])
    if params.repetition_penalty != 1:
        seen, _ = _distinct(past, row.size)
        row[seen] = _penalize_repetition(row[seen], params.repetition_penalty)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        new, counts = _distinct(past[history.num_prompt :], row.size)
        row[new] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        row[new] -= np.float32(params.presence_penalty)


def _banned_ids(history: History, vocab_size: int) -> Ids:
    banned = history.end_ids.union(history.params.stop_token_ids or ())
    return np.array([token for token in banned if token < vocab_size], np.int64)


def _biased_ids(logit_bias: Mapping[int, float], vocab_size: int) -> Ids:
    highest = max(logit_bias)
    if highest >= vocab_size:
        raise ParameterError(f"logit_bias names id {highest}; this model's ids are 0 to {vocab_size - 1}.")
    return np.fromiter(logit_bias, np.int64)


def _distinct(ids: Ids, vocab_size: int) -> tuple[Ids, Ids]:
    """The distinct ids below `vocab_size`, ascending, and how often each occurs."""
    # Without the counts numpy takes a hash table, which is 20 times slower on some thousands of ids.
    distinct, counts = np.unique(ids, return_counts=True)
    num_inside = np.searchsorted(distinct, vocab_size)
    return distinct[:num_inside], counts[:num_inside]


def _penalize_repetition(values: Float32s, penalty: float) -> Float32s:
    # Kept among the normal numbers of float32: neither 0 nor infinity times a logit may make a nan.
    divisor = np.float32(np.clip(penalty, FLOAT32.tiny, FLOAT32.max))
    with np.errstate(over="ignore", under="ignore"):
        return np.where(values > 0, values / divisor, values * divisor)


# ---------------------------------------------------------------------------------------------- logits to scores


def filter_scores(row: Float32s, params: SamplingParams) -> Float64s:
    """Scores [V] whose softmax is the law a token is drawn from: 0 for the largest logit, -inf for what is cut off.

    Args:
        row: processed logits [V], no nan, at least one above -inf; where there are infinite ones, they share the law.
        params: with a temperature above 0.

    min_p keeps p >= min_p * max p. top_k keeps exactly k (at a border of equal logits, the lowest ids). top_p
    keeps the shortest run of the remaining tokens, most probable first, that holds top_p of their probability.
    """
    with np.errstate(over="ignore"):
        scores = _shift(row, row.max()) / params.temperature
    if params.min_p > 0:
        scores[scores < exact_log(params.min_p)] = -np.inf
    if 0 < params.top_k < row.size:
        keep = _largest(row, params.top_k)
        scores = _keep_only(scores, keep)
    if params.top_p < 1:
        ids = np.flatnonzero(scores > -np.inf)
        ordered = ids[np.argsort(-row[ids], kind="stable")]
        weights = exact_exp(scores)
        goal = params.top_p * _sum_by_lanes(weights)
        reached = np.add.accumulate(weights[ordered]) >= goal
        # Rounding may leave the whole sum a little below the goal; then everything stays.
        length = int(np.argmax(reached)) + 1 if reached[-1] else len(ordered)
        scores = _keep_only(scores, ordered[:length])
    return scores


def _shift(row: Float32s, best: float) -> Float64s:
    """row - best in float64; where the best is +inf, 0 for the infinite ones and -inf for all others."""
    if best == np.inf:
        return np.where(row == np.inf, 0.0, -np.inf)
    return row.astype(np.float64) - np.float64(best)


def _largest(row: Float32s | Float64s, k: int) -> Ids:
    """The indices of the k largest values, largest first, the lower index first among equals."""
    if k == 0:
        return NO_IDS
    border = np.partition(row, row.size - k)[row.size - k]
    candidates = np.flatnonzero(row >= border)
    return candidates[np.argsort(-row[candidates], kind="stable")][:k]


def _keep_only(scores: Float64s, ids: Ids) -> Float64s:
    kept = np.full_like(scores, -np.inf)
    kept[ids] = scores[ids]
    return kept


def _sum_by_lanes(weights: Float64s) -> np.float64:
    """Their sum in an order that vectorises: lane id % 16 by ascending id, then the upper lanes onto the lower half."""
    padded = np.zeros(-(-weights.size // SUM_LANES) * SUM_LANES)
    padded[: weights.size] = weights
    lanes = np.add.accumulate(padded.reshape(-1, SUM_LANES), axis=0)[-1]
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return np.float64(lanes[0])


# ---------------------------------------------------------------------------------------------- checks


def _row(logits: Float32s) -> Float32s:
    row = np.ascontiguousarray(logits, np.float32)
    assert row.ndim == 1, "a row of logits has one axis"
    assert row.size > 0, "a row of logits is not empty"
    return row


def _nan_error(history: History) -> SakiyomiError:
    return SakiyomiError(
        f"the logits of position {history.position} hold nan; the model's weights or its inputs are damaged."
    )


def _nothing_left_error(history: History) -> SakiyomiError:
    return SakiyomiError(
        f"no token can be chosen at position {history.position}: every logit is -inf; "
        "relax min_tokens, stop_token_ids or the mask on the logits."
    )
