"""The MLP speculator in training: its closed-form start, its parameters, and how it is unrolled.

Its large matrices see inputs that are centred and scaled, which is what makes them trainable: some dimensions of a
hidden state have a mean of many standard deviations. The net itself knows nothing of that; each step folds the moments
into the weights that it runs with, and so do the gradients find their way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.nets.mlp import HEAD, TOKEN_IDS, MlpConfig, MlpSpeculator, find_token_rows, split_fuse
from sakiyomi.train.acceptance import most_frequent
from sakiyomi.train.batches import Batch, Ints
from sakiyomi.train.estimate import Announce
from sakiyomi.train.fit import FitConfig, Report, Tell, fit_net, round_weights
from sakiyomi.train.heads import Exported, Frozen, Noise, Trainee
from sakiyomi.train.ridge import RidgeSums, Solution
from sakiyomi.train.shards import Shards
from sakiyomi.types import Model
from sakiyomi.types import Tensor as Stored

SHRINKAGE = 8.0
"""Rows that a token's own vector must outweigh before it is half believed."""
MOMENTS = ("start.mean", "start.std", "advance.mean", "advance.std")


@dataclass(frozen=True, kw_only=True)
class MlpFit(FitConfig):
    """The recipe of an MLP speculator.

    Args:
        inner_size: width of the inner layer.
        own_tokens: ids that have trained vectors of their own, which cost a draft next to nothing.
        head_bits: of the head's rows in the drafter file, 8 or 4; 0 keeps none there and takes the target's. It may be
            changed after training.
    """

    inner_size: int = 512
    own_tokens: int = 0
    head_bits: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_one_of("head_bits", (8, 4, 0))
        self._check_positive("inner_size")

    @property
    def late_choices(self) -> tuple[str, ...]:
        return (*super().late_choices, "head_bits")


def fit_mlp(
    recipe: Mapping[str, Any],
    shards: Shards,
    target: Model,
    folder: Path,
    report: Report | None = None,
    announce: Announce | None = None,
    tell: Tell | None = None,
) -> Path:
    """Train an MLP speculator and write its drafter file.

    Args:
        recipe: fields of `MlpFit`. The other arguments and the errors are those of `fit.fit_net`.
    """
    return fit_net(MlpFamily, MlpFit.read(recipe), shards, target, folder, report, announce, tell)


