"""Products of matrices in bfloat16 for training: processors with matrix units take an eighth of the time for them.

Operands and results are rounded; weights, gradients, the sums within a product and all between products are float32
(mixed precision, Micikevicius et al., 2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sakiyomi.ops.torch import TorchOps

STEP, LONG_STEP = 64, 256
"""Sizes that the first does not divide are padded to multiples of the second.

A library that compiles a kernel for each shape takes longer for that than for the product, and each batch has another
number of rows.
"""


class RoundedOps(TorchOps):
    """Linear layers whose operands and results are rounded to bfloat16, forwards and backwards."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [R, K] -> [R, N]."""
        product: Tensor = _RoundedProduct.apply(x, weight.T)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias


class _RoundedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        narrow_left, narrow_right = _round(left), _round(right)
        ctx.save_for_backward(narrow_left, narrow_right)
        ctx.shapes = left.shape, right.shape
        return _cut(narrow_left @ narrow_right, left.shape[0], right.shape[1])

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> tuple[Tensor | None, ...]:
        left, right = ctx.saved_tensors
        (num_rows, width), (_, num_outputs) = ctx.shapes
        slope = _round(upstream[0])
        wants_left, wants_right = ctx.needs_input_grad
        of_left = _cut(slope @ right.T, num_rows, width) if wants_left else None
        return of_left, _cut(left.T @ slope, width, num_outputs) if wants_right else None


def _round(matrix: Tensor) -> Tensor:
    """The matrix in bfloat16, padded with zeros; its order in memory stays."""
    if matrix.stride(0) == 1 and matrix.stride(1) > 1:
        return _round(matrix.T).T
    rows, columns = (size if size % STEP == 0 else -(-size // LONG_STEP) * LONG_STEP for size in matrix.shape)
    if matrix.shape == (rows, columns):
        return matrix.to(torch.bfloat16)
    padded = torch.empty(rows, columns, dtype=torch.bfloat16)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    padded[matrix.shape[0] :] = 0
    padded[:, matrix.shape[1] :] = 0
    return padded


def _cut(product: Tensor, num_rows: int, num_columns: int) -> Tensor:
    return product[:num_rows, :num_columns].float()
