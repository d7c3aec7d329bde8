"""Fitting a drafter's net: closed-form start, gradient steps on unrolled rows, measured on documents held out.

A run is a function of recipe, seed and data. It may be killed anywhere: its state is one file, replaced as a whole
every few steps, and a run that goes on from it ends with the same bytes (on one thread, with deterministic torch).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sakiyomi.checkpoints.drafter import write_drafter
from sakiyomi.errors import CheckpointError, ParameterError, SakiyomiError
from sakiyomi.nets.binding import describe_target
from sakiyomi.ops.native import quantize
from sakiyomi.ops.torch import TorchOps
from sakiyomi.train.acceptance import (
    Acceptance,
    count_choices,
    fit_sharpness,
    measure_acceptance,
    most_frequent,
)
from sakiyomi.train.batches import Batch, Ints, plan_epoch, read_batch, split_documents
from sakiyomi.train.estimate import Announce, Estimate, private_bytes
from sakiyomi.train.files import replacing
from sakiyomi.train.heads import CandidateSet, Family, Frozen, Noise, Trainee
from sakiyomi.train.losses import check_mix, head_loss
from sakiyomi.train.optimizers import OPTIMIZERS, Optimizer
from sakiyomi.train.rounded import RoundedOps
from sakiyomi.train.shards import Shards
from sakiyomi.types import GROUP_SIZE, DrafterFile, Model
from sakiyomi.types import Tensor as Stored

Report = Callable[[str, int, int], None]
"""Told what is going on, and how much of how much is done."""

STATE_FILE, DRAFTER_FILE = "fit.safetensors", "drafter.safetensors"
EVALUATIONS_OF_EXPORT = 3
"""What writing the drafter file takes, in evaluations: two of them, and the sharpness of its guesses."""
SUMS = 2
"""Of the optimiser for each parameter, at most."""
STATE_COPIES = 2 + SUMS
"""Parameters, the optimiser's sums and the best parameters so far."""
STEP_DECAY = 0.8
"""Weight of a step of the unrolling against the one before (EAGLE-3)."""


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """The recipe of a fit; a kind of net adds its own fields.

    Args:
        passes: how often training sees the data.
        rows_per_step: rows of a step at least; whole documents are taken.
        optimizer: "adamw", or "muon" for the matrices that belong to no ids (train/optimizers.py).
        matrix_factor: the rate of those matrices over `learning_rate`, under Muon.
        learning_rate: held for `constant_share` of the run after `warmup_steps`, then linear to 3 % of it.
        weight_decay: on matrices.
        dropout: share of the inputs of the large matrices that are hidden.
        clip: largest norm of the gradient.
        loss: weights of ce, kl, tv and lk.
        loss_on: "all" rows, or "answers" alone.
        unroll: for each stage the share of the run at which it begins and the number of steps unrolled.
        num_frequent, num_random: ids that every step compares laws over, beside the choices of its own rows.
        num_frequent_late: `num_frequent` in the last fifth.
        ridge_rows: rows of the closed-form start.
        held_out: documents that training never sees; a share, or a number above 1.
        evaluations: how often acceptance is measured.
        patience: evaluations of the last stage without a better one that end the run; 0 never ends it.
        vocabulary: ids that are drafted, the target's most frequent choices. It may be changed after training.
        bits: of the matrices in the drafter file, 16, 8 or 4; may be changed after training.
        depth: length of the drafts whose acceptance decides.
        precision: of the products in training, "float32" or "bfloat16" (train/rounded.py).
        seed: of everything.
        checkpoint_s: seconds between saved states.
    """

    passes: float = 3.0
    rows_per_step: int = 1200
    optimizer: str = "adamw"
    matrix_factor: float = 2.0
    learning_rate: float = 3e-4
    constant_share: float = 0.3
    warmup_steps: int = 20
    weight_decay: float = 0.05
    dropout: float = 0.1
    clip: float = 1.0
    loss: Mapping[str, float] = field(default_factory=lambda: {"ce": 0.3, "kl": 0.7})
    loss_on: str = "all"
    unroll: tuple[tuple[float, int], ...] = ((0.0, 1), (0.35, 2), (0.65, 3))
    num_frequent: int = 768
    num_random: int = 256
    num_frequent_late: int = 2048
    ridge_rows: int = 150_000
    held_out: float = 0.03
    evaluations: int = 12
    patience: int = 3
    vocabulary: int = 2048
    bits: int = 16
    depth: int = 3
    precision: str = "float32"
    seed: int = 0
    checkpoint_s: float = 30.0

    def __post_init__(self) -> None:
        check_mix(self.loss)
        if self.loss_on not in ("all", "answers"):
            raise ParameterError(f"loss_on={self.loss_on!r} is not allowed; give all or answers.")
        if not 0 <= self.dropout < 1:
            raise ParameterError(f"dropout={self.dropout} is not allowed; give a number from 0 to below 1.")
        self._check_one_of("bits", (16, 8, 4))
        self._check_one_of("precision", ("float32", "bfloat16"))
        self._check_one_of("optimizer", OPTIMIZERS)
        self._check_positive(
            "passes", "rows_per_step", "learning_rate", "held_out", "vocabulary", "depth", "matrix_factor"
        )

    def _check_one_of(self, name: str, allowed: Sequence[object]) -> None:
        if getattr(self, name) not in allowed:
            raise ParameterError(f"{name}={getattr(self, name)} is not allowed; give {', '.join(map(str, allowed))}.")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise ParameterError(f"{name}={getattr(self, name)} is not allowed; give a number above 0.")

    @property
    def late_choices(self) -> tuple[str, ...]:
        """Fields that a state does not depend on."""
        return ("patience", "vocabulary", "bits")

    @classmethod
    def read(cls, recipe: Mapping[str, Any]) -> Self:
        """From a section of a recipe.

        Raises:
            ParameterError: an unknown key or a value out of range.
        """
        known = cls.__dataclass_fields__
        for key in recipe:
            if key not in known:
                raise ParameterError(f"the recipe's fit has no key {key!r}; known are {', '.join(known)}.")
        options = dict(recipe)
        if "unroll" in options:
            options["unroll"] = tuple((float(start), int(steps)) for start, steps in options["unroll"])
        return cls(**options)

    def num_unrolled(self, progress: float) -> int:
        """Steps unrolled when a share of the run is done."""
        return [steps for start, steps in self.unroll if start <= progress][-1]

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate of a step."""
        warm = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        progress = step / max(num_steps, 1)
        left = min(1.0, (1 - progress) / max(1 - self.constant_share, 1e-9))
        return self.learning_rate * warm * max(left, 0.03)


@dataclass
class Progress:
    """How a run goes; told after each step.

    Attributes:
        hit: share of rows of the last steps whose next token is the most probable of its candidates.
    """

    step: int
    num_steps: int
    loss: float
    hit: float
    rows_per_s: float
    best: float


Tell = Callable[[Progress], None]


Config = TypeVar("Config", bound=FitConfig)


def fit_net(
    make_family: Callable[[Config, Frozen, tuple[int, ...]], Family],
    config: Config,
    shards: Shards,
    target: Model,
    folder: Path,
    report: Report | None = None,
    announce: Announce | None = None,
    tell: Tell | None = None,
) -> Path:
    """Train a net and write its drafter file.

    Args:
        make_family: what the kind of net brings, from the recipe, the target's weights and the taps of the shards.
        shards: documents whose last tap is the target's last state before the final norm.
        folder: where the state lies and the drafter file comes.
        report: told about long phases.
        announce: told what the steps that are left will take, before they begin.
        tell: told about each step.

    Returns:
        The drafter file.

    Raises:
        ParameterError: a target without weights to lend, or shards without the last tap.
        CheckpointError: a state in the folder that belongs to another run.
        SakiyomiError: the loss is no number any more; the last good state stays.
    """
    held = private_bytes()
    frozen = _freeze(target, shards, RoundedOps() if config.precision == "bfloat16" else TorchOps())
    run = Fit(config, make_family(config, frozen, shards.taps), frozen, shards, folder, report, tell)
    if announce is not None and not run.is_done():
        announce(run.estimate(held))
    run.train()
    return run.export(describe_target(target.info, target.lend()))  # type: ignore[arg-type]  # _freeze checked it


def _freeze(target: Model, shards: Shards, ops: TorchOps) -> Frozen:
    lent = target.lend()
    if lent is None:
        raise ParameterError(f"{target.info.name} lends no weights, so that no drafter can be trained for it.")
    if not shards.taps or shards.taps[-1] != target.info.num_layers or shards.hidden_size != target.info.hidden_size:
        raise ParameterError(
            f"the shards hold taps {shards.taps} of width {shards.hidden_size}; training needs those of "
            f"{target.info.name}, the last one tap {target.info.num_layers}: capture again."
        )
    return Frozen.of(target.info, lent, ops)


class Fit:
    """A run over some documents."""

    def __init__(
        self,
        config: FitConfig,
        family: Family,
        frozen: Frozen,
        shards: Shards,
        folder: Path,
        report: Report | None,
        tell: Tell | None,
    ) -> None:
        self.config = config
        self.family = family
        self.frozen = frozen
        self.shards = shards
        self.folder = folder
        self._report = report or (lambda what, done, total: None)
        self._tell = tell or (lambda progress: None)
        wanted = config.held_out if config.held_out > 1 else max(1.0, config.held_out * len(shards))
        if len(shards) < 2:
            raise ParameterError(f"{len(shards)} documents are too few to train on; generate more.")
        self.members, self.held_out = split_documents(len(shards), min(int(wanted), len(shards) - 1), config.seed)
        counts = count_choices(shards, self.members, frozen.info.vocab_size)
        self.frequent = np.argsort(-counts, kind="stable")
        self.vocabulary = most_frequent(counts, min(config.vocabulary, frozen.info.vocab_size))
        self.plans = self._plan()
        self.state = self._load() or self._start()
        self.trainee = self.state.trainee
        self._last_saved = time.monotonic()

    # ---- training

    def train(self) -> None:
        """Train to the end of the run, or to where measured acceptance rises no more."""
        every = self._evaluated_every()
        while not self.is_done():
            self._train_step(self.plans[self.state.step])
            self.state.step += 1
            if self.state.step % every == 0 or self.state.step == len(self.plans):
                self._evaluate(self.state.step)
            if time.monotonic() - self._last_saved > self.config.checkpoint_s:
                self._save()
        self._save()

    def is_done(self) -> bool:
        return self.state.step >= len(self.plans) or self._is_flat()

    def _evaluated_every(self) -> int:
        return max(1, len(self.plans) // self.config.evaluations)

    def _train_step(self, members: Sequence[int]) -> None:
        state, started = self.state, time.perf_counter()
        total, num_rows, hits = self._add_losses(members, state.step)
        value = float(total.detach())
        if not math.isfinite(value):
            raise SakiyomiError(
                f"the loss is {value} at step {state.step}; the last good state stays in {self.folder / STATE_FILE}. "
                f"Remove it and train with a learning_rate below {self.config.learning_rate:g}."
            )
        self._descend(total)
        state.loss = 0.95 * state.loss + 0.05 * value if state.step else value
        state.hit = 0.95 * state.hit + 0.05 * hits if state.step else hits
        state.rows += num_rows
        rate = num_rows / (time.perf_counter() - started)
        self._say(Progress(state.step + 1, len(self.plans), state.loss, state.hit, rate, state.best_length))

    def _add_losses(self, members: Sequence[int], step: int) -> tuple[Tensor, int, float]:
        """The loss of some documents as a step takes it, its rows, and the share of first guesses that hit."""
        config = self.config
        rng = np.random.default_rng((config.seed, step, 7))
        noise = Noise(config.dropout, config.seed * 1_000_003 + step)
        batch = read_batch(self.shards, members, config.loss_on == "answers")
        num_unrolled, num_frequent = self._stage(step)
        candidates = CandidateSet.draw(
            batch.argmax, self.frequent[:num_frequent], config.num_random, self.frozen.info.vocab_size, rng
        )
        finals = self.frozen.final(batch.taps[:, -self.frozen.info.hidden_size :])
        teacher = candidates.teacher(finals, self.frozen.head[candidates.ids], batch.argmax)

        total, num_rows, hits = torch.zeros(()), 0, 0.0
        for unrolled, (rows, features) in enumerate(self.trainee.unroll(batch, num_unrolled, noise)):
            head = self.trainee.head(unrolled, candidates.ids)
            goals = rows + 1 + unrolled
            counted = torch.from_numpy(_counted(batch, goals)).float()
            part = teacher.rows(goals)
            weights = counted / counted.sum().clamp(min=1)
            loss = head_loss(features, head, part, config.loss, weights, self.frozen.ops.linear)
            total = total + STEP_DECAY**unrolled * loss
            num_rows += len(rows)
            if unrolled == 0:
                hits = self._hit_rate(features, head, part)
        return total, num_rows, hits

    def _stage(self, step: int) -> tuple[int, int]:
        """Steps unrolled, and frequent ids that laws are compared over."""
        progress = step / len(self.plans)
        return self.config.num_unrolled(progress), (
            self.config.num_frequent if progress < 0.8 else self.config.num_frequent_late
        )

    # ---- what is left

    def estimate(self, held: int = 0) -> Estimate:
        """What the rest of the run takes: a step of each of its stages is tried, and so is a part of an evaluation.

        Args:
            held: private bytes of the process before the run.
        """
        left = range(self.state.step, len(self.plans))
        members = sorted((self.plans[step] for step in left), key=lambda plan: int(self.shards.lengths[plan].sum()))
        middle = members[len(members) // 2]
        stages: dict[tuple[int, int], list[int]] = {}
        for step in left:
            stages.setdefault(self._stage(step), []).append(step)
        self._add_losses(middle, left[0])[0].backward()  # type: ignore[no-untyped-call]  # finds code and memory cold
        seconds = len(left) * self._time_descent()
        for steps in stages.values():
            self.state.optimizer.clear()
            started = time.perf_counter()
            self._add_losses(middle, steps[0])[0].backward()  # type: ignore[no-untyped-call]
            seconds += len(steps) * (time.perf_counter() - started)
        self.state.optimizer.clear()
        with _Peak() as peak:
            self._add_losses(members[-1], left[-1])[0].backward()  # type: ignore[no-untyped-call]
        self.state.optimizer.clear()
        seconds += (len(left) // self._evaluated_every() + EVALUATIONS_OF_EXPORT) * self._time_evaluation()
        parameters = 4 * sum(value.numel() for value in self.trainee.parameters.values())
        return Estimate(
            what=f"fitting, {len(left):,} steps",
            seconds=seconds,
            disk_bytes=2 * STATE_COPIES * parameters,  # the last state stays until the next one is whole
            memory_bytes=max(peak.num_bytes - held, 0) + SUMS * parameters,
        )

    def _time_descent(self) -> float:
        """A step of the optimiser, on copies of the parameters and of the gradients that they have."""
        config, copies = self.config, {}
        for name, value in self.trainee.parameters.items():
            copies[name] = value.detach().clone().requires_grad_()
            copies[name].grad = None if value.grad is None else value.grad.clone()
        optimizer = Optimizer(copies, self.trainee.tables, config.optimizer, config.weight_decay, config.matrix_factor)
        optimizer.step(config.learning_rate)  # makes its sums
        started = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(copies.values(), config.clip)
        optimizer.step(config.learning_rate)
        return time.perf_counter() - started

    def _time_evaluation(self) -> float:
        some = self.held_out[: max(1, len(self.held_out) // 8)]
        started = time.perf_counter()
        measure_acceptance(self.trainee, self.shards, some, self.vocabulary, self.config.depth)
        lengths = self.shards.lengths
        return (time.perf_counter() - started) * float(lengths[self.held_out].sum()) / float(lengths[some].sum())

    def _say(self, progress: Progress) -> None:
        told = f"fitting: loss {progress.loss:.3f}, hit {progress.hit:.3f}, {progress.rows_per_s:.0f} rows/s"
        self._report(f"{told}, best length {progress.best:.3f}", progress.step, progress.num_steps)
        self._tell(progress)

    def _descend(self, loss: Tensor) -> None:
        config, optimizer = self.config, self.state.optimizer
        optimizer.clear()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.trainee.parameters.values(), config.clip)
        optimizer.step(config.rate(self.state.step, len(self.plans)))

    def _hit_rate(self, features: Tensor, head: Tensor, teacher: Any) -> float:
        """Of a sample of the rows."""
        with torch.no_grad():
            every = max(1, len(features) // 128)
            return float(((features[::every] @ head.T).argmax(-1) == teacher.labels[::every]).float().mean())

    # ---- measuring

    def measure(self, vocabulary: Ints | None = None, depth: int | None = None) -> Acceptance:
        """Greedy acceptance of the net on the held-out documents."""
        ids = self.vocabulary if vocabulary is None else vocabulary
        return measure_acceptance(self.trainee, self.shards, self.held_out, ids, depth or self.config.depth)

    def _evaluate(self, step: int) -> None:
        self._report(f"measuring acceptance at step {step}", step, len(self.plans))
        found = self.measure()
        state = self.state
        state.curve.append({"step": step, "rows": state.rows, "loss": state.loss, **found.as_dict()})
        if found.lengths[-1] > state.best_length:
            state.best_length, state.best_step = found.lengths[-1], step
            state.best = {name: value.detach().clone() for name, value in self.trainee.parameters.items()}

    def _is_flat(self) -> bool:
        """Whether the last stage has had its evaluations without a better one."""
        config = self.config
        last_stage = config.unroll[-1][0] * len(self.plans)
        late = [point for point in self.state.curve if point["step"] > max(self.state.best_step, last_stage)]
        return config.patience > 0 and len(late) >= config.patience

    # ---- the drafter file

    def export(self, target: Mapping[str, Any]) -> Path:
        """Write the drafter of the best parameters."""
        for name, value in self.state.best.items():
            self.trainee.parameters[name].data.copy_(value)
        exported = self.trainee.export(self.vocabulary)
        told = self.family.describe(self.trainee, self.shards, self.held_out, self.vocabulary)
        sharpness = fit_sharpness(self.trainee, self.shards, self.held_out, self.vocabulary)
        found = self.measure()
        tensors = {name: round_weights(matrix, self.config.bits) for name, matrix in exported.tensors.items()}
        path = self.folder / DRAFTER_FILE
        with replacing(path) as working:
            write_drafter(
                working,
                DrafterFile(
                    kind=self.family.kind,
                    config={**exported.config, **told, "sharpness": sharpness},
                    taps=self.family.taps,
                    target=target,
                    tensors={**tensors, **exported.kept},
                    vocabulary=self.vocabulary.astype(np.int32),
                    recipe={**_plain(self.config), "documents": len(self.members), "rows": self.state.rows},
                    measured={
                        "held_out": found.as_dict(),
                        "curve": self.state.curve,
                        "best_step": self.state.best_step,
                    },
                ),
            )
        return path

    # ---- the state

    def _plan(self) -> list[list[int]]:
        """The documents of each step of the run."""
        plans: list[list[int]] = []
        for epoch in range(math.ceil(self.config.passes)):
            plans += plan_epoch(self.shards.lengths, self.members, self.config.rows_per_step, self.config.seed, epoch)
        share = self.config.passes / math.ceil(self.config.passes)
        return plans[: max(1, round(share * len(plans)))]

    def _start(self) -> _State:
        self._report("solving for the closed-form start", 0, 1)
        batches, num_rows = [], 0
        for members in self.plans:
            if num_rows >= self.config.ridge_rows:
                break
            batches.append(read_batch(self.shards, members))
            num_rows += len(batches[-1].tokens)
        tensors = self.family.start(batches, self.vocabulary)
        state = _State(self.family.build(tensors), tensors, self.config)
        self.trainee, self.state = state.trainee, state
        self._evaluate(0)
        self._save()
        return state

    def _identity(self) -> dict[str, Any]:
        """What a state must have been made with to go on from it."""
        return {
            "recipe": {k: v for k, v in _plain(self.config).items() if k not in self.config.late_choices},
            "documents": [len(self.shards), int(self.shards.lengths.sum())],
            "taps": list(self.shards.taps),
        }

    def _save(self) -> None:
        state, path = self.state, self.folder / STATE_FILE
        told = {**state.as_dict(), "identity": self._identity()}
        with replacing(path) as working:
            working.write_bytes(save(state.tensors(), {"sakiyomi": json.dumps(told)}))
        self._last_saved = time.monotonic()

    def _load(self) -> _State | None:
        path = self.folder / STATE_FILE
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                told = json.loads(file.metadata()["sakiyomi"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged; remove it to train from the start.") from error
        if told["identity"] != json.loads(json.dumps(self._identity())):
            raise CheckpointError(
                f"{path} belongs to a run with another recipe or other data; remove it to train from the start."
            )
        return _State.resume(told, tensors, self.family.build, self.config)


class _State:
    """All that a run needs to go on: parameters, the optimiser's sums, counts, and the best so far."""

    def __init__(self, trainee: Trainee, first: Mapping[str, Tensor], config: FitConfig) -> None:
        self.trainee = trainee
        self.fixed = {k: v for k, v in first.items() if k not in trainee.parameters}
        self.step = self.rows = self.best_step = 0
        self.loss = self.hit = self.best_length = 0.0
        self.curve: list[dict[str, Any]] = []
        self.best: dict[str, Tensor] = {}
        self.optimizer = Optimizer(
            trainee.parameters, trainee.tables, config.optimizer, config.weight_decay, config.matrix_factor
        )

    def as_dict(self) -> dict[str, Any]:
        names = ("step", "rows", "best_step", "loss", "hit", "best_length", "curve")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> dict[str, Tensor]:
        tensors = {f"fixed.{name}": value for name, value in self.fixed.items()}
        for name, value in self.trainee.parameters.items():
            tensors[f"now.{name}"] = value.detach()
        tensors |= {f"sums.{name}": value for name, value in self.optimizer.tensors().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        return {name: value.contiguous() for name, value in tensors.items()}

    @classmethod
    def resume(
        cls,
        told: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        build: Callable[[Mapping[str, Tensor]], Trainee],
        config: FitConfig,
    ) -> _State:
        first = _under("fixed.", tensors) | _under("now.", tensors)
        state = cls(build(first), first, config)
        for name in state.as_dict():
            setattr(state, name, told[name])
        state.best = _under("best.", tensors)
        state.optimizer.load(_under("sums.", tensors))
        return state


class _Peak:
    """The most private bytes that the process holds whenever gradients keep something or take it back."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._look, self._look)

    def _look(self, kept: Tensor) -> Tensor:
        self.num_bytes = max(self.num_bytes, private_bytes())
        return kept

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _counted(batch: Batch, goals: Ints) -> Any:
    """Whether predicting what follows each row counts: by the token that is predicted, where it is known."""
    following = np.minimum(goals + 1, len(batch.counts) - 1)
    is_known = goals + 1 <= batch.last[goals]
    return np.where(is_known, batch.counts[following], batch.counts[goals])


def round_weights(values: npt.NDArray[np.float32], bits: int) -> Stored:
    """A matrix in the precision of a drafter file; vectors stay as they are."""
    if values.ndim != 2:
        return values
    if bits == 16 or values.shape[1] % GROUP_SIZE:
        return values.astype(np.float16)
    return quantize(values, bits)


def _plain(config: FitConfig) -> dict[str, Any]:
    """The recipe as JSON takes it, without what has no influence on the result."""
    fields = {name: dict(value) if isinstance(value, Mapping) else value for name, value in asdict(config).items()}
    del fields["checkpoint_s"]
    return fields
