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
from sakiyomi.errors import (
    CheckpointError,
    MissingExtraError,
    ParameterError,
    UnsupportedModelError,
    VocabularyError,
    advise_extra,
)
from sakiyomi.plugins import find_class, list_names, make_config, parse_spec, suggest
from sakiyomi.text.chat import ChatTemplate
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.text.vocabulary import Side, Translation
from sakiyomi.tuned import load_choices
from sakiyomi.types import Checkpoint, Drafter, DrafterContext, DrafterFile, DrawMode, Model, Verifier

logger = logging.getLogger("sakiyomi")

MADE_OF_PARTS = ("sakiyomi.drafters.combined", "sakiyomi.drafters.auto")
Backend = Literal["auto", "native", "torch", "hf"]
NATIVE_DTYPES = ("int8", "float32")
TORCH_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How to load a model.

    Args:
        dtype: "int8" or "float32" on the native CPU backend (default int8); "float32", "bfloat16", "float16" or
            "float64" on torch and hf (default float32 on a CPU, bfloat16 on a GPU).
        device: "cpu", or a torch device such as "cuda".
        backend: "native" (our C++ kernels), "torch", "hf" (any causal model of transformers), or "auto": the first of
            these that is here and knows the model.
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


def load_model(
    name: str | os.PathLike[str], options: ModelOptions, *, fitting: LoadedModel | None = None
) -> LoadedModel:
    """Find, read and prepare a model.

    Args:
        name: "smollm2", a folder in transformers' layout, a .gguf file, or a hub id.
        fitting: a target of the same tokenizer, to whose ids the vocabulary is cut (padding beyond it is dropped).

    Raises:
        CheckpointError: with the path, and for a model that `sakiyomi pull` fetched with the advice to do so again.
    """
    path = hub.resolve(name)
    with _naming_the_model(path):
        checkpoint = read_checkpoint(path, weights=options.backend != "hf")
        tokenizer = template = vocab_size = None
        if checkpoint.tokenizer is not None:
            tokenizer = Tokenizer.load(checkpoint.tokenizer)
            template = None if checkpoint.tokenizer.chat_template is None else ChatTemplate(checkpoint.tokenizer)
            vocab_size = tokenizer.vocab_size
            if fitting is not None and _shares_tokenizer(fitting, tokenizer):
                vocab_size = min(vocab_size, fitting.model.info.vocab_size)
        model = _build_model(checkpoint, options, vocab_size, path)
    return LoadedModel(model=model, tokenizer=tokenizer, chat_template=template, path=path)


def _shares_tokenizer(model: LoadedModel, tokenizer: Tokenizer) -> bool:
    return model.tokenizer is not None and model.tokenizer.describe_mismatch(tokenizer) is None


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


def read_checkpoint(path: Path, *, weights: bool = True) -> Checkpoint:
    """Read a model folder or a .gguf file; of a folder without its weights if need be."""
    if path.is_dir():
        from sakiyomi.checkpoints.safetensors import read_safetensors

        return read_safetensors(path, weights=weights)
    if path.suffix == ".gguf":
        from sakiyomi.checkpoints.gguf import read_gguf

        return read_gguf(path)
    raise CheckpointError(f"{path} is neither a model folder nor a .gguf file; give one of these.")


def _build_model(checkpoint: Checkpoint, options: ModelOptions, vocab_size: int | None, path: Path) -> Model:
    backend = choose_backend(options)
    if backend == "hf":
        return _build_foreign(checkpoint, options, vocab_size, path)
    try:
        return _build_own(backend, checkpoint, options, vocab_size)
    except UnsupportedModelError as error:
        if options.backend != "auto" or options.dtype == "int8" or not path.is_dir():
            raise
        if not (_has_torch() and _has_transformers()):
            raise MissingExtraError(
                f"{path}: {error} Transformers, which may know it, is not installed; run {advise_extra('torch')}."
            ) from error
        logger.info("%s; taking transformers instead.", str(error).rstrip("."))
    return _build_foreign(checkpoint, options, vocab_size, path)


def _build_foreign(checkpoint: Checkpoint, options: ModelOptions, vocab_size: int | None, path: Path) -> Model:
    if not path.is_dir():
        raise ParameterError(f"backend=hf takes folders in transformers' layout, and {path} is none.")
    from sakiyomi.models.hf import HFModel

    return HFModel.load(
        path,
        dtype=options.dtype or ("float32" if options.device == "cpu" else "bfloat16"),
        device=options.device,
        max_model_len=options.max_model_len,
        vocab_size=vocab_size,
        end_token_ids=checkpoint.end_token_ids,
    )


