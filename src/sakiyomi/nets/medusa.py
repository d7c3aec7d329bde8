"""Medusa heads, written once over `ops` (Cai et al., "Medusa", 2024).

Every head reads the target's last hidden state behind its final norm and guesses, without knowing the guesses of the
others, one token further on: head i the token i + 2 positions behind the state's. A head is a few residual blocks
x + silu(W x + b) in front of a language-model head, its own or the target's.

Letters: R rows, H hidden width, N heads, L blocks of a head, K drafted ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sakiyomi.errors import CheckpointError
from sakiyomi.ops.base import DraftRoom, GreedyRules, MedusaWeights, Ops
from sakiyomi.tree import Draft
from sakiyomi.types import Array, DrafterFile, Lent, Tensor


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Shape of the heads.

    Attributes:
        num_heads, num_layers: N and L.
    """

    num_heads: int
    num_layers: int
    hidden_size: int

    @classmethod
    def read(cls, stored: DrafterFile) -> MedusaConfig:
        """From a drafter file.

        Raises:
            CheckpointError: a number is missing or is none.
        """
        try:
            return cls(**{name: int(stored.config[name]) for name in cls.__dataclass_fields__})
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the drafter's configuration {dict(stored.config)} is not that of medusa."
            ) from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the blocks by name; biases may be absent, and so may `lm_heads.{i}.weight` [K, H]."""
        hidden = self.hidden_size
        names = [f"heads.{head}.{layer}" for head in range(self.num_heads) for layer in range(self.num_layers)]
        return {f"{name}.weight": (hidden, hidden) for name in names} | {f"{name}.bias": (hidden,) for name in names}


class MedusaHeads:
    """The net with weights in the form that `ops` wants.

    Args:
        blocks: for each layer the matrices of all heads under one another [N * H, H] in the first layer, where all
            heads read the same, and one [H, H] per head behind it; with the biases likewise.
        heads: the language-model heads [K, H], one for all or one per head.
        final_norm: weight and eps of the target's.
    """

    def __init__(
        self,
        ops: Ops,
        config: MedusaConfig,
        blocks: Sequence[Sequence[tuple[Any, Array | None]]],
        heads: Sequence[Any],
        final_norm: tuple[Array, float],
    ) -> None:
        self.ops = ops
        self.config = config
        norm, eps = final_norm
        ones = ops.array(np.ones(config.hidden_size, np.float32))
        self._weights = MedusaWeights(blocks=blocks, heads=heads, norm=norm, eps=eps, ones=ones)

    @classmethod
    def load(cls, config: MedusaConfig, tensors: Mapping[str, Tensor], lent: Lent, head: Any) -> MedusaHeads:
        """The net of tensors as they are stored.

        Args:
            head: what the heads share where they have none of their own, rows of the target's.

        Raises:
            CheckpointError: a tensor that is missing or has another shape.
        """
        for name, shape in config.shapes().items():
            tensor = tensors.get(name)
            if (tensor is None and not name.endswith(".bias")) or (tensor is not None and tuple(tensor.shape) != shape):
                found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
                raise CheckpointError(f"the heads' tensor {name} is {found}; it must be {list(shape)}.")
        ops: Ops = lent.ops
        count = config.num_heads
        blocks = [_first_block(ops, config, tensors)]
        for layer in range(1, config.num_layers):
            blocks.append([_block(ops, tensors, f"heads.{index}.{layer}") for index in range(count)])
        own = [tensors.get(f"lm_heads.{index}.weight") for index in range(count)]
        heads = [head] if own[0] is None else [ops.weight(tensor) for tensor in own if tensor is not None]
        if len(heads) not in (1, count):
            raise CheckpointError(f"{len(heads)} of {count} heads have a matrix to logits; all must have one, or none.")
        return cls(ops, config, blocks, heads, (lent.norm, lent.eps))

    def features(self, states: Array, num_heads: int) -> list[Array]:
        """What the language-model heads read [R, H], of the first `num_heads` heads.

        Args:
            states: the target's last hidden states [R, H], in front of its final norm.
        """
        ops, hidden = self.ops, self.config.hidden_size
        weights = self._weights
        x = ops.rms_norm(states, weights.norm, weights.eps)
        stacked = ops.linear(x, *weights.blocks[0][0])
        parts = stacked[:, : num_heads * hidden].reshape(-1, hidden)
        repeated = ops.concat([x] * num_heads).reshape(-1, hidden)
        joined = ops.add(repeated, self._silu(parts)).reshape(len(x), num_heads, hidden)
        rows = [joined[:, index] for index in range(num_heads)]
        for layer in weights.blocks[1:]:
            rows = [ops.add(row, self._silu(ops.linear(row, *layer[index]))) for index, row in enumerate(rows)]
        return rows

    def logits(self, features: Sequence[Array]) -> list[Array]:
        """Logits [R, K] of each head."""
        heads = self._weights.heads
        if len(heads) > 1:
            return [self.ops.linear(row, head) for row, head in zip(features, heads, strict=False)]
        # One product for all, which reads the shared matrix once.
        num_rows, hidden = features[0].shape
        rows = self.ops.concat(list(features)).reshape(-1, hidden)
        logits = self.ops.linear(rows, heads[0]).reshape(num_rows, len(features), -1)
        return [logits[:, index] for index in range(len(features))]

    def draft(self, states: Array, rules: GreedyRules, rooms: Sequence[DraftRoom]) -> list[Draft | None]:
        """Drafts of the most probable tokens; None where one has to be grown level by level (`Ops.medusa_drafts`)."""
        return self.ops.medusa_drafts(states, self._weights, rules, rooms)

    def _silu(self, x: Array) -> Array:
        one = self._weights.ones.reshape(1, -1)
        ones = one.repeat(len(x), 0) if isinstance(one, np.ndarray) else one.expand(len(x), -1)
        return self.ops.silu_mul(self.ops.concat([x, ones]))


def _first_block(ops: Ops, config: MedusaConfig, tensors: Mapping[str, Tensor]) -> list[tuple[Any, Array | None]]:
    names = [f"heads.{index}.0" for index in range(config.num_heads)]
    matrices = [tensors[f"{name}.weight"] for name in names]
    weight = ops.weight(matrices if len(matrices) > 1 else matrices[0])
    biases = [np.asarray(tensors.get(f"{name}.bias", np.zeros(config.hidden_size)), np.float32) for name in names]
    return [(weight, ops.array(np.concatenate(biases)))]


def _block(ops: Ops, tensors: Mapping[str, Tensor], name: str) -> tuple[Any, Array | None]:
    bias = tensors.get(f"{name}.bias")
    return ops.weight(tensors[f"{name}.weight"]), None if bias is None else ops.array(np.asarray(bias, np.float32))
