"""EAGLE-3 and P-EAGLE heads in training: one net (nets/eagle3.py), two ways to unroll it.

EAGLE-3 is trained as it drafts (training-time test, Li et al., 2025): step i feeds its own states of step i - 1, and
its row t attends to the first step's rows up to t and to the rows that grew out of t. P-EAGLE (Hui et al., 2026) feeds
all its steps at once, the later ones with learnt inputs, under the same rule of attention. The rule is that of a draft
tree in which every position has a chain below it, so training uses the mask that drafting trees use.

Both begin in closed form (`eagle_start`); their matrices have no biases and train as `centred` tells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sakiyomi.errors import ParameterError
from sakiyomi.nets.eagle3 import ATTENTION, EagleConfig, EagleHead, Kind, prepare
from sakiyomi.ops.base import KVSlots, Past, Tree
from sakiyomi.train.batches import Batch, Ints
from sakiyomi.train.centred import Centring, TrainingOps, to_numpy
from sakiyomi.train.eagle_start import FIRST, FUSED, READ, solve_start
from sakiyomi.train.estimate import Announce
from sakiyomi.train.fit import FitConfig, Report, Tell, fit_net
from sakiyomi.train.heads import Exported, Frozen, Noise, Trainee
from sakiyomi.train.shards import Shards
from sakiyomi.types import Model

ROPE_THETA = 10000.0


@dataclass(frozen=True, kw_only=True)
class EagleFit(FitConfig):
    """The recipe of an EAGLE head.

    Args:
        inner_size: width of the feed-forward layer.
        num_layers: decoder layers.
        head_dim: width of an attention head.
        num_heads, num_kv_heads: 0 takes as many as fill the width of the model.
        fc_norm: each tap has a norm of its own in front of `fc` (EAGLE-3.1).
        norm_output: the normed state is fed back (EAGLE-3.1).
        kept_share: of the rows of a step, how many have a next one (P-EAGLE; conditional drop-token sampling).
    """

    inner_size: int = 512
    num_layers: int = 1
    head_dim: int = 64
    num_heads: int = 0
    num_kv_heads: int = 0
    fc_norm: bool = True
    norm_output: bool = True
    kept_share: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("inner_size", "num_layers", "head_dim")
        if self.head_dim % 2 or (self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads):
            raise ParameterError(
                f"head_dim={self.head_dim}, num_heads={self.num_heads} and num_kv_heads={self.num_kv_heads} do not "
                "fit; the width is even, and num_heads a multiple of num_kv_heads."
            )
        if not 0 < self.kept_share <= 1:
            raise ParameterError(f"kept_share={self.kept_share} is not allowed; give a number above 0 up to 1.")


def fit_eagle3(
    recipe: Mapping[str, Any],
    shards: Shards,
    target: Model,
    folder: Path,
    report: Report | None = None,
    announce: Announce | None = None,
    tell: Tell | None = None,
) -> Path:
    """Train an EAGLE-3 head and write its drafter file.

    Args:
        recipe: fields of `EagleFit`. The other arguments and the errors are those of `fit.fit_net`.
    """
    return fit_net(Eagle3Family, EagleFit.read(recipe), shards, target, folder, report, announce, tell)


def fit_peagle(
    recipe: Mapping[str, Any],
    shards: Shards,
    target: Model,
    folder: Path,
    report: Report | None = None,
    announce: Announce | None = None,
    tell: Tell | None = None,
) -> Path:
    """Train a P-EAGLE head and write its drafter file; arguments as in `fit_eagle3`."""
    return fit_net(PEagleFamily, EagleFit.read(recipe), shards, target, folder, report, announce, tell)


class Eagle3Family:
    """What an EAGLE-3 head brings to its fit."""

    kind: str = "eagle3"

    def __init__(self, recipe: EagleFit, frozen: Frozen, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.recipe = recipe
        self.frozen = frozen

    def start(self, batches: Sequence[Batch], vocabulary: Ints) -> dict[str, Tensor]:
        num_steps = max(steps for _, steps in self.recipe.unroll)
        config = self.config(_rarest_id(batches, self.frozen))
        return solve_start(config, self.frozen, batches, self.recipe.seed, num_steps)

    def build(self, tensors: Mapping[str, Tensor]) -> Trainee:
        return Eagle3Trainee(self.config(0), self.frozen, tensors)

    def describe(self, trainee: Trainee, shards: Shards, held_out: Ints, vocabulary: Ints) -> Mapping[str, Any]:
        return {}

    def config(self, mask_token_id: int) -> EagleConfig:
        """The shape of the net."""
        recipe, info = self.recipe, self.frozen.info
        num_heads = recipe.num_heads or max(1, info.hidden_size // recipe.head_dim)
        return EagleConfig(
            kind=cast("Kind", self.kind),
            hidden_size=info.hidden_size,
            target_hidden_size=info.hidden_size,
            inner_size=recipe.inner_size,
            num_layers=recipe.num_layers,
            num_heads=num_heads,
            num_kv_heads=recipe.num_kv_heads or num_heads,
            head_dim=recipe.head_dim,
            num_taps=len(self.taps),
            vocab_size=info.vocab_size,
            eps=self.frozen.eps,
            rope={"rope_theta": ROPE_THETA},
            fc_norm=recipe.fc_norm,
            norm_before_residual=True,
            norm_output=recipe.norm_output,
            mask_token_id=mask_token_id if self.kind == "peagle" else None,
        )


class PEagleFamily(Eagle3Family):
    """What a P-EAGLE head brings to its fit."""

    kind: str = "peagle"

    def build(self, tensors: Mapping[str, Tensor]) -> Trainee:
        config = self.config(int(tensors["mask_token_id"]))
        return PEagleTrainee(config, self.frozen, tensors, self.recipe.kept_share)


class EagleTrainee:
    """A head with parameters that have gradients.

    Args:
        tensors: parameters and centrings by name, as `solve_start` makes them.
    """

    def __init__(self, config: EagleConfig, frozen: Frozen, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.frozen = frozen
        self.fused, self.read = Centring.read(FUSED, tensors), Centring.read(READ, tensors)
        biases = ["fc.bias", *(f"{FIRST}{name}.bias" for name in ATTENTION)]
        self.parameters = {name: tensors[name].clone().requires_grad_() for name in (*config.shapes(), *biases)}
        self.tables: frozenset[str] = frozenset()

    def head(self, step: int, ids: Tensor) -> Tensor:
        return self.frozen.head[ids]

    def export(self, vocabulary: Ints) -> Exported:
        config = {name: value for name, value in asdict(self.config).items() if name != "kind" and value is not None}
        more = {"hidden_act": "silu", "max_positions": self.frozen.info.max_model_len}
        return Exported({**config, **more}, to_numpy(self._weights()))

    def _weights(self) -> dict[str, Tensor]:
        """The weights that the net runs with."""
        weights = {name: self.parameters[name] for name in self.config.shapes()}
        for centring, name in ((self.fused, "fc"), *((self.read, f"{FIRST}{part}") for part in ATTENTION)):
            weights[f"{name}.weight"] = centring.fold(weights[f"{name}.weight"], self.parameters[f"{name}.bias"])
        return weights

    def net(self, noise: Noise | None) -> EagleHead:
        """The net as it runs."""
        ops = TrainingOps(noise, self.frozen.embedding.dtype, self.frozen.ops.linear)
        weights = prepare(ops, self.config, self._weights(), torch.cat)
        ops.hide_inputs(weights["fc.weight"], self.fused.mean)
        for index, layer in enumerate(weights["layers"]):
            ops.hide_inputs(layer.qkv, self.read.mean if index == 0 else 0.0)
            ops.hide_inputs(layer.down)
        return EagleHead(ops, self.config, weights, self.frozen.embedding)


class Eagle3Trainee(EagleTrainee):
    """An EAGLE-3 head in training."""

    def unroll(self, batch: Batch, num_steps: int, noise: Noise | None = None) -> Iterator[tuple[Ints, Tensor]]:
        net, texts = self.net(noise), _texts(batch)
        if not texts:
            return
        places = np.concatenate([np.arange(first, last) for first, last in texts])
        memory = _Memory(net, len(texts), len(batch.tokens))
        states = net.fuse(batch.taps[places])
        for step in range(num_steps):
            wanted = batch.rows(step)
            rows = places if step == 0 else wanted
            if not len(wanted):
                return
            read, states = memory.run(batch, rows, step, states)
            kept = np.searchsorted(rows, wanted)
            yield wanted, read[kept]
            states = states[np.searchsorted(rows, batch.rows(step + 1))]


class _Memory:
    """The keys and values of all steps so far, with their gradients, and where the latest row of each position lies."""

    def __init__(self, net: EagleHead, num_texts: int, num_rows: int) -> None:
        config = net.config
        empty = torch.zeros(config.num_layers, config.num_kv_heads, 0, config.head_dim, dtype=net.embedding.dtype)
        self._net = net
        self._slots = [KVSlots(empty, empty, 0) for _ in range(num_texts)]
        self._latest = np.zeros(num_rows, np.int64)

    def run(self, batch: Batch, rows: Ints, step: int, features: Tensor) -> tuple[Tensor, Tensor]:
        """One step at `rows`: what the head reads there, and the states to feed back."""
        texts = _texts(batch)
        bounds = np.searchsorted(rows, [*(first for first, _ in texts), len(batch.tokens)])
        parents = np.concatenate(
            [
                self._grow(rows[a:b], step, len(s.pending))
                for s, a, b in zip(self._slots, bounds, bounds[1:], strict=False)
            ]
        )
        positions = (rows - batch.first[rows] + step).astype(np.int32)
        mask = Tree(parents, tuple(bounds.tolist()))
        tokens = batch.tokens[rows + 1 + step]
        result = self._net.forward(tokens, features, positions, Past(self._slots), mask)
        self._append(bounds.tolist(), parents)
        return result

    def _grow(self, rows: Ints, step: int, end: int) -> npt.NDArray[np.int32]:
        """The parents of the rows of one text: in the first step the position before, then the step before."""
        count = len(rows)
        parents = np.arange(count) - 1 if step == 0 else self._latest[rows]
        self._latest[rows] = end + np.arange(count)
        return parents.astype(np.int32)

    def _append(self, bounds: list[int], parents: npt.NDArray[np.int32]) -> None:
        stored = self._net.ops.stored  # type: ignore[attr-defined]  # TrainingOps
        keys, values = (torch.stack([stored[layer][i] for layer in sorted(stored)]).transpose(1, 2) for i in (0, 1))
        self._slots = [
            KVSlots(
                torch.cat((slots.keys, keys[:, :, a:b]), 2),
                torch.cat((slots.values, values[:, :, a:b]), 2),
                0,
                (*slots.pending, *parents[a:b].tolist()),
            )
            for slots, a, b in zip(self._slots, bounds, bounds[1:], strict=False)
        ]


class PEagleTrainee(EagleTrainee):
    """A P-EAGLE head in training.

    Args:
        kept_share: of the rows of a step, how many have a next one in training.
    """

    def __init__(
        self, config: EagleConfig, frozen: Frozen, tensors: Mapping[str, Tensor], kept_share: float = 1.0
    ) -> None:
        super().__init__(config, frozen, tensors)
        self._kept_share = kept_share
        self.mask_token_id = tensors["mask_token_id"].clone()

    def unroll(self, batch: Batch, num_steps: int, noise: Noise | None = None) -> Iterator[tuple[Ints, Tensor]]:
        depths = np.full(len(batch.tokens), num_steps)
        if noise is not None:
            # A row has a chain of d placeholders with probability share ** d, never one of two without the first.
            drawn = np.log(np.maximum(noise.draw(len(depths)), 1e-12)) / np.log(min(self._kept_share, 1 - 1e-9))
            depths = 1 + np.floor(drawn).astype(np.int64)
        net, texts = self.net(noise), _texts(batch)
        if not texts:
            return
        layout = _lay_out(batch, texts, depths, num_steps)
        real = layout.depths == 0
        features = torch.empty(len(layout.rows), self.config.hidden_size, dtype=self.frozen.embedding.dtype)
        features = features.index_put((torch.from_numpy(real),), net.fuse(batch.taps[layout.rows[real]]))
        if not real.all():
            features = features.index_put((torch.from_numpy(~real),), net.placeholders(int((~real).sum())))
        tokens = np.where(
            real, batch.tokens[np.minimum(layout.rows + 1, len(batch.tokens) - 1)], self.config.mask_token_id or 0
        )
        positions = layout.rows - batch.first[layout.rows] + layout.depths
        mask = Tree(layout.parents, layout.bounds)
        read, _ = net.forward(tokens.astype(np.int32), features, positions.astype(np.int32), None, mask)
        for step in range(num_steps):
            at = np.flatnonzero((layout.depths == step) & (layout.rows > batch.first[layout.rows]))
            if not len(at):
                return
            yield layout.rows[at], read[at]


@dataclass(frozen=True)
class _Layout:
    """Rows of P-EAGLE under one another: for each its position's row in the batch, how many placeholders stand between,
    and its parent in the tree of its text."""

    rows: Ints
    depths: Ints
    parents: npt.NDArray[np.int32]
    bounds: tuple[int, ...]


def _lay_out(batch: Batch, texts: Sequence[tuple[int, int]], lengths: Ints, num_steps: int) -> _Layout:
    """Each text's positions, then their first placeholders, their second ones, ...

    Args:
        lengths: for each row of the batch how many steps it has at most.
    """
    rows, depths, parents, bounds = [], [], [], [0]
    for first, last in texts:
        latest = np.arange(-1, last - first - 1)
        here, count = np.arange(first, last), 0
        for step in range(num_steps):
            if step > 0:
                goes_on = (here > first) & (here + 1 + step <= last) & (lengths[here] > step)
                here, latest = here[goes_on], latest[goes_on]
            rows.append(here)
            depths.append(np.full(len(here), step))
            parents.append(latest)
            latest = count + np.arange(len(here))
            count += len(here)
        bounds.append(bounds[-1] + count)
    return _Layout(
        np.concatenate(rows), np.concatenate(depths), np.concatenate(parents).astype(np.int32), tuple(bounds)
    )


def _texts(batch: Batch) -> list[tuple[int, int]]:
    """First and last row of each document that has something to predict."""
    firsts = np.unique(batch.first)
    return [(int(first), int(batch.last[first])) for first in firsts if batch.last[first] - first >= 2]


def _rarest_id(batches: Sequence[Batch], frozen: Frozen) -> int:
    """The id that is seen least, the last among equals: placeholders take its embedding."""
    counts = np.bincount(np.concatenate([b.tokens for b in batches]), minlength=frozen.info.vocab_size)
    return int(frozen.info.vocab_size - 1 - np.argmin(counts[::-1]))
