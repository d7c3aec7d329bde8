"""The closed-form start of EAGLE heads.

The residual stream begins with the direction of the target's last hidden state, the attention's heads look at their own
row alone, and what they add to it is a ridge regression to that direction one position on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sakiyomi.nets.eagle3 import EagleConfig
from sakiyomi.train.batches import Batch
from sakiyomi.train.centred import Centring
from sakiyomi.train.heads import Frozen
from sakiyomi.train.ridge import RidgeSums

FIRST = "layers.0.self_attn."
FUSED, READ = "fc.inputs", "read.inputs"
"""Names of the centrings of what `fc` reads and of what the first layer's attention reads."""
SHARPNESS = 5.0
"""How much higher the start's attention scores its own row than its neighbours."""
NUM_FAST, NUM_SLOW = 4, 3
"""Rotary pairs, from the fastest on, that tell a row from its neighbours; and those behind them, whose products fall
over as many rows as a draft is long, for placeholders that look back."""
NARROW = 0.05
"""Size of the first queries and keys that are not constant, against 1 / sqrt(inputs)."""


def solve_start(config: EagleConfig, frozen: Frozen, batches: Sequence[Batch], seed: int) -> dict[str, Tensor]:
    """Parameters and centrings of a head that begins as a linear regression."""
    generator = torch.Generator().manual_seed(seed)
    # States are fed back as the language-model head reads them, or as they are in front of the norm.
    space = frozen.norm if config.norm_output else torch.ones(config.hidden_size)
    tensors = _first_tensors(config, frozen, space, generator)
    tensors |= _solve_fusion(config, frozen, batches, tensors, space)
    reader = _Reader(config, frozen, batches, tensors)
    # The residual stream is to begin with a direction of size 1, not with what the head reads.
    lowest = 0.05 * float(space.abs().mean())
    tensors["layers.0.hidden_norm.weight"] = reader.find_size() / torch.where(space.abs() < lowest, lowest, space)
    sums = reader.regress(0, None)
    centring, maps = Centring.of(sums), [_Map.of(sums)]
    tensors |= centring.named(READ)
    placeholder = None
    if config.kind == "peagle":
        taps = torch.cat([batch.taps[batch.rows(0)] for batch in batches[:8]]).mean(0, keepdim=True)
        tensors["mask_hidden"] = taps.reshape(1, 1, -1)
        tensors["mask_token_id"] = torch.tensor(config.mask_token_id)
        inputs = reader.read(reader.fuse(taps), np.array([config.mask_token_id], np.int32))
        placeholder = _Placeholder.of(inputs[0], centring, sums)
        if config.num_kv_heads > 1:
            maps.append(_Map.of(reader.regress(1, inputs[:, config.hidden_size :])))
    return tensors | _solve_attention(config, maps, sums.correlation(), placeholder, generator)


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

    def regress(self, step: int, begin: Tensor | None) -> RidgeSums:
        """From what a row reads to what its residual stream lacks of the direction of the target's state 1 + step
        positions on.

        Args:
            begin: [1, H], where the stream begins; None where it does so with the row's own feature.
        """
        hidden = self._config.hidden_size
        sums = RidgeSums(2 * hidden, hidden)
        for batch in self._batches:
            rows = batch.rows(step)
            x = self.read(self.fuse(batch.taps[rows]), batch.tokens[rows + 1])
            goals = self._frozen.direction(batch.taps[rows + 1 + step, -hidden:])
            sums.add(x, goals - (x[:, hidden:] if begin is None else begin))
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

    def without(self, outputs: Tensor, values: _Map) -> _Map:
        """What is left for others when those add their part."""
        return _Map(self.weight - outputs @ values.weight, self.bias - outputs @ values.bias)


@dataclass(frozen=True)
class _Placeholder:
    """What a placeholder of P-EAGLE reads, and how it is told from other rows.

    Attributes:
        inputs: centred and scaled [K].
        constant: what stands for the 1 of the bias.
        detector: [K], 1 on the inputs and near 0 on those of other rows.
    """

    inputs: Tensor
    constant: float
    detector: Tensor

    @classmethod
    def of(cls, read: Tensor, centring: Centring, sums: RidgeSums) -> _Placeholder:
        constant = float(centring.constant @ read)
        inputs = (read - centring.mean * constant) / centring.std
        along = torch.linalg.solve(sums.correlation().float(), inputs)
        return cls(inputs, constant, along / (along @ inputs))

    def set(self, values: _Map, wanted: Tensor) -> _Map:
        """The map changed such that it says `wanted` [N] on a placeholder, and hardly anything else on other rows."""
        missing = wanted - values.weight @ self.inputs - values.bias * self.constant
        return _Map(values.weight + torch.outer(missing, self.detector), values.bias)


