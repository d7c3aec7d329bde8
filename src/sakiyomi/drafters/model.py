"""model: a second, smaller model drafts chains or trees.

Two-model speculation (Leviathan, Kalman and Matias, 2023; Chen et al., 2023). How tokens are found and trees grow is in
sampling/growth.py. Where the second model has another tokenizer, it reads the text in its own ids and drafts either
tokens that both models have, by laws over these alone, or text that is spelled again in the target's tokens (Timor et
al., 2025; text/vocabulary.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import ParameterError, VocabularyError
from sakiyomi.noise import Randomness
from sakiyomi.params import SamplingParams
from sakiyomi.plugins import check_growth
from sakiyomi.sampling.choose import choose
from sakiyomi.sampling.distributions import KeyedRandomness
from sakiyomi.sampling.growth import Growth
from sakiyomi.text.vocabulary import Reader, Translation
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import Cache, Drafter, DrafterContext, DrawMode, History, Model, Output, Sequence, Span

logger = logging.getLogger("sakiyomi")

CATCH_UP_CHUNK = 256
LITTLE_OVERLAP = 0.25
"""Where fewer of the drafting model's tokens exist in the target, most words of one are several of the other."""


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
            vocabulary: what a model with another tokenizer drafts: "tokens" that both have, or "text", its most
                probable one. "auto" takes the text at temperature 0, for draw=argmax, and where they share little.
        """

        model: str
        num_speculative_tokens: int = 4
        width: int = 1
        max_nodes: int = 24
        draw: Literal["auto", "coupled", "independent", "argmax"] = "auto"
        vocabulary: Literal["auto", "tokens", "text"] = "auto"

        def __post_init__(self) -> None:
            check_growth(self)
            if self.vocabulary not in ("auto", "tokens", "text"):
                raise ParameterError(f"vocabulary={self.vocabulary!r} is not allowed; give auto, tokens or text.")

    def __init__(self, config: Config, context: DrafterContext, randomness: Randomness | None = None) -> None:
        self.config = config
        self.draw: DrawMode = context.draw if config.draw == "auto" else config.draw
        self.model: Model = context.load_model(config.model)
        self.randomness = randomness or KeyedRandomness()
        self.translation: Translation | None = context.translate(config.model)
        if self.translation is not None:
            _advise(self.translation, config)
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
            sequence.memo.rewind_text(length)

    def _start(self, sequence: Sequence, budget: int) -> _Growth:
        state = sequence.memo
        if not isinstance(state, _State):
            state = sequence.memo = _State(self.model.new_cache(), self.translation)
        config, translation = self.config, self.translation
        ids, is_whole = state.read(sequence.tokens)
        writes_text = translation is not None and self._writes_text(translation, sequence)
        grower = Growth(
            _in_own_ids(sequence, ids, translation) if translation is not None and writes_text else sequence,
            "argmax" if writes_text else self.draw,
            self.randomness,
            width=config.width,
            max_depth=self._num_tokens(len(ids), budget) if is_whole and ids else 0,
            max_nodes=min(budget, config.max_nodes),
        )
        return _Growth(sequence, state, grower, ids, translation, budget, config.width == 1, writes_text)

    def _writes_text(self, translation: Translation, sequence: Sequence) -> bool:
        if self.config.vocabulary != "auto":
            return self.config.vocabulary == "text"
        return sequence.params.is_greedy or self.draw == "argmax" or translation.overlap < LITTLE_OVERLAP

    def _num_tokens(self, num_ids: int, budget: int) -> int:
        """Depth of the draft: the last one drafted is never fed, so it needs no room in the drafter's context."""
        room = self.model.info.max_model_len - num_ids + 1
        if room <= 0 and not self._is_exhaustion_reported:
            self._is_exhaustion_reported = True
            logger.warning(
                "The drafting model's context of %d tokens is exhausted; decoding goes on without its drafts.",
                self.model.info.max_model_len,
            )
        return min(budget, self.config.num_speculative_tokens, room)

    def _catch_up(self, growth: _Growth) -> None:
        """Bring the cache to all committed tokens but the last."""
        state, tokens = growth.state, growth.ids
        state.align(tokens)
        while state.cache.length < len(tokens) - 1:
            start = state.cache.length
            chunk = tokens[start : min(start + CATCH_UP_CHUNK, len(tokens) - 1)]
            self.model.forward([Span(state.cache, chunk, range(-1, len(chunk) - 1))])
            state.keep(chunk)


