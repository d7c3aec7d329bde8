"""Stage `capture`: the target reads its own text once, and its hidden states and choices are kept.

On disk a file holds some documents: taps in half precision and the most probable next token of every position, to be
mapped into memory by the fit. A file is a function of text, taps and target, and appears whole or not at all.
`OnlineShards` computes the same while it is read, for those who have more processor than disk.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.assemble import LoadedModel
from sakiyomi.errors import ParameterError
from sakiyomi.train.corpus import Corpus
from sakiyomi.train.estimate import Announce, Estimate, Report, announce_nothing, say_nothing
from sakiyomi.train.files import check_room, map_arrays, write_arrays
from sakiyomi.train.shards import Document, Shards
from sakiyomi.train.target import check_target, identify_target
from sakiyomi.types import Model, Span

LARGEST_HALF = 65504.0


@dataclass(frozen=True, kw_only=True)
class CaptureConfig:
    """Settings of the stage `capture`.

    Args:
        taps: depths of the hidden states, as shares of the target's layers: 1.0 is the last one before the final norm,
            0.9 of 30 layers the state after 27. None captures nothing: for drafters that read only the text.
        shard_tokens: tokens per file; what a killed run loses at most.
        rows: tokens per forward pass.
        online: keep nothing on disk; the target runs while the drafter is fitted.
    """

    taps: tuple[float, ...] = ()
    shard_tokens: int = 32768
    rows: int = 512
    online: bool = False

    def __post_init__(self) -> None:
        if not all(0 <= tap <= 1 for tap in self.taps):
            raise ParameterError(f"capture: taps={list(self.taps)} is not allowed; give shares of the depth, 0 to 1.")
        for name in ("shard_tokens", "rows"):
            if getattr(self, name) < 1:
                raise ParameterError(f"capture: {name}={getattr(self, name)} is not allowed; give at least 1.")

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Tap numbers for a target."""
        return tuple(sorted({round(tap * num_layers) for tap in self.taps}))


class TextShards(Shards):
    """Documents without hidden states; each position's "choice" is the token that follows in the text (-1: none)."""

    def __init__(self, corpus: Corpus, hidden_size: int) -> None:
        self.corpus = corpus
        self.taps: tuple[int, ...] = ()
        self.hidden_size = hidden_size

    def __len__(self) -> int:
        return len(self.corpus)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.corpus.lengths

    def document(self, index: int) -> Document:
        tokens = self.corpus.tokens_of(index)
        return Document(
            tokens=tokens,
            taps=np.zeros((len(tokens), 0), np.float16),
            argmax=np.append(tokens[1:], np.int32(-1)).astype(np.int32),
            loss_mask=self.corpus.mask_of(index),
            group=self.corpus.group_of(index),
        )

    def documents(self) -> Iterator[Document]:
        return (self.document(index) for index in range(len(self)))


class OnlineShards(TextShards):
    """Documents whose hidden states the target computes when they are asked for."""

    def __init__(self, corpus: Corpus, model: Model, taps: tuple[int, ...]) -> None:
        super().__init__(corpus, model.info.hidden_size)
        self.taps = taps
        self._model = model

    def document(self, index: int) -> Document:
        tokens = self.corpus.tokens_of(index)
        ((taps, argmax),) = read_states(self._model, [tokens], self.taps)
        return Document(tokens, taps, argmax, self.corpus.mask_of(index), self.corpus.group_of(index))


class ShardFiles(TextShards):
    """Documents whose hidden states lie in files, mapped into memory."""

    def __init__(self, corpus: Corpus, folder: Path, config: CaptureConfig, taps: tuple[int, ...], hidden: int) -> None:
        super().__init__(corpus, hidden)
        self.taps = taps
        self._plan = _plan(corpus, config)
        self._paths = [_path(folder, number) for number in range(len(self._plan) - 1)]
        self._arrays: dict[int, dict[str, npt.NDArray[Any]]] = {}

    def document(self, index: int) -> Document:
        number = int(np.searchsorted(self._plan, index, side="right")) - 1
        if number not in self._arrays:
            self._arrays[number], _ = map_arrays(self._paths[number])
        arrays, offsets = self._arrays[number], self.corpus.offsets
        rows = slice(*(int(offsets[one] - offsets[self._plan[number]]) for one in (index, index + 1)))
        return Document(
            tokens=self.corpus.tokens_of(index),
            taps=arrays["taps"][rows],
            argmax=arrays["argmax"][rows],
            loss_mask=self.corpus.mask_of(index),
            group=self.corpus.group_of(index),
        )


def capture(
    target: LoadedModel,
    corpus: Corpus,
    config: CaptureConfig,
    folder: Path,
    report: Report = say_nothing,
    announce: Announce = announce_nothing,
) -> Shards:
    """The documents of a corpus with the target's states, from disk, or computed and kept now.

    Raises:
        ParameterError: files that were made from another text, target or taps; no room on the disk.
    """
    taps = config.layers(target.model.info.num_layers)
    if not taps or config.online:
        return open_captured(target, corpus, config, folder)
    about = _about(target, corpus, taps)
    plan = _plan(corpus, config)
    missing = [number for number in range(len(plan) - 1) if not _is_there(_path(folder, number), about)]
    if missing:
        _announce(target, corpus, config, folder, [(plan[n], plan[n + 1]) for n in missing], announce)
    done = corpus.num_tokens - sum(int(corpus.offsets[plan[n + 1]] - corpus.offsets[plan[n]]) for n in missing)
    for number in missing:
        first, last = plan[number], plan[number + 1]
        report("reading the text", done, corpus.num_tokens)
        arrays = _read_documents(target.model, corpus, range(first, last), taps, config.rows)
        write_arrays(_path(folder, number), arrays, {**about, "documents": [int(first), int(last)]})
        done += int(corpus.offsets[last] - corpus.offsets[first])
    report("reading the text", corpus.num_tokens, corpus.num_tokens)
    return open_captured(target, corpus, config, folder, must_exist=False)


