"""Fitting: a killed run ends with the same bytes, faults end in a message, what is measured is what decoding does."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sakiyomi.assemble import ModelOptions, load_model, make_drafter  # noqa: E402
from sakiyomi.checkpoints.drafter import read_drafter  # noqa: E402
from sakiyomi.decode import prefill, step  # noqa: E402
from sakiyomi.drafters.mlp import MlpDrafter, read_config  # noqa: E402
from sakiyomi.drafters.ngram import NgramDrafter  # noqa: E402
from sakiyomi.errors import CheckpointError, ParameterError, SakiyomiError  # noqa: E402
from sakiyomi.params import SamplingParams  # noqa: E402
from sakiyomi.train.acceptance import find_hits, measure_acceptance  # noqa: E402
from sakiyomi.train.batches import read_batch  # noqa: E402
from sakiyomi.train.estimate import Estimate  # noqa: E402
from sakiyomi.train.fit import STATE_FILE, FitConfig  # noqa: E402
from sakiyomi.train.heads import CandidateSet, Frozen, find_columns  # noqa: E402
from sakiyomi.train.mlp import MlpTrainee, fit_mlp  # noqa: E402
from sakiyomi.types import Drafter, DrafterContext, Sequence  # noqa: E402
from sakiyomi.verify.match import MatchVerifier  # noqa: E402
from trained_toy import FAST_FIT, KINDS, VOCAB, load_fit, write_documents  # noqa: E402

SMALL = {**FAST_FIT, **KINDS["mlp"], "passes": 4, "dropout": 0.1, "vocabulary": 64, "num_frequent": 32, "num_random": 8}

MIXED = {"optimizer": "muon", "precision": "bfloat16"}

# A run that kills itself without warning at a step, as a fresh process.
KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trained_toy import Toy, speak, write_documents
import numpy as np
from trained_toy import load_fit
import json
toy = Toy(Path(sys.argv[2]), [speak(np.random.default_rng(100 + i), 12) for i in range(40)])
model, stop = toy.load(), int(sys.argv[4])
def tell(progress):
    if progress.step == stop:
        os.kill(os.getpid(), signal.SIGKILL)
shards = write_documents(model, toy.prompts[:8], 40, 1.0)
load_fit(sys.argv[6])(json.loads(sys.argv[5]), shards, model, Path(sys.argv[3]), tell=tell)
"""


@pytest.fixture(scope="module")
def shards(trained_toy: Any) -> Any:
    return write_documents(trained_toy.load(), trained_toy.prompts[:8], 40, 1.0)


def fit(trained_toy: Any, shards: Any, folder: Path, **more: Any) -> Path:
    return fit_mlp({**SMALL, **more}, shards, trained_toy.load(), folder)


@pytest.mark.parametrize(
    ("kind", "more"), [*((kind, {}) for kind in KINDS), *((kind, MIXED) for kind in ("mlp", "medusa", "peagle"))]
)
def test_a_killed_run_ends_with_the_same_bytes(
    trained_toy: Any, shards: Any, tmp_path: Path, kind: str, more: dict[str, str]
) -> None:
    shape = {**KINDS[kind], "passes": 4, **more}
    recipe = {**FAST_FIT, **shape, "dropout": 0.1, "num_frequent": 32, "num_random": 8, "checkpoint_s": 0.0}
    whole = load_fit(kind)({**recipe, "checkpoint_s": 100.0}, shards, trained_toy.load(), tmp_path / "whole")
    tests = Path(__file__).resolve().parent.parent
    arguments = [str(tests), str(trained_toy.folder), str(tmp_path / "killed"), "4", json.dumps(recipe), kind]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / STATE_FILE).is_file()
    told: list[Estimate] = []
    resumed = load_fit(kind)(recipe, shards, trained_toy.load(), tmp_path / "killed", announce=told.append)
    assert len(told) == 1  # what is tried for it leaves no trace
    assert told[0].seconds > 0
    assert told[0].memory_bytes > 0
    load_fit(kind)(recipe, shards, trained_toy.load(), tmp_path / "killed", announce=told.append)
    assert len(told) == 1  # nothing is left
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (whole, resumed)]
    assert digests[0] == digests[1]


