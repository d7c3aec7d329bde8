"""A model that computes each row of logits once, and only when somebody looks at it; and so the laws of rows.

Thousands of draws at a few contexts then cost about as many passes as there are distinct beginnings of answers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from sakiyomi.decode import PREFILL_CHUNK
from sakiyomi.models.eagle import join_rows
from sakiyomi.models.packing import check_span
from sakiyomi.models.toy import TokenCache
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.choose import choose
from sakiyomi.sampling.distributions import Law, law_of
from sakiyomi.types import Array, Cache, History, Lent, Model, Output, Span

MAX_BYTES = 256 * 2**20
MAX_LAWS = 256
MAX_TAPS = 2**14  # rows of hidden states
MAX_TAIL = 8  # tokens beyond a prefilled beginning that a row may recompute

Path = tuple[int, ...]
Logits = npt.NDArray[np.float32]


class MemoModel(Model):
    """`model` with a memory of its rows; its caches hold nothing but tokens.

    Args:
        max_bytes: of rows kept; beyond it those unused for longest are computed again when asked for.
    """

    def __init__(self, model: Model, max_bytes: int = MAX_BYTES) -> None:
        self.info = model.info
        self.num_passes = 0
        self._model = model
        self._max_rows = max(max_bytes // (4 * model.info.vocab_size), 1)
        self._rows: OrderedDict[Path, Logits] = OrderedDict()
        self._laws: OrderedDict[tuple[Path, int, frozenset[int], int], tuple[Law, SamplingParams]] = OrderedDict()
        self._taps: OrderedDict[tuple[Path, tuple[int, ...]], Array] = OrderedDict()
        self._bases: dict[Path, Cache] = {}
        self._shallow: dict[tuple[int, tuple[int, ...]], MemoModel] = {}

    def new_cache(self) -> TokenCache:
        return TokenCache()

    def forward(self, spans: Seq[Span]) -> list[Output]:
        return [self._forward(span) for span in spans]

    def shallow(self, num_layers: int, skip: Collection[int] = ()) -> MemoModel:
        key = (num_layers, tuple(sorted(skip)))
        if key not in self._shallow:
            self._shallow[key] = MemoModel(self._model.shallow(num_layers, skip))
        return self._shallow[key]

    def lend(self) -> Lent | None:
        return self._model.lend()

    def row(self, path: Path) -> Logits:
        """The logits of the token that follows all of `path`."""
        if path in self._rows:
            self._rows.move_to_end(path)
            return self._rows[path]
        base = self._base(path)
        tail = path[len(base) :]
        row = self._pass(Span(self._bases[base], tail, range(-1, len(tail) - 1), [len(tail) - 1])).row(0)
        self._rows[path] = np.array(row, np.float32)
        if len(self._rows) > self._max_rows:
            self._rows.popitem(last=False)
        return self._rows[path]

    def law(self, path: Path, history: History) -> Law:
        """The law of the token that follows all of `path`, whose history is `history`."""
        key = path, history.num_prompt, history.end_ids, id(history.params)
        if key not in self._laws:
            self._laws[key] = law_of(self.row(path), history), history.params  # held, so that its id stays its own
            if len(self._laws) > MAX_LAWS:
                self._laws.popitem(last=False)
        self._laws.move_to_end(key)
        return self._laws[key][0]

    def _forward(self, span: Span) -> Output:
        cache = span.cache
        assert isinstance(cache, TokenCache)
        check_span(span, self.info)
        cache.pending = list(span.tokens)
        cached = tuple(cache.tokens)
        branches: list[Path] = []
        for token, parent in zip(span.tokens, span.parents, strict=True):
            branches.append((*(branches[parent] if parent >= 0 else ()), token))
        taps = self.taps(cached, branches, span) if span.taps else None
        return _LazyOutput(self, cached, [branches[row] for row in span.logit_rows], taps)

    def taps(self, cached: Path, branches: Seq[Path], span: Span) -> Array:
        """The hidden states of a span's rows behind `cached`; a row is known by all tokens up to its own."""
        keys = [(cached + branch, span.taps) for branch in branches]
        if any(key not in self._taps for key in keys):
            found = self._pass(Span(self._prefill(cached), span.tokens, span.parents, (), span.taps)).taps
            assert found is not None, "taps were asked for"
            if len(self._taps) + len(keys) > MAX_TAPS:
                self._taps.clear()
            self._taps.update((key, found[row : row + 1]) for row, key in enumerate(keys))
        return join_rows([self._taps[key] for key in keys])

    def _base(self, path: Path) -> Path:
        """The longest prefilled beginning of `path`, or a new one where none is long enough."""
        base = self._longest(path)
        if base not in self._bases or len(path) - len(base) > MAX_TAIL:
            base = path[:-1]
            self._bases[base] = self._prefill(base)
        return base

    def _longest(self, path: Path) -> Path:
        known = (base for base in self._bases if len(base) < len(path) and path[: len(base)] == base)
        return max(known, key=len, default=())

    def _prefill(self, tokens: Path) -> Cache:
        base = self._longest(tokens)
        cache = self._bases[base].fork() if base in self._bases else self._model.new_cache()
        for start in range(len(base), len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            self._pass(Span(cache, chunk, range(-1, len(chunk) - 1)))
            cache.keep(range(len(chunk)))
        return cache

    def _pass(self, span: Span) -> Output:
        self.num_passes += 1
        return self._model.forward([span])[0]


def remember(memos: dict[int, MemoModel]) -> Callable[[Model], MemoModel]:
    """A function that gives each model one MemoModel, held in `memos`."""

    def wrap(model: Model) -> MemoModel:
        if isinstance(model, MemoModel):
            return model
        return memos.setdefault(id(model), MemoModel(model))

    return wrap


class _LazyOutput:
    def __init__(self, model: MemoModel, cached: Path, branches: list[Path], taps: Array | None) -> None:
        self.model = model
        self.cached = cached
        self.branches = branches
        self.taps = taps

    def row(self, i: int) -> Logits:
        return self.model.row(self.cached + self.branches[i])

    def law(self, i: int, history: History) -> Law:
        return self.model.law(self.cached + self.branches[i], history)

    def argmax(self) -> list[int]:
        return [int(np.argmax(self.row(i))) for i in range(len(self.branches))]

    def choose(self, i: int, history: History) -> int:
        return choose(self.row(i), history)
