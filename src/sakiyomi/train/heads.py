"""What fits the nets of drafters has in common: what a trained net must offer, and the target's side of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sakiyomi.ops.torch import TorchOps
from sakiyomi.train.batches import Batch, Ints
from sakiyomi.train.losses import Teacher
from sakiyomi.train.shards import Shards
from sakiyomi.types import Lent, ModelInfo
from sakiyomi.types import Tensor as Stored


class Noise:
    """The chance in a step of training.

    Args:
        dropout: share of the inputs of the large matrices that are hidden.
    """

    def __init__(self, dropout: float, seed: int) -> None:
        self._dropout = dropout
        self._generator = torch.Generator().manual_seed(seed)

    def hide(self, x: Tensor) -> Tensor:
        """x with some of its values 0 and the others scaled up."""
        if not self._dropout:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self._dropout, generator=self._generator)
        return x * kept.mul_(1 / (1 - self._dropout))

    def draw(self, count: int) -> npt.NDArray[np.float32]:
        """Uniform numbers from 0 to below 1."""
        return torch.rand(count, generator=self._generator).numpy()


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """The target's weights that a net is trained against, in float32.

    Attributes:
        embedding, head: [V, H].
        norm: the final norm's weight [H].
    """

    ops: TorchOps
    info: ModelInfo
    embedding: Tensor
    head: Tensor
    norm: Tensor
    eps: float

    @classmethod
    def of(cls, info: ModelInfo, lent: Lent, ops: TorchOps | None = None) -> Frozen:
        """Copies of what a target lends.

        Args:
            ops: that nets train with; None takes those of float32.
        """
        ids = np.arange(info.vocab_size, dtype=np.int32)
        embedding = torch.from_numpy(lent.ops.to_numpy(lent.ops.embed(lent.embedding, ids)))
        is_tied = lent.head is lent.embedding
        head = embedding if is_tied else torch.from_numpy(lent.ops.to_numpy(lent.ops.embed(lent.head, ids)))
        norm = torch.from_numpy(np.array(lent.ops.to_numpy(lent.norm)))
        return cls(ops=ops or TorchOps(), info=info, embedding=embedding, head=head, norm=norm, eps=lent.eps)

    def final(self, last_taps: Tensor) -> Tensor:
        """What the head reads [N, H], from the last states before the final norm."""
        return self.ops.rms_norm(last_taps, self.norm, self.eps)

    def direction(self, x: Tensor) -> Tensor:
        """x [N, H] at size 1."""
        return self.ops.rms_norm(x, torch.ones_like(self.norm), self.eps)


@dataclass(frozen=True)
class Exported:
    """What a trained net leaves in its drafter file.

    Attributes:
        config: numbers of its net.
        tensors: its weights; matrices are stored in the precision of the recipe.
        kept: tensors that are stored as they are.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, npt.NDArray[np.float32]]
    kept: Mapping[str, Stored] = field(default_factory=dict)


class Trainee(Protocol):
    """A net in training.

    Attributes:
        tables: names of the parameters whose rows belong to one id each.
    """

    parameters: dict[str, Tensor]
    tables: frozenset[str]

    def unroll(self, batch: Batch, num_steps: int, noise: Noise | None = None) -> Iterator[tuple[Ints, Tensor]]:
        """For each step the rows t of the batch that it predicts from, and what the head reads there [R, H].

        Step i guesses the token behind t + 1 + i, as the drafter does when all its guesses before were right.

        Args:
            noise: of training; None for the net as it drafts.
        """
        ...

    def head(self, step: int, ids: Tensor) -> Tensor:
        """The rows [K, H] of the ids [K] in the matrix through which a step's features become logits."""
        ...

    def export(self, vocabulary: Ints) -> Exported:
        """The net as it drafts.

        Args:
            vocabulary: ascending ids that it shall draft.
        """
        ...


class Family(Protocol):
    """What a kind of net brings to its fit; `fit.fit_net` brings the rest.

    Attributes:
        kind: of the drafter file.
        taps: the hidden states that the net reads.
    """

    kind: str
    taps: tuple[int, ...]

    def start(self, batches: Sequence[Batch], vocabulary: Ints) -> dict[str, Tensor]:
        """The closed-form start: the tensors that training begins with, and those that it never changes."""
        ...

    def build(self, tensors: Mapping[str, Tensor]) -> Trainee:
        """The net of such tensors."""
        ...

    def describe(self, trainee: Trainee, shards: Shards, held_out: Ints, vocabulary: Ints) -> Mapping[str, Any]:
        """What else the drafter file's configuration tells, found on documents that are held out."""
        ...


@dataclass(frozen=True)
class CandidateSet:
    """Ids over which a step of training compares laws.

    Attributes:
        ids: int64 [K], ascending.
        weights: float32 [K], how many ids of the vocabulary each stands for in sums over all of it: 1 where it was
            chosen, more where it was drawn by chance.
    """

    ids: Tensor
    weights: Tensor

    @classmethod
    def draw(
        cls, labels: Ints, frequent: Ints, num_random: int, vocab_size: int, rng: np.random.Generator
    ) -> CandidateSet:
        """The labels of a batch, the most frequent ids, and others drawn by chance."""
        chosen = np.union1d(labels, frequent)
        is_left = np.ones(vocab_size, np.bool_)
        is_left[chosen] = False
        left = np.flatnonzero(is_left)
        rest = rng.choice(left, min(num_random, len(left)), replace=False)
        share = len(left) / max(len(rest), 1)
        ids = np.concatenate([chosen, rest])
        weights = np.concatenate([np.ones(len(chosen)), np.full(len(rest), share)]).astype(np.float32)
        order = np.argsort(ids)
        return cls(torch.from_numpy(ids[order]), torch.from_numpy(weights[order]))

    def teacher(self, finals: Tensor, head: Tensor, argmax: Ints) -> Teacher:
        """The target's laws over the set, at rows with `finals` [N, H] and choices `argmax` [N].

        The sum over the whole vocabulary is estimated without bias from the ids drawn by chance.
        """
        with torch.no_grad():
            logits = finals @ head.T
            log_total = torch.logsumexp(logits + self.weights.log(), -1)
            return Teacher.of(logits, find_columns(self.ids, argmax), log_total)


def find_columns(ids: Tensor, tokens: npt.NDArray[np.int64]) -> Tensor:
    """For each token its column among ascending ids, or -1."""
    wanted = torch.from_numpy(tokens)
    columns = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
    return torch.where(ids[columns] == wanted, columns, -1)