def test_a_state_of_another_run_is_refused(trained_toy: Any, shards: Any, tmp_path: Path) -> None:
    fit(trained_toy, shards, tmp_path)
    with pytest.raises(CheckpointError, match="another recipe"):
        fit(trained_toy, shards, tmp_path, learning_rate=1e-3)
    (tmp_path / STATE_FILE).write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="damaged"):
        fit(trained_toy, shards, tmp_path)


def test_a_loss_that_is_no_number_keeps_the_last_good_state(trained_toy: Any, tmp_path: Path) -> None:
    shards = write_documents(trained_toy.load(), trained_toy.prompts[:8], 40, 1.0)
    fit(trained_toy, shards, tmp_path, passes=1)
    good = (tmp_path / STATE_FILE).read_bytes()
    for index in range(len(shards)):
        shards.document(index).taps[5] = np.nan
    (tmp_path / STATE_FILE).unlink()
    with pytest.raises(SakiyomiError, match=r"loss is nan at step .*learning_rate"):
        fit(trained_toy, shards, tmp_path, passes=1)
    assert good


def test_wrong_recipes_are_refused(trained_toy: Any, shards: Any, tmp_path: Path) -> None:
    for recipe, told in (
        ({"rate": 1}, "no key 'rate'"),
        ({"loss": {"mse": 1.0}}, "mse"),
        ({"loss_on": "users"}, "loss_on"),
        ({"passes": 0}, "passes"),
        ({"optimizer": "sgd"}, "give adamw, muon"),
        ({"precision": "float16"}, "give float32, bfloat16"),
        ({"matrix_factor": 0}, "matrix_factor"),
    ):
        with pytest.raises(ParameterError, match=told):
            fit(trained_toy, shards, tmp_path, **recipe)
    shards = write_documents(trained_toy.load(), trained_toy.prompts[:3], 10)
    shards.taps = (0, 1)
    with pytest.raises(ParameterError, match="capture again"):
        fit(trained_toy, shards, tmp_path)


def test_rates_and_stages() -> None:
    config = FitConfig(learning_rate=1.0, warmup_steps=10)
    assert config.rate(0, 1000) == pytest.approx(0.1)
    assert config.rate(200, 1000) == 1.0
    assert config.rate(650, 1000) == pytest.approx(0.5)
    assert config.rate(999, 1000) == pytest.approx(0.03)
    assert [config.num_unrolled(share) for share in (0, 0.34, 0.35, 0.64, 0.65, 1)] == [1, 1, 2, 2, 3, 3]


def test_a_candidate_set_estimates_the_whole_sum_without_bias() -> None:
    rng = np.random.default_rng(0)
    head, finals = torch.from_numpy(rng.normal(0, 0.5, (300, 4))), torch.from_numpy(rng.normal(0, 1, (6, 4)))
    whole = torch.exp(finals @ head.T).sum(-1)
    labels = np.array([3, 250, 7, 7, 1, 0])
    sums = []
    for seed in range(300):
        chosen = CandidateSet.draw(labels, np.arange(20), 30, 300, np.random.default_rng(seed))
        assert set(labels) | set(range(20)) <= set(chosen.ids.tolist())
        assert len(chosen.ids) == 21 + 30
        teacher = chosen.teacher(finals, head[chosen.ids], labels)
        assert (chosen.ids[teacher.labels].numpy() == labels).all()
        sums.append((torch.exp(finals @ head[chosen.ids].T)[:, 0] / teacher.probs[:, 0]).numpy())
    assert np.allclose(np.mean(sums, 0), whole.numpy(), rtol=0.03)
    everything = CandidateSet.draw(labels, np.arange(300), 5, 300, rng)
    assert everything.ids.tolist() == list(range(300))
    assert find_columns(torch.tensor([2, 5, 9]), np.array([5, 4, 9, 11])).tolist() == [1, -1, 2, -1]


