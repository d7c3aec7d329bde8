"""Corpus: texts of the target as token ids, with what kind each is and which parts are the target's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.train.files import read_arrays, write_arrays

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents under one another. N tokens, D documents, S answers.

    Attributes:
        tokens: uint16 or uint32 [N].
        offsets: int64 [D + 1], where each document begins in `tokens`.
        spans: int64 [S, 3], the answers: document, first position, position behind the last.
        is_looping: bool [S], whether the answer ended in a loop.
        groups: int64 [D], indices into `group_names`.
        user_hashes: uint64 [D], of the first user's turn.
        about: seeds and counts.
    """

    tokens: npt.NDArray[Any]
    offsets: Ints
    spans: Ints
    is_looping: npt.NDArray[np.bool_]
    groups: Ints
    user_hashes: npt.NDArray[np.uint64]
    group_names: tuple[str, ...]
    about: dict[str, Any]

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def tokens_of(self, index: int) -> npt.NDArray[np.int32]:
        """int32 [L] of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].astype(np.int32)

    def mask_of(self, index: int) -> npt.NDArray[np.bool_]:
        """bool [L], the answers of one document."""
        mask = np.zeros(int(self.offsets[index + 1] - self.offsets[index]), np.bool_)
        first, last = np.searchsorted(self.spans[:, 0], [index, index + 1])
        for _, start, stop in self.spans[first:last]:
            mask[start:stop] = True
        return mask

    def group_of(self, index: int) -> str:
        return self.group_names[int(self.groups[index])]

    def subset(self, indices: Sequence[int] | Ints) -> Corpus:
        """Some documents, in the given order."""
        lengths = self.lengths[indices]
        where = np.searchsorted(self.spans[:, 0], np.stack([np.asarray(indices), np.asarray(indices) + 1]))
        rows = [np.arange(first, last) for first, last in where.T]
        spans = [np.stack([np.full(len(own), new), *self.spans[own, 1:].T], 1) for new, own in enumerate(rows)]
        chosen = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        parts = [self.tokens[self.offsets[index] : self.offsets[index + 1]] for index in indices]
        return Corpus(
            tokens=np.concatenate(parts) if parts else self.tokens[:0],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            spans=np.concatenate(spans) if spans else self.spans[:0],
            is_looping=self.is_looping[chosen],
            groups=self.groups[indices],
            user_hashes=self.user_hashes[indices],
            group_names=self.group_names,
            about=self.about,
        )

    def save(self, path: Path) -> None:
        """Write one file, a compressed one where the path ends in .xz."""
        arrays = {
            "tokens": self.tokens,
            "offsets": self.offsets,
            "spans": self.spans,
            "is_looping": self.is_looping,
            "groups": self.groups,
            "user_hashes": self.user_hashes,
        }
        write_arrays(path, arrays, {**self.about, "group_names": self.group_names})

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read one file.

        Raises:
            CheckpointError: a file that is absent, damaged or of another kind.
        """
        arrays, about = read_arrays(path)
        names = tuple(about.pop("group_names"))
        return cls(**arrays, group_names=names, about=about)


class CorpusBuilder:
    """Collects documents."""

    def __init__(self, vocab_size: int, group_names: Sequence[str]) -> None:
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        self._group_names = tuple(group_names)
        self._tokens: list[Sequence[int]] = []
        self._spans: list[tuple[int, int, int]] = []
        self._is_looping: list[bool] = []
        self._groups: list[int] = []
        self._hashes: list[int] = []

    def add(
        self, tokens: Sequence[int], answers: Sequence[tuple[int, int, bool]], group: str, user_hash: int = 0
    ) -> None:
        """Append a document.

        Args:
            answers: for each answer its first position, the one behind its last, and whether it ended in a loop.
        """
        number = len(self._groups)
        self._tokens.append(tokens)
        self._spans += [(number, start, stop) for start, stop, _ in answers]
        self._is_looping += [is_looping for *_, is_looping in answers]
        self._groups.append(self._group_names.index(group))
        self._hashes.append(user_hash)

    def build(self, about: dict[str, Any]) -> Corpus:
        flat = [token for tokens in self._tokens for token in tokens]
        return Corpus(
            tokens=np.array(flat, self._dtype),
            offsets=np.cumsum([0, *(len(tokens) for tokens in self._tokens)]).astype(np.int64),
            spans=np.array(self._spans, np.int64).reshape(-1, 3),
            is_looping=np.array(self._is_looping, np.bool_),
            groups=np.array(self._groups, np.int64),
            user_hashes=np.array(self._hashes, np.uint64),
            group_names=self._group_names,
            about=about,
        )


def join_corpora(parts: Sequence[Corpus], about: dict[str, Any]) -> Corpus:
    """Corpora under one another."""
    num_documents = np.cumsum([0, *(len(part) for part in parts)])
    num_tokens = np.cumsum([0, *(part.num_tokens for part in parts)])
    names = sorted({name for part in parts for name in part.group_names})
    numbers = [np.array([names.index(name) for name in part.group_names], np.int64) for part in parts]
    spans = [part.spans + [first, 0, 0] for part, first in zip(parts, num_documents, strict=False)]
    offsets = [part.offsets[:-1] + first for part, first in zip(parts, num_tokens, strict=False)]
    return Corpus(
        tokens=np.concatenate([part.tokens for part in parts]),
        offsets=np.concatenate([*offsets, num_tokens[-1:]]).astype(np.int64),
        spans=np.concatenate(spans),
        is_looping=np.concatenate([part.is_looping for part in parts]),
        groups=np.concatenate([new[part.groups] for part, new in zip(parts, numbers, strict=True)]),
        user_hashes=np.concatenate([part.user_hashes for part in parts]),
        group_names=tuple(names),
        about=about,
    )
