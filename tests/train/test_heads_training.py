"""EAGLE-3, P-EAGLE and Medusa in training: they are unrolled as they draft, and learn what they are to learn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sakiyomi.models.eagle import HeadRunner  # noqa: E402
from sakiyomi.nets.eagle3 import EagleHead  # noqa: E402
from sakiyomi.nets.medusa import MedusaHeads  # noqa: E402
from sakiyomi.ops.base import Causal  # noqa: E402
from sakiyomi.params import SamplingParams  # noqa: E402
from sakiyomi.train.acceptance import measure_acceptance  # noqa: E402
from sakiyomi.train.batches import Batch, read_batch  # noqa: E402
from sakiyomi.train.eagle import Eagle3Family, EagleFit, PEagleFamily  # noqa: E402
from sakiyomi.train.heads import Frozen, Noise  # noqa: E402
from sakiyomi.train.medusa import MedusaFamily, MedusaFit  # noqa: E402
from sakiyomi.types import Sequence  # noqa: E402
from trained_toy import TAPS, VOCAB, write_documents  # noqa: E402

ALL = np.arange(VOCAB)
EAGLES = {
    "3.1": (Eagle3Family, EagleFit(head_dim=16, inner_size=24)),
    "3": (Eagle3Family, EagleFit(head_dim=16, inner_size=24, fc_norm=False, norm_output=False)),
    "two layers, shared keys": (
        Eagle3Family,
        EagleFit(head_dim=16, inner_size=24, num_layers=2, num_heads=4, num_kv_heads=2),
    ),
    "parallel": (PEagleFamily, EagleFit(head_dim=16, inner_size=24, num_layers=2)),
}


@pytest.fixture(scope="module")
def shards(trained_toy: Any) -> Any:
    return write_documents(trained_toy.load(), trained_toy.prompts[:8], 40, 1.0)


def make_trainee(family: Any, frozen: Frozen, shards: Any, vocabulary: Any = ALL, seed: int = 0) -> Any:
    """The start, shaken, so that every tensor matters."""
    tensors = family.start([read_batch(shards, range(len(shards)))], vocabulary)
    generator = torch.Generator().manual_seed(seed)
    trainee = family.build(tensors)
    with torch.no_grad():
        for name, value in trainee.parameters.items():
            if name.endswith(("q_proj.bias", "k_proj.bias")):
                value *= 0.3  # heads that look at other rows too
            value += 0.1 * torch.randn(value.shape, generator=generator) * value.abs().mean().clamp(min=0.05)
    return trainee


def freeze(trained_toy: Any) -> tuple[Any, Frozen]:
    model = trained_toy.load("torch")
    return model, Frozen.of(model.info, model.lend())


def as_head(trainee: Any, model: Any) -> EagleHead:
    exported = trainee.export(ALL)
    assert set(exported.tensors) == set(trainee.config.shapes())
    return EagleHead.load(trainee.config, exported.tensors, model.lend())


# ---------------------------------------------------------------------------------------------- as it drafts


@pytest.mark.parametrize("name", [name for name in EAGLES if name != "parallel"])
def test_unrolled_training_is_the_cached_chain_at_inference(trained_toy: Any, shards: Any, name: str) -> None:
    model, frozen = freeze(trained_toy)
    make, recipe = EAGLES[name]
    trainee = make_trainee(make(recipe, frozen, TAPS), frozen, shards)
    head, batch, num_steps = as_head(trainee, model), read_batch(shards, [2, 5]), 4
    with torch.no_grad():
        found = [(rows.tolist(), features) for rows, features in trainee.unroll(batch, num_steps)]
    assert [len(rows) for rows, _ in found] == [len(batch.rows(step)) for step in range(num_steps)]
    for first in np.unique(batch.first):
        for row in range(first + 1, batch.last[first], 7):
            for step, wanted in enumerate(draft_chain(head, batch, int(first), row, num_steps)):
                rows, features = found[step]
                assert torch.allclose(features[rows.index(row)], wanted, atol=1e-4), (row, step)


def draft_chain(head: EagleHead, batch: Batch, first: int, row: int, num_steps: int) -> list[Any]:
    """What the language-model head reads in a chain drafted behind `row`, as the drafter's cache makes it."""
    runner = HeadRunner(head, 1024)
    memo = runner.new_memo()
    tokens = batch.tokens[first : batch.last[first] + 1].tolist()
    sequence = Sequence("0", tokens[: row - first + 2], 1, SamplingParams(), 0, None)  # type: ignore[arg-type]
    runner.observe(memo, sequence, 0, batch.taps[first : row + 1])
    runner.catch_up([memo], [sequence])
    assert memo.last is not None
    read, state = memo.last
    chain = [read[0]]
    while len(chain) < num_steps and row + 1 + len(chain) <= batch.last[first]:
        token = np.array([batch.tokens[row + 1 + len(chain)]], np.int32)
        place = np.array([row - first + len(chain)], np.int32)
        read, state = runner.run([memo], token, state, place, Causal((0, 1)), (0, 1))
        memo.cache.keep([0])
        chain.append(read[0])
    return chain


