"""A recurrent MLP speculator, written once over `ops`.

It reads a few hidden states of the target at the last verified position (the taps) and the embedding of the token that
follows, and predicts the token behind that one; further tokens come from its own state fed back. No attention and no
cache: a relative of the speculators of Wertheimer et al. (2024), with the frozen embedding and head of the target.

    start:    x = [norm(tap) of each tap, norm(embed(token))]
    advance:  x = [norm(state), norm(embed(token))]
    both:     fused = W x + b,  state = fused + down(silu_mul(gate_up(norm(fused)))),  logits = head(norm(state))

Letters: R rows, H hidden width, T taps, I inner width, K ids of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError
from sakiyomi.ops.base import Ops
from sakiyomi.types import Array, Tensor

Dropout = Callable[[str, Array], Array]
"""From the name of a matrix and its inputs to the inputs with some of them hidden."""

MATRICES = ("start.weight", "advance.weight", "gate_up.weight", "down.weight")
VECTORS = ("start.bias", "advance.bias", "inner_norm.weight", "norm.weight")


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """Shape of a speculator.

    Attributes:
        num_taps: T, hidden states of the target that it reads.
        eps: of its norms.
    """

    hidden_size: int
    inner_size: int
    num_taps: int
    eps: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors by name. Matrices are [outputs, inputs]; gate and up are stacked."""
        hidden, inner = self.hidden_size, self.inner_size
        return {
            "start.weight": (hidden, (self.num_taps + 1) * hidden),
            "start.bias": (hidden,),
            "advance.weight": (hidden, 2 * hidden),
            "advance.bias": (hidden,),
            "inner_norm.weight": (hidden,),
            "gate_up.weight": (2 * inner, hidden),
            "down.weight": (hidden, inner),
            "norm.weight": (hidden,),
        }


class MlpSpeculator:
    """The net with weights in the form that `ops` wants.

    Args:
        weights: the tensors of `MlpConfig.shapes`, matrices made by `Ops.weight` and vectors by `Ops.array`.
        embedding: the target's, [V, H].
        dropout: put on the inputs of the large matrices while the net is trained.
    """

    def __init__(
        self,
        ops: Ops,
        config: MlpConfig,
        weights: Mapping[str, Any],
        embedding: Any,
        dropout: Dropout = lambda name, x: x,
    ) -> None:
        self.ops = ops
        self.config = config
        self.weights = weights
        self.embedding = embedding
        self._dropout = dropout
        self._ones = ops.array(np.ones(config.hidden_size, np.float32))

    @classmethod
    def load(cls, ops: Ops, config: MlpConfig, tensors: Mapping[str, Tensor], embedding: Any) -> MlpSpeculator:
        """The net of tensors as they are stored.

        Raises:
            CheckpointError: a tensor that is missing or has another shape.
        """
        weights: dict[str, Any] = {}
        for name, shape in config.shapes().items():
            tensor = tensors.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
                raise CheckpointError(f"the drafter's tensor {name} is {found}; it must be {list(shape)}.")
            weights[name] = ops.weight(tensor) if name in MATRICES else ops.array(np.asarray(tensor, np.float32))
        return cls(ops, config, weights, embedding)

    def start(self, taps: Array, token_ids: npt.NDArray[np.int32]) -> Array:
        """The states [R, H] that predict what follows `token_ids` [R].

        Args:
            taps: the target's hidden states [R, T * H] at the positions in front of the tokens.
        """
        return self._fuse("start", [taps, self.ops.embed(self.embedding, token_ids)])

    def advance(self, states: Array, token_ids: npt.NDArray[np.int32]) -> Array:
        """The states one token further, given the states that were to predict `token_ids` [R]."""
        return self._fuse("advance", [states, self.ops.embed(self.embedding, token_ids)])

    def features(self, states: Array) -> Array:
        """What the head reads [R, H]."""
        return self.ops.rms_norm(states, self.weights["norm.weight"], self.config.eps)

    def logits(self, states: Array, head: Any) -> Array:
        """Logits [R, K] over the rows of a head [K, H]."""
        return self.ops.linear(self.features(states), head)

    def _fuse(self, name: str, parts: list[Array]) -> Array:
        ops, weights, config = self.ops, self.weights, self.config
        x = ops.concat(parts)
        num_rows, width = x.shape
        normed = ops.rms_norm(x.reshape(-1, config.hidden_size), self._ones, config.eps).reshape(num_rows, width)
        fused = ops.linear(self._dropout(name, normed), weights[f"{name}.weight"], weights[f"{name}.bias"])
        inner = ops.linear(ops.rms_norm(fused, weights["inner_norm.weight"], config.eps), weights["gate_up.weight"])
        return ops.add(fused, ops.linear(self._dropout("down", ops.silu_mul(inner)), weights["down.weight"]))