def open_captured(
    target: LoadedModel, corpus: Corpus, config: CaptureConfig, folder: Path, must_exist: bool = True
) -> Shards:
    """The documents of a corpus with the target's states as the fit reads them.

    Raises:
        ParameterError: with `must_exist`, when not all of them were captured.
    """
    taps = config.layers(target.model.info.num_layers)
    if not taps:
        return TextShards(corpus, target.model.info.hidden_size)
    if config.online:
        return OnlineShards(corpus, target.model, taps)
    about = _about(target, corpus, taps)
    num_shards = len(_plan(corpus, config)) - 1
    if must_exist and not all(_is_there(_path(folder, number), about) for number in range(num_shards)):
        raise ParameterError(f"{folder} does not hold all of the text; run the stage capture first.")
    return ShardFiles(corpus, folder, config, taps, target.model.info.hidden_size)


def _about(target: LoadedModel, corpus: Corpus, taps: tuple[int, ...]) -> dict[str, Any]:
    return {"target": identify_target(target), "text": digest_text(corpus), "taps": list(taps)}


def _path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}.safetensors"


def _plan(corpus: Corpus, config: CaptureConfig) -> list[int]:
    """Where each file begins, and the number of documents."""
    starts = [0]
    for index in range(1, len(corpus)):
        if corpus.offsets[index] - corpus.offsets[starts[-1]] >= config.shard_tokens:
            starts.append(index)
    return [*starts, len(corpus)]


def _is_there(path: Path, about: dict[str, Any]) -> bool:
    if not path.exists():
        return False
    _, found = map_arrays(path)
    check_target(found["target"], about["target"], f"what was captured in {path.parent}")
    for key, what in (("text", "from another text"), ("taps", "at other taps")):
        if found[key] != about[key]:
            raise ParameterError(f"what lies in {path.parent} was captured {what}; delete it or choose another --out.")
    return True


def _announce(
    target: LoadedModel,
    corpus: Corpus,
    config: CaptureConfig,
    folder: Path,
    missing: Sequence[tuple[int, int]],
    announce: Announce,
) -> None:
    info = target.model.info
    num_tokens = sum(int(corpus.offsets[last] - corpus.offsets[first]) for first, last in missing)
    per_token = 2 * info.hidden_size * len(config.layers(info.num_layers)) + 4
    sample = range(missing[0][0], min(missing[0][0] + 8, missing[0][1]))
    started = time.perf_counter()
    _read_documents(target.model, corpus, sample, config.layers(info.num_layers), config.rows)
    num_read = int(corpus.offsets[sample.stop] - corpus.offsets[sample.start])
    seconds = (time.perf_counter() - started) * num_tokens / max(num_read, 1)
    memory = config.shard_tokens * per_token + config.rows * info.vocab_size * 4
    disk = int(num_tokens * per_token * 1.01)
    check_room(folder, disk, "what is captured")
    announce(Estimate(what="reading the text", seconds=seconds, disk_bytes=disk, memory_bytes=memory))


def _read_documents(
    model: Model, corpus: Corpus, indices: Sequence[int], taps: tuple[int, ...], num_rows: int
) -> dict[str, npt.NDArray[Any]]:
    states: list[tuple[npt.NDArray[np.float16], npt.NDArray[np.int32]]] = []
    group: list[npt.NDArray[np.int32]] = []
    for index in indices:
        group.append(corpus.tokens_of(index))
        if sum(map(len, group)) >= num_rows:
            states += read_states(model, group, taps)
            group = []
    states += read_states(model, group, taps) if group else []
    return {
        "taps": np.concatenate([one for one, _ in states]),
        "argmax": np.concatenate([one for _, one in states]),
    }


def read_states(
    model: Model, documents: Sequence[npt.NDArray[np.int32]], taps: tuple[int, ...]
) -> list[tuple[npt.NDArray[np.float16], npt.NDArray[np.int32]]]:
    """Taps [L, T * H] and the most probable next tokens [L] of some documents, in one forward pass."""
    spans = [
        Span(model.new_cache(), tokens.tolist(), range(-1, len(tokens) - 1), range(len(tokens)), taps)
        for tokens in documents
    ]
    states = []
    for output in model.forward(spans):
        values = np.asarray(output.taps, np.float32)
        states.append(
            (
                np.clip(values, -LARGEST_HALF, LARGEST_HALF).astype(np.float16),
                np.array(output.argmax(), np.int32),
            )
        )
    return states


def digest_text(corpus: Corpus) -> str:
    """SHA-256 of the tokens and of where documents begin."""
    digest = hashlib.sha256(np.ascontiguousarray(corpus.tokens, np.uint32).tobytes())
    digest.update(np.ascontiguousarray(corpus.offsets).tobytes())
    return digest.hexdigest()
