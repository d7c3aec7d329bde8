"""What fits the nets of drafters has in common: what a trained net must offer, and the target's side of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sakiyomi.ops.torch import TorchOps
from sakiyomi.train.batches import Batch, Ints
from sakiyomi.train.losses import Teacher
from sakiyomi.types import Lent, ModelInfo

Dropout = Callable[[Tensor], Tensor]


def keep_all(x: Tensor) -> Tensor:
    """No dropout."""
    return x


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
    def of(cls, info: ModelInfo, lent: Lent) -> Frozen:
        """Copies of what a target lends."""
        ids = np.arange(info.vocab_size, dtype=np.int32)
        embedding = torch.from_numpy(lent.ops.to_numpy(lent.ops.embed(lent.embedding, ids)))
        is_tied = lent.head is lent.embedding
        head = embedding if is_tied else torch.from_numpy(lent.ops.to_numpy(lent.ops.embed(lent.head, ids)))
        norm = torch.from_numpy(np.array(lent.ops.to_numpy(lent.norm)))
        return cls(ops=TorchOps(), info=info, embedding=embedding, head=head, norm=norm, eps=lent.eps)

    def final(self, last_taps: Tensor) -> Tensor:
        """What the head reads [N, H], from the last states before the final norm."""
        return self.ops.rms_norm(last_taps, self.norm, self.eps)


class Trainee(Protocol):
    """A net in training."""

    kind: str
    parameters: dict[str, Tensor]

    def unroll(self, batch: Batch, num_steps: int, dropout: Dropout = keep_all) -> Iterator[tuple[Ints, Tensor]]:
        """For each step the rows t of the batch that it predicts from, and what the head reads there [R, H].

        Step i guesses the token behind t + 1 + i, as the drafter does when all its guesses before were right.
        """
        ...

    def export(self) -> tuple[Mapping[str, Any], dict[str, npt.NDArray[np.float32]]]:
        """Configuration and tensors of the drafter file."""
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
