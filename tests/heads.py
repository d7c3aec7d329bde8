"""Tiny random heads in the layouts in which they are published, for the target that `write_llama` makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Arrays = dict[str, npt.NDArray[Any]]

TARGET = {"hidden": 64, "vocab": 257, "layers": 2}
DRAFTED = 96


def eagle3_parts(
    *,
    taps: tuple[int, ...] = (0, 1, 2),
    prefix: str = "midlayer.",
    vocab: int = TARGET["vocab"],
    seed: int = 1,
    **flags: Any,
) -> tuple[dict[str, Any], Arrays]:
    """config.json and tensors of an official EAGLE-3 head; `flags` go into the configuration."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads, kv_heads, dim = TARGET["hidden"], 80, 4, 2, 16

    def draw(*shape: int) -> npt.NDArray[np.float32]:
        return rng.normal(0, 0.2, shape).astype(np.float32)

    tensors: Arrays = {
        "fc.weight": draw(hidden, len(taps) * hidden),
        f"{prefix}self_attn.q_proj.weight": draw(heads * dim, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": draw(kv_heads * dim, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": draw(kv_heads * dim, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": draw(hidden, heads * dim),
        f"{prefix}mlp.gate_proj.weight": draw(inner, hidden),
        f"{prefix}mlp.up_proj.weight": draw(inner, hidden),
        f"{prefix}mlp.down_proj.weight": draw(hidden, inner),
        **{
            f"{prefix}{n}.weight": 1 + draw(hidden)
            for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "norm.weight": 1 + draw(hidden),
        "lm_head.weight": draw(DRAFTED, hidden),
    }
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": 1 + draw(hidden) for i in range(len(taps))}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + draw(len(taps) * hidden)
    if "mask_token_id" in flags:
        tensors["mask_hidden"] = draw(1, 1, len(taps) * hidden)
    ids = np.sort(rng.choice(vocab, DRAFTED, replace=False))
    tensors["d2t"] = ids - np.arange(DRAFTED)
    tensors["t2d"] = np.isin(np.arange(vocab), ids)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocab,
        "draft_vocab_size": DRAFTED,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
        **flags,
    }
    return config, tensors


def eagle1_parts(seed: int = 2) -> tuple[dict[str, Any], Arrays]:
    """config.json and tensors of an official EAGLE-1 head."""
    config, tensors = eagle3_parts(prefix="layers.0.", seed=seed)
    rng = np.random.default_rng(seed)
    hidden = TARGET["hidden"]
    for name in ("q_proj", "k_proj", "v_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        tensors[key] = np.ascontiguousarray(tensors[key][:, :hidden])
    tensors["fc.weight"] = rng.normal(0, 0.2, (hidden, 2 * hidden)).astype(np.float32)
    tensors["fc.bias"] = rng.normal(0, 0.2, hidden).astype(np.float32)
    for name in ("norm", "lm_head", "layers.0.input_layernorm", "layers.0.hidden_norm"):
        del tensors[f"{name}.weight"]
    del tensors["d2t"], tensors["t2d"]
    kept = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size", "rms_norm_eps")
    return {**{key: config[key] for key in kept}, "architectures": ["LlamaForCausalLM"], "bias": True}, tensors


def medusa_parts(*, vllm: bool = False, num_heads: int = 3, seed: int = 3) -> tuple[dict[str, Any], Arrays]:
    """config.json and tensors of Medusa heads, official or as vLLM keeps them."""
    rng = np.random.default_rng(seed)
    hidden, vocab = TARGET["hidden"], TARGET["vocab"]
    tensors: Arrays = {}
    for head in range(num_heads):
        weight = rng.normal(0, 0.2, (hidden, hidden)).astype(np.float32)
        bias = rng.normal(0, 0.2, hidden).astype(np.float32)
        rows = rng.normal(0, 0.2, (vocab, hidden)).astype(np.float32)
        names = (
            (f"blocks.{head}.layers.0.weight", f"blocks.{head}.layers.0.bias", f"lm_heads.{head}.weight")
            if vllm
            else (f"{head}.0.linear.weight", f"{head}.0.linear.bias", f"{head}.1.weight")
        )
        tensors |= dict(zip(names, (weight, bias, rows), strict=True))
    if vllm:
        return {"model_type": "medusa", "hidden_size": hidden, "vocab_size": vocab, "num_heads": num_heads}, tensors
    return {"medusa_num_heads": num_heads, "medusa_num_layers": 1, "version": "2"}, tensors


def write_head(folder: Path, config: dict[str, Any], tensors: Arrays, name: str = "model.safetensors") -> Path:
    """A folder of these."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
