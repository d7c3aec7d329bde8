"""Batches of whole documents, and the order in which training sees them.

Everything is a function of the seed and of counts, so that a run that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sakiyomi.train.shards import Shards

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Documents under one another: N rows.

    Attributes:
        tokens: int32 [N].
        taps: float32 [N, T * H].
        argmax: int64 [N], the target's choice behind each row.
        counts: bool [N], whether predicting the token of a row counts in the loss.
        last: int64 [N], the last row of each row's document.
        first: int64 [N], the first one.
    """

    tokens: npt.NDArray[np.int32]
    taps: Tensor
    argmax: Ints
    counts: npt.NDArray[np.bool_]
    first: Ints
    last: Ints

    def rows(self, step: int) -> Ints:
        """Rows t from whose taps the step-th token beyond the known one is predicted: the target's choice at
        t + 1 + step is in the same document."""
        t = np.arange(len(self.tokens))
        # The first position of a text has states unlike all others and says nothing yet.
        return t[(t + 1 + step <= self.last) & (t > self.first)]


def read_batch(shards: Shards, indices: Sequence[int], only_answers: bool = False) -> Batch:
    """The documents `indices` as one batch.

    Args:
        only_answers: whether only the target's own answers count; else all of the text does.
    """
    documents = [shards.document(index) for index in indices]
    lengths = np.array([len(document) for document in documents])
    ends = np.cumsum(lengths)
    counts = [d.loss_mask if only_answers else np.ones(len(d), np.bool_) for d in documents]
    return Batch(
        tokens=np.concatenate([d.tokens for d in documents]).astype(np.int32),
        taps=torch.from_numpy(np.concatenate([np.asarray(d.taps) for d in documents])).float(),
        argmax=np.concatenate([d.argmax for d in documents]).astype(np.int64),
        counts=np.concatenate(counts),
        first=np.repeat(ends - lengths, lengths),
        last=np.repeat(ends - 1, lengths),
    )


def plan_epoch(lengths: Ints, members: Ints, num_rows: int, seed: int, epoch: int) -> list[list[int]]:
    """One pass over the documents `members` in a random order, cut into batches of at least `num_rows` rows."""
    order = np.random.default_rng((seed, epoch)).permutation(members)
    batches: list[list[int]] = [[]]
    filled = 0
    for index in order:
        if filled >= num_rows:
            batches.append([])
            filled = 0
        batches[-1].append(int(index))
        filled += int(lengths[index])
    return batches


def split_documents(num_documents: int, num_held_out: int, seed: int) -> tuple[Ints, Ints]:
    """Documents to train on and documents held out, by chance."""
    order = np.random.default_rng((seed, 1 << 20)).permutation(num_documents)
    return np.sort(order[num_held_out:]), np.sort(order[:num_held_out])