def _build_own(
    backend: Literal["native", "torch"], checkpoint: Checkpoint, options: ModelOptions, vocab_size: int | None
) -> Model:
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


def choose_backend(options: ModelOptions) -> Literal["native", "torch", "hf"]:
    """The backend for these options; a model that it does not know may still need another.

    Raises:
        ParameterError: for a dtype, device or backend that does not exist, or that do not go together.
        MissingExtraError: if what it needs was not built or is not installed.
    """
    dtype, backend = options.dtype, options.backend
    if backend not in ("auto", "native", "torch", "hf"):
        raise ParameterError(f"backend={backend!r} is not allowed; give auto, native, torch or hf.")
    if dtype is not None and dtype not in (*NATIVE_DTYPES, *TORCH_DTYPES):
        raise ParameterError(f"dtype={dtype!r} is not allowed; give int8, float32, bfloat16, float16 or float64.")
    is_native_possible = options.device == "cpu" and dtype in (None, *NATIVE_DTYPES)
    is_torch_possible = dtype in (None, *TORCH_DTYPES)
    if backend == "native" and not is_native_possible:
        raise ParameterError(
            f"backend=native has no dtype={dtype!r} on device={options.device!r}; it runs int8 or float32 on cpu."
        )
    if not is_torch_possible and (backend in ("torch", "hf") or not is_native_possible):
        raise ParameterError(
            f"dtype={dtype!r} runs on the native CPU backend only, not on backend={backend} device={options.device!r}."
        )
    if not is_native_possible or backend in ("torch", "hf"):
        if not _has_torch():
            raise MissingExtraError(f"this needs torch, which is not installed; run {advise_extra('torch')}.")
        if backend == "hf" and not _has_transformers():
            raise MissingExtraError(
                f"backend=hf needs transformers, which is not installed; run {advise_extra('torch')}."
            )
        return "hf" if backend == "hf" else "torch"
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


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


# ---------------------------------------------------------------------------------------------- drafters, verifiers


def check_drafter(spec: str, more: Mapping[str, Any] | None = None) -> None:
    """Check name and options of a drafter, of all its parts too, before any model is loaded.

    Args:
        spec, more: as in `make_drafter`.

    Raises:
        UnknownNameError, ParameterError
    """
    drafter, config = _read_drafter(spec, more)
    if drafter.__module__ in MADE_OF_PARTS and config.parts is not None:
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
    load = functools.cache(lambda name: _load_drafting_model(name, target, options))
    context = DrafterContext(
        wrap(target.model),
        lambda name: wrap(load(name)[0]),
        draw,
        lambda parts: [make_drafter(part, target, options, draw=draw, wrap=wrap) for part in _split_drafters(parts)],
        lambda kinds, path: open_drafter(kinds, path, target.model),
        "+".join(["suffix", *find_trained_drafters(target)]),
        lambda name: load(name)[1],
        load_choices(target.path, tuning_variant(target.model)),
    )
    built: Drafter = drafter(config, context)
    return built


def open_drafter(kinds: tuple[str, ...], path: str | None, target: Model) -> DrafterFile:
    """The trained drafter of one of `kinds` at `path`, or the one that comes with the package, made for `target`.

    Raises:
        ParameterError: nothing comes with the package for this target, or it lends no weights.
        CheckpointError: a file that is damaged, of another kind, or made for another model.
    """
    from sakiyomi.checkpoints.drafter import find_packaged
    from sakiyomi.nets.binding import cut_padding, find_mismatch

    lent, info = target.lend(), target.info
    if lent is None:
        raise ParameterError(
            f"the drafter {kinds[0]} needs a target that lends its weights, and {info.name} has none to lend; take a "
            "drafter that needs no training, such as suffix."
        )
    if path is None:
        packaged = [stored for kind in kinds for stored in find_packaged(kind)]
        fitting = [stored for stored in packaged if find_mismatch(stored.target, info, lent) is None]
        if fitting:
            return fitting[0]
        raise ParameterError(
            f"no drafter of kind {kinds[0]} comes with the package for {info.name}; write {kinds[0]}:path=PATH with "
            f"one that `sakiyomi train {kinds[0]}` made or that was published for this model, or take suffix."
        )
    stored = read_drafter_at(Path(path).expanduser())
    if stored.kind not in kinds:
        raise CheckpointError(f"{path} holds a drafter of kind {stored.kind!r}; write {stored.kind}:path={path}.")
    mismatch = find_mismatch(stored.target, info, lent)
    if mismatch is not None:
        raise CheckpointError(
            f"{path} was trained for {stored.target.get('name') or 'another model'}, not for {info.name}: {mismatch}; "
            f"take a drafter of this model, or train one with `sakiyomi train {stored.kind}`."
        )
    return cut_padding(stored, info.vocab_size) if "probe" not in stored.target else stored


