"""Heads in the `speculators` format, which vLLM serves: EAGLE-3 and P-EAGLE, read and written."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from sakiyomi.checkpoints.files import FLAG, INTEGER, OBJECT, TEXT, WEIGHTS_NAME, read_json
from sakiyomi.checkpoints.layout import (
    EAGLE_KINDS,
    FLAGS,
    LAYERS,
    eagle_tensors,
    input_layers,
    offsets_of,
    read_eagle_layout,
)
from sakiyomi.errors import CheckpointError
from sakiyomi.types import DrafterFile, Quantized, Tensor

logger = logging.getLogger("sakiyomi")

ALGORITHMS = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}
VERSION = "0.3.0"
KINDS = {
    **dict.fromkeys(("speculators_model_type", "speculators_version"), TEXT),
    **dict.fromkeys(("transformer_layer_config", "speculators_config"), OBJECT),
    **dict.fromkeys(("draft_vocab_size", "target_hidden_size", "mask_token_id"), INTEGER),
    **dict.fromkeys(FLAGS, FLAG),
    "eagle_aux_hidden_state_layer_ids": LAYERS,
}


def read_speculators(folder: Path, tensors: Mapping[str, Tensor]) -> DrafterFile:
    """A folder in the speculators format.

    Args:
        tensors: its weights.

    Raises:
        CheckpointError: an algorithm that is not supported, and what `read_eagle_layout` finds wrong.
    """
    config = read_json(folder / "config.json", KINDS)
    kind = config.get("speculators_model_type")
    if kind not in ALGORITHMS:
        raise CheckpointError(f"{folder} holds a speculator of type {kind!r}; supported are {', '.join(ALGORITHMS)}.")
    flat = _flatten(folder, config)
    if "norm_before_residual" not in config:
        # vLLM's loader then takes True for eagle3, the library's own class False.
        flat["norm_before_residual"] = kind == "eagle3"
        logger.warning(
            "%s does not tell norm_before_residual; %s is taken, as vLLM does. `sakiyomi doctor` tries both.",
            folder,
            flat["norm_before_residual"],
        )
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    taps = None if ids is None else input_layers(ids, is_output_of=False)
    return read_eagle_layout(folder, flat, eagle_tensors(folder, tensors), taps=taps, kind=str(kind))


def _flatten(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a native configuration: those of the layers, and the speculator's own."""
    layers = config.get("transformer_layer_config")
    if layers is None:
        raise CheckpointError(f"{folder / 'config.json'} has no transformer_layer_config; export the drafter again.")
    for key in EAGLE_KINDS:
        _check(folder, key, layers.get(key))
    own = {key: value for key, value in config.items() if key in KINDS and value is not None}
    return {**layers, **own}


def _check(folder: Path, key: str, value: Any) -> None:
    if value is not None and not EAGLE_KINDS[key].fits(value):
        raise CheckpointError(
            f"{folder / 'config.json'}: {key} of transformer_layer_config is {value!r}; "
            f"it must be {EAGLE_KINDS[key].words}."
        )


def write_speculators(
    folder: Path,
    drafter: DrafterFile,
    *,
    target_name: str,
    target_architecture: str,
    embedding: npt.NDArray[np.float32] | None = None,
    head: npt.NDArray[np.float32] | None = None,
    num_speculative_tokens: int = 3,
) -> None:
    """Write an EAGLE-3 or P-EAGLE head as vLLM reads it.

    Args:
        target_name: path or hub id of the model that verifies.
        target_architecture: transformers' class name ("LlamaForCausalLM").
        embedding: the target's [V, H], written where the drafter has none of its own.
        head: the target's rows of the drafted ids [K, H], likewise.

    Raises:
        CheckpointError: a kind that the format has no room for, or a lent matrix that is missing.
    """
    if drafter.kind not in ALGORITHMS:
        raise CheckpointError(
            f"a drafter of kind {drafter.kind!r} has no place in the speculators format; "
            f"it holds {', '.join(ALGORITHMS)}."
        )
    tensors = {name: _expand(tensor) for name, tensor in drafter.tensors.items()}
    for name, lent in (("embed_tokens.weight", embedding), ("lm_head.weight", head)):
        if name not in tensors and lent is None:
            raise CheckpointError(f"the drafter has no {name} of its own; give the target's to write it.")
        tensors.setdefault(name, np.asarray(lent, np.float32))
    vocab_size = drafter.config["vocab_size"]
    ids = np.arange(vocab_size, dtype=np.int32) if drafter.vocabulary is None else drafter.vocabulary
    marks = np.zeros(vocab_size, np.bool_)
    marks[ids] = True
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, npt.NDArray[Any]] = {**tensors, "d2t": offsets_of(ids), "t2d": marks}
    save_file({name: np.ascontiguousarray(arrays[name]) for name in sorted(arrays)}, folder / WEIGHTS_NAME)
    config = _config(drafter, len(ids), target_name, target_architecture, num_speculative_tokens)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _expand(tensor: Tensor) -> npt.NDArray[np.float32]:
    return tensor.dequantize() if isinstance(tensor, Quantized) else np.asarray(tensor, np.float32)


def _config(drafter: DrafterFile, num_drafted: int, name: str, architecture: str, num_tokens: int) -> dict[str, Any]:
    own = drafter.config
    theta = own["rope"].get("rope_theta")
    scaling = {key: value for key, value in own["rope"].items() if key != "rope_theta"}
    layers = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": own["hidden_size"],
        "intermediate_size": own["inner_size"],
        "num_hidden_layers": own["num_layers"],
        "num_attention_heads": own["num_heads"],
        "num_key_value_heads": own["num_kv_heads"],
        "head_dim": own["head_dim"],
        "hidden_act": own["hidden_act"],
        "vocab_size": own["vocab_size"],
        "rms_norm_eps": own["eps"],
        "rope_theta": theta,
        "rope_scaling": scaling or None,
        "max_position_embeddings": own.get("max_positions"),
        "num_aux_hidden_states": own["num_taps"],  # vLLM takes 3 otherwise, whatever the list of layers
        "attention_bias": any(name.endswith("q_proj.bias") for name in drafter.tensors),
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config: dict[str, Any] = {
        "architectures": [ALGORITHMS[drafter.kind]],
        "speculators_model_type": drafter.kind,
        "speculators_version": VERSION,
        "transformer_layer_config": layers,
        "draft_vocab_size": num_drafted,
        "target_hidden_size": own["target_hidden_size"] if own["target_hidden_size"] != own["hidden_size"] else None,
        "eagle_aux_hidden_state_layer_ids": list(drafter.taps),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        **{flag: own[flag] for flag in FLAGS},
        "speculators_config": {
            "algorithm": drafter.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": [architecture]},
        },
    }
    if drafter.kind == "peagle":
        config["mask_token_id"] = own["mask_token_id"]
    return config