def decode(model: Any, drafter: Drafter, prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """Mean acceptance length, and the share of steps whose first guess is right."""
    accepted = first = steps = 0
    for prompt in prompts:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        sequence = Sequence("0", list(prompt), len(prompt), params, 0, model.new_cache())
        prefill(model, drafter, sequence)
        while sequence.num_new < num_tokens - 4:
            done = step(model, drafter, MatchVerifier(), [sequence], [3])[0]
            accepted, first, steps = accepted + done.num_accepted, first + (done.num_accepted > 0), steps + 1
    return 1 + accepted / steps, first / steps


@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in KINDS), ("mlp", MIXED)])
def test_twenty_dialogues_are_learnt_by_heart(
    trained_toy: Any, tmp_path: Path, kind: str, more: dict[str, str]
) -> None:
    """A feature, a position or a mask that is off by one would keep the first guess from being right nine times in
    ten."""
    loaded = load_model(trained_toy.folder, ModelOptions(dtype="float32", threads=1))
    model, prompts = loaded.model, trained_toy.prompts[:20]
    shards = write_documents(model, prompts, 60)
    path = load_fit(kind)(
        {**FAST_FIT, "evaluations": 1, "loss": {"ce": 1.0}, **KINDS[kind], **more}, shards, model, tmp_path
    )
    length, first = decode(model, make_drafter(f"{kind}:path={path}", loaded, ModelOptions()), prompts, 60)
    assert first > 0.9
    assert length > 3
    assert length > 1.3 * decode(model, NgramDrafter(NgramDrafter.Config(num_speculative_tokens=3)), prompts, 60)[0]


def test_offline_acceptance_is_that_of_the_real_loop(trained_toy: Any, toy_mlp: Path) -> None:
    """Round by round: what teacher-forced unrolling calls right is what the loop accepts."""
    model = trained_toy.load()
    trainee, frozen = _as_trainee(model, read_drafter(toy_mlp))
    drafter = MlpDrafter(MlpDrafter.Config(path=str(toy_mlp)), DrafterContext(model, lambda name: model))
    prompts = trained_toy.prompts[20:26]
    shards = write_documents(model, prompts, 60)
    total, lengths = 0, []
    for index, prompt in enumerate(prompts):
        hits = find_hits(trainee, read_batch(shards, [index]), torch.from_numpy(ALL), 3)
        right = np.minimum.accumulate(hits, axis=1).sum(1)
        rounds, row = [], len(prompt) - 2  # behind the taps of the last prompt token but one
        while row < len(hits) - 5:
            rounds.append(int(right[row]))
            row += rounds[-1] + 1
        params = SamplingParams(temperature=0, max_tokens=60)
        sequence = Sequence("0", list(prompt), len(prompt), params, 0, model.new_cache())
        prefill(model, drafter, sequence)
        assert [step(model, drafter, MatchVerifier(), [sequence], [3])[0].num_accepted for _ in rounds] == rounds
        total += len(rounds)
        lengths.append(1 + np.mean(rounds))
    assert total > 60
    found = measure_acceptance(trainee, shards, range(len(prompts)), ALL)
    assert found.lengths[2] == pytest.approx(np.mean(lengths), abs=0.2)
    assert found.conditional[0] == found.hit


ALL = np.arange(VOCAB)


def _as_trainee(model: Any, stored: Any) -> Any:
    """The net of a drafter file where training would have it: moments of 0 and 1 leave its weights as they are."""
    config = read_config(stored)
    tensors = {name: torch.from_numpy(np.asarray(value, np.float32)) for name, value in stored.tensors.items()}
    for name, parts in (("start", config.num_taps + 1), ("advance", 2)):
        tensors[f"{name}.mean"] = torch.zeros(parts * config.hidden_size)
        tensors[f"{name}.std"] = torch.ones(parts * config.hidden_size)
    frozen = Frozen.of(model.info, model.lend())
    return MlpTrainee(config, frozen, tensors), frozen


def test_precision_and_vocabulary_are_chosen_after_training(trained_toy: Any, shards: Any, tmp_path: Path) -> None:
    """Without another step of training; a head of its own makes the drafter independent of the target's rows."""
    model = trained_toy.load()
    plain = read_drafter(fit(trained_toy, shards, tmp_path))
    path = fit(trained_toy, shards, tmp_path, bits=4, head_bits=8, vocabulary=40)
    stored = read_drafter(path)
    assert stored.vocabulary is not None
    assert len(stored.vocabulary) == 40
    assert stored.recipe["rows"] == plain.recipe["rows"]
    head = stored.tensors["head.weight"]
    assert np.abs(head.dequantize() - model.lend().ops.embed(model.lend().head, stored.vocabulary)).max() < 0.02
    assert int(stored.tensors["start.weight"].values.max()) == 15
    drafter = MlpDrafter(MlpDrafter.Config(path=str(path)), DrafterContext(model, lambda name: model))
    assert decode(model, drafter, trained_toy.prompts[:3], 30)[0] > 1.2
    with pytest.raises(ParameterError, match="bits=5"):
        fit(trained_toy, shards, tmp_path, bits=5)