class MlpFamily:
    """What an MLP speculator brings to its fit."""

    kind = "mlp"

    def __init__(self, recipe: MlpFit, frozen: Frozen, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self._recipe = recipe
        self._frozen = frozen
        self._config = MlpConfig(
            hidden_size=frozen.info.hidden_size,
            inner_size=recipe.inner_size,
            num_taps=len(taps),
            num_tokens=min(recipe.own_tokens, frozen.info.vocab_size),
            eps=frozen.eps,
        )

    def start(self, batches: Sequence[Batch], vocabulary: Ints) -> dict[str, Tensor]:
        counts = np.bincount(
            np.concatenate([batch.tokens for batch in batches]), minlength=self._frozen.info.vocab_size
        )
        own = most_frequent(counts, self._config.num_tokens)
        return solve_start(self._config, self._frozen, iter(batches), own, self._recipe.seed)

    def build(self, tensors: Mapping[str, Tensor]) -> MlpTrainee:
        return MlpTrainee(self._config, self._frozen, tensors, self._recipe.head_bits)

    def describe(self, trainee: Trainee, shards: Shards, held_out: Ints, vocabulary: Ints) -> Mapping[str, Any]:
        return {}


class MlpTrainee:
    """An MLP speculator with parameters that have gradients.

    Args:
        tensors: parameters and moments by name, as `solve_start` makes them.
        head_bits: as in `MlpFit`.
    """

    def __init__(self, config: MlpConfig, frozen: Frozen, tensors: Mapping[str, Tensor], head_bits: int = 0) -> None:
        self.config = config
        self.frozen = frozen
        self._head_bits = head_bits
        self.token_ids = tensors.get(TOKEN_IDS)
        rows = None if self.token_ids is None else find_token_rows(self.token_ids.numpy(), frozen.info.vocab_size)
        self._token_rows = rows
        self.moments = {name: tensors[name].clone() for name in MOMENTS}
        self.parameters = {name: tensors[name].clone().requires_grad_() for name in config.shapes()}
        self.tables = frozenset(name for name in self.parameters if name.endswith(".tokens"))

    def unroll(self, batch: Batch, num_steps: int, noise: Noise | None = None) -> Iterator[tuple[Ints, Tensor]]:
        net = self._net(noise)
        rows = batch.rows(0)
        states = net.start(batch.taps[rows], batch.tokens[rows + 1])
        for step in range(num_steps):
            if step > 0:
                later = batch.rows(step)
                states = net.advance(states[np.searchsorted(rows, later)], batch.tokens[later + 1 + step])
                rows = later
            yield rows, net.features(states)

    def head(self, step: int, ids: Tensor) -> Tensor:
        return self.frozen.head[ids]

    def export(self, vocabulary: Ints) -> Exported:
        with torch.no_grad():
            weights = {name: weight.numpy().astype(np.float32) for name, weight in self._weights().items()}
        for name in weights:
            if name.endswith(".tokens"):
                weights[name] = weights[name][:-1]
        kept: dict[str, Stored] = {} if self.token_ids is None else {TOKEN_IDS: self.token_ids.numpy()}
        if self._head_bits:
            rows = self.frozen.head[torch.from_numpy(vocabulary)].numpy()
            kept[HEAD] = round_weights(rows, self._head_bits)
        names = ("hidden_size", "inner_size", "num_tokens", "eps")
        return Exported({name: getattr(self.config, name) for name in names}, weights, kept)

    def _net(self, noise: Noise | None) -> MlpSpeculator:
        def hide(name: str, x: Tensor) -> Tensor:
            # What is hidden is put at its mean, since the weights expect inputs that are not centred.
            assert noise is not None, "only training hides"
            mean = self.moments.get(f"{name}.mean")
            return noise.hide(x) if mean is None else mean + noise.hide(x - mean)

        frozen, wanted, weights = self.frozen, None if noise is None else hide, self._weights()
        for name in ("start", "advance"):
            left, token = split_fuse(weights[f"{name}.weight"], self.config.hidden_size)
            weights |= {f"{name}.weight": left, f"{name}.token_weight": token}
        return MlpSpeculator(frozen.ops, self.config, weights, frozen.embedding, self._token_rows, wanted)

    def _weights(self) -> dict[str, Tensor]:
        """The weights that the net runs with."""
        weights = dict(self.parameters)
        for name in ("start", "advance"):
            scaled = weights[f"{name}.weight"] / self.moments[f"{name}.std"]
            weights[f"{name}.weight"] = scaled
            weights[f"{name}.bias"] = weights[f"{name}.bias"] - scaled @ self.moments[f"{name}.mean"]
            if self.token_ids is not None:
                weights[f"{name}.tokens"] = F.pad(weights[f"{name}.tokens"], (0, 0, 0, 1))
        return weights


def solve_start(
    config: MlpConfig, frozen: Frozen, batches: Iterator[Batch], token_ids: Ints, seed: int
) -> dict[str, Tensor]:
    """The closed-form start: parameters and moments of a net that is a linear regression.

    The first matrix maps taps and token to the direction of the target's last state one position on. The second does so
    from what the first one says, so that it is ready for the errors it will meet. A token's own vector begins as the
    mean of what the regression leaves over behind it, shrunk where the token is rare. The inner layer begins at zero.

    Args:
        token_ids: ascending ids [M] that have vectors of their own.
    """
    kept, hidden = list(batches), config.hidden_size

    def pairs(step: int) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Inputs, goals and known tokens of a step, whose states come from the step before."""
        for batch in kept:
            rows = batch.rows(step)
            known = batch.tokens[rows + 1 + step]
            left = batch.taps[rows]
            if step > 0:
                before = batch.tokens[rows + step]
                left = _apply(first, _inputs(frozen, left, before)) + _look_up(first_own, token_ids, before)
            yield _inputs(frozen, left, known), _goals(frozen, batch, rows + 1 + step), known

    first = _solve((config.num_taps + 1) * hidden, hidden, pairs(0))
    first_own = _average_rest(first, token_ids, pairs(0))
    second = _solve(2 * hidden, hidden, pairs(1))
    tensors = _assemble(config, frozen, first, second, seed)
    if config.num_tokens:
        tensors |= {
            TOKEN_IDS: torch.from_numpy(token_ids.astype(np.int32)),
            "start.tokens": first_own,
            "advance.tokens": _average_rest(second, token_ids, pairs(1)),
        }
    return tensors


def _solve(num_inputs: int, num_outputs: int, pairs: Iterator[tuple[Tensor, Tensor, Any]]) -> Solution:
    sums = RidgeSums(num_inputs, num_outputs)
    for x, y, _ in pairs:
        sums.add(x, y)
    return sums.solve()


def _average_rest(solution: Solution, token_ids: Ints, pairs: Iterator[tuple[Tensor, Tensor, Any]]) -> Tensor:
    """For each token with a vector of its own the shrunk mean [M, H] of what a regression leaves over behind it."""
    rest = torch.zeros(len(token_ids) + 1, len(solution.bias))
    counts = torch.zeros(len(token_ids) + 1)
    if not len(token_ids):
        return rest[:-1]
    for x, y, known in pairs:
        rows = _own_rows(token_ids, known)
        rest.index_add_(0, rows, y - _apply(solution, x))
        counts.index_add_(0, rows, torch.ones(len(rows)))
    return (rest / (counts + SHRINKAGE)[:, None])[:-1].contiguous()


def _look_up(own: Tensor, token_ids: Ints, known: Any) -> Tensor:
    return F.pad(own, (0, 0, 0, 1))[_own_rows(token_ids, known)]


def _own_rows(token_ids: Ints, known: Any) -> Tensor:
    rows = np.searchsorted(token_ids, known)
    is_own = rows < len(token_ids)
    is_own[is_own] = token_ids[rows[is_own]] == known[is_own]
    return torch.from_numpy(np.where(is_own, rows, len(token_ids)))


def _assemble(config: MlpConfig, frozen: Frozen, first: Solution, second: Solution, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.inner_size
    tensors = {
        "inner_norm.weight": torch.ones(hidden),
        "gate_up.weight": torch.randn(2 * inner, hidden, generator=generator) / hidden**0.5,
        "down.weight": torch.zeros(hidden, inner),
        "norm.weight": frozen.norm.clone(),
    }
    for name, solution in (("start", first), ("advance", second)):
        tensors[f"{name}.weight"] = torch.from_numpy(solution.weight)
        tensors[f"{name}.bias"] = torch.from_numpy(solution.bias)
        tensors[f"{name}.mean"] = torch.from_numpy(solution.moments.mean)
        tensors[f"{name}.std"] = torch.from_numpy(solution.moments.std)
    return tensors


def _inputs(frozen: Frozen, left: Tensor, token_ids: np.ndarray[Any, np.dtype[np.int32]]) -> Tensor:
    """The normed inputs of a matrix, as the net makes them."""
    x = torch.cat([left, frozen.ops.embed(frozen.embedding, token_ids)], -1)
    hidden = frozen.embedding.shape[1]
    return frozen.ops.rms_norm(x.reshape(-1, hidden), torch.ones(hidden), frozen.eps).reshape(x.shape)


def _goals(frozen: Frozen, batch: Batch, rows: Ints) -> Tensor:
    """The directions of the target's last states at some rows."""
    hidden = frozen.embedding.shape[1]
    return frozen.ops.rms_norm(batch.taps[rows, -hidden:], torch.ones(hidden), frozen.eps)


def _apply(solution: Solution, x: Tensor) -> Tensor:
    centred = (x - torch.from_numpy(solution.moments.mean)) / torch.from_numpy(solution.moments.std)
    return centred @ torch.from_numpy(solution.weight).T + torch.from_numpy(solution.bias)
