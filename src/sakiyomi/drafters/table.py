"""table: a static back-off n-gram table of the target's own text drafts chains or trees.

The non-neural baseline among the trained drafters (lookup/table.py): it reads the last few tokens and nothing else.
Its laws are real probabilities, so tokens are found as in the other drafters with laws of their own: coupled,
independent or argmax (sampling/growth.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from sakiyomi.checkpoints.drafter import find_packaged, read_drafter
from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.lookup.table import NgramTable
from sakiyomi.noise import Randomness
from sakiyomi.plugins import check_growth
from sakiyomi.sampling.distributions import KeyedRandomness
from sakiyomi.sampling.growth import Growth, SubsetCandidates
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, DrafterFile, DrawMode, ModelInfo, Sequence

KIND = "table"


class TableDrafter(Drafter):
    """Drafts with an n-gram table that was counted on the target's own text."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `table`.

        Args:
            path: the drafter file; None takes the one that comes with the package for the target.
            num_speculative_tokens: depth of a draft at most, the length of a chain.
            width: children of a node, and nodes that go on at each depth; 1 drafts chains.
            max_nodes: nodes of a tree at most.
            min_confidence: what is believed with less is not drafted.
            draw: "coupled", "independent" or "argmax"; "auto" takes what the verifier asks for.
        """

        path: str | None = None
        num_speculative_tokens: int = 3
        width: int = 1
        max_nodes: int = 8
        min_confidence: float = 0.0
        draw: Literal["auto", "coupled", "independent", "argmax"] = "auto"

        def __post_init__(self) -> None:
            check_growth(self)

    def __init__(self, config: Config, context: DrafterContext, randomness: Randomness | None = None) -> None:
        self.config = config
        self.draw: DrawMode = context.draw if config.draw == "auto" else config.draw
        self.randomness = randomness or KeyedRandomness()
        self.vocab_size = context.target.info.vocab_size
        stored = _find_file(config.path, context.target.info)
        self.table = NgramTable.from_tensors(int(stored.config.get("order", 0)), stored.tensors)
        if len(self.table) and int(self.table.tokens.max()) >= self.vocab_size:
            raise CheckpointError(f"the table holds ids beyond the vocabulary of {self.vocab_size}; make it anew.")

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._propose(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _propose(self, sequence: Sequence, budget: int) -> Draft:
        config = self.config
        growth = Growth(
            sequence,
            self.draw,
            self.randomness,
            width=config.width,
            max_depth=min(budget, config.num_speculative_tokens),
            max_nodes=min(budget, config.num_speculative_tokens if config.width == 1 else config.max_nodes),
            min_confidence=config.min_confidence,
        )
        while growth.frontier:
            num_before = len(growth.tree)
            for node in growth.frontier:
                self._add_children(growth, node)
            if len(growth.tree) == num_before:
                break
            growth.go_on()
        return growth.draft() if len(growth.tree) else Draft.empty()

    def _add_children(self, growth: Growth, node: int) -> None:
        path = growth.tree.path_tokens(node)
        tail = growth.sequence.tokens[-self.table.order :]
        found = self.table.continue_text([*tail, *path])
        if len(found.ids):
            logits = np.log(found.probs).astype(np.float32)
            growth.add(node, SubsetCandidates(logits, found.ids, self.vocab_size))


def _find_file(path: str | None, info: ModelInfo) -> DrafterFile:
    """The drafter file of the options, or the packaged one, made for this target."""
    if path is None:
        for packaged in find_packaged(KIND):
            if _find_mismatch(packaged, info) is None:
                return packaged
        raise ParameterError(
            f"no table comes with the package for {info.name}; write table:path=FILE with one that "
            "`sakiyomi train table` made, or take suffix, which needs none."
        )
    stored = read_drafter(Path(path).expanduser())
    if stored.kind != KIND:
        raise CheckpointError(f"{path} holds a drafter of kind {stored.kind!r}; write {stored.kind}:path={path}.")
    mismatch = _find_mismatch(stored, info)
    if mismatch is not None:
        raise CheckpointError(
            f"{path} was made for {stored.target.get('name')}, and {info.name} is another model: {mismatch}; make one "
            "for this model with `sakiyomi train table`."
        )
    return stored


def _find_mismatch(stored: DrafterFile, info: ModelInfo) -> str | None:
    # A table is about tokens: it may serve a fine-tuned or rounded sibling of its model, if less well.
    told = stored.target.get("vocab_size")
    return None if told == info.vocab_size else f"its vocabulary has {info.vocab_size} ids and not {told}"
