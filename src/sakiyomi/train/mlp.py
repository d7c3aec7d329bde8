"""The MLP speculator in training: its closed-form start, its parameters, and how it is unrolled.

Its large matrices see inputs that are centred and scaled, which is what makes them trainable: some dimensions of a
hidden state have a mean of many standard deviations. The net itself knows nothing of that; each step folds the moments
into the weights that it runs with, and so do the gradients find their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sakiyomi.nets.mlp import MlpConfig, MlpSpeculator
from sakiyomi.train.batches import Batch, Ints
from sakiyomi.train.heads import Dropout, Frozen, keep_all
from sakiyomi.train.ridge import RidgeSums, Solution
from sakiyomi.types import Tensor as Stored

MOMENTS = ("start.mean", "start.std", "advance.mean", "advance.std")


class MlpTrainee:
    """An MLP speculator with parameters that have gradients.

    Args:
        tensors: parameters and moments by name, as `first_tensors` makes them.
    """

    kind = "mlp"

    def __init__(self, config: MlpConfig, frozen: Frozen, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.frozen = frozen
        self.moments = {name: tensors[name].clone() for name in MOMENTS}
        self.parameters = {name: tensors[name].clone().requires_grad_() for name in config.shapes()}

    def unroll(self, batch: Batch, num_steps: int, dropout: Dropout = keep_all) -> Iterator[tuple[Ints, Tensor]]:
        net = self._net(dropout)
        rows = batch.rows(0)
        states = net.start(batch.taps[rows], batch.tokens[rows + 1])
        for step in range(num_steps):
            if step > 0:
                later = batch.rows(step)
                states = net.advance(states[np.searchsorted(rows, later)], batch.tokens[later + 1 + step])
                rows = later
            yield rows, net.features(states)

    def export(self) -> tuple[Mapping[str, Any], dict[str, Stored]]:
        with torch.no_grad():
            weights = {name: weight.numpy() for name, weight in self._weights().items()}
        config = {name: getattr(self.config, name) for name in ("hidden_size", "inner_size", "eps")}
        return config, {name: weight.astype(np.float32) for name, weight in weights.items()}

    def _net(self, dropout: Dropout) -> MlpSpeculator:
        def hide(name: str, x: Tensor) -> Tensor:
            if dropout is keep_all:
                return x
            # What is hidden is put at its mean, since the weights expect inputs that are not centred.
            mean = self.moments.get(f"{name}.mean")
            return dropout(x) if mean is None else mean + dropout(x - mean)

        return MlpSpeculator(self.frozen.ops, self.config, self._weights(), self.frozen.embedding, hide)

    def _weights(self) -> dict[str, Tensor]:
        """The weights that the net runs with."""
        weights = dict(self.parameters)
        for name in ("start", "advance"):
            scaled = weights[f"{name}.weight"] / self.moments[f"{name}.std"]
            weights[f"{name}.weight"] = scaled
            weights[f"{name}.bias"] = weights[f"{name}.bias"] - scaled @ self.moments[f"{name}.mean"]
        return weights


def solve_start(config: MlpConfig, frozen: Frozen, batches: Iterator[Batch], seed: int) -> dict[str, Tensor]:
    """The closed-form start: parameters and moments of a net that is a linear regression.

    The first matrix maps taps and token to the direction of the target's last state one position on. The second does so
    from what the first one says, so that it is ready for the errors it will meet. The inner layer begins at zero.

    Args:
        batches: read twice; give an iterator over a list.
    """
    kept = list(batches)
    hidden = config.hidden_size
    starts = RidgeSums((config.num_taps + 1) * hidden, hidden)
    for batch in kept:
        rows = batch.rows(0)
        starts.add(_inputs(frozen, batch.taps[rows], batch.tokens[rows + 1]), _goals(frozen, batch, rows + 1))
    first = starts.solve()
    advances = RidgeSums(2 * hidden, hidden)
    for batch in kept:
        rows = batch.rows(1)
        guesses = _apply(first, _inputs(frozen, batch.taps[rows], batch.tokens[rows + 1]))
        advances.add(_inputs(frozen, guesses, batch.tokens[rows + 2]), _goals(frozen, batch, rows + 2))
    return _assemble(config, frozen, first, advances.solve(), seed)


def _assemble(config: MlpConfig, frozen: Frozen, first: Solution, second: Solution, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.inner_size
    tensors = {
        "inner_norm.weight": torch.ones(hidden),
        "gate_up.weight": torch.randn(2 * inner, hidden, generator=generator) / hidden**0.5,
        "down.weight": torch.zeros(hidden, inner),
        "norm.weight": frozen.norm.clone(),
    }
    for name, solution in (("start", first), ("advance", second)):
        tensors[f"{name}.weight"] = torch.from_numpy(solution.weight)
        tensors[f"{name}.bias"] = torch.from_numpy(solution.bias)
        tensors[f"{name}.mean"] = torch.from_numpy(solution.moments.mean)
        tensors[f"{name}.std"] = torch.from_numpy(solution.moments.std)
    return tensors


def _inputs(frozen: Frozen, left: Tensor, token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> Tensor:
    """The normed inputs of a matrix, as the net makes them."""
    x = torch.cat([left, frozen.ops.embed(frozen.embedding, token_ids)], -1)
    hidden = frozen.embedding.shape[1]
    return frozen.ops.rms_norm(x.reshape(-1, hidden), torch.ones(hidden), frozen.eps).reshape(x.shape)


def _goals(frozen: Frozen, batch: Batch, rows: Ints) -> Tensor:
    """The directions of the target's last states at some rows."""
    hidden = frozen.embedding.shape[1]
    return frozen.ops.rms_norm(batch.taps[rows, -hidden:], torch.ones(hidden), frozen.eps)


def _apply(solution: Solution, x: Tensor) -> Tensor:
    centred = (x - torch.from_numpy(solution.moments.mean)) / torch.from_numpy(solution.moments.std)
    return centred @ torch.from_numpy(solution.weight).T + torch.from_numpy(solution.bias)