def _advise(translation: Translation, config: ModelDrafter.Config) -> None:
    """Say so where two vocabularies have little in common.

    Raises:
        VocabularyError: they share no token at all, and shared tokens are what shall be drafted.
    """
    shared, total = translation.num_shared, translation.drafting.vocab_size
    advice = (
        "a smaller model of the target's own family would draft better, or a drafter that needs none, such as suffix"
    )
    if config.vocabulary == "tokens" and not shared:
        raise VocabularyError(
            f"the drafting model {config.model} shares no token with the target; give vocabulary=text, or {advice}."
        )
    if translation.overlap < LITTLE_OVERLAP:
        logger.warning(
            "The drafting model %s shares only %d of its %d tokens (%.0f %%) with the target, so few of its guesses "
            "can be right in one piece; %s.",
            config.model,
            shared,
            total,
            100 * translation.overlap,
            advice,
        )


def _in_own_ids(sequence: Sequence, ids: list[int], translation: Translation) -> Sequence:
    """The sequence as the drafting model sees it, for its most probable continuation."""
    params = SamplingParams(temperature=0, max_tokens=None)
    ends = frozenset(translation.drafting.end_ids)
    return Sequence(sequence.id, ids, len(ids), params, sequence.seed, sequence.cache, ends)


class _State:
    """A drafter's cache for one sequence, with the tokens it holds, and the reader of another tokenizer's text."""

    def __init__(self, cache: Cache, translation: Translation | None) -> None:
        self.cache = cache
        self.fed: list[int] = []
        self._translation = translation
        self._reader = None if translation is None else Reader(translation)
        self._num_agreed = 0

    def read(self, tokens: list[int]) -> tuple[list[int], bool]:
        """The committed tokens in the drafter's own ids, and whether these stand for all of the text."""
        if self._reader is None:
            return tokens, True
        ids = self._reader.read(tokens)
        self._num_agreed = min(self._num_agreed, self._reader.num_settled)
        return ids, self._reader.is_whole

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

    def rewind_text(self, length: int) -> None:
        """The text from token `length` on was replaced."""
        if self._translation is None:
            self.rewind(length)
        else:
            # Where in its own ids that is will show when the text is read again.
            self._reader, self._num_agreed = Reader(self._translation), 0

    def rewind(self, length: int) -> None:
        if length < len(self.fed):
            del self.fed[length:]
            self.cache.truncate(length)
        self._num_agreed = min(self._num_agreed, length)


class _Growth:
    """A draft of one sequence in the making, and what the model has been fed for it.

    Rows of a tree are not committed, so each pass feeds the nodes of the passes before again; those of a chain are.
    """

    def __init__(
        self,
        sequence: Sequence,
        state: _State,
        grower: Growth,
        ids: list[int],
        translation: Translation | None,
        budget: int,
        is_chain: bool,
        writes_text: bool,
    ) -> None:
        self.state = state
        self.ids = ids
        self._sequence = sequence
        self._grower = grower
        self._translation = translation
        self._budget = budget
        self._is_chain = is_chain
        self._writes_text = writes_text
        self._fed: list[int] = []

    @property
    def frontier(self) -> Seq[int]:
        return self._grower.frontier

    def span(self) -> Span:
        """What the next pass computes: the frontier behind its ancestors."""
        nodes = [*self._fed, *self.frontier]
        rows = {node: row for row, node in enumerate(nodes)}
        tokens = [self._own_id(node) for node in nodes]
        parents = [-1 if node == ROOT else rows.get(self._grower.parent(node), -1) for node in nodes]
        return Span(self.state.cache, tokens, parents, range(len(self._fed), len(nodes)))

    def grow(self, output: Output) -> None:
        """Append the children of the frontier."""
        if self._is_chain:
            self.state.keep([self._own_id(self.frontier[0])])
        else:
            self._fed += self.frontier
        is_foreign = self._translation is not None and not self._writes_text
        self._grower.grow(_SharedTokens(output, self._translation) if is_foreign else output)

    def draft(self) -> Draft:
        draft = self._grower.draft()
        translation = self._translation
        if translation is None or not self._writes_text:
            return draft
        leaves = set(range(len(draft))) - set(draft.parents)
        texts = [[draft.tokens[node] for node in draft.path(leaf)] for leaf in sorted(leaves)]
        paths = [translation.spell(self._sequence.tokens, text) for text in texts]
        return Draft.from_paths(path for path in paths if path).trim(self._budget, self._budget)

    def _own_id(self, node: int) -> int:
        """The drafting model's id for a node."""
        if node == ROOT:
            return self.ids[-1]
        token = self._grower.token(node)
        if self._translation is None or self._writes_text:
            return token
        return int(self._translation.to_drafting[token])


class _SharedTokens:
    """An output of the drafting model over the target's ids (`types.Output`)."""

    taps = None

    def __init__(self, output: Output, translation: Translation | None) -> None:
        assert translation is not None
        self._output = output
        self._translation = translation

    def row(self, i: int) -> npt.NDArray[np.float32]:
        return self._translation.restrict(self._output.row(i))

    def argmax(self) -> list[int]:
        return [int(np.argmax(self.row(i))) for i in range(len(self._output.argmax()))]

    def choose(self, i: int, history: History) -> int:
        return choose(self.row(i), history)
