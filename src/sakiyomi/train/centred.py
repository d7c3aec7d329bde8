"""Matrices that train on centred, scaled inputs, and the memory that makes unrolled attention exact.

Some dimensions of a hidden state have a mean of many standard deviations; gradient descent needs them centred. A matrix
without a bias cannot take that up, but behind a norm there is a direction u in which all inputs are near 1, so that
W (x - mean) / std + c becomes the plain matrix W / std (1 - mean u) + c u. Whatever u is, that is only another way to
write down the matrix which runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.ops.base import Past
from sakiyomi.ops.torch import TorchOps
from sakiyomi.train.heads import Noise
from sakiyomi.train.ridge import RidgeSums


@dataclass(frozen=True)
class Centring:
    """What is known of the inputs of a matrix: mean, standard deviation, and the weights of a constant, each [K]."""

    mean: Tensor
    std: Tensor
    constant: Tensor

    @classmethod
    def of(cls, sums: RidgeSums) -> Centring:
        """From the inputs that a regression took in."""
        moments = sums.solve().moments
        return cls(*(torch.from_numpy(part) for part in (moments.mean, moments.std, sums.solve_constant())))

    @classmethod
    def read(cls, prefix: str, tensors: Mapping[str, Tensor]) -> Centring:
        """What `named` wrote."""
        return cls(*(tensors[f"{prefix}.{name}"].clone() for name in ("mean", "std", "constant")))

    def named(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.mean": self.mean, f"{prefix}.std": self.std, f"{prefix}.constant": self.constant}

    def fold(self, weight: Tensor, bias: Tensor) -> Tensor:
        """The matrix [N, K] that runs, of the one that is trained and its bias [N]."""
        scaled = weight / self.std
        return scaled + torch.outer(bias - scaled @ self.mean, self.constant)


class TrainingOps(TorchOps):
    """Ops that hide some inputs of chosen matrices, and whose caches keep gradients.

    The rows of a call with a past are not written into it; they are left in `stored`, for the caller to append.

    Args:
        linear: what multiplies; `TorchOps.linear` or `RoundedOps.linear`.

    Attributes:
        stored: keys and values [R, G, D] of the last call by layer.
    """

    def __init__(
        self,
        noise: Noise | None = None,
        dtype: torch.dtype = torch.float32,
        linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
    ) -> None:
        super().__init__(dtype)
        self._multiply = linear
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._noise = noise
        self._hidden: list[tuple[Tensor, Tensor | float]] = []

    def hide_inputs(self, weight: Tensor, mean: Tensor | float = 0.0) -> None:
        """From now on some inputs of a matrix are put at their mean."""
        self._hidden.append((weight, mean))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._noise is not None:
            for hidden, mean in self._hidden:
                if hidden is weight:
                    x = mean + self._noise.hide(x - mean)
        return self._multiply(x, weight, bias)

    def store(self, past: Past, k: Tensor, v: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.stored[past.layer] = (k, v)
        return k, v


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, npt.NDArray[np.float32]]:
    """Float32 copies without gradients."""
    return {name: np.array(tensor.detach().float().numpy()) for name, tensor in tensors.items()}
