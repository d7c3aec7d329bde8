"""Models that run on torch: any precision, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from sakiyomi.errors import ParameterError
from sakiyomi.models.base import DecoderModel, load_decoder
from sakiyomi.ops.torch import TorchOps
from sakiyomi.types import Checkpoint, Output, Span

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class TorchModel(DecoderModel):
    """A decoder over `ops.torch` (`types.Model`)."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_model_len: int | None = None,
        vocab_size: int | None = None,
    ) -> Self:
        """Build the model of a checkpoint.

        Args:
            dtype: precision of weights, activations and cache: float32, bfloat16, float16 or float64.
            device: a torch device.
            max_model_len: positions of the context; None takes the model's own.
            vocab_size: ids that have logits; None takes the rows of the model's head.

        Raises:
            CheckpointError: an unsupported or incomplete checkpoint.
            ParameterError: an unknown precision or device, or a size outside the model's.
        """
        if dtype not in DTYPES:
            raise ParameterError(f"dtype={dtype!r} is not allowed; torch models take {', '.join(DTYPES)}.")
        ops = TorchOps(DTYPES[dtype], device)
        return cls(*load_decoder(ops, checkpoint, dtype=dtype, max_model_len=max_model_len, vocab_size=vocab_size))

    def forward(self, spans: Sequence[Span]) -> list[Output]:
        """Run all spans in one pass, without gradients; see `DecoderModel.forward`."""
        with torch.no_grad():
            return super().forward(spans)
