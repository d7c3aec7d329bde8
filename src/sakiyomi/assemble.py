"""From names to objects: the only place that picks concrete classes."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sakiyomi import hub
from sakiyomi.errors import CheckpointError, MissingExtraError, ParameterError, VocabularyError, advise_extra
from sakiyomi.plugins import find_class, list_names, make_config, parse_spec, suggest
from sakiyomi.text.chat import ChatTemplate
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import Checkpoint, Drafter, DrafterContext, DrawMode, Model, Verifier

logger = logging.getLogger("sakiyomi")

Backend = Literal["auto", "native", "torch"]
NATIVE_DTYPES = ("int8", "float32")
TORCH_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How to load a model.

    Args:
        dtype: "int8" or "float32" on the native CPU backend (default int8); "float32", "bfloat16", "float16" or
            "float64" on torch (default float32 on a CPU, bfloat16 on a GPU).
        device: "cpu", or a torch device such as "cuda".
        backend: "native" (our C++ kernels), "torch", or "auto".
        threads: CPU threads of the native backend; None uses what the process may use.
        max_model_len: positions of the context; None takes the model's own.
    """

    dtype: str | None = None
    device: str = "cpu"
    backend: Backend = "auto"
    threads: int | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with its text side; tokenizer and chat template are None where the files have none."""

    model: Model
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    path: Path


def load_model(name: str | os.PathLike[str], options: ModelOptions, *, vocab_size: int | None = None) -> LoadedModel:
    """Find, read and prepare a model.

    Args:
        name: "smollm2", a folder in transformers' layout, a .gguf file, or a hub id.
        vocab_size: cut the vocabulary to this many ids (a drafter's padding beyond its target's).

    Raises:
        CheckpointError: with the path, and for a model that `sakiyomi pull` fetched with the advice to do so again.
    """
    path = hub.resolve(name)
    with _naming_the_model(path):
        checkpoint = read_checkpoint(path)
        tokenizer = template = None
        if checkpoint.tokenizer is not None:
            tokenizer = Tokenizer.load(checkpoint.tokenizer)
            template = None if checkpoint.tokenizer.chat_template is None else ChatTemplate(checkpoint.tokenizer)
            vocab_size = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
        model = _build_model(checkpoint, options, vocab_size)
    return LoadedModel(model=model, tokenizer=tokenizer, chat_template=template, path=path)


@contextmanager
def _naming_the_model(path: Path) -> Iterator[None]:
    """Let every CheckpointError say which model it is about, and how to mend one that was pulled."""
    try:
        yield
    except CheckpointError as error:
        told = str(error) if str(path) in str(error) else f"{path}: {error}"
        known = hub.find_known_name(path)
        if known is not None:
            told += f" To check and mend it run `sakiyomi pull {known}`."
        raise CheckpointError(told) from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a model folder or a .gguf file."""
    if path.is_dir():
        from sakiyomi.checkpoints.safetensors import read_safetensors

        return read_safetensors(path)
    if path.suffix == ".gguf":
        from sakiyomi.checkpoints.gguf import read_gguf

        return read_gguf(path)
    raise CheckpointError(f"{path} is neither a model folder nor a .gguf file; give one of these.")


def _build_model(checkpoint: Checkpoint, options: ModelOptions, vocab_size: int | None) -> Model:
    backend = choose_backend(options)
    if backend == "native":
        from sakiyomi.models.native import NativeModel

        return NativeModel.load(
            checkpoint,
            dtype=options.dtype or "int8",  # type: ignore[arg-type]  # choose_backend allows these two alone
            threads=options.threads,
            max_model_len=options.max_model_len,
            vocab_size=vocab_size,
        )
    from sakiyomi.models.torch import TorchModel

    return TorchModel.load(
        checkpoint,
        dtype=options.dtype or ("float32" if options.device == "cpu" else "bfloat16"),
        device=options.device,
        max_model_len=options.max_model_len,
        vocab_size=vocab_size,
    )


