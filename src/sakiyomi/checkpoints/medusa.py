"""Medusa heads (Cai et al., 2024) as their authors publish them and as vLLM keeps them.

Head i is L residual blocks x + silu(W x + b) and a matrix to logits; it predicts the token i + 2 positions on. The
number of heads is taken from the tensors: published configurations are known to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.checkpoints.files import FLAG, INTEGER, TEXT, read_json
from sakiyomi.checkpoints.layout import Checker
from sakiyomi.errors import CheckpointError
from sakiyomi.types import DrafterFile, Tensor

KINDS = {
    **dict.fromkeys(("medusa_num_heads", "medusa_num_layers", "num_heads", "num_hidden_layers"), INTEGER),
    **dict.fromkeys(("hidden_size", "vocab_size", "truncated_vocab_size"), INTEGER),
    **dict.fromkeys(("medusa_fc_bias", "original_lm_head"), FLAG),
    **dict.fromkeys(("model_type", "base_model_name_or_path"), TEXT),
}
OFFICIAL = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def read_medusa(folder: Path, tensors: Mapping[str, Tensor]) -> DrafterFile:
    """A folder of Medusa heads, in either layout.

    Our names: `heads.{i}.{l}.weight`, `.bias` of the blocks and `lm_heads.{i}.weight`, absent where the target's own
    head is shared.

    Args:
        tensors: its weights.

    Raises:
        CheckpointError: missing, unknown, misshapen or not finite tensors, and a bias that the configuration denies.
    """
    config = read_json(folder / "config.json", KINDS)
    renamed = _rename(folder, tensors)
    check = Checker(folder, renamed)
    num_heads, num_layers = _count(folder, renamed)
    hidden = check.shape("heads.0.0.weight", 2)[0]
    vocabulary = _vocabulary(folder, tensors.get("token_map"))
    has_heads = "lm_heads.0.weight" in renamed
    rows = check.shape("lm_heads.0.weight", 2)[0] if has_heads else config.get("vocab_size")
    if vocabulary is not None and has_heads and len(vocabulary) != rows:
        raise CheckpointError(f"{folder}: token_map names {len(vocabulary)} ids but the heads have {rows} rows.")
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            expected[f"heads.{head}.{layer}.weight"] = (hidden, hidden)
            if f"heads.{head}.{layer}.bias" in renamed:
                expected[f"heads.{head}.{layer}.bias"] = (hidden,)
        if has_heads:
            expected[f"lm_heads.{head}.weight"] = (rows or 0, hidden)
    _check_counts(folder, config, num_heads, num_layers, hidden)
    return DrafterFile(
        kind="medusa",
        config={"num_heads": num_heads, "num_layers": num_layers, "hidden_size": hidden, "vocab_size": rows},
        taps=(),
        target={"hidden_size": hidden, "name": config.get("base_model_name_or_path")},
        tensors=check.take(expected),
        vocabulary=vocabulary,
    )


def _rename(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our names. The matrix behind a head's blocks is its way to logits: the one that is not square, or the last."""
    renamed: dict[str, Tensor] = {}
    official: dict[int, dict[int, dict[str, Tensor]]] = {}
    for name in tensors:
        if name == "token_map":
            continue
        if found := VLLM_BLOCK.fullmatch(name):
            renamed[f"heads.{found[1]}.{found[2]}.{found[3]}"] = tensors[name]
        elif found := VLLM_HEAD.fullmatch(name):
            renamed[f"lm_heads.{found[1]}.weight"] = tensors[name]
        elif found := OFFICIAL.fullmatch(name):
            is_block = ".linear." in name
            key = found[3] if is_block else "head"
            official.setdefault(int(found[1]), {}).setdefault(int(found[2]), {})[key] = tensors[name]
        else:
            raise CheckpointError(
                f"{folder} holds {name}, which no Medusa head has; it would be ignored silently. Is it another kind?"
            )
    for head, layers in official.items():
        for layer, parts in layers.items():
            for key, tensor in parts.items():
                own = f"lm_heads.{head}.weight" if key == "head" else f"heads.{head}.{layer}.{key}"
                renamed[own] = tensor
    return renamed


def _count(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    blocks = [(int(parts[1]), int(parts[2])) for parts in (name.split(".") for name in tensors) if parts[0] == "heads"]
    heads, layers = {head for head, _ in blocks}, {layer for _, layer in blocks}
    if not blocks or heads != set(range(len(heads))) or layers != set(range(len(layers))):
        raise CheckpointError(
            f"{folder} holds blocks {sorted(set(blocks))[:6]}; heads and their layers must count from 0 without a gap."
        )
    return len(heads), len(layers)


def _vocabulary(folder: Path, token_map: Tensor | None) -> npt.NDArray[np.int32] | None:
    if token_map is None:
        return None
    ids = np.asarray(token_map).astype(np.int64)
    if ids.ndim != 1 or len(ids) == 0 or ids.min() < 0 or (np.diff(ids) <= 0).any():
        raise CheckpointError(f"{folder}: token_map must name ascending ids; export the heads again.")
    return ids.astype(np.int32)


def _check_counts(folder: Path, config: Mapping[str, Any], num_heads: int, num_layers: int, hidden: int) -> None:
    is_vllm = config.get("model_type") == "medusa"
    told = config.get("num_heads" if is_vllm else "medusa_num_heads")
    if told is not None and told > num_heads:
        raise CheckpointError(
            f"{folder}: config.json tells of {told} heads but the weights hold {num_heads}; the file is incomplete."
        )
    told_layers = config.get("num_hidden_layers" if is_vllm else "medusa_num_layers")
    for key, value, found in (("layers", told_layers, num_layers), ("hidden_size", config.get("hidden_size"), hidden)):
        if value is not None and value != found:
            raise CheckpointError(f"{folder}: config.json gives {key} as {value} but the weights have {found}.")
