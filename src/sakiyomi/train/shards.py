"""What a fit reads: documents of the target's own text with its hidden states and its own next tokens.

Letters: L tokens of a document, T taps, H hidden width of the target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Document:
    """One text of the target with what the target computed over it.

    Attributes:
        tokens: int32 [L].
        taps: float16 [L, T * H], the hidden states that `Shards.taps` numbers, side by side in that order; row t is the
            state of the position that read tokens[t]. Tap L_target is the last state before the final norm.
        argmax: int32 [L], the target's most probable next token: argmax[t] is its guess of tokens[t + 1].
        loss_mask: bool [L], whether tokens[t] belongs to an answer of the target. A row that predicts tokens[t + 1]
            counts by loss_mask[t + 1].
        group: what kind of text it is.
    """

    tokens: npt.NDArray[np.int32]
    taps: npt.NDArray[np.float16]
    argmax: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    group: str

    def __len__(self) -> int:
        return len(self.tokens)


class Shards(Protocol):
    """A collection of documents, on disk, in memory, or computed while they are read."""

    taps: tuple[int, ...]
    """Tap numbers, as in `types.Span.taps`."""
    hidden_size: int
    """H."""

    def __len__(self) -> int:
        """Number of documents."""
        ...

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """L of every document."""
        ...

    def document(self, index: int) -> Document:
        """One document; its arrays may be views of a file and are not to be written."""
        ...

    def documents(self) -> Iterator[Document]:
        """All documents in order."""
        ...


class MemoryShards(Shards):
    """Documents in memory."""

    def __init__(self, documents: Sequence[Document], taps: tuple[int, ...], hidden_size: int) -> None:
        self._documents = list(documents)
        self.taps = taps
        self.hidden_size = hidden_size

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.array([len(document) for document in self._documents], np.int64)

    def document(self, index: int) -> Document:
        return self._documents[index]

    def documents(self) -> Iterator[Document]:
        return iter(self._documents)