def _solve_attention(
    config: EagleConfig,
    maps: Sequence[_Map],
    correlation: Tensor,
    placeholder: _Placeholder | None,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """The first layer's attention as a map of each row alone.

    Queries and keys are the same constant everywhere, which the rotation makes most alike at one and the same row.
    Values and outputs are the two factors of the map, cut to the rank that the heads have room for.

    Of P-EAGLE a third of the heads add nothing of their own: their placeholders look at the last row that is none, and
    say the second map of it, two positions on. On other rows the first heads take that back.
    """
    width, num_kv = config.head_dim, config.num_kv_heads
    num_ahead = max(1, num_kv // 3) if len(maps) > 1 else 0
    fast, slow = _pattern(config, 0, NUM_FAST, 256), _pattern(config, NUM_FAST, NUM_SLOW, 8)
    now, parts = maps[0], []
    if num_ahead:
        outputs, values = maps[1].factor(num_ahead * width, correlation)
        now = now.without(outputs, values)
        parts = [(outputs, values)]
    outputs, values = now.factor((num_kv - num_ahead) * width, correlation)
    if placeholder is not None:
        values = placeholder.set(values, torch.zeros(len(values.bias)))
    parts = [(outputs, values), *parts]
    tensors = _name("v_proj", [values for _, values in parts])
    tensors[f"{FIRST}o_proj.weight"] = _share_outputs(config, torch.cat([outputs for outputs, _ in parts], 1))
    for name, repeats in (("q_proj", config.num_heads // num_kv), ("k_proj", 1)):
        counts = ((num_kv - num_ahead) * repeats, num_ahead * repeats)
        heads = [
            _constant(fast if i == 0 or name == "q_proj" else fast + slow, n, config, generator)
            for i, n in enumerate(counts)
        ]
        if placeholder is not None and num_ahead:
            wanted = slow if name == "q_proj" else torch.zeros(width)
            heads[1] = placeholder.set(heads[1], wanted.repeat(counts[1]))
        tensors |= _name(name, heads)
    return tensors


def _name(name: str, maps: Sequence[_Map]) -> dict[str, Tensor]:
    """Maps under one another as the tensors of a projection."""
    weight, bias = torch.cat([one.weight for one in maps]), torch.cat([one.bias for one in maps])
    return {f"{FIRST}{name}.weight": weight, f"{FIRST}{name}.bias": bias}


def _share_outputs(config: EagleConfig, outputs: Tensor) -> Tensor:
    """Outputs [H, G * D] of key/value heads, for the query heads that share them in equal parts [H, Q * D]."""
    shared = config.num_heads // config.num_kv_heads
    parts = outputs.reshape(len(outputs), config.num_kv_heads, 1, config.head_dim).expand(-1, -1, shared, -1)
    return (parts / shared).reshape(len(outputs), -1).contiguous()


def _constant(pattern: Tensor, count: int, config: EagleConfig, generator: torch.Generator) -> _Map:
    """Queries or keys of some heads that are nearly the same for all inputs."""
    width = 2 * config.hidden_size
    noise = torch.randn(count * len(pattern), width, generator=generator)
    return _Map(NARROW * noise / width**0.5, pattern.repeat(count))


def _pattern(config: EagleConfig, first: int, count: int, reach: int) -> Tensor:
    """A vector [D] on some rotary pairs whose product with itself, rotated to another row, is lower by `SHARPNESS`."""
    half = config.head_dim // 2
    pairs = slice(min(first, half - 1), min(first + count, half))
    lost = float((1 - np.cos(np.arange(1, reach)[:, None] * config.spec.inv_freq[pairs])).sum(1).min())
    pattern = torch.zeros(config.head_dim)
    pattern[pairs] = float(np.sqrt(SHARPNESS * np.sqrt(config.head_dim) / lost))
    return pattern