def read_drafter_at(path: Path) -> DrafterFile:
    """A drafter in our own file, or in a folder of EAGLE, speculators or Medusa heads.

    Raises:
        CheckpointError: nothing readable there.
    """
    if not path.is_dir():
        from sakiyomi.checkpoints.drafter import read_drafter

        return read_drafter(path)
    from sakiyomi.checkpoints.eagle import read_eagle
    from sakiyomi.checkpoints.files import read_json
    from sakiyomi.checkpoints.medusa import read_medusa
    from sakiyomi.checkpoints.speculators import read_speculators

    tensors, config = _read_tensors(path), read_json(path / "config.json", {})
    if config.get("speculators_model_type") is not None:
        return read_speculators(path, tensors)
    if "medusa_num_heads" in config or config.get("model_type") == "medusa":
        return read_medusa(path, tensors)
    return read_eagle(path, tensors)


def _read_tensors(folder: Path) -> Mapping[str, Any]:
    """The weights of a folder of heads, whatever kind of file holds them."""
    from sakiyomi.checkpoints.files import SafetensorsFolder
    from sakiyomi.checkpoints.pickled import read_pickled

    names = ("medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found or (folder / "model.safetensors").is_file():
        return SafetensorsFolder(folder)
    return SafetensorsFolder.of(found[0]) if found[0].suffix == ".safetensors" else read_pickled(found[0])


def tuning_variant(model: Model) -> str:
    """How a model is run, as far as `sakiyomi tune` may come to another choice for it."""
    return f"{type(model).__name__}-{model.info.dtype}"


def find_trained_drafters(target: LoadedModel) -> list[str]:
    """The trained drafters of the package that were made for this target, best first."""
    from sakiyomi.checkpoints.drafter import find_packaged
    from sakiyomi.nets.binding import find_mismatch

    lent = target.model.lend()
    if lent is None:
        return []
    kinds = ("mlp", "table")
    return [
        kind
        for kind in kinds
        if any(find_mismatch(stored.target, target.model.info, lent) is None for stored in find_packaged(kind))
    ]


def _read_drafter(spec: str, more: Mapping[str, Any] | None) -> tuple[Any, Any]:
    """Class and Config of a drafter."""
    name, settings = _parse_drafter(spec)
    drafter = find_class("sakiyomi.drafters", "sakiyomi.drafters", "drafter", name)
    return drafter, make_config(name, drafter.Config, {**settings, **(more or {})})


def _parse_drafter(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options. `a:x=1,y=2+b` is `combined:parts=a:x=1,y=2+b`; `parts` takes the rest of the text."""
    if not spec.startswith(("combined", "auto:")):
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


def _load_drafting_model(name: str, target: LoadedModel, options: ModelOptions) -> tuple[Model, Translation | None]:
    """A second model, the target itself where the name says so; and how its ids translate if they are not the same."""
    path = hub.resolve(name)
    if path == target.path:
        return target.model, None
    options = ModelOptions(dtype=options.dtype, device=options.device, backend=options.backend, threads=options.threads)
    loaded = load_model(str(path), options, fitting=target)
    if loaded.tokenizer is None or target.tokenizer is None:
        raise VocabularyError(
            f"the drafting model {name} or the target has no tokenizer, so their ids cannot be compared; give both "
            "their tokenizer.json, or take a drafter that needs no second model, such as suffix."
        )
    mismatch = target.tokenizer.describe_mismatch(loaded.tokenizer)
    if mismatch is None:
        return loaded.model, None
    logger.info("The drafting model %s has another tokenizer than the target: %s.", name, mismatch)
    return loaded.model, Translation(_side(loaded), _side(target))


def _side(loaded: LoadedModel) -> Side:
    assert loaded.tokenizer is not None
    info = loaded.model.info
    return Side(tokenizer=loaded.tokenizer, vocab_size=info.vocab_size, end_ids=info.end_token_ids)


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


DEFAULT_DRAFTER = "auto"
FIXED_DRAFTER = "suffix"
"""The default where a number of tokens to draft is given, which `auto` decides by itself."""
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
        return (FIXED_DRAFTER if drafter is None else drafter), older
    if len([way for way in (drafter, config, older) if way]) > 1:
        raise ParameterError("the drafter is named twice; give one of drafter, speculative_config, speculative_model.")
    if config or older:
        return read_speculative_config(config or older)
    return (DEFAULT_DRAFTER if drafter is None else drafter), {}