def test_parallel_training_is_one_pass_at_inference(trained_toy: Any, shards: Any) -> None:
    model, frozen = freeze(trained_toy)
    make, recipe = EAGLES["parallel"]
    trainee = make_trainee(make(recipe, frozen, TAPS), frozen, shards)
    head, batch, num_steps = as_head(trainee, model), read_batch(shards, [1, 4]), 4
    with torch.no_grad():
        found = [(rows.tolist(), features) for rows, features in trainee.unroll(batch, num_steps)]
        sampled = [(rows.tolist(), features) for rows, features in trainee.unroll(batch, num_steps, Noise(0.0, 3))]
    assert 0.3 < len(sampled[3][0]) / len(found[3][0]) < 0.8, "a share of the chains is dropped"
    runner = HeadRunner(head, 1024)
    for first in np.unique(batch.first):
        for row in range(first + 1, batch.last[first], 7):
            memo = runner.new_memo()
            tokens = batch.tokens[first : row + 2].tolist()
            sequence = Sequence("0", tokens, 1, SamplingParams(), 0, None)  # type: ignore[arg-type]
            runner.observe(memo, sequence, 0, batch.taps[first : row + 1])
            wanted = runner.look_ahead([memo], [sequence], num_steps - 1)[0]
            for steps in (found, sampled):
                for step, (rows, features) in enumerate(steps):
                    if row in rows:
                        assert torch.allclose(features[rows.index(row)], wanted[step], atol=1e-4), (row, step)


