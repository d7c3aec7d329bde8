"""EAGLE heads as their authors and SpecForge or ModelOpt publish them: config.json with Llama's keys, and weights.

EAGLE-1 and EAGLE-2 (Li et al., 2024) share a layout; EAGLE-3 (2025) with the options of 3.1, and P-EAGLE (Hui et al.,
2026), which adds `mask_hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sakiyomi.checkpoints.files import read_json
from sakiyomi.checkpoints.layout import EAGLE_KINDS, LAYERS, eagle_tensors, input_layers, read_eagle_layout
from sakiyomi.errors import CheckpointError
from sakiyomi.types import DrafterFile, Tensor

MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""In the order in which engines look for it."""


def read_eagle(folder: Path, tensors: Mapping[str, Tensor]) -> DrafterFile:
    """An official EAGLE-1, EAGLE-3 or P-EAGLE folder.

    Args:
        tensors: its weights, whatever kind of file holds them.

    Raises:
        CheckpointError: what `read_eagle_layout` finds wrong.
    """
    config = read_json(folder / "config.json", EAGLE_KINDS)
    renamed = eagle_tensors(folder, tensors)
    kind = _kind(folder, renamed)
    if kind == "peagle":
        config["mask_token_id"] = _mask_token(folder, config)
    return read_eagle_layout(folder, config, renamed, taps=_taps(folder, config), kind=kind)


def _kind(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    if "fc.weight" not in tensors or "layers.0.self_attn.q_proj.weight" not in tensors:
        raise CheckpointError(
            f"{folder} has no fc.weight and midlayer.self_attn.q_proj.weight, so it is no EAGLE head; "
            "give the folder of an EAGLE-1, EAGLE-3, P-EAGLE or Medusa head."
        )
    if "mask_hidden" in tensors:
        return "peagle"
    hidden, fused = tensors["fc.weight"].shape
    is_wide = tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * hidden
    # The width that attention reads tells the kinds apart also where a target is so wide that fc's width does not.
    return "eagle3" if is_wide or fused != 2 * hidden else "eagle1"


def _taps(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The list of layers by our count. A list that begins with 1 counts outputs, one that begins later inputs."""
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return None
    if not LAYERS.fits(ids) or min(ids) < 0:
        raise CheckpointError(f"{folder}: eagle_aux_hidden_state_layer_ids is {ids!r}; it must be {LAYERS.words}.")
    return input_layers(ids, is_output_of=ids[0] == 1)


def _mask_token(folder: Path, config: Mapping[str, Any]) -> int:
    for place in (config.get("dflash_config") or {}, config):
        for key in MASK_TOKEN_KEYS:
            if type(place.get(key)) is int:
                return int(place[key])
    raise CheckpointError(
        f"{folder} holds mask_hidden, so it drafts in parallel, but config.json names no mask_token_id; "
        "add the id that it was trained with."
    )
