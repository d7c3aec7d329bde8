"""layerskip: the target's own first layers draft, and the verification goes on from where they ended.

A forward pass that is left after some layers, with the final norm and the head, guesses the next token (LayerSkip;
Elhoushi et al., 2024). The rows stay in the target's own cache, uncommitted, with their hidden states, so that the
check runs the remaining layers alone. Layers in between may be left out as well (Draft & Verify; Zhang et al., 2024;
SWIFT; Xia et al., 2025); then the check goes on from the first layer that was left out.

A checkpoint that was not trained for it seldom agrees with its own first layers. `sakiyomi tune` measures whether it
pays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

from sakiyomi.errors import ParameterError
from sakiyomi.noise import Randomness
from sakiyomi.plugins import check_bounds, check_growth
from sakiyomi.sampling.distributions import KeyedRandomness
from sakiyomi.sampling.growth import Growth
from sakiyomi.tree import ROOT, Computed, Draft
from sakiyomi.types import Drafter, DrafterContext, DrawMode, Model, Output, Sequence, Span

logger = logging.getLogger("sakiyomi")

MAX_LAYER = 10_000


class LayerskipDrafter(Drafter):
    """Drafts with a part of the target's layers, over the target's cache."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `layerskip`.

        Args:
            exit_layer: how many layers draft; None takes what `sakiyomi tune` chose for this model.
            skip: layers among them that are left out, counted from 0: "10-19" or "4/10-12/20".
            num_speculative_tokens: depth of a draft at most; None: what `sakiyomi tune` chose, or 4.
            width: children of a node, and nodes that go on at each depth; 1 drafts chains.
            max_nodes: nodes of a tree at most.
            draw: "coupled", "independent" or "argmax"; "auto" takes what the verifier asks for.
        """

        exit_layer: int | None = None
        skip: str = ""
        num_speculative_tokens: int | None = None
        width: int = 1
        max_nodes: int = 24
        draw: Literal["auto", "coupled", "independent", "argmax"] = "auto"

        def __post_init__(self) -> None:
            check_growth(self)
            if self.exit_layer is not None:
                check_bounds("exit_layer", self.exit_layer, 1, MAX_LAYER)
            parse_layers(self.skip)

    def __init__(self, config: Config | None, context: DrafterContext, randomness: Randomness | None = None) -> None:
        self.config = config = config or self.Config()
        self.draw: DrawMode = context.draw if config.draw == "auto" else config.draw
        self.randomness = randomness or KeyedRandomness()
        self.num_tokens = config.num_speculative_tokens or 4
        self.model: Model | None = None
        num_layers = context.target.info.num_layers
        if config.exit_layer is None and not config.skip:
            self.model = self._read_choice(context)
            return
        exit_layer = config.exit_layer or num_layers
        if exit_layer > num_layers:
            raise ParameterError(
                f"exit_layer={exit_layer} is not allowed; {context.target.info.name} has {num_layers}."
            )
        self.model = context.target.shallow(exit_layer, parse_layers(config.skip))

    def _read_choice(self, context: DrafterContext) -> Model | None:
        """The layers that were found best, or None where none pay."""
        choice = context.tuned.get("layerskip")
        name = context.target.info.name
        if choice is None:
            raise ParameterError(
                f"layerskip has not been tuned for {name}; run `sakiyomi tune` with this model, or say how many of its "
                f"{context.target.info.num_layers} layers shall draft: layerskip:exit_layer=..."
            )
        if not choice["pays"]:
            logger.warning(
                "layerskip does not pay with %s (measured: %.2f times the speed of plain decoding at best) and drafts "
                "nothing; layerskip:exit_layer=... insists.",
                name,
                choice["speedup"],
            )
            return None
        if self.config.num_speculative_tokens is None:
            self.num_tokens = choice["num_speculative_tokens"]
        return context.target.shallow(choice["exit_layer"], parse_layers(choice["skip"]))

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        model = self.model
        if model is None:
            return [Draft.empty() for _ in sequences]
        growths = [self._start(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        while active := [growth for growth in growths if growth.grower.frontier]:
            outputs = model.forward([growth.span() for growth in active])
            for growth, output in zip(active, outputs, strict=True):
                growth.grow(output)
        return [growth.draft() for growth in growths]

    def _start(self, sequence: Sequence, budget: int) -> _Growth:
        grower = Growth(
            sequence,
            self.draw,
            self.randomness,
            width=self.config.width,
            max_depth=min(budget, self.num_tokens),
            max_nodes=min(budget, self.config.max_nodes),
        )
        return _Growth(sequence, grower, min(budget, self.config.max_nodes))


class _Growth:
    """A draft of one sequence in the making, and the rows of it that wait in the target's cache."""

    def __init__(self, sequence: Sequence, grower: Growth, max_nodes: int) -> None:
        self.grower = grower
        self._sequence = sequence
        self._max_nodes = max_nodes
        self._fed: list[int] = []
        self._computed: Computed | None = None

    def span(self) -> Span:
        """The committed tail, the nodes that were fed, and the frontier, whose rows are new."""
        cache = self._sequence.cache
        tail = self._sequence.tokens[cache.length :]
        root = len(tail) - 1
        nodes = [node for node in [*self._fed, *self.grower.frontier] if node != ROOT]
        rows = {ROOT: root} | {node: root + 1 + i for i, node in enumerate(nodes)}
        tokens = [*tail, *(self.grower.token(node) for node in nodes)]
        parents = [*range(-1, root), *(rows[self.grower.parent(node)] for node in nodes)]
        asked = [rows[node] for node in self.grower.frontier]
        return Span(cache, tokens, parents, asked, computed=self._computed)

    def grow(self, output: Output) -> None:
        """Append the children of the frontier."""
        self._fed += (node for node in self.grower.frontier if node != ROOT)
        self._computed = getattr(output, "computed", None)
        self.grower.grow(output)
        if len(self._fed) >= self._max_nodes:
            self.grower.frontier = []

    def draft(self) -> Draft:
        return replace(self.grower.draft(self._fed), computed=self._computed)


def parse_layers(text: str) -> frozenset[int]:
    """The layers of "4/10-12/20".

    Raises:
        ParameterError: for anything else.
    """
    layers: set[int] = set()
    for part in filter(None, text.split("/")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ParameterError(f"skip={text!r} is not allowed; write layers as in 10-19 or 4/10-12/20.")
        if not int(first) <= int(last or first) <= MAX_LAYER:
            raise ParameterError(f"skip={text!r} is not allowed; ranges ascend, up to layer {MAX_LAYER}.")
        layers.update(range(int(first), int(last or first) + 1))
    return frozenset(layers)
