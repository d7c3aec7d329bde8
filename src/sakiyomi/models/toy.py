"""toy: a tiny analytic model with a chosen next-token law, the test double for everything above the models.

It keeps real caches with the real contract, so that a row written or kept in the wrong place shows in its logits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import ParameterError
from sakiyomi.models.packing import check_span
from sakiyomi.sampling.choose import choose
from sakiyomi.types import History, Model, ModelInfo, Output, Span

Logits = npt.NDArray[np.float32]
Law = Callable[[Seq[int]], Logits]
"""From all tokens so far to the logits [V] of the next."""

NUM_BYTES_PER_TOKEN = 8


class ToyModel(Model):
    """A model whose logits are a Python function of the tokens.

    A tap is three numbers: tap number, position, token id.

    Args:
        shallow_law: what the first layers say, however many; None: the same as all.
    """

    def __init__(
        self,
        law: Law,
        vocab_size: int,
        *,
        max_model_len: int = 4096,
        num_layers: int = 2,
        end_token_ids: tuple[int, ...] = (),
        name: str = "toy",
        shallow_law: Law | None = None,
    ) -> None:
        self.law = law
        self._shallow_law = shallow_law
        self.info = ModelInfo(
            name=name,
            architecture="toy",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_layers=num_layers,
            hidden_size=3,
            end_token_ids=end_token_ids,
            is_bit_exact=True,
        )

    def new_cache(self) -> TokenCache:
        return TokenCache()

    def forward(self, spans: Seq[Span]) -> list[Output]:
        return [self._forward(span) for span in spans]

    def shallow(self, num_layers: int, skip: Collection[int] = ()) -> ToyModel:
        if not 1 <= num_layers <= self.info.num_layers:
            raise ParameterError(f"num_layers={num_layers}; the model has layers 1 to {self.info.num_layers}.")
        if self._shallow_law is None:
            return self
        info = self.info
        return ToyModel(self._shallow_law, info.vocab_size, max_model_len=info.max_model_len, num_layers=num_layers)

    def _forward(self, span: Span) -> Output:
        cache = span.cache
        assert isinstance(cache, TokenCache)
        positions = check_span(span, self.info)
        cache.pending = list(span.tokens)
        rows = [self.law([*cache.tokens, *_branch(span, row)]).astype(np.float32) for row in span.logit_rows]
        taps = None
        if span.taps:
            taps = np.array(
                [
                    [value for tap in span.taps for value in (tap, position, token)]
                    for position, token in zip(positions, span.tokens, strict=True)
                ],
                np.float32,
            )
        return ToyOutput(rows, taps)


class ToyOutput:
    """Logits that are there already."""

    def __init__(self, rows: list[Logits], taps: npt.NDArray[np.float32] | None) -> None:
        self._rows = rows
        self.taps = taps

    def row(self, i: int) -> Logits:
        return self._rows[i]

    def argmax(self) -> list[int]:
        return [int(np.argmax(row)) for row in self._rows]

    def choose(self, i: int, history: History) -> int:
        return choose(self._rows[i], history)


def _branch(span: Span, row: int) -> list[int]:
    """Tokens of the span from the cached prefix down to `row`."""
    tokens: list[int] = []
    while row >= 0:
        tokens.append(span.tokens[row])
        row = span.parents[row]
    return tokens[::-1]


class TokenCache:
    """The cache of a toy: the tokens themselves."""

    def __init__(self, tokens: Seq[int] = ()) -> None:
        self.tokens = list(tokens)
        self.pending: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return NUM_BYTES_PER_TOKEN * len(self.tokens)

    def expect(self, length: int) -> None:
        return None

    def keep(self, path: Seq[int]) -> None:
        if any(row >= len(self.pending) for row in path) or list(path) != sorted(set(path)) or min(path, default=0) < 0:
            raise ParameterError(f"rows {list(path)} to keep; give ascending rows below {len(self.pending)}.")
        self.tokens.extend(self.pending[row] for row in path)
        self.pending = []

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ParameterError(f"truncate to {length}; the cache holds {self.length} positions.")
        del self.tokens[length:]
        self.pending = []

    def fork(self) -> TokenCache:
        return TokenCache(self.tokens)


def random_law(vocab_size: int, seed: int = 0, *, order: int = 2, scale: float = 3.0) -> Law:
    """A fixed random law over the last `order` tokens; `scale` is the standard deviation of its logits."""

    def law(tokens: Seq[int]) -> Logits:
        key = zlib.crc32(np.asarray(tokens[-order:], np.int64).tobytes())
        return np.random.default_rng((seed, key)).normal(0, scale, vocab_size).astype(np.float32)

    return law


def scripted_law(vocab_size: int, script: Mapping[int, int] | Seq[int], *, start: int = 0, other: int = 0) -> Law:
    """A law that all but surely says script[i] as the token at position start + i, and `other` elsewhere."""
    table: Mapping[int, Any] = script if isinstance(script, Mapping) else dict(enumerate(script))

    def law(tokens: Seq[int]) -> Logits:
        logits = np.zeros(vocab_size, np.float32)
        logits[table.get(len(tokens) - start, other)] = 50.0
        return logits

    return law
