"""model: a second, smaller model with the same tokenizer drafts chains or trees.

Two-model speculation (Leviathan, Kalman and Matias, 2023; Chen et al., 2023) in three forms, `draw`:

- coupled: it chooses with the seed, position and parameters of the request, so that where both models agree in law
  they agree in token (Daliri, Musco and Suresh, 2024). For the rule `match`.
- independent: it samples with randomness of its own and reports its laws, siblings without replacement (Gumbel top-k).
  For the rules that keep the distribution.
- argmax: its most probable tokens. For any rule.

Trees grow where the drafter is confident, as in EAGLE-2 (Li et al., 2024), and are cut to the most confident nodes
unless they are sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from sakiyomi.errors import ParameterError
from sakiyomi.noise import Randomness
from sakiyomi.plugins import MAX_DRAFT_TOKENS, check_bounds
from sakiyomi.sampling.distributions import KeyedRandomness
from sakiyomi.sampling.growth import Growth, OutputCandidates
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import Cache, Drafter, DrafterContext, DrawMode, Model, Output, Sequence, Span

logger = logging.getLogger("sakiyomi")

CATCH_UP_CHUNK = 256


class ModelDrafter(Drafter):
    """Drafts with a model of its own; its caches live in the sequences' memos."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `model`.

        Args:
            model: the drafting model: a name, a folder or a .gguf file.
            num_speculative_tokens: depth of a draft at most, the length of a chain.
            width: children of a node, and nodes that go on at each depth; 1 drafts chains.
            max_nodes: nodes of a tree at most.
            draw: "coupled", "independent" or "argmax"; "auto" takes what the verifier asks for.
        """

        model: str
        num_speculative_tokens: int = 4
        width: int = 1
        max_nodes: int = 24
        draw: Literal["auto", "coupled", "independent", "argmax"] = "auto"

        def __post_init__(self) -> None:
            for name in ("num_speculative_tokens", "width", "max_nodes"):
                check_bounds(name, getattr(self, name), 1, MAX_DRAFT_TOKENS)
            if self.draw not in ("auto", "coupled", "independent", "argmax"):
                raise ParameterError(f"draw={self.draw!r} is not allowed; give auto, coupled, independent or argmax.")

    def __init__(self, config: Config, context: DrafterContext, randomness: Randomness | None = None) -> None:
        self.config = config
        self.draw: DrawMode = context.draw if config.draw == "auto" else config.draw
        self.model: Model = context.load_model(config.model)
        self.randomness = randomness or KeyedRandomness()
        self._is_exhaustion_reported = False

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        growths = [self._start(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        active = [growth for growth in growths if growth.frontier]
        for growth in active:
            self._catch_up(growth)
        while active:
            outputs = self.model.forward([growth.span() for growth in active])
            for growth, output in zip(active, outputs, strict=True):
                growth.grow(output)
            active = [growth for growth in active if growth.frontier]
        return [growth.draft() for growth in growths]

    def rewind(self, sequence: Sequence, length: int) -> None:
        if isinstance(sequence.memo, _State):
            sequence.memo.rewind(length)

    def _start(self, sequence: Sequence, budget: int) -> _Growth:
        if not isinstance(sequence.memo, _State):
            sequence.memo = _State(self.model.new_cache())
        return _Growth(sequence, sequence.memo, self, self._num_tokens(sequence, budget), budget)

    def _num_tokens(self, sequence: Sequence, budget: int) -> int:
        """Depth of the draft: the last one drafted is never fed, so it needs no room in the drafter's context."""
        room = self.model.info.max_model_len - len(sequence.tokens) + 1
        if room <= 0 and not self._is_exhaustion_reported:
            self._is_exhaustion_reported = True
            logger.warning(
                "The drafting model's context of %d tokens is exhausted; decoding goes on without its drafts.",
                self.model.info.max_model_len,
            )
        return min(budget, self.config.num_speculative_tokens, room)

    def _catch_up(self, growth: _Growth) -> None:
        """Bring the cache to all committed tokens but the last."""
        state, tokens = growth.state, growth.sequence.tokens
        state.align(tokens)
        while state.cache.length < len(tokens) - 1:
            start = state.cache.length
            chunk = tokens[start : min(start + CATCH_UP_CHUNK, len(tokens) - 1)]
            self.model.forward([Span(state.cache, chunk, range(-1, len(chunk) - 1))])
            state.keep(chunk)


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


class _Growth(Growth):
    """A draft with the cache that its rows land in.

    Rows of a tree are not committed, so the next pass feeds its nodes again in front of the frontier; those of a chain
    are.
    """

    def __init__(self, sequence: Sequence, state: _State, drafter: ModelDrafter, max_depth: int, budget: int) -> None:
        width, max_nodes = drafter.config.width, min(budget, drafter.config.max_nodes)
        super().__init__(
            sequence, drafter.draw, drafter.randomness, width=width, max_depth=max_depth, max_nodes=max_nodes
        )
        self.state = state
        self._is_chain = width == 1
        self._fed: list[int] = []

    def span(self) -> Span:
        """What the next pass computes: the frontier behind its ancestors."""
        nodes = [*self._fed, *self.frontier]
        rows = {node: row for row, node in enumerate(nodes)}
        parents = [-1 if node == ROOT else rows.get(self.tree.parents[node], -1) for node in nodes]
        return Span(self.state.cache, [self.token(node) for node in nodes], parents, range(len(self._fed), len(nodes)))

    def grow(self, output: Output) -> None:
        """Append the children of the frontier."""
        if self._is_chain:
            self.state.keep([self.token(self.frontier[0])])
        else:
            self._fed += self.frontier
        for row, node in enumerate(self.frontier):
            self.add(node, OutputCandidates(output, row))
        self.go_on()
