"""planted: scripted drafts, for tests, benchmarks and certificates.

It guesses what it is told, right or wrong, in any shape, so that every path through verification can be forced.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, Sequence

logger = logging.getLogger("sakiyomi")

Script = Callable[[Sequence, int], Draft]
"""Given a sequence and its budget, the draft."""


class PlantedDrafter(Drafter):
    """Drafts what a script says."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `planted`.

        Args:
            script: called with each sequence and its budget; None drafts nothing.
        """

        script: Script | None = field(default=None)

    def __init__(self, config: Config | None = None, context: DrafterContext | None = None) -> None:
        self.config = config or self.Config()
        if self.config.script is None:
            logger.warning("planted drafts nothing without a script, which only Python can give it (script=...).")

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        script = self.config.script
        if script is None:
            return [Draft.empty() for _ in sequences]
        return [script(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]


def follow(answers: Mapping[tuple[int, ...], Seq[int]], num_tokens: int) -> Script:
    """A script that drafts the known answer to each prompt (ids of the prompt -> ids of the answer) as chains."""

    def script(sequence: Sequence, budget: int) -> Draft:
        return Draft.chain(_continuation(answers, sequence)[: min(num_tokens, budget)])

    return script


def stray(answers: Mapping[tuple[int, ...], Seq[int]], num_tokens: int, vocab_size: int, seed: int = 0) -> Script:
    """A script that drafts chains which leave the known answer at a random place; a function of seed and position."""

    def script(sequence: Sequence, budget: int) -> Draft:
        rng = random.Random(f"{seed}/{len(sequence.tokens)}")
        truth = _continuation(answers, sequence)[: rng.randint(0, num_tokens)]
        rest = [rng.randrange(vocab_size) for _ in range(num_tokens - len(truth))]
        return Draft.chain([*truth, *rest][: min(num_tokens, budget)])

    return script


def scatter(answers: Mapping[tuple[int, ...], Seq[int]], num_nodes: int, vocab_size: int, seed: int = 0) -> Script:
    """A script that plants known answers in random trees.

    Each draft holds the true continuation down to a random depth, with random siblings and subtrees around it, in
    random order; a pure function of seed and position.
    """

    def script(sequence: Sequence, budget: int) -> Draft:
        truth = _continuation(answers, sequence)
        rng = random.Random(f"{seed}/{len(sequence.tokens)}")
        paths = [list(truth[: rng.randint(0, num_nodes)])]
        for _ in range(rng.randint(1, num_nodes)):
            stem = list(truth[: rng.randint(0, len(paths[0]))])
            paths.append([*stem, *(rng.randrange(vocab_size) for _ in range(rng.randint(1, 3)))])
        rng.shuffle(paths)
        return Draft.from_paths(path for path in paths if path).trim(min(num_nodes, budget), budget)

    return script


def _continuation(answers: Mapping[tuple[int, ...], Seq[int]], sequence: Sequence) -> Seq[int]:
    return answers.get(tuple(sequence.tokens[: sequence.num_prompt]), ())[sequence.num_new :]
