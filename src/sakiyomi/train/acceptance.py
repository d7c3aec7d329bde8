"""How many guesses of a net the target would accept, found on documents that are known already.

Teacher-forced unrolling makes exactly the guesses that drafting makes up to its first miss, so the rounds of greedy
decoding can be played through without the target: guess, accept up to the first miss, take the target's own token, go
on behind it. tests/train/ holds this against the real decoding loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sakiyomi.train.batches import Batch, Ints, read_batch
from sakiyomi.train.heads import Trainee
from sakiyomi.train.shards import Shards

EVALUATION_ROWS = 4096


@dataclass(frozen=True)
class Acceptance:
    """What greedy drafting reaches.

    Attributes:
        num_rows: positions looked at.
        hit: share of positions whose next token is guessed right from the taps.
        conditional: for each depth the share of right guesses among those whose guesses before were all right.
        lengths: mean acceptance length (the bonus token included) for drafts of 1, 2, ... tokens.
    """

    num_rows: int
    hit: float
    conditional: tuple[float, ...]
    lengths: tuple[float, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_acceptance(
    trainee: Trainee, shards: Shards, indices: Iterable[int], vocabulary: Ints, depth: int = 3
) -> Acceptance:
    """Greedy acceptance over some documents, drafting ids of `vocabulary` (ascending) alone."""
    runs = []
    ids = torch.from_numpy(vocabulary)
    for batch in read_batches(shards, indices):
        hits = find_hits(trainee, batch, ids, depth)
        for first in np.unique(batch.first):
            last = batch.last[first]
            if last - first > 2:
                # Behind the document's end nothing is known: those guesses count as misses.
                runs.append(np.minimum.accumulate(hits[first + 1 : last], axis=1))
    return summarize_hits(runs, depth)


def find_hits(trainee: Trainee, batch: Batch, ids: Tensor, depth: int) -> npt.NDArray[np.bool_]:
    """Whether each guess is the target's choice, bool [N, depth]; False where there is no guess."""
    hits = np.zeros((len(batch.tokens), depth), np.bool_)
    with torch.no_grad():
        for step, (rows, features) in enumerate(trainee.unroll(batch, depth)):
            guesses = ids[(features @ trainee.head(step, ids).T).argmax(-1)].numpy()
            hits[rows, step] = guesses == batch.argmax[rows + 1 + step]
    return hits


def summarize_hits(runs: Sequence[npt.NDArray[np.bool_]], depth: int) -> Acceptance:
    """Acceptance from the right guesses of each document, bool [rows, depth], each row true up to its first miss."""
    everything = np.concatenate(runs) if runs else np.zeros((0, depth), np.bool_)
    passed = everything.sum(0)
    reached = np.concatenate([[len(everything)], passed[:-1]])
    conditional = tuple(float(p / max(r, 1)) for p, r in zip(passed, reached, strict=True))
    lengths = []
    for longest in range(1, depth + 1):
        num_steps = num_tokens = 0
        for run in runs:
            accepted = run[:, :longest].sum(1)
            row = 0
            while row < len(run):
                num_steps += 1
                row += int(accepted[row]) + 1
            num_tokens += row
        lengths.append(num_tokens / max(num_steps, 1))
    return Acceptance(len(everything), conditional[0], conditional, tuple(lengths))


def fit_sharpness(trainee: Trainee, shards: Shards, indices: Iterable[int], vocabulary: Ints) -> float:
    """The factor on the logits that makes their softmax the best forecast of the target's choice (Guo et al., 2017)."""
    ids = torch.from_numpy(vocabulary)
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for batch in read_batches(shards, indices):
            rows, features = next(iter(trainee.unroll(batch, 1)))
            labels = torch.from_numpy(batch.argmax[rows + 1])
            columns = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
            kept.append((features @ trainee.head(0, ids).T, torch.where(ids[columns] == labels, columns, -1)))
    factors = np.geomspace(0.25, 4.0, 33)
    return float(min(factors, key=lambda factor: sum(_surprise(*one, float(factor)) for one in kept)))


def count_ranks(
    trainee: Trainee, shards: Shards, indices: Iterable[int], vocabulary: Ints, depth: int, num_ranks: int
) -> list[list[float]]:
    """For each step how often its first, second, ... choice is the target's, over all rows alike."""
    ids = torch.from_numpy(vocabulary)
    counts, totals = np.zeros((depth, num_ranks)), np.zeros((depth, 1))
    with torch.no_grad():
        for batch in read_batches(shards, indices):
            for step, (rows, features) in enumerate(trainee.unroll(batch, depth)):
                best = (features @ trainee.head(step, ids).T).topk(min(num_ranks, len(ids))).indices
                is_right = ids[best].numpy() == batch.argmax[rows + 1 + step, None]
                counts[step, : is_right.shape[1]] += is_right.sum(0)
                totals[step] += len(rows)
    rates: list[list[float]] = (counts / np.maximum(totals, 1)).round(4).tolist()
    return rates


def _surprise(logits: Tensor, columns: Tensor, factor: float) -> float:
    """The negative log-likelihood of what was guessed: right with its probability, or wrong with the rest."""
    best = logits.max(-1)
    confidence = torch.exp(best.values * factor - torch.logsumexp(logits * factor, -1)).clamp(1e-6, 1 - 1e-6)
    is_right = best.indices == columns
    return float(-torch.where(is_right, confidence.log(), (1 - confidence).log()).sum())


def read_batches(shards: Shards, indices: Iterable[int]) -> Iterator[Batch]:
    """Some documents, a few thousand rows at a time."""
    batches, pending, num_rows = [], [], 0
    for index in indices:
        pending.append(int(index))
        num_rows += int(shards.lengths[index])
        if num_rows >= EVALUATION_ROWS:
            batches.append(pending)
            pending, num_rows = [], 0
    return (read_batch(shards, group) for group in [*batches, pending] if group)


def count_choices(shards: Shards, indices: Iterable[int], vocab_size: int, only_answers: bool = False) -> Ints:
    """How often the target chooses each id, int64 [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for index in indices:
        document = shards.document(int(index))
        chosen = document.argmax[:-1][document.loss_mask[1:]] if only_answers else document.argmax
        counts += np.bincount(chosen, minlength=vocab_size)
    return counts


def most_frequent(counts: Ints, size: int) -> Ints:
    """The `size` most frequent ids, ascending; the lower id first among equals."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])
