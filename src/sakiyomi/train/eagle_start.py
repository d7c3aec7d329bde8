"""The closed-form start of EAGLE heads.

The residual stream begins with the direction of the target's last hidden state, the attention's heads look at their own
row alone, and what they add to it is a ridge regression to that direction one position on.

P-EAGLE has further heads that look a fixed number of rows back. On a placeholder that many rows behind the last true
one they find that row, and add the regression so many positions further on. Nearer placeholders, and true rows, find
rows before it, whose guess for the same position is a part of their own; farther ones find placeholders, which say
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sakiyomi.nets.eagle3 import ATTENTION, EagleConfig
from sakiyomi.train.batches import Batch
from sakiyomi.train.centred import Centring
from sakiyomi.train.heads import Frozen
from sakiyomi.train.ridge import RidgeSums

FIRST = "layers.0.self_attn."
FUSED, READ = "fc.inputs", "read.inputs"
"""Names of the centrings of what `fc` reads and of what the first layer's attention reads."""
SHARPNESS, MAX_DISTANCE = 5.0, 256
"""How much higher the start's attention scores the row that it looks at than others up to a distance."""
NUM_FAST = 4
"""Rotary pairs, the fastest ones, that tell a row from its neighbours."""
NARROW = 0.05
"""Size of the first queries and keys that are not constant, against 1 / sqrt(inputs)."""


def solve_start(
    config: EagleConfig, frozen: Frozen, batches: Sequence[Batch], seed: int, num_steps: int = 1
) -> dict[str, Tensor]:
    """Parameters and centrings of a head that begins as a linear regression.

    Args:
        num_steps: tokens that P-EAGLE drafts in one pass.
    """
    generator = torch.Generator().manual_seed(seed)
    # States are fed back as the language-model head reads them, or as they are in front of the norm.
    space = frozen.norm if config.norm_output else torch.ones(config.hidden_size)
    tensors = _first_tensors(config, frozen, space, generator)
    tensors |= _solve_fusion(config, frozen, batches, tensors, space)
    reader = _Reader(config, frozen, batches, tensors)
    # The residual stream is to begin with a direction of size 1, not with what the head reads.
    lowest = 0.05 * float(space.abs().mean())
    tensors["layers.0.hidden_norm.weight"] = reader.find_size() / torch.where(space.abs() < lowest, lowest, space)
    placeholder = None
    if config.kind == "peagle":
        taps = torch.cat([batch.taps[batch.rows(0)] for batch in batches[:8]]).mean(0, keepdim=True)
        tensors["mask_hidden"] = taps.reshape(1, 1, -1)
        tensors["mask_token_id"] = torch.tensor(config.mask_token_id)
        placeholder = reader.read(reader.fuse(taps), np.array([config.mask_token_id], np.int32))
    return tensors | _solve_attention(config, reader, placeholder, num_steps, generator)


class _Reader:
    """What the first layer reads, with the tensors so far."""

    def __init__(
        self, config: EagleConfig, frozen: Frozen, batches: Sequence[Batch], tensors: Mapping[str, Tensor]
    ) -> None:
        self._config = config
        self._frozen = frozen
        self._batches = batches
        self._tensors = tensors
        self._fc = Centring.read(FUSED, tensors).fold(tensors["fc.weight"], tensors["fc.bias"])

    def fuse(self, taps: Tensor) -> Tensor:
        """Features [R, H] of hidden states [R, A * H]."""
        return _fusion_inputs(self._config, self._frozen, taps, self._tensors) @ self._fc.T

    def find_size(self) -> float:
        """The mean size of a feature."""
        parts = [self.fuse(batch.taps[batch.rows(0)]).square().mean().sqrt() for batch in self._batches]
        return float(np.mean([float(part) for part in parts]))

    def read(self, features: Tensor, token_ids: npt.NDArray[np.int32]) -> Tensor:
        """The inputs [R, 2H] of the attention."""
        frozen, config = self._frozen, self._config
        begins = frozen.ops.rms_norm(features, self._tensors["layers.0.hidden_norm.weight"], config.eps)
        return torch.cat((frozen.direction(frozen.ops.embed(frozen.embedding, token_ids)), begins), -1)

    def regress(self, step: int, num_steps: int, begin: Tensor | None, others: Sequence[_Look]) -> RidgeSums:
        """From what a row reads to what its residual stream lacks of the direction of the target's state 1 + step
        positions on.

        Args:
            num_steps: all of them; only rows with so many before and behind them are taken.
            begin: [1, H], where the stream begins; None where it does so with the row's own feature.
            others: what other heads add already.
        """
        hidden = self._config.hidden_size
        sums = RidgeSums(2 * hidden, hidden)
        for batch in self._batches:
            rows = batch.rows(num_steps - 1)
            rows = rows[rows - batch.first[rows] >= num_steps]
            x = self.read(self.fuse(batch.taps[rows]), batch.tokens[rows + 1])
            goals = self._frozen.direction(batch.taps[rows + 1 + step, -hidden:])
            goals = goals - (x[:, hidden:] if begin is None else begin)
            for other in others:
                before = rows - (other.distance - step)
                goals = goals - other.add(self.read(self.fuse(batch.taps[before]), batch.tokens[before + 1]))
            sums.add(x, goals)
        return sums