def choose_backend(options: ModelOptions) -> Literal["native", "torch"]:
    """The backend for these options.

    Raises:
        ParameterError: for a dtype, device or backend that does not exist, or that do not go together.
        MissingExtraError: if what it needs was not built or is not installed.
    """
    dtype, backend = options.dtype, options.backend
    if backend not in ("auto", "native", "torch"):
        raise ParameterError(f"backend={backend!r} is not allowed; give auto, native or torch.")
    if dtype is not None and dtype not in (*NATIVE_DTYPES, *TORCH_DTYPES):
        raise ParameterError(f"dtype={dtype!r} is not allowed; give int8, float32, bfloat16, float16 or float64.")
    is_native_possible = options.device == "cpu" and dtype in (None, *NATIVE_DTYPES)
    is_torch_possible = dtype in (None, *TORCH_DTYPES)
    if backend == "native" and not is_native_possible:
        raise ParameterError(
            f"backend=native has no dtype={dtype!r} on device={options.device!r}; it runs int8 or float32 on cpu."
        )
    if not is_torch_possible and (backend == "torch" or not is_native_possible):
        raise ParameterError(
            f"dtype={dtype!r} runs on the native CPU backend only, not on backend={backend} device={options.device!r}."
        )
    if not is_native_possible or backend == "torch":
        if not _has_torch():
            raise MissingExtraError(f"this needs torch, which is not installed; run {advise_extra('torch')}.")
        return "torch"
    if _has_native():
        return "native"
    if backend == "auto" and is_torch_possible and _has_torch():
        _warn_of_torch()
        return "torch"
    raise MissingExtraError(
        "the native kernels were not built, since no C++17 compiler worked at installation; install one (such as g++) "
        f"and reinstall sakiyomi with pip --force-reinstall --no-cache-dir, or run {advise_extra('torch')}."
    )


@functools.cache  # said once
def _warn_of_torch() -> None:
    logger.warning("The native kernels were not built (no C++17 compiler at installation); using torch.")


def _has_native() -> bool:
    return importlib.util.find_spec("sakiyomi._native") is not None


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


# ---------------------------------------------------------------------------------------------- drafters, verifiers


def check_drafter(spec: str, more: Mapping[str, Any] | None = None) -> None:
    """Check name and options of a drafter, of all its parts too, before any model is loaded.

    Args:
        spec, more: as in `make_drafter`.

    Raises:
        UnknownNameError, ParameterError
    """
    drafter, config = _read_drafter(spec, more)
    if drafter.__module__ == "sakiyomi.drafters.combined":
        for part in _split_drafters(config.parts):
            check_drafter(part)


def make_drafter(
    spec: str,
    target: LoadedModel,
    options: ModelOptions,
    more: Mapping[str, Any] | None = None,
    draw: DrawMode = "coupled",
    wrap: Callable[[Model], Model] = lambda model: model,
) -> Drafter:
    """Build a drafter from `name:key=value,...` and further options, or from several that are joined by `+`.

    Args:
        draw: how the verifier wants tokens to be found (`Verifier.draw`), where the options leave it open.
        wrap: put around the target and around every model that the drafter loads.

    Raises:
        UnknownNameError, ParameterError, VocabularyError
    """
    drafter, config = _read_drafter(spec, more)
    context = DrafterContext(
        wrap(target.model),
        lambda model: wrap(_load_drafting_model(model, target, options)),
        draw,
        lambda parts: [make_drafter(part, target, options, draw=draw, wrap=wrap) for part in _split_drafters(parts)],
    )
    built: Drafter = drafter(config, context)
    return built


def _read_drafter(spec: str, more: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Class and Config of a drafter."""
    name, settings = _parse_drafter(spec)
    drafter = find_class("sakiyomi.drafters", "sakiyomi.drafters", "drafter", name)
    return drafter, make_config(name, drafter.Config, {**settings, **(more or {})})


def _parse_drafter(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options. `a:x=1,y=2+b` is `combined:parts=a:x=1,y=2+b`; `parts` takes the rest of the text."""
    if not spec.startswith("combined"):
        return ("combined", {"parts": spec}) if len(_split_drafters(spec)) > 1 else parse_spec(spec)
    head, found, parts = spec.partition("parts=")
    name, settings = parse_spec(head)
    return name, settings | ({"parts": parts} if found else {})


def _split_drafters(spec: str) -> list[str]:
    """The parts between `+` signs; only a known name makes a `+` a join, since paths may hold one."""
    names = "|".join(map(re.escape, list_names("sakiyomi.drafters", "sakiyomi.drafters")))
    return re.split(rf"\+(?=(?:{names})(?:[:+]|$))", spec)


def make_verifier(spec: str) -> Verifier:
    """Build a verifier from `name:key=value,...`.

    Raises:
        UnknownNameError, ParameterError: also for a lossy rule without the consent `lossy=true`.
    """
    name, settings = parse_spec(spec)
    verifier = find_class("sakiyomi.verify", "sakiyomi.verifiers", "verifier", name)
    config = make_config(name, verifier.Config, settings)
    if verifier.is_lossless not in ("tokens", "distribution") and getattr(config, "lossy", False) is not True:
        raise ParameterError(
            f"the verifier {name} is lossy: the text would not be the model's own; write {name}:lossy=true to accept "
            "that, or take match, rejection, block, tree or traversal."
        )
    built: Verifier = verifier(config)
    return built


def _load_drafting_model(name: str, target: LoadedModel, options: ModelOptions) -> Model:
    """A second model that speaks the target's tokens; the target itself where the name says so."""
    path = hub.resolve(name)
    if path == target.path:
        return target.model
    options = ModelOptions(dtype=options.dtype, device=options.device, backend=options.backend, threads=options.threads)
    loaded = load_model(str(path), options, vocab_size=target.model.info.vocab_size)
    if loaded.tokenizer is None or target.tokenizer is None:
        raise VocabularyError(
            f"the drafting model {name} or the target has no tokenizer, so their ids cannot be compared."
        )
    mismatch = target.tokenizer.describe_mismatch(loaded.tokenizer)
    if mismatch is not None:
        raise VocabularyError(
            f"the drafting model {name} has another tokenizer than the target: {mismatch}. "
            "Take a smaller model of the target's own family, or a drafter that needs none, such as ngram."
        )
    return loaded.model


# ---------------------------------------------------------------------------------------------- vLLM's keys

METHODS = {"ngram": "ngram", "draft_model": "model", "suffix": "suffix", "mlp_speculator": "mlp"}
SUFFIX_KEYS = {"suffix_decoding_min_token_prob": "min_confidence"}
IGNORED_KEYS = (
    "draft_tensor_parallel_size",
    "enforce_eager",
    "disable_log_stats",
    "disable_logprobs",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
)
KNOWN_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
    *SUFFIX_KEYS,
    *IGNORED_KEYS,
)


