"""Medusa heads in training (nets/medusa.py): residual blocks on the target's last hidden state.

The blocks start as identities. Heads of their own start in closed form: ridge regression from the target's last state
to that of i + 1 positions on, multiplied with the target's own rows. Where the heads share the target's rows there is
no room for a linear map, since silu lets nothing but what is positive through, and all is left to the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sakiyomi.nets.medusa import MedusaConfig, MedusaHeads
from sakiyomi.train.acceptance import count_ranks
from sakiyomi.train.batches import Batch, Ints
from sakiyomi.train.centred import Centring, TrainingOps, to_numpy
from sakiyomi.train.estimate import Announce
from sakiyomi.train.fit import FitConfig, Report, Tell, fit_net
from sakiyomi.train.heads import Exported, Frozen, Noise, Trainee
from sakiyomi.train.ridge import RidgeSums
from sakiyomi.train.shards import Shards
from sakiyomi.types import Model

INPUTS, OWN_IDS = "state.inputs", "own.ids"
NUM_RANKS = 10


@dataclass(frozen=True, kw_only=True)
class MedusaFit(FitConfig):
    """The recipe of Medusa heads.

    Args:
        num_heads: tokens guessed ahead.
        num_layers: residual blocks of a head.
        own_heads: whether each head has a matrix to logits of its own, over `vocabulary`, which is then fixed.
    """

    num_heads: int = 4
    num_layers: int = 1
    own_heads: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("num_heads", "num_layers")

    @property
    def late_choices(self) -> tuple[str, ...]:
        late = super().late_choices
        return tuple(name for name in late if name != "vocabulary") if self.own_heads else late


def fit_medusa(
    recipe: Mapping[str, Any],
    shards: Shards,
    target: Model,
    folder: Path,
    report: Report | None = None,
    announce: Announce | None = None,
    tell: Tell | None = None,
) -> Path:
    """Train Medusa heads and write their drafter file.

    Args:
        recipe: fields of `MedusaFit`. The other arguments and the errors are those of `fit.fit_net`.
    """
    return fit_net(MedusaFamily, MedusaFit.read(recipe), shards, target, folder, report, announce, tell)


class MedusaFamily:
    """What Medusa heads bring to their fit."""

    kind = "medusa"

    def __init__(self, recipe: MedusaFit, frozen: Frozen, taps: tuple[int, ...]) -> None:
        self.taps = taps[-1:]
        self._recipe = recipe
        self._frozen = frozen
        self._config = MedusaConfig(
            num_heads=recipe.num_heads, num_layers=recipe.num_layers, hidden_size=frozen.info.hidden_size
        )

    def start(self, batches: Sequence[Batch], vocabulary: Ints) -> dict[str, Tensor]:
        return solve_start(self._config, self._frozen, batches, vocabulary if self._recipe.own_heads else None)

    def build(self, tensors: Mapping[str, Tensor]) -> Trainee:
        return MedusaTrainee(self._config, self._frozen, tensors)

    def describe(self, trainee: Trainee, shards: Shards, held_out: Ints, vocabulary: Ints) -> Mapping[str, Any]:
        """How often each head's first, second, ... choice is right: what a static tree is laid out by."""
        return {"rank_rates": count_ranks(trainee, shards, held_out, vocabulary, self._config.num_heads, NUM_RANKS)}