def _first_tensors(config: EagleConfig, frozen: Frozen, space: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Norms that do nothing, matrices that say nothing, and random ones where gradients are to arise."""
    tensors = {}
    for name, shape in config.shapes().items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = torch.zeros(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    tensors["norm.weight"] = frozen.norm.clone()
    if config.fc_norm:
        tensors[f"fc_norm.{config.num_taps - 1}.weight"] = space.clone()
    return tensors


def _solve_fusion(
    config: EagleConfig, frozen: Frozen, batches: Sequence[Batch], tensors: Mapping[str, Tensor], space: Tensor
) -> dict[str, Tensor]:
    """`fc` such that a feature is the target's last state: the last tap itself where it has a norm of its own, else the
    regression to it."""
    hidden = config.hidden_size
    sums = RidgeSums(config.num_taps * hidden, hidden)
    for batch in batches:
        rows = batch.rows(0)
        inputs = _fusion_inputs(config, frozen, batch.taps[rows], tensors)
        sums.add(inputs, space * frozen.direction(batch.taps[rows, -hidden:]))
    centring = Centring.of(sums)
    if config.fc_norm:
        weight = torch.zeros(hidden, config.num_taps * hidden)
        weight[:, -hidden:] = torch.diag(centring.std[-hidden:])
        bias = centring.mean[-hidden:].clone()
    else:
        solution = sums.solve()
        weight, bias = torch.from_numpy(solution.weight), torch.from_numpy(solution.bias)
    return {"fc.weight": weight, "fc.bias": bias, **centring.named(FUSED)}


def _fusion_inputs(config: EagleConfig, frozen: Frozen, taps: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    if not config.fc_norm:
        return taps
    parts = torch.split(taps, config.target_hidden_size, -1)
    norms = [tensors[f"fc_norm.{index}.weight"] for index in range(config.num_taps)]
    return torch.cat([frozen.ops.rms_norm(*pair, config.eps) for pair in zip(parts, norms, strict=True)], -1)


@dataclass(frozen=True)
class _Map:
    """x -> weight x + bias of centred, scaled inputs: [N, K] and [N]."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, sums: RidgeSums) -> _Map:
        solution = sums.solve()
        return cls(torch.from_numpy(solution.weight), torch.from_numpy(solution.bias))

    def factor(self, rank: int, correlation: Tensor) -> tuple[Tensor, _Map]:
        """Outputs [N, rank] and values whose product is the map, or the one of that rank that is nearest on inputs of
        some correlation [K, K] (reduced-rank regression)."""
        whole = torch.cat((self.weight, self.bias[:, None]), 1).double()
        spread = torch.cat((whole[:, :-1] @ torch.linalg.cholesky(correlation), whole[:, -1:]), 1)
        left, sizes, _ = torch.linalg.svd(spread, full_matrices=False)
        count = min(rank, len(sizes))
        scales = sizes[:count].clamp(min=1e-6).sqrt()
        outputs, values = torch.zeros(len(whole), rank), torch.zeros(rank, whole.shape[1])
        outputs[:, :count] = (left[:, :count] * scales).float()
        values[:count] = (left[:, :count].T @ whole / scales[:, None]).float()
        return outputs, _Map(values[:, :-1], values[:, -1])


@dataclass(frozen=True)
class _Look:
    """Key/value heads that look at the row so many before their own.

    Attributes:
        outputs: [H, rank].
        values: to [rank], of centred, scaled inputs.
        folded: the values' matrix for the plain inputs.
    """

    distance: int
    outputs: Tensor
    values: _Map
    folded: Tensor

    def add(self, read: Tensor) -> Tensor:
        """What they add where they look at rows that read [R, 2H]."""
        added: Tensor = (read @ self.folded.T) @ self.outputs.T
        return added


@dataclass(frozen=True)
class _Placeholder:
    """How the inputs of P-EAGLE's placeholders are told from those of other rows.

    Attributes:
        inputs: centred and scaled [K].
        constant: what they make of the constant.
        detector: [K], 1 on the inputs and near 0 on those of other rows.
    """

    inputs: Tensor
    constant: float
    detector: Tensor

    @classmethod
    def of(cls, read: Tensor, centring: Centring, correlation: Tensor) -> _Placeholder:
        constant = float(centring.constant @ read[0])
        inputs = (read[0] - centring.mean * constant) / centring.std
        along = torch.linalg.solve(correlation.float(), inputs)
        return cls(inputs, constant, along / (along @ inputs))

    def set(self, values: _Map, wanted: Tensor) -> _Map:
        """The map changed such that it says `wanted` [N] on a placeholder, and nearly what it said on other rows."""
        missing = wanted - values.weight @ self.inputs - values.bias * self.constant
        return _Map(values.weight + torch.outer(missing, self.detector), values.bias)


def _solve_attention(
    config: EagleConfig, reader: _Reader, placeholder: Tensor | None, num_steps: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """The first layer's attention as maps of single rows.

    Keys are the same constant everywhere, and so are queries but for a rotation, by which they are most alike at one
    distance. Values and outputs are the two factors of a map, cut to the rank that the heads have room for.
    """
    counts = _share_heads(config.num_kv_heads, num_steps if placeholder is not None else 1)
    looks: list[_Look] = []
    for step in reversed(range(len(counts))):
        begin = None if step == 0 or placeholder is None else placeholder[:, config.hidden_size :]
        sums = reader.regress(step, len(counts), begin, looks)
        centring, correlation = Centring.of(sums), sums.correlation()
        outputs, values = _Map.of(sums).factor(counts[step] * config.head_dim, correlation)
        if placeholder is not None:
            values = _Placeholder.of(placeholder, centring, correlation).set(values, torch.zeros_like(values.bias))
        looks.insert(0, _Look(step, outputs, values, centring.fold(values.weight, values.bias)))
    shared, pattern = config.num_heads // config.num_kv_heads, _sharp_pattern(config)
    rotated = [_rotate(config, pattern, -step).repeat(count * shared) for step, count in enumerate(counts)]
    queries, keys = (_nearly(bias, config, generator) for bias in (torch.cat(rotated), pattern.repeat(sum(counts))))
    if placeholder is not None:
        known = _Placeholder.of(placeholder, centring, correlation)
        queries, keys = known.set(queries, queries.bias), known.set(keys, keys.bias)
    values = _Map(torch.cat([x.values.weight for x in looks]), torch.cat([x.values.bias for x in looks]))
    tensors = {f"{FIRST}o_proj.weight": _share_outputs(config, torch.cat([look.outputs for look in looks], 1))}
    for name, one in zip(ATTENTION, (queries, keys, values), strict=True):
        tensors |= {f"{FIRST}{name}.weight": one.weight, f"{FIRST}{name}.bias": one.bias}
    return {**tensors, **centring.named(READ)}


def _share_heads(num_kv_heads: int, num_steps: int) -> list[int]:
    """How many key/value heads look at the row itself, one before it, two before it, ...: half of them at the row
    itself, the others at as many distances as there are steps, rather at near ones."""
    if num_steps == 1 or num_kv_heads == 1:
        return [num_kv_heads]
    others = num_kv_heads // 2
    num_looks = min(num_steps - 1, others)
    looks = [others // num_looks + (index < others % num_looks) for index in range(num_looks)]
    return [num_kv_heads - others, *looks]


def _share_outputs(config: EagleConfig, outputs: Tensor) -> Tensor:
    """Outputs [H, G * D] of key/value heads, for the query heads that share them in equal parts [H, Q * D]."""
    shared = config.num_heads // config.num_kv_heads
    parts = outputs.reshape(len(outputs), config.num_kv_heads, 1, config.head_dim).expand(-1, -1, shared, -1)
    return (parts / shared).reshape(len(outputs), -1).contiguous()


def _nearly(bias: Tensor, config: EagleConfig, generator: torch.Generator) -> _Map:
    """Queries or keys that are nearly the same on all rows."""
    width = 2 * config.hidden_size
    noise = torch.randn(len(bias), width, generator=generator)
    return _Map(noise * (NARROW / math.sqrt(width)), bias)


def _sharp_pattern(config: EagleConfig) -> Tensor:
    """A vector [D] whose product with itself, rotated to another row, is lower by `SHARPNESS` at least."""
    count = min(NUM_FAST, config.head_dim // 2)
    distances = np.arange(1, MAX_DISTANCE)[:, None]
    lost = float((1 - np.cos(distances * config.spec.inv_freq[:count])).sum(1).min())
    pattern = torch.zeros(config.head_dim)
    pattern[:count] = float(np.sqrt(SHARPNESS * np.sqrt(config.head_dim) / lost))
    return pattern


def _rotate(config: EagleConfig, pattern: Tensor, distance: int) -> Tensor:
    """The pattern [D] as it stands some rows further on."""
    angles = torch.from_numpy(distance * config.spec.inv_freq.astype(np.float64)).float()
    first, second = pattern.chunk(2)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))
