"""Stage `export` for other engines: a trained head as a folder that vLLM loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sakiyomi.assemble import LoadedModel
from sakiyomi.checkpoints.speculators import ALGORITHMS, write_speculators
from sakiyomi.errors import ParameterError
from sakiyomi.types import DrafterFile

FORMATS = ("sakiyomi", "speculators")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""transformers' class names, by which other engines know a target."""


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Settings of the stage `export`.

    Args:
        format: "sakiyomi" writes one file; "speculators" beside it a folder in the format that vLLM serves.
        target: what that folder names as its target, a hub id or a folder; "" takes the path of the target.
        num_speculative_tokens: tokens of a draft that the folder asks for.
    """

    format: str = "sakiyomi"
    target: str = ""
    num_speculative_tokens: int = 3

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ParameterError(f"export: format={self.format!r} is not allowed; give {' or '.join(FORMATS)}.")
        if self.num_speculative_tokens < 1:
            raise ParameterError(
                f"export: num_speculative_tokens={self.num_speculative_tokens} is not allowed; give at least 1."
            )


def check_export(config: ExportConfig, drafter: str, target: LoadedModel) -> None:
    """Refuse, before anything is trained, what could not be exported.

    Raises:
        ParameterError: a drafter or a target that the format has no room for.
    """
    if config.format == "sakiyomi":
        return
    if drafter not in ALGORITHMS:
        raise ParameterError(
            f"export: the format speculators has no room for the drafter {drafter}; it holds {', '.join(ALGORITHMS)}."
        )
    if target.model.lend() is None or target.model.info.architecture not in ARCHITECTURES:
        raise ParameterError(
            f"export: the format speculators names its target's class, and {target.model.info.architecture!r} is not "
            f"among {', '.join(ARCHITECTURES)}; take export.format=sakiyomi."
        )


def export_speculators(folder: Path, drafter: DrafterFile, target: LoadedModel, config: ExportConfig) -> None:
    """Write a head with the rows that it borrows of its target as vLLM reads it."""
    lent, info = target.model.lend(), target.model.info
    assert lent is not None, "check_export saw to it"
    ids = np.arange(info.vocab_size, dtype=np.int32)
    write_speculators(
        folder,
        drafter,
        target_name=config.target or str(target.path),
        target_architecture=ARCHITECTURES[info.architecture],
        embedding=lent.ops.to_numpy(lent.ops.embed(lent.embedding, ids)),
        head=lent.ops.to_numpy(lent.ops.embed(lent.head, ids if drafter.vocabulary is None else drafter.vocabulary)),
        num_speculative_tokens=config.num_speculative_tokens,
    )
