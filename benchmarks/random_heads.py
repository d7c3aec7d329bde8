"""Heads of realistic sizes with random weights: what they guess is worthless, what they cost is not.

    python benchmarks/random_heads.py eagle3 --model smollm2 --out head.safetensors
    python benchmarks/random_heads.py peagle --model smollm2 --format speculators --out folder --target-name TARGET

The first writes a file of ours, to be drafted with; the second what vLLM reads.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.assemble import ModelOptions, load_model
from sakiyomi.checkpoints.drafter import write_drafter
from sakiyomi.checkpoints.speculators import write_speculators
from sakiyomi.nets.binding import describe_target
from sakiyomi.ops.native import quantize
from sakiyomi.types import DrafterFile, Lent, ModelInfo

KINDS = ("eagle3", "peagle", "medusa")


def random_head(kind: str, info: ModelInfo, lent: Lent, *, num_ids: int = 4096, **flags: Any) -> DrafterFile:
    """An untrained head for a target.

    Args:
        kind: "eagle3", "peagle" or "medusa".
        num_ids: drafted ids.
        flags: further keys of the configuration.
    """
    rng = np.random.default_rng(0)
    width = info.hidden_size

    def draw(*shape: int) -> npt.NDArray[np.float32]:
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    ids = np.sort(rng.choice(info.vocab_size, num_ids, replace=False)).astype(np.int32)
    target = describe_target(info, lent)
    if kind == "medusa":
        config: dict[str, Any] = {"num_heads": 4, "num_layers": 1, "hidden_size": width}
        tensors = {f"heads.{head}.0.weight": 0.1 * draw(width, width) for head in range(4)}
        return DrafterFile(kind=kind, config=config, taps=(), target=target, tensors=tensors, vocabulary=ids)
    inner, num_heads, num_kv_heads = 8 * width // 3 // 64 * 64, width // 64, max(width // 192, 1)
    layer, taps = "layers.0.", (2, info.num_layers // 2, info.num_layers - 3)
    sizes = {"q": 64 * num_heads, "k": 64 * num_kv_heads, "v": 64 * num_kv_heads}
    tensors = {
        "fc.weight": draw(width, 3 * width),
        **{f"{layer}self_attn.{name}_proj.weight": draw(size, 2 * width) for name, size in sizes.items()},
        f"{layer}self_attn.o_proj.weight": draw(width, 64 * num_heads),
        f"{layer}mlp.gate_proj.weight": draw(inner, width),
        f"{layer}mlp.up_proj.weight": draw(inner, width),
        f"{layer}mlp.down_proj.weight": draw(width, inner),
        **{f"{layer}{name}.weight": np.ones(width, np.float32) for name in ("input_layernorm", "hidden_norm")},
        f"{layer}post_attention_layernorm.weight": np.ones(width, np.float32),
        "norm.weight": np.ones(width, np.float32),
    }
    if kind == "peagle":
        tensors["mask_hidden"] = draw(1, 1, 3 * width)
    config = {
        "hidden_size": width,
        "target_hidden_size": width,
        "inner_size": inner,
        "num_layers": 1,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 64,
        "num_taps": 3,
        "vocab_size": info.vocab_size,
        "eps": lent.eps,
        "rope": {"rope_theta": 10000.0},
        "hidden_act": "silu",
        **dict.fromkeys(("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output"), False),
        **({"mask_token_id": 0} if kind == "peagle" else {}),
        "max_positions": info.max_model_len,
        **flags,
    }
    return DrafterFile(kind=kind, config=config, taps=taps, target=target, tensors=tensors, vocabulary=ids)


def round_head(head: DrafterFile, bits: int) -> DrafterFile:
    """The head with its matrices in 4 or 8 bits in groups of 32."""
    rounded = {
        name: quantize(tensor, bits) if tensor.ndim == 2 and tensor.shape[1] % 32 == 0 else tensor
        for name, tensor in head.tensors.items()
        if isinstance(tensor, np.ndarray)
    }
    return replace(head, tensors=rounded)


def write_for_vllm(folder: Path, head: DrafterFile, lent: Lent, target_name: str) -> None:
    """A speculators folder with the target's embedding, and its rows where the head has none of its own."""
    ids = np.arange(head.config["vocab_size"], dtype=np.int32)
    embedding = np.asarray(lent.ops.to_numpy(lent.ops.embed(lent.embedding, ids)), np.float32)
    drafted = ids if head.vocabulary is None else head.vocabulary
    rows = np.asarray(lent.ops.to_numpy(lent.ops.embed(lent.head, drafted)), np.float32)
    names = {"target_name": target_name, "target_architecture": "LlamaForCausalLM"}
    write_speculators(folder, head, **names, embedding=embedding, head=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ids", type=int, default=4096)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8, help="of the matrices in a file of ours")
    parser.add_argument("--format", choices=("own", "speculators"), default="own")
    parser.add_argument("--target-name", default="target")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = load_model(arguments.model, ModelOptions()).model
    lent = model.lend()
    assert lent is not None, "native and torch models lend"
    head = random_head(arguments.kind, model.info, lent, num_ids=arguments.ids)
    if arguments.format == "own":
        write_drafter(arguments.out, round_head(head, arguments.bits))
    else:
        write_for_vllm(arguments.out, head, lent, arguments.target_name)
    print(arguments.out)


if __name__ == "__main__":
    main()
