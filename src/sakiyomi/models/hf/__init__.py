"""Every causal language model that transformers can load, as a `types.Model`.

Where the model's attention takes a 4-D mask, the trees of all sequences are checked in one pass (`trees`). Elsewhere a
tree is run as its chains, and the engine cuts drafts to chains (`chains`). Which it is, is tried out at load (`probe`).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from sakiyomi.errors import CheckpointError, MissingExtraError, ParameterError, advise_extra

try:
    import torch
    import transformers
    from torch import nn
    from transformers.cache_utils import DummyLayer as _  # noqa: F401  # not in versions before 5.24
except ImportError as error:
    raise MissingExtraError(
        f"models of transformers need torch and transformers 5.24 or later ({error}); run {advise_extra('torch')}."
    ) from error

from sakiyomi.models.base import Turnstile
from sakiyomi.models.hf.calls import Caller, find_layers
from sakiyomi.models.hf.chains import ChainCache, ChainRunner
from sakiyomi.models.hf.probe import find_runner
from sakiyomi.models.hf.trees import TreeCache, TreeRunner
from sakiyomi.types import Model, ModelInfo, Output, Span

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")
UNBOUNDED = 2**20
"""Positions of a model whose configuration names no end."""
STRETCHED = ("dynamic", "longrope")
"""Rotary scalings that turn with the length of the text, so that cached keys hold only up to the original length."""


class HFModel(Model):
    """A model of transformers that verifies. Several threads may use one; their passes run one after the other.

    Args:
        model: a causal language model in evaluation mode; it is not changed.
        name: for messages.
        max_model_len: positions of the context; None takes the model's own.
        vocab_size: ids that have logits; None takes all.
        end_token_ids: the ids that end an answer; None takes those of the model's generation config.

    Raises:
        ParameterError: a model in training mode, or a size outside the model's.
        UnsupportedModelError: a model that cannot decode step by step, or whose state cannot be put back.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str | None = None,
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        end_token_ids: Sequence[int] | None = None,
    ) -> None:
        if model.training:
            raise ParameterError(f"{type(model).__name__} is in training mode; call its eval() first.")
        self._caller = Caller(model)
        config = self._caller.config
        self.info = ModelInfo(
            name=name or type(model).__name__,
            architecture=config.model_type,
            vocab_size=min(vocab_size or config.vocab_size, config.vocab_size),
            max_model_len=_context(config, max_model_len),
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            end_token_ids=_end_ids(model) if end_token_ids is None else tuple(end_token_ids),
            dtype=str(self._caller.dtype).removeprefix("torch."),
        )
        self._runner: TreeRunner | ChainRunner = find_runner(self._caller, self.info)
        self.info = replace(self.info, draft_shape=self._runner.draft_shape)
        self._pass = Turnstile()

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_model_len: int | None = None,
        vocab_size: int | None = None,
        end_token_ids: Sequence[int] | None = None,
    ) -> HFModel:
        """Load a folder in transformers' layout; no code from the folder is run, and nothing is fetched.

        Raises:
            CheckpointError: what transformers cannot load.
            ParameterError: an unknown precision or device, or a size outside the model's.
        """
        if dtype not in DTYPES:
            raise ParameterError(f"dtype={dtype!r} is not allowed; transformers' models take {', '.join(DTYPES)}.")
        with _without_bars():
            model = _load(path, DTYPES[dtype])
        try:
            model.to(device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ParameterError(f"device={device!r} is not usable here ({reason}); try 'cpu'.") from None
        return cls(
            model.eval(),
            name=path.resolve().name,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            end_token_ids=end_token_ids,
        )

    def new_cache(self) -> TreeCache | ChainCache:
        """An empty cache for one sequence."""
        return self._runner.new_cache(self.info)

    def forward(self, spans: Sequence[Span]) -> list[Output]:
        """Run all spans: in one pass where trees are, else one after the other.

        Raises:
            ParameterError: a span that cannot be run.
            ContextLengthError: a row behind the model's context.
        """
        if not spans:
            return []
        with self._pass.lock:
            return self._runner.forward(spans, self.info)

    def shallow(self, num_layers: int, skip: Collection[int] = ()) -> HFModel:
        """The same model cut after its first layers, with final norm and head, sharing weights; it has own caches.

        Raises:
            ParameterError: a number of layers that the model does not have, layers to skip, or a model whose layers
                are not found.
        """
        if skip:
            raise ParameterError(f"skip={sorted(skip)} is not possible on the backend hf; leave it out.")
        if not 1 <= num_layers <= self.info.num_layers:
            raise ParameterError(f"num_layers={num_layers}; the model has layers 1 to {self.info.num_layers}.")
        cut = _cut(self._caller.model, self._caller.config, num_layers)
        return HFModel(
            cut,
            name=self.info.name,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            end_token_ids=self.info.end_token_ids,
        )


def _load(path: Path, dtype: torch.dtype) -> Any:
    try:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # damaged configurations raise whatever their values run into
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"transformers cannot load {path}: {reason}") from error
    missing = sorted(told["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}; "
            "fetch the model again."
        )
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers from drawing progress bars."""
    logs = transformers.utils.logging
    was_shown = logs.is_progress_bar_enabled()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logs.enable_progress_bar()


def _context(config: Any, asked: int | None) -> int:
    own = next((value for name in LENGTH_NAMES if isinstance(value := getattr(config, name, None), int)), UNBOUNDED)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) in STRETCHED:
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        own = min(own, original or own)
    if asked is not None and not 2 <= asked <= own:
        raise ParameterError(f"max_model_len={asked} is not allowed; this model has a context of 2 to {own} positions.")
    return asked or own


def _end_ids(model: Any) -> tuple[int, ...]:
    config = getattr(model, "generation_config", None) or model.config
    ids = getattr(config, "eos_token_id", None)
    return tuple(ids) if isinstance(ids, list | tuple) else () if ids is None else (ids,)


def _cut(model: Any, config: Any, num_layers: int) -> Any:
    """A model of the same modules, but for the list of layers and what holds it."""
    layers = find_layers(model, config.num_hidden_layers)
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        with suppress(AttributeError):  # some derive it from the number of layers
            shallow.layer_types = list(config.layer_types)[:num_layers]
    return _replaced(model, layers, nn.ModuleList(list(layers)[:num_layers]), shallow)


def _replaced(module: nn.Module, layers: nn.ModuleList, shorter: nn.ModuleList, config: Any) -> Any:
    if module is layers:
        return shorter
    twin = copy.copy(module)
    twin._modules = {
        name: _replaced(child, layers, shorter, config) if child is not None and _holds(child, layers) else child
        for name, child in module._modules.items()
    }
    if hasattr(twin, "config"):
        twin.config = config
    return twin


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return any(found is other for found in module.modules())
