"""Reading a transformers folder: config.json, safetensors in one file or in shards, the tokenizer's files."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sakiyomi.checkpoints.files import (
    FLAG,
    IDS,
    INTEGER,
    NUMBER,
    OBJECT,
    TEXT,
    TEXTS,
    Kind,
    SafetensorsFolder,
    is_integer,
    is_list_of,
    is_text,
    read_json,
    read_optional_json,
    read_text,
    weight_files,
)
from sakiyomi.errors import CheckpointError
from sakiyomi.types import Checkpoint, TokenizerData


def read_safetensors(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Read a model folder as transformers writes it. Tensors are read from the disk when they are asked for.

    Half-precision tensors are returned in float32.

    Args:
        weights: False leaves the tensors, and every check of them, to whoever reads them in another way.

    Raises:
        CheckpointError: a missing, truncated or broken file, a missing shard, or weights in a quantised format.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json", CONFIG_KINDS if weights else GENERATION_KINDS)
    if weights and config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"{folder} holds weights quantised by {method!r}, which is not supported; "
            "use the unquantised model or a GGUF file."
        )
    tokenizer = _read_tokenizer(folder)
    return Checkpoint(
        name=folder.resolve().name,
        config=config,
        tensors=SafetensorsFolder(folder) if weights else {},
        tokenizer=tokenizer,
        end_token_ids=_end_token_ids(folder, config, tokenizer),
        files=tuple(weight_files(folder)) if weights else (),
    )


# ---------------------------------------------------------------------------------------------- kinds of values


def _is_token(value: Any) -> bool:
    return is_text(value["content"] if isinstance(value, dict) else value)


def _is_added_token(number: str, token: Any) -> bool:
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    is_flagged = all(isinstance(token.get(flag, False), bool) for flag in flags)
    return number.isdecimal() and len(number) < 10 and is_flagged and is_text(token["content"])


TOKEN = Kind("a token, or an object with its content", _is_token)
TOKENS = Kind(
    "a list or an object of tokens",
    lambda value: is_list_of(_is_token)(list(value.values()) if isinstance(value, dict) else value),
)
ADDED_TOKENS = Kind("an object of ids and tokens", lambda value: all(_is_added_token(*item) for item in value.items()))
TEMPLATE = Kind(
    "a text, or a list of objects with name and template",
    lambda value: is_text(value) or is_list_of(lambda one: is_text(one["name"]) and is_text(one["template"]))(value),
)

CONFIG_KINDS = {
    **dict.fromkeys(("model_type", "hidden_act"), TEXT),
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), INTEGER),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"), INTEGER),
    **dict.fromkeys(("sliding_window", "max_window_layers"), INTEGER),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "partial_rotary_factor"), NUMBER),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), FLAG),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), OBJECT),
    "layer_types": TEXTS,
    "eos_token_id": IDS,
}
GENERATION_KINDS = {"eos_token_id": IDS}
TOKENIZER_KINDS = {
    **{f"{role}_token": TOKEN for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), TOKENS),
    "added_tokens_decoder": ADDED_TOKENS,
    "chat_template": TEMPLATE,
}


# ---------------------------------------------------------------------------------------------- other files


def _read_tokenizer(folder: Path) -> TokenizerData | None:
    text = read_text(folder / "tokenizer.json")
    if text is None:
        return None
    # Older folders name the special tokens in a file of their own.
    names = ("special_tokens_map.json", "tokenizer_config.json")
    first, second = (read_optional_json(folder / name, TOKENIZER_KINDS) for name in names)
    config = first | second
    template = read_text(folder / "chat_template.jinja")
    return TokenizerData(json=text, config=config, chat_template=template or _configured_template(config))


def _configured_template(config: Mapping[str, Any]) -> str | None:
    """The template of a tokenizer_config.json: one text, or several named ones of which "default" counts."""
    template = config.get("chat_template")
    named = template if isinstance(template, list) else [{"name": "default", "template": template}]
    return {entry["name"]: entry["template"] for entry in named}.get("default")


def _end_token_ids(folder: Path, config: Mapping[str, Any], tokenizer: TokenizerData | None) -> tuple[int, ...]:
    """Every id at which the files say that generation ends, without repetition."""
    found: list[int] = []
    for source in (read_optional_json(folder / "generation_config.json", GENERATION_KINDS), config):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    if tokenizer is not None:
        found += _tokenizer_end_ids(folder / "tokenizer.json", tokenizer)
    return tuple(dict.fromkeys(token_id for token_id in found if token_id >= 0))  # some write -1 for none


def _tokenizer_end_ids(path: Path, tokenizer: TokenizerData) -> list[int]:
    token = tokenizer.config.get("eos_token")
    if isinstance(token, dict):
        token = token["content"]
    if token is None:
        return []
    content = read_json(path, {})
    try:
        added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
        vocabulary = content["model"]["vocab"]
    except (TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path} has no readable added_tokens and model; fetch the model again.") from error
    known = added if token in added or not isinstance(vocabulary, dict) else vocabulary
    if token in known and not is_integer(known[token]):
        raise CheckpointError(
            f"{path}: the id of {token!r} is {reprlib.repr(known[token])}; it must be {INTEGER.words}; "
            "fetch the model again."
        )
    return [known[token]] if token in known else []
