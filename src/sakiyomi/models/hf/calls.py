"""One call of a transformers model: what its `forward` takes, what it gives back, and the hidden states on the way."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from sakiyomi.errors import ParameterError

STATE_NAMES = ("cache", "past_key_values", "cache_params", "state")
"""How `forward` calls what it remembers of earlier tokens, in the versions and models of transformers."""
FINAL_STATES = ("keys", "values")
"""Tensors of a growing attention layer that are replaced and never written in place."""


class Caller:
    """Calls a causal model of transformers, each time for one row of ids.

    Raises:
        ParameterError: a model whose `forward` takes no state, so that it cannot go on from earlier tokens.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = getattr(model, "config").get_text_config(decoder=True)  # noqa: B009  # untyped
        takes = inspect.signature(model.forward).parameters
        names = [name for name in STATE_NAMES if name in takes]
        if not names:
            raise ParameterError(f"{type(model).__name__} takes no cache, so it cannot go on from earlier tokens.")
        self.state_name = names[0]
        self.takes_positions = "position_ids" in takes
        self._takes_mask = "attention_mask" in takes
        self._takes_rows = "logits_to_keep" in takes

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def __call__(
        self,
        ids: Sequence[int],
        state: Any,
        rows: Sequence[int],
        taps: Sequence[int] = (),
        *,
        mask: Any = None,
        positions: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Feed ids [M] behind `state` (None: nothing yet).

        Args:
            rows: the rows whose logits are wanted.
            taps: the layer numbers whose hidden states are wanted.
            mask: a 4-D mask or a dict of them; None leaves causality to the model.

        Returns:
            Logits [len(rows), V] or None, taps [M, len(taps) * H] or None, and the state behind the ids.
        """
        inputs: dict[str, Any] = {"input_ids": self._row(ids), "use_cache": True, "return_dict": True}
        if state is not None:
            inputs[self.state_name] = state
        if mask is not None and self._takes_mask:
            inputs["attention_mask"] = mask
        if positions is not None and self.takes_positions:
            inputs["position_ids"] = self._row(positions)
        if self._takes_rows:
            # At least one row: not every head takes none.
            inputs["logits_to_keep"] = torch.tensor(list(rows) or [len(ids) - 1], device=self.device)
        with torch.no_grad(), self._listen(taps) as heard:
            result = self.model(**inputs)
        logits = None
        if rows:
            logits = result.logits[0] if self._takes_rows else result.logits[0, list(rows)]
        return logits, _side_by_side(heard, taps), getattr(result, self.state_name, None)

    def _row(self, values: Sequence[int]) -> Tensor:
        return torch.tensor([list(values)], device=self.device)

    @contextmanager
    def _listen(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect hidden states by hooks that are gone afterwards: transformers reports the last one normed."""
        heard: dict[int, Tensor] = {}
        hooks = [self._listen_at(tap, heard) for tap in dict.fromkeys(taps)]
        try:
            yield heard
        finally:
            for hook in hooks:
                hook.remove()

    def _listen_at(self, tap: int, heard: dict[int, Tensor]) -> Any:
        layers = find_layers(self.model, self.config.num_hidden_layers)
        if tap == 0:

            def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                heard[0] = args[0] if args else kwargs["hidden_states"]

            return layers[0].register_forward_pre_hook(before, with_kwargs=True)

        def after(_: Any, __: Any, output: Any) -> None:
            heard[tap] = output[0] if isinstance(output, tuple) else output

        return layers[tap - 1].register_forward_hook(after)


def find_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers: the outermost one of that length.

    Raises:
        ParameterError: if there is none.
    """
    decoder: nn.Module = getattr(model, "get_decoder", lambda: model)() or model
    found = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    if not found:
        raise ParameterError(f"{type(model).__name__} has no list of its {num_layers} layers; its taps cannot be read.")
    return found[0]


def _side_by_side(heard: dict[int, Tensor], taps: Sequence[int]) -> Tensor | None:
    if not taps:
        return None
    for tap in taps:
        if tap not in heard or heard[tap].dim() != 3:
            raise ParameterError(f"tap {tap} of this model is no single hidden state per token; it cannot be read.")
    return torch.cat([heard[tap][0] for tap in taps], dim=-1)


def copy_state(state: Any) -> Any:
    """An independent copy of a state; keys and values of growing caches are shared, since nothing writes into them."""
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, list | tuple):
        return type(state)(map(copy_state, state))
    if isinstance(state, dict):
        return {key: copy_state(value) for key, value in state.items()}
    if isinstance(state, Cache):
        twin = copy.copy(state)
        twin.layers = [_copy_layer(layer) for layer in state.layers]
        return twin
    return copy.deepcopy(state)


def _copy_layer(layer: Any) -> Any:
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if not (isinstance(layer, DynamicLayer) and name in FINAL_STATES):
            setattr(twin, name, copy_state(value))
    return twin


def count_bytes(state: Any) -> int:
    """Bytes of the tensors in a state."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, list | tuple):
        return sum(map(count_bytes, state))
    if isinstance(state, dict):
        return sum(map(count_bytes, state.values()))
    if isinstance(state, Cache):
        return sum(count_bytes(vars(layer)) for layer in state.layers)
    return count_bytes(vars(state)) if hasattr(state, "__dict__") else 0