class MedusaTrainee:
    """Medusa heads with parameters that have gradients.

    Args:
        tensors: parameters and centring by name, as `solve_start` makes them.
    """

    def __init__(self, config: MedusaConfig, frozen: Frozen, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.frozen = frozen
        self._centring = Centring.read(INPUTS, tensors)
        self._own_ids = tensors.get(OWN_IDS)
        names = [*config.shapes()]
        if self._own_ids is not None:
            names += [f"lm_heads.{i}.{part}" for i in range(config.num_heads) for part in ("weight", "bias")]
            self._columns = torch.full((frozen.info.vocab_size,), -1)
            self._columns[self._own_ids] = torch.arange(len(self._own_ids))
        self.parameters = {name: tensors[name].clone().requires_grad_() for name in names}
        self.tables = frozenset(name for name in names if name.startswith("lm_heads."))

    def unroll(self, batch: Batch, num_steps: int, noise: Noise | None = None) -> Iterator[tuple[Ints, Tensor]]:
        rows, count = batch.rows(0), min(num_steps, self.config.num_heads)
        parts = self.net(noise).features(batch.taps[rows, -self.config.hidden_size :], count)
        for step, features in enumerate(parts):
            wanted = batch.rows(step)
            if len(wanted):
                yield wanted, features[np.searchsorted(rows, wanted)]

    def head(self, step: int, ids: Tensor) -> Tensor:
        frozen = self.frozen.head[ids]
        if self._own_ids is None:
            return frozen
        columns = self._columns[ids]
        own = self._centring.fold(*(self.parameters[f"lm_heads.{step}.{part}"] for part in ("weight", "bias")))
        return torch.where(columns[:, None] >= 0, own[columns.clamp(min=0)], frozen)

    def export(self, vocabulary: Ints) -> Exported:
        weights = self._weights()
        if self._own_ids is not None:
            ids = torch.from_numpy(vocabulary)
            weights |= {f"lm_heads.{i}.weight": self.head(i, ids) for i in range(self.config.num_heads)}
        return Exported(asdict(self.config), to_numpy(weights))

    def net(self, noise: Noise | None) -> MedusaHeads:
        """The net as it runs."""
        ops = TrainingOps(noise, self.frozen.embedding.dtype, self.frozen.ops.linear)
        weights = self._weights()
        names = [
            [f"heads.{i}.{layer}" for i in range(self.config.num_heads)] for layer in range(self.config.num_layers)
        ]
        blocks = [[(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in layer] for layer in names]
        blocks[0] = [tuple(torch.cat([block[part] for block in blocks[0]]) for part in (0, 1))]  # type: ignore[list-item]
        ops.hide_inputs(blocks[0][0][0], self._centring.mean)
        return MedusaHeads(ops, self.config, blocks, [self.frozen.head], (self.frozen.norm, self.frozen.eps))

    def _weights(self) -> dict[str, Tensor]:
        """The blocks as they run; those of the first layer are trained for centred, scaled inputs."""
        weights = {name: self.parameters[name] for name in self.config.shapes()}
        for head in range(self.config.num_heads):
            name = f"heads.{head}.0"
            scaled = weights[f"{name}.weight"] / self._centring.std
            weights[f"{name}.weight"] = scaled
            weights[f"{name}.bias"] = weights[f"{name}.bias"] - scaled @ self._centring.mean
        return weights


def solve_start(
    config: MedusaConfig, frozen: Frozen, batches: Sequence[Batch], vocabulary: Ints | None
) -> dict[str, Tensor]:
    """Parameters and centring of heads that begin as linear regressions.

    Args:
        vocabulary: the ids of heads of their own; None for heads that share the target's rows.
    """
    hidden = config.hidden_size
    tensors = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    for step in range(config.num_heads if vocabulary is not None else 1):
        sums = RidgeSums(hidden, hidden)
        for batch in batches:
            rows = batch.rows(step)
            goals = frozen.direction(batch.taps[rows + 1 + step, -hidden:])
            sums.add(frozen.final(batch.taps[rows, -hidden:]), goals)
        if step == 0:
            tensors |= Centring.of(sums).named(INPUTS)
        if vocabulary is not None:
            solution, rows_of_ids = sums.solve(), frozen.head[torch.from_numpy(vocabulary)] * frozen.norm
            # Of the last regression the moments differ by a few rows; its weights are for nearly the same inputs.
            tensors[f"lm_heads.{step}.weight"] = rows_of_ids @ torch.from_numpy(solution.weight)
            tensors[f"lm_heads.{step}.bias"] = rows_of_ids @ torch.from_numpy(solution.bias)
    if vocabulary is not None:
        tensors[OWN_IDS] = torch.from_numpy(vocabulary)
    return tensors