def read_speculative_config(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """vLLM's `speculative_config` as a drafter's name and options.

    Raises:
        ParameterError: for an unknown key or a method that does not exist here, with the known ones.
    """
    for key in config:
        if key not in KNOWN_KEYS:
            raise ParameterError(f"speculative_config has no key {key!r} here; known are {', '.join(KNOWN_KEYS)}.")
        if key in IGNORED_KEYS:
            logger.warning("speculative_config: %s has no effect here and is ignored.", key)
    model = config.get("model")
    method = config.get("method") or ("ngram" if model in ("ngram", "[ngram]") else "draft_model" if model else None)
    if method not in METHODS:
        raise ParameterError(f"speculative_config: method={method!r} is not allowed; give one of {', '.join(METHODS)}.")
    options: dict[str, Any] = {}
    if config.get("num_speculative_tokens") is not None:
        options["num_speculative_tokens"] = config["num_speculative_tokens"]
    if method == "draft_model":
        if not model:
            raise ParameterError("speculative_config: method=draft_model needs the key model, the drafting model.")
        return "model", {"model": model, **options}
    if method == "mlp_speculator":
        return "mlp", options if model is None else {"path": model, **options}
    if method == "suffix":
        return "suffix", options | {SUFFIX_KEYS[key]: config[key] for key in SUFFIX_KEYS if config.get(key) is not None}
    longest, shortest = config.get("prompt_lookup_max"), config.get("prompt_lookup_min")
    if longest is not None or shortest is not None:
        options["max_ngram"] = longest if longest is not None else shortest
        options["min_ngram"] = shortest if shortest is not None else longest
    return "ngram", options


DEFAULT_DRAFTER = "suffix"
LEGACY_KEYS = (
    "speculative_model",
    "num_speculative_tokens",
    "ngram_prompt_lookup_max",
    "ngram_prompt_lookup_min",
    "use_v2_block_manager",
)


def choose_drafter(
    drafter: str | Drafter | None,
    config: Mapping[str, Any] | None,
    legacy: Mapping[str, Any],
    other_options: Sequence[str] = (),
) -> tuple[str | Drafter, dict[str, Any]]:
    """The drafter's name and options from `drafter`, `speculative_config` or vLLM's older keywords.

    Args:
        other_options: the caller's other options, for the message about an unknown one.

    Raises:
        ParameterError: for an unknown key, or a drafter that is named in two ways.
    """
    for key in legacy:
        if key not in LEGACY_KEYS:
            known = [*other_options, *LEGACY_KEYS]
            raise ParameterError(f"there is no option {key!r}{suggest(key, known)}; known are {', '.join(known)}.")
    if "use_v2_block_manager" in legacy:
        logger.warning("use_v2_block_manager has no effect here and is ignored.")
    older = {
        "model": legacy.get("speculative_model"),
        "num_speculative_tokens": legacy.get("num_speculative_tokens"),
        "prompt_lookup_max": legacy.get("ngram_prompt_lookup_max"),
        "prompt_lookup_min": legacy.get("ngram_prompt_lookup_min"),
    }
    older = {key: value for key, value in older.items() if value is not None}
    if set(older) == {"num_speculative_tokens"} and not config:
        return (DEFAULT_DRAFTER if drafter is None else drafter), older
    if len([way for way in (drafter, config, older) if way]) > 1:
        raise ParameterError("the drafter is named twice; give one of drafter, speculative_config, speculative_model.")
    if config or older:
        return read_speculative_config(config or older)
    return (DEFAULT_DRAFTER if drafter is None else drafter), {}
