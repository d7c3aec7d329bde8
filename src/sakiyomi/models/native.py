"""Models that run on our own CPU kernels; rows are the same bits whatever is computed beside them."""

from __future__ import annotations

from typing import Literal, Self

from sakiyomi.models.base import DecoderModel, load_decoder
from sakiyomi.models.packed import PackedFile
from sakiyomi.ops.native import NativeOps
from sakiyomi.types import Checkpoint


class NativeModel(DecoderModel):
    """A decoder over `ops.native` (`types.Model`)."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: Literal["int8", "float32"] = "int8",
        threads: int | None = None,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        keep_packed: bool = True,
    ) -> Self:
        """Build the model of a checkpoint.

        Args:
            dtype: "int8" holds matrices in groups of 32 unsigned values, 4 bits each where they fit, as Q4_0, Q4_1 and
                Q8_0 files have them, and rounds activations to 8 bits in such groups; "float32" rounds nothing.
            threads: worker threads; None takes as many as NativeOps chooses.
            max_model_len: positions of the context; None takes the model's own.
            vocab_size: ids that have logits; None takes the rows of the model's head.
            keep_packed: keep the packed weights in the user's cache for the next start (models/packed.py).

        Raises:
            CheckpointError: an unsupported or incomplete checkpoint.
            ParameterError: an unknown precision, a number of threads below 1, or a size outside the model's.
            MissingExtraError: the kernels were not built.
        """
        packing = NativeOps(dtype=dtype, threads=threads).packing
        packed = PackedFile.of(checkpoint.files, packing) if keep_packed and checkpoint.files else None
        ops = NativeOps(dtype=dtype, threads=threads, store=packed)
        model = cls(*load_decoder(ops, checkpoint, dtype=dtype, max_model_len=max_model_len, vocab_size=vocab_size))
        if packed is not None:
            packed.save()
        return model
