"""Tiny random models of many kinds, and what tests of them share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from sakiyomi.assemble import LoadedModel
from sakiyomi.models.hf import HFModel
from sakiyomi.params import SamplingParams
from sakiyomi.sampling.choose import rank
from sakiyomi.types import History, Model, Span

VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = SHAPE | {"num_key_value_heads": 2}
FALCON = {key: value for key, value in SHAPE.items() if key != "intermediate_size"}
RECURRENT = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "initializer_range")}
TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


class Tiny(NamedTuple):
    """A kind of model, and how it is run: "trees", "chains" (cropped), "states" (fed again) or "steps"."""

    config: str
    options: dict[str, Any]
    manner: str


MODELS = {
    "gpt2": Tiny("GPT2Config", SHAPE, "trees"),
    "gpt_neox": Tiny("GPTNeoXConfig", SHAPE, "trees"),
    "gemma3": Tiny("Gemma3TextConfig", GROUPED | TWO_KINDS | {"head_dim": 8}, "trees"),
    "phi3": Tiny("Phi3Config", GROUPED | {"sliding_window": 9}, "trees"),
    "mixtral": Tiny("MixtralConfig", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, "trees"),
    "olmo2": Tiny("Olmo2Config", GROUPED, "trees"),
    "falcon": Tiny("FalconConfig", FALCON, "trees"),
    "falcon_alibi": Tiny("FalconConfig", FALCON | {"alibi": True}, "chains"),
    "llama4": Tiny(
        "Llama4TextConfig",
        GROUPED
        | {"head_dim": 8, "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]}
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
        "trees",
    ),
    "mamba": Tiny("MambaConfig", RECURRENT | {"state_size": 8}, "steps"),
    "mamba2": Tiny(
        "Mamba2Config",
        RECURRENT | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
        "states",
    ),
    "rwkv": Tiny("RwkvConfig", {**RECURRENT, "context_length": 256}, "states"),
    "jamba": Tiny(
        "JambaConfig",
        GROUPED
        | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
        | {"expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4},
        "steps",
    ),
    "lfm2": Tiny("Lfm2Config", GROUPED | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}, "states"),
    "qwen3_next": Tiny(
        "Qwen3NextConfig",
        GROUPED
        | {"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
        | {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        "states",
    ),
}
REFUSED = {
    "bert": Tiny("BertConfig", SHAPE, "token by token"),
    "recurrent_gemma": Tiny(
        "RecurrentGemmaConfig",
        RECURRENT
        | {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "lru_width": 32}
        | {"attention_window_size": 8, "num_key_value_heads": 1, "head_dim": 8},
        "its forward returns none",
    ),
}


def build(tiny: Tiny) -> Any:
    """The model of transformers, with random weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = getattr(transformers, tiny.config)(**tiny.options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@functools.cache
def foreign(name: str) -> Any:
    """A model of transformers by the name of its kind."""
    return build(MODELS[name])


@functools.cache
def model_of(name: str) -> HFModel:
    """The same as a Model of ours."""
    return HFModel(foreign(name))


def loaded(name: str) -> LoadedModel:
    return LoadedModel(model=model_of(name), tokenizer=None, chat_template=None, path=Path(name))


def logits_after(model: Model, tokens: Sequence[int]) -> Any:
    """Logits [V] behind tokens that are fed to a fresh cache."""
    (output,) = model.forward([Span(model.new_cache(), tokens, range(-1, len(tokens) - 1), [len(tokens) - 1])])
    return output.row(0)


def same_or_near(model: Model, prompt: list[int], params: SamplingParams, one: list[int], other: list[int]) -> bool:
    """Whether two answers are equal, but for what follows a place where rounding decides between two tokens."""
    for index, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            tokens = prompt + one[:index]
            ends = frozenset(() if params.ignore_eos else model.info.end_token_ids)
            history = History(tokens, len(prompt), params, params.seed or 0, ends)
            _, logs = rank(logits_after(model, tokens), history, 2)
            return logs[0] - logs[1] < 1e-3
    return len(one) == len(other)