def test_placeholders_of_a_chain_see_no_other_chain(trained_toy: Any, shards: Any) -> None:
    """By hand, on one document of six tokens: which rows the rows of P-EAGLE see."""
    from sakiyomi.train.eagle import _lay_out, _texts

    batch = read_batch(shards, [0])
    batch = replace(
        batch, **{name: getattr(batch, name)[:6] for name in ("tokens", "taps", "argmax", "counts", "first")}
    )
    batch = replace(batch, last=np.full(6, 5))
    layout = _lay_out(batch, _texts(batch), np.full(6, 3), 3)
    assert list(zip(layout.rows.tolist(), layout.depths.tolist(), strict=True)) == [
        *((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (3, 1), (1, 2), (2, 2)),
    ]
    assert layout.parents.tolist() == [-1, 0, 1, 2, 3, 1, 2, 3, 5, 6]


@pytest.mark.parametrize("name", ["3.1", "parallel"])
def test_documents_that_are_short_or_empty_of_guesses_do_no_harm(trained_toy: Any, shards: Any, name: str) -> None:
    _, frozen = freeze(trained_toy)
    make, recipe = EAGLES[name]
    trainee, whole = make_trainee(make(recipe, frozen, TAPS), frozen, shards), read_batch(shards, [0])
    lengths = np.array([1, 9, 2, 3, 4])
    ends = lengths.cumsum()
    places = np.concatenate([np.arange(n) for n in lengths])
    parts = {key: getattr(whole, key)[places] for key in ("tokens", "taps", "argmax", "counts")}
    batch = Batch(**parts, first=np.repeat(ends - lengths, lengths), last=np.repeat(ends - 1, lengths))
    alone = Batch(**{key: value[1:10] for key, value in parts.items()}, first=np.zeros(9, np.int64), last=np.full(9, 8))
    with torch.no_grad():
        wanted = [features for _, features in trainee.unroll(alone, 4)]
        for index, (rows, features) in enumerate(trainee.unroll(batch, 4)):
            assert rows.tolist() == batch.rows(index).tolist()
            assert torch.allclose(features[rows < 10], wanted[index], atol=1e-5)
        nothing = Batch(
            **{key: value[:1] for key, value in parts.items()}, first=np.zeros(1, int), last=np.zeros(1, int)
        )
        assert not list(trainee.unroll(nothing, 4))


@pytest.mark.parametrize("own_heads", [True, False])
def test_medusa_trains_what_drafts(trained_toy: Any, shards: Any, own_heads: bool) -> None:
    model, frozen = freeze(trained_toy)
    vocabulary = np.arange(0, VOCAB, 2)
    family = MedusaFamily(MedusaFit(num_heads=3, num_layers=2, own_heads=own_heads), frozen, TAPS)
    assert family.taps == TAPS[-1:]
    trainee = make_trainee(family, frozen, shards, vocabulary)
    exported, lent = trainee.export(vocabulary), model.lend()
    net = MedusaHeads.load(trainee.config, exported.tensors, lent, lent.ops.select_rows(lent.head, vocabulary))
    batch, ids = read_batch(shards, [3]), torch.from_numpy(vocabulary)
    wanted = net.logits(net.features(batch.taps[:, -64:], 3))
    with torch.no_grad():
        for index, (rows, features) in enumerate(trainee.unroll(batch, 3)):
            assert torch.allclose(features @ trainee.head(index, ids).T, wanted[index][rows], atol=1e-3)
    others = torch.arange(1, VOCAB, 2)
    assert torch.equal(trainee.head(0, others), frozen.head[others])


# ---------------------------------------------------------------------------------------------- the closed-form start


def test_the_start_is_a_linear_regression(trained_toy: Any) -> None:
    """Before any step of training many guesses are right; P-EAGLE's heads that look back guess the later ones too."""
    _, frozen = freeze(trained_toy)
    shards = write_documents(trained_toy.load(), trained_toy.prompts, 40, 1.0)
    for family, lowest in (
        (Eagle3Family(EagleFit(head_dim=32), frozen, TAPS), 0.3),
        (Eagle3Family(EagleFit(head_dim=32, fc_norm=False, norm_output=False), frozen, TAPS), 0.0),
        (PEagleFamily(EagleFit(head_dim=32, num_heads=8), frozen, TAPS), 0.3),
        (MedusaFamily(MedusaFit(), frozen, TAPS), 0.3),
    ):
        trainee = family.build(family.start([read_batch(shards, range(30))], ALL))
        found = measure_acceptance(trainee, shards, range(30, 40), ALL)
        assert found.hit > 0.4, family
        assert found.conditional[2] >= lowest, family


# ---------------------------------------------------------------------------------------------- gradients


@dataclass(frozen=True)
class Wide:
    """Everything in float64."""

    frozen: Frozen
    batch: Batch

    @classmethod
    def of(cls, frozen: Frozen, batch: Batch) -> Wide:
        wide = {name: getattr(frozen, name).double() for name in ("embedding", "head", "norm")}
        return cls(replace(frozen, **wide), replace(batch, taps=batch.taps.double()))


@pytest.mark.parametrize("name", [*EAGLES, "medusa"])
def test_gradients_are_those_of_finite_differences(trained_toy: Any, shards: Any, name: str) -> None:
    _, frozen = freeze(trained_toy)
    make, recipe = EAGLES.get(name, (MedusaFamily, MedusaFit(num_heads=3)))
    wide = Wide.of(frozen, read_batch(shards, [0, 1]))
    narrow = make_trainee(make(recipe, frozen, TAPS), frozen, shards)
    tensors = {
        key: value.double() for key, value in make(recipe, frozen, TAPS).start([wide_to_float(wide)], ALL).items()
    }
    tensors |= {key: value.detach().double() for key, value in narrow.parameters.items()}
    for key in ("mask_token_id", "own.ids"):
        if key in tensors:
            tensors[key] = tensors[key].long()
    trainee = make(recipe, wide.frozen, TAPS).build(tensors)
    generator = torch.Generator().manual_seed(1)
    ids = torch.arange(VOCAB)

    def loss() -> Any:
        total = torch.zeros((), dtype=torch.float64)
        for index, (rows, features) in enumerate(trainee.unroll(wide.batch, 3)):
            logits = features @ trainee.head(index, ids).T
            goals = torch.from_numpy(wide.batch.argmax[rows + 1 + index])
            total = total + torch.nn.functional.cross_entropy(logits, goals)
        return total

    loss().backward()
    for key, value in trainee.parameters.items():
        along = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        along *= 1e-5 / along.norm()
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                value += sign * along
                ends.append(float(loss()))
                value -= sign * along
        wanted = (ends[0] - ends[1]) / 2
        assert value.grad is not None, f"{key} has no gradient"
        found = float((value.grad * along).sum())
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-10), key
        assert float(value.grad.abs().max()) > 0, f"{key} does not matter"


def wide_to_float(wide: Wide) -> Batch:
    return replace(wide.batch, taps=wide.batch.taps.float())
