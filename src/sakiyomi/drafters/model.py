"""model: a second, smaller model with the same tokenizer drafts, coupled with the target's own noise.

Two-model speculation (Leviathan, Kalman and Matias, 2023; Chen et al., 2023) under the rule `match`: the drafter
chooses its tokens with the seed, position and parameters of the request, so that where both models agree in law they
agree in token (Daliri, Musco and Suresh, 2024).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from sakiyomi.errors import ParameterError
from sakiyomi.tree import Draft
from sakiyomi.types import Cache, Drafter, DrafterContext, Model, Sequence, Span

logger = logging.getLogger("sakiyomi")

CATCH_UP_CHUNK = 256


class ModelDrafter(Drafter):
    """Drafts chains with a model of its own; its caches live in the sequences' memos."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `model`.

        Args:
            model: the drafting model: a name, a folder or a .gguf file.
            num_speculative_tokens: tokens of a draft at most.
        """

        model: str
        num_speculative_tokens: int = 4

        def __post_init__(self) -> None:
            if self.num_speculative_tokens < 1:
                raise ParameterError(f"num_speculative_tokens={self.num_speculative_tokens}; give at least 1.")

    def __init__(self, config: Config, context: DrafterContext) -> None:
        self.config = config
        self.model: Model = context.load_model(config.model)
        self._is_exhaustion_reported = False

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        chains = [
            _Chain(sequence, self._state(sequence), self._num_tokens(sequence, budget))
            for sequence, budget in zip(sequences, budgets, strict=True)
        ]
        active = [chain for chain in chains if chain.num_tokens > 0]
        for chain in active:
            self._catch_up(chain)
        while active:
            self._extend(active)
            active = [chain for chain in active if not chain.is_done()]
        return [Draft.chain(chain.tokens, "coupled") for chain in chains]

    def rewind(self, sequence: Sequence, length: int) -> None:
        if isinstance(sequence.memo, _State):
            sequence.memo.rewind(length)

    def _state(self, sequence: Sequence) -> _State:
        if not isinstance(sequence.memo, _State):
            sequence.memo = _State(self.model.new_cache())
        return sequence.memo

    def _num_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens to draft: the last one drafted is never fed, so it needs no room in the drafter's context."""
        room = self.model.info.max_model_len - len(sequence.tokens) + 1
        if room <= 0 and not self._is_exhaustion_reported:
            self._is_exhaustion_reported = True
            logger.warning(
                "The drafting model's context of %d tokens is exhausted; decoding goes on without its drafts.",
                self.model.info.max_model_len,
            )
        return min(budget, self.config.num_speculative_tokens, room)

    def _catch_up(self, chain: _Chain) -> None:
        """Bring the cache to all committed tokens but the last."""
        state, tokens = chain.state, chain.sequence.tokens
        state.align(tokens)
        while state.cache.length < len(tokens) - 1:
            start = state.cache.length
            chunk = tokens[start : min(start + CATCH_UP_CHUNK, len(tokens) - 1)]
            self.model.forward([Span(state.cache, chunk, range(-1, len(chunk) - 1))])
            state.keep(chunk)
        chain.pending = tokens[-1]

    def _extend(self, chains: Seq[_Chain]) -> None:
        """One forward pass over all chains; each gets one more token."""
        outputs = self.model.forward([Span(chain.state.cache, [chain.pending], [-1], [0]) for chain in chains])
        for chain, output in zip(chains, outputs, strict=True):
            chain.state.keep([chain.pending])
            chain.pending = output.choose(0, chain.sequence.history(tuple(chain.tokens)))
            chain.tokens.append(chain.pending)


class _State:
    """A drafter's cache for one sequence, with the tokens it holds."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.fed: list[int] = []
        self._num_agreed = 0

    def keep(self, tokens: Seq[int]) -> None:
        self.cache.keep(range(len(tokens)))
        self.fed.extend(tokens)

    def align(self, tokens: Seq[int]) -> None:
        """Drop what was fed beyond the committed tokens' prefix; leave at least the last token to feed."""
        agreed = min(self._num_agreed, len(self.fed))
        limit = min(len(self.fed), len(tokens) - 1)
        while agreed < limit and self.fed[agreed] == tokens[agreed]:
            agreed += 1
        self.rewind(min(agreed, limit))
        self._num_agreed = agreed

    def rewind(self, length: int) -> None:
        if length < len(self.fed):
            del self.fed[length:]
            self.cache.truncate(length)
        self._num_agreed = min(self._num_agreed, length)


@dataclass
class _Chain:
    sequence: Sequence
    state: _State
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    pending: int = -1

    def is_done(self) -> bool:
        return len(self.tokens) >= self.num_tokens or self.pending in self.sequence.end_ids
