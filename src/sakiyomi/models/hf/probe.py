"""Finding out by trial how a model's state may be handled: no list of names knows every model.

Each trial computes logits in the way in question and compares them with one pass over all tokens from the start. The
tokens are few, so windows longer than `LONGEST_WINDOW` are not filled; they are positions in a mask like the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer

from sakiyomi.errors import UnsupportedModelError
from sakiyomi.models.hf.calls import Caller, copy_state
from sakiyomi.models.hf.chains import ChainRunner, Manner, record_past
from sakiyomi.models.hf.trees import TreeRunner
from sakiyomi.types import ModelInfo, Span

logger = logging.getLogger("sakiyomi")

NUM_SHORT, NUM_TAIL = 5, 6
LONGEST_WINDOW = 32
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Mean difference of a row's logits that counts as rounding, over their standard deviation."""
COARSE_TOLERANCE = 0.1  # of half precision


def find_runner(caller: Caller, info: ModelInfo) -> TreeRunner | ChainRunner:
    """What runs spans on a model: as trees where its attention takes a mask of ours, else as chains.

    Raises:
        UnsupportedModelError: a model that cannot go on from earlier tokens, or whose state cannot be put back.
    """
    name = type(caller.model).__name__
    try:
        trial = _Trial(caller, info)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"{name} cannot decode token by token with a cache ({reason}).") from error
    if not trial.holds("restore"):
        raise UnsupportedModelError(
            f"the state of {name} cannot be put back after a rejected draft, since the cache that its forward returns "
            "does not hold all of it."
        )
    if not trial.holds("whole"):
        logger.warning(
            "%s computes other logits token by token than at once; sakiyomi does as transformers' generate does: the "
            "prompt at once, the rest token by token, without drafts.",
            name,
        )
        return ChainRunner(caller, Manner(crops=False, chunks=False))
    if trial.holds("trees"):
        return TreeRunner(caller)
    chunks = trial.holds("chunks")
    return ChainRunner(caller, Manner(crops=chunks and trial.holds("crop"), chunks=chunks))


