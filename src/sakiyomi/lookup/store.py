"""A store of finished texts, from which the texts to come may draft: bounded in bytes, the oldest out first.

The texts lie in a row of suffix automata. The newest one grows; once it has its share of the bytes it is closed and a
new one is begun, and when the closed ones exceed theirs the oldest is dropped whole. With a file the store outlives the
process: each text is appended when it comes, and the file is rewritten when it holds twice what the store does.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from sakiyomi.errors import ParameterError
from sakiyomi.lookup.automaton import Automaton, new_automaton

logger = logging.getLogger("sakiyomi")

NUM_SHARES = 8
NUM_CLOSED_SHARES = 5
"""Of the bytes. The other three are the growing automaton's: while an array of it moves, old and new are both there."""

SLICE = 512
"""Tokens between two looks at the size."""

NUM_READ_BACK = 256
"""Tokens of a text that are read when a search begins."""

END_OF_TEXT = -1
MIN_BYTES = 1 << 16

MAGIC = b"sakiyomi-texts-1\n"
HEADER = struct.Struct("<I")
RECORD = struct.Struct("<II")
"""Of a text: number of tokens, and the CRC-32 of the tokens as 32-bit integers, which follow."""
MIN_REWRITE_TOKENS = 1 << 14


class TextStore:
    """Texts of finished requests. Several threads may share one.

    Args:
        max_bytes: memory at most.
        path: a file to keep the texts in, or None.
        vocab_size: ids of the model; a file of another vocabulary is refused.
    """

    def __init__(self, max_bytes: int, path: Path | None = None, vocab_size: int = 0) -> None:
        if max_bytes < MIN_BYTES:
            raise ParameterError(f"a store of {max_bytes} bytes is too small; give at least {MIN_BYTES}.")
        self.lock = threading.Lock()
        self._share = max_bytes // NUM_SHARES
        self._closed: list[tuple[int, Automaton]] = []
        self._number = 0
        self._open = new_automaton()
        self._file = None if path is None else _TextFile(path, vocab_size)
        if self._file is not None:
            for text in self._file.read():
                self._insert(text)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._open.num_bytes + sum(automaton.num_bytes for _, automaton in self._closed)

    @property
    def num_tokens(self) -> int:
        """Tokens held, ends of texts included."""
        return len(self._open) + sum(len(automaton) for _, automaton in self._closed)

    def add(self, tokens: Sequence[int]) -> None:
        """Take a finished text in."""
        if len(tokens) == 0:
            return
        with self.lock:
            self._insert(tokens)
            if self._file is not None:
                self._file.append(tokens, self.num_tokens)

    def automata(self) -> Iterator[tuple[int, Automaton]]:
        """Numbered automata, the newest first; hold the lock."""
        yield self._number, self._open
        yield from reversed(self._closed)

    def _insert(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), SLICE):
            self._open.extend(tokens[start : start + SLICE])
            if self._open.num_used_bytes >= self._share:
                self._close()
        self._open.extend([END_OF_TEXT])

    def _close(self) -> None:
        self._open.shrink()
        self._closed.append((self._number, self._open))
        self._number += 1
        self._open = new_automaton()
        while sum(automaton.num_bytes for _, automaton in self._closed) > NUM_CLOSED_SHARES * self._share:
            del self._closed[0]


class StoreReader:
    """How the end of one growing text matches the texts of a store."""

    def __init__(self, store: TextStore) -> None:
        self._store = store
        self._num_read = 0
        self._matches: dict[int, tuple[int, int]] = {}

    def match(self, tokens: Sequence[int]) -> tuple[Automaton, int, int]:
        """The longest match of the end of `tokens`, in the newest texts that have it: (automaton, state, length).

        Args:
            tokens: those of the call before, and further ones; hold the store's lock.
        """
        back = tokens[max(len(tokens) - NUM_READ_BACK, 0) :]
        num_new = len(tokens) - self._num_read
        matches: dict[int, tuple[int, int]] = {}
        best: tuple[Automaton, int, int] | None = None
        for number, automaton in self._store.automata():
            known = self._matches.get(number) if num_new < len(back) else None
            recent = back if known is None else back[len(back) - num_new :]
            state, length = matches[number] = automaton.advance(*(known or (0, 0)), recent)
            if best is None or length > best[2]:
                best = automaton, state, length
        self._matches, self._num_read = matches, len(tokens)
        assert best is not None, "a store has at least the automaton that grows"
        return best


_stores: WeakValueDictionary[Path, TextStore] = WeakValueDictionary()


def open_store(max_bytes: int, path: Path | None = None, vocab_size: int = 0) -> TextStore:
    """A new store, or the one that this process has already opened on the same file.

    Raises:
        ParameterError: a bound that is too small, or a file that is no store of this vocabulary.
    """
    if path is None:
        return TextStore(max_bytes)
    path = path.expanduser().absolute()
    store = _stores.get(path)
    if store is None:
        store = _stores[path] = TextStore(max_bytes, path, vocab_size)
    return store


class _TextFile:
    """Texts one behind the other, each with a checksum; what is damaged, and all behind it, counts for nothing."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._head = MAGIC + HEADER.pack(vocab_size)
        self._num_tokens = 0
        self._is_failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_bytes(self._head)
            with path.open("rb") as file:
                head = file.read(len(self._head))
        except OSError as error:
            raise ParameterError(f"cannot keep texts in {path} ({error.strerror}); give another store_file.") from error
        if head != self._head:
            raise ParameterError(
                f"{path} holds no texts of this model's vocabulary; give another store_file, or delete it."
            )

    def read(self) -> Iterator[Sequence[int]]:
        """All texts, the oldest first. A damaged end is cut off."""
        self._num_tokens = 0
        with self._path.open("rb") as file:
            file.seek(len(self._head))
            end = file.tell()
            for text in _read_records(file):
                end = file.tell()
                self._num_tokens += len(text)
                yield text
        if end < self._path.stat().st_size:
            os.truncate(self._path, end)

    def append(self, tokens: Sequence[int], num_kept: int) -> None:
        """Write one more text; rewrite the file once it holds twice the `num_kept` tokens of the store."""
        if self._is_failing:
            return
        try:
            with self._path.open("ab") as file:
                file.write(_pack(tokens))
            self._num_tokens += len(tokens)
            if self._num_tokens > 2 * num_kept + MIN_REWRITE_TOKENS:
                self._rewrite(num_kept)
        except OSError as error:
            self._is_failing = True
            logger.warning("Texts are no longer written to %s (%s).", self._path, error.strerror)

    def _rewrite(self, num_kept: int) -> None:
        texts = list(self.read())
        first, num_tokens = len(texts), 0
        while first > 0 and num_tokens + len(texts[first - 1]) <= num_kept:
            first -= 1
            num_tokens += len(texts[first])
        scratch = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        try:
            scratch.write_bytes(self._head + b"".join(map(_pack, texts[first:])))
            os.replace(scratch, self._path)
        finally:
            with suppress(OSError):
                scratch.unlink()
        self._num_tokens = num_tokens


def _pack(tokens: Sequence[int]) -> bytes:
    data = struct.pack(f"<{len(tokens)}i", *tokens)
    return RECORD.pack(len(tokens), zlib.crc32(data)) + data


def _read_records(file: BinaryIO) -> Iterator[Sequence[int]]:
    while True:
        head = file.read(RECORD.size)
        if len(head) < RECORD.size:
            return
        length, checksum = RECORD.unpack(head)
        data = file.read(4 * length)
        if len(data) < 4 * length or zlib.crc32(data) != checksum:
            return
        yield struct.unpack(f"<{length}i", data)
