"""From names to objects: the only place that picks concrete classes."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sakiyomi import hub
from sakiyomi.errors import CheckpointError, MissingExtraError, ParameterError, VocabularyError
from sakiyomi.plugins import find_class, make_config, parse_spec
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


def load_model(name: str, options: ModelOptions, *, vocab_size: int | None = None) -> LoadedModel:
    """Find, read and prepare a model.

    Args:
        name: "smollm2", a folder in transformers' layout, a .gguf file, or a hub id.
        vocab_size: cut the vocabulary to this many ids (a drafter's padding beyond its target's).
    """
    path = hub.resolve(name)
    checkpoint = read_checkpoint(path)
    tokenizer = template = None
    if checkpoint.tokenizer is not None:
        tokenizer = Tokenizer.load(checkpoint.tokenizer)
        template = None if checkpoint.tokenizer.chat_template is None else ChatTemplate(checkpoint.tokenizer)
        vocab_size = min(tokenizer.vocab_size, vocab_size or tokenizer.vocab_size)
    model = _build_model(checkpoint, options, vocab_size)
    return LoadedModel(model=model, tokenizer=tokenizer, chat_template=template, path=path)


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
            raise MissingExtraError('this needs torch, which is not installed; run pip install "sakiyomi[torch]".')
        return "torch"
    if _has_native():
        return "native"
    if backend == "auto" and is_torch_possible and _has_torch():
        _warn_of_torch()
        return "torch"
    raise MissingExtraError(
        "the native kernels were not built, since no C++17 compiler worked at installation; install one (such as g++) "
        'and reinstall sakiyomi with pip --force-reinstall --no-cache-dir, or run pip install "sakiyomi[torch]".'
    )


@functools.cache  # said once
def _warn_of_torch() -> None:
    logger.warning("The native kernels were not built (no C++17 compiler at installation); using torch.")


def _has_native() -> bool:
    return importlib.util.find_spec("sakiyomi._native") is not None


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


# ---------------------------------------------------------------------------------------------- drafters, verifiers


def make_drafter(
    spec: str,
    target: LoadedModel,
    options: ModelOptions,
    more: Mapping[str, Any] | None = None,
    draw: DrawMode = "coupled",
    wrap: Callable[[Model], Model] = lambda model: model,
) -> Drafter:
    """Build a drafter from `name:key=value,...` and further options.

    Args:
        draw: how the verifier wants tokens to be found (`Verifier.draw`), where the options leave it open.
        wrap: put around the target and around every model that the drafter loads.

    Raises:
        UnknownNameError, ParameterError, VocabularyError
    """
    name, settings = parse_spec(spec)
    drafter = find_class("sakiyomi.drafters", "sakiyomi.drafters", "drafter", name)
    config = make_config(name, drafter.Config, {**settings, **(more or {})})
    context = DrafterContext(wrap(target.model), lambda model: wrap(_load_drafting_model(model, target, options)), draw)
    built: Drafter = drafter(config, context)
    return built


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

METHODS = {"ngram": "ngram", "draft_model": "model"}
IGNORED_KEYS = ("draft_tensor_parallel_size", "enforce_eager", "disable_log_stats", "disable_logprobs")
KNOWN_KEYS = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", *IGNORED_KEYS)


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
    longest, shortest = config.get("prompt_lookup_max"), config.get("prompt_lookup_min")
    if longest is not None or shortest is not None:
        options["max_ngram"] = longest if longest is not None else shortest
        options["min_ngram"] = shortest if shortest is not None else longest
    return "ngram", options