@dataclass
class _Trial:
    """A model with some tokens, and what it computes for them token by token.

    Raises:
        ValueError: a model that returns no state.
    """

    caller: Caller
    info: ModelInfo

    def __post_init__(self) -> None:
        sizes = [size for layer in _layers(self.caller) if (size := getattr(layer, "sliding_window", None))]
        small = [size for size in sizes if size <= LONGEST_WINDOW]
        self.num_known = min(max([NUM_SHORT, *(size + 2 for size in small)]), self.info.max_model_len - NUM_TAIL)
        self.ids = self._pick(self.num_known + NUM_TAIL, 13)
        self.wrong = [token for token in self._pick(NUM_TAIL, 101) if token not in self.ids[self.num_known :]] or [0]
        self.tolerance = TOLERANCES.get(self.caller.dtype, COARSE_TOLERANCE)
        self.steps = self._step()

    def _step(self) -> Tensor:
        """Logits of all tokens: the known ones fed at once, then one after the other."""
        logits, state = self._feed(self.ids[: self.num_known], None)
        if state is None:
            raise ValueError("its forward returns none")
        rows = [logits]
        for token in self.ids[self.num_known :]:
            logits, state = self._feed([token], state)
            rows.append(logits)
        return torch.cat(rows)

    def holds(self, name: str) -> bool:
        """Whether the trial called `name` gives the logits that it should; one that fails does not."""
        trial: Callable[[], bool] = getattr(self, f"_try_{name}")
        try:
            return trial()
        except Exception:
            logger.debug("The trial of %s failed:", name, exc_info=True)
            return False

    def _pick(self, count: int, start: int) -> list[int]:
        return [(start + 7919 * index) % self.info.vocab_size for index in range(count)]

    # ------------------------------------------------------------------------------------------ trials

    def _try_whole(self) -> bool:
        """Feed all tokens at once."""
        return self._agree(self._expected(self.ids), self.steps)

    def _try_restore(self) -> bool:
        """Feed wrong tokens to copies of the state, before each right one."""
        _, state = self._feed(self.ids[: self.num_known], None)
        rows = []
        for token in self.ids[self.num_known :]:
            self._feed(self.wrong[:1], copy_state(state))
            logits, state = self._feed([token], copy_state(state))
            rows.append(logits)
        return self._agree(torch.cat(rows), self.steps[self.num_known :])

    def _try_chunks(self) -> bool:
        """Feed several tokens at once behind a state."""
        _, state = self._feed(self.ids[: self.num_known], None)
        logits, _ = self._feed(self.ids[self.num_known :], state)
        return self._agree(logits, self.steps[self.num_known :])

    def _try_crop(self) -> bool:
        """Feed wrong tokens, crop them, and go on; twice, since the first pass may fill a window."""
        state: Any = DynamicCache(config=self.caller.config)
        if not all(isinstance(layer, DynamicLayer | DummyLayer) for layer in state.layers):
            return False
        done, rows = 0, []
        for end in (self.num_known, len(self.ids)):
            record_past(state)
            logits, state = self._feed([*self.ids[done:end], *self.wrong], state)
            state.crop(-len(self.wrong))
            rows.append(logits[: end - done])
            done = end
        return self._agree(torch.cat(rows), self.steps)

    def _try_trees(self) -> bool:
        """A tree with wrong branches beside a chain of another sequence; then go on behind the right path."""
        if not (self.caller.state_name in ("cache", "past_key_values") and self.caller.takes_positions):
            return False
        runner = TreeRunner(self.caller)
        ids, known, wrong = self.ids, self.num_known, self.wrong[0]
        one, other = runner.new_cache(self.info), runner.new_cache(self.info)
        for cache, length in ((one, known), (other, 2)):
            runner.forward([Span(cache, ids[:length], range(-1, length - 1))], self.info)
            cache.keep(range(length))
        tokens, parents = [ids[known], wrong, ids[known + 1], wrong, ids[known + 2]], [-1, 0, 0, 2, 2]
        spans = [Span(one, tokens, parents, range(5)), Span(other, ids[2:5], range(-1, 2), range(3))]
        tree, chain = (
            torch.from_numpy(_stack(output, count))
            for output, count in zip(runner.forward(spans, self.info), (5, 3), strict=True)
        )
        one.keep((0, 2, 4))
        (after,) = runner.forward([Span(one, ids[known + 3 :], range(-1, 2), range(3))], self.info)
        expected = self.steps
        first, second = ([*ids[: known + count], wrong] for count in (1, 2))
        return (
            self._agree(tree[[0, 2, 4]], expected[known : known + 3])
            and self._agree(tree[[1]], self._expected(first)[-1:])
            and self._agree(tree[[3]], self._expected(second)[-1:])
            and self._agree(chain, expected[2:5])
            and self._agree(torch.from_numpy(_stack(after, 3)), expected[known + 3 :])
        )

    # ------------------------------------------------------------------------------------------ helpers

    def _feed(self, ids: Sequence[int], state: Any) -> tuple[Tensor, Any]:
        logits, _, state = self.caller(ids, state, range(len(ids)))
        assert logits is not None
        return logits[:, : self.info.vocab_size].float().cpu(), state

    def _expected(self, ids: Sequence[int]) -> Tensor:
        return self._feed(ids, None)[0]

    def _agree(self, rows: Tensor, expected: Tensor) -> bool:
        differences = (rows - expected).abs().mean(-1) / expected.std(-1)
        return bool((differences <= self.tolerance).all())


def _layers(caller: Caller) -> list[Any]:
    try:
        cache: Cache = DynamicCache(config=caller.config)
    except Exception:  # models with a state of their own
        return []
    return list(cache.layers)


def _stack(output: Any, count: int) -> Any:
    import numpy as np

    return np.stack([output.row(i) for i in range(count)])
