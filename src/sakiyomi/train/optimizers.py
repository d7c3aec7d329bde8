"""Steps down the gradient: AdamW, or Muon for the matrices of a net and AdamW for the rest.

Muon (Jordan et al., 2024) makes the momentum of a matrix orthogonal, so that all its directions move alike. It wants
about half the text that AdamW wants. Tables, whose rows belong to one id each, stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from sakiyomi.errors import ParameterError

OPTIMIZERS = ("adamw", "muon")


class Optimizer:
    """Moves parameters, by name, against their gradients.

    Args:
        tables: names of matrices whose rows belong to one id each.
        name: "adamw" or "muon".
        weight_decay: on matrices; vectors do not decay.
        matrix_factor: the rate of Muon over that of AdamW. Both are told for updates of the size of AdamW's
            (Liu et al., 2025).

    Raises:
        ParameterError: Muon with a torch that has none.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        tables: Collection[str],
        name: str,
        weight_decay: float,
        matrix_factor: float,
    ) -> None:
        self._parameters = parameters
        self._matrix_factor = matrix_factor
        wide = [key for key, value in parameters.items() if value.ndim > 1]
        matrices = {key for key in wide if parameters[key].ndim == 2 and key not in tables}
        self._turned = matrices if name == "muon" else set()
        kinds = [
            (weight_decay, [parameters[key] for key in wide if key not in self._turned]),
            (0.0, [value for value in parameters.values() if value.ndim == 1]),
        ]
        groups = [{"params": values, "weight_decay": decay} for decay, values in kinds if values]
        self._adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        turned = [parameters[key] for key in wide if key in self._turned]
        self._muon = _make_muon(turned, weight_decay) if turned else None

    def step(self, rate: float) -> None:
        """Move by the gradients that are there, at a learning rate."""
        _step(self._adamw, rate)
        if self._muon is not None:
            _step(self._muon, rate * self._matrix_factor)

    def clear(self) -> None:
        """Forget the gradients."""
        for value in self._parameters.values():
            value.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The sums that it goes on from, named KEY.PARAMETER."""
        return {
            f"{key}.{name}": sums
            for name, value in self._parameters.items()
            for key, sums in self._of(name).state.get(value, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` gave."""
        for named, sums in tensors.items():
            key, _, name = named.partition(".")
            value = self._parameters[name]
            self._of(name).state[value][key] = sums

    def _of(self, name: str) -> torch.optim.Optimizer:
        return self._muon if self._muon is not None and name in self._turned else self._adamw


def _make_muon(matrices: list[Tensor], weight_decay: float) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise ParameterError(
            f"optimizer='muon' needs torch 2.9 or newer, and this is {torch.__version__}; give optimizer='adamw'."
        )
    return torch.optim.Muon(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")


def _step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
