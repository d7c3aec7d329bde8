"""The closed-form start: ridge regression from normed, centred, scaled inputs to what they are to predict.

A network whose largest matrices start as the least-squares solution begins where gradient descent would be after many
thousand rows. Sums are taken once over the data, in double precision; centring and scaling happen on the sums.

Letters: N rows, K inputs, H outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LOWEST_STD = 1e-4
RIDGE = 0.02
"""Added to the correlation matrix's diagonal, which is 1."""


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation [K] of the inputs of a matrix."""

    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Solution:
    """y = weight ((x - mean) / std) + bias.

    Attributes:
        weight: float32 [H, K].
        bias: float32 [H].
    """

    moments: Moments
    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32]


class RidgeSums:
    """Sums from which the regression is solved."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        self.num_rows = 0
        self._x = torch.zeros(num_inputs, dtype=torch.float64)
        self._y = torch.zeros(num_outputs, dtype=torch.float64)
        self._xx = torch.zeros(num_inputs, num_inputs, dtype=torch.float64)
        self._xy = torch.zeros(num_inputs, num_outputs, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in rows x [N, K] and y [N, H]."""
        self.num_rows += len(x)
        self._x += x.sum(0, dtype=torch.float64)
        self._y += y.sum(0, dtype=torch.float64)
        self._xx += (x.T @ x).double()
        self._xy += (x.T @ y).double()

    def solve(self, ridge: float = RIDGE) -> Solution:
        """The regression of all rows taken in."""
        assert self.num_rows > 0, "a regression needs rows"
        mean, std, target = *self._moments(), self._y / self.num_rows
        cross = (self._xy / self.num_rows - torch.outer(mean, target)) / std[:, None]
        weight = torch.linalg.solve(self.correlation(ridge), cross).T
        return Solution(Moments(_floats(mean), _floats(std)), _floats(weight), _floats(target))

    def solve_constant(self, ridge: float = RIDGE) -> npt.NDArray[np.float32]:
        """Weights u [K] with u x near 1 on all rows: what serves as a bias in a matrix that has none.

        Hidden states behind a norm allow it, since some of their dimensions are far from 0 everywhere.
        """
        mean, std = self._moments()
        weights = torch.linalg.solve(self.correlation(ridge), mean / std) / std
        return _floats(weights / (weights @ mean))

    def correlation(self, ridge: float = RIDGE) -> Tensor:
        """The inputs' correlation matrix [K, K] in double precision, with `ridge` on its diagonal."""
        mean, std = self._moments()
        covariance = self._xx / self.num_rows - torch.outer(mean, mean)
        return covariance / torch.outer(std, std) + ridge * torch.eye(len(std), dtype=torch.float64)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the inputs [K]."""
        assert self.num_rows > 0, "a regression needs rows"
        mean = self._x / self.num_rows
        variance = self._xx.diagonal() / self.num_rows - mean**2
        return mean, variance.clamp(min=LOWEST_STD**2).sqrt()


def _floats(values: Tensor) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(values.numpy(), np.float32)
