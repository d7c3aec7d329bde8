"""The MLP speculator: equal on both backends, unrolled training equals drafting, gradients are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sakiyomi.errors import CheckpointError
from sakiyomi.nets.mlp import MATRICES, TOKEN_IDS, MlpConfig, MlpSpeculator
from sakiyomi.ops.native import NativeOps

torch = pytest.importorskip("torch")

from sakiyomi.ops.torch import TorchOps  # noqa: E402
from sakiyomi.train.batches import Batch  # noqa: E402
from sakiyomi.train.heads import Frozen, Noise  # noqa: E402
from sakiyomi.train.mlp import MlpTrainee  # noqa: E402
from sakiyomi.types import ModelInfo  # noqa: E402

HIDDEN, INNER, TAPS, VOCAB = 32, 64, 2, 50
OWN = np.array([1, 4, 5, 30, 49], np.int32)
CONFIG = MlpConfig(hidden_size=HIDDEN, inner_size=INNER, num_taps=TAPS, num_tokens=len(OWN), eps=1e-5)


def random_tensors(seed: int = 0, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tensors = {n: (rng.normal(0, 1, s) / s[-1] ** 0.5).astype(dtype) for n, s in CONFIG.shapes().items()}
    return tensors | {TOKEN_IDS: OWN}


def random_inputs(num_rows: int = 5, seed: int = 1) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    embedding = rng.normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32)
    taps = rng.normal(0, 3, (num_rows, TAPS * HIDDEN)).astype(np.float32)
    return embedding, taps, rng.integers(0, VOCAB, (3, num_rows)).astype(np.int32)


def test_both_backends_agree() -> None:
    embedding, taps, ids = random_inputs()
    found = []
    for ops in (NativeOps(dtype="float32", threads=1), TorchOps()):
        table = ops.weight(embedding)
        net = MlpSpeculator.load(ops, CONFIG, random_tensors(), table, VOCAB)
        head = ops.select_rows(table, np.arange(0, VOCAB, 3, dtype=np.int32))
        states, first = net.start_logits(ops.array(taps), ids[0], head)
        logits = [first]
        for step in (1, 2):
            states, more = net.advance_logits(states, ids[step], head)
            logits.append(more)
        found.append(np.concatenate([ops.to_numpy(rows) for rows in logits]))
    assert found[0].shape == (15, 17)
    assert np.abs(found[0] - found[1]).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_fused_step_is_the_composed_one_bit_by_bit(dtype: Any, threads: int) -> None:
    embedding, taps, ids = random_inputs(9)
    ops = NativeOps(dtype=dtype, threads=threads)
    table = ops.weight(embedding)
    net = MlpSpeculator.load(ops, CONFIG, random_tensors(), table, VOCAB)
    head = ops.select_rows(table, np.arange(0, VOCAB, 3, dtype=np.int32))
    for num_rows in (1, 2, 9, 0):
        states, logits = net.start_logits(taps[:num_rows], ids[0, :num_rows], head)
        plain = net.start(taps[:num_rows], ids[0, :num_rows])
        for step in (1, 2):
            assert np.array_equal(states, plain)
            assert np.array_equal(logits, ops.linear(net.features(plain), head))
            states, logits = net.advance_logits(states, ids[step, :num_rows], head)
            plain = net.advance(plain, ids[step, :num_rows])


def test_rows_of_a_batch_do_not_meet() -> None:
    embedding, taps, ids = random_inputs()
    ops = NativeOps(dtype="int8", threads=2)
    net = MlpSpeculator.load(ops, CONFIG, random_tensors(), ops.weight(embedding), VOCAB)
    together = net.advance(net.start(taps, ids[0]), ids[1])
    for row in range(len(taps)):
        alone = net.advance(net.start(taps[row : row + 1], ids[0, row : row + 1]), ids[1, row : row + 1])
        assert np.array_equal(alone[0], together[row])


def make_trainee(dtype: Any = torch.float32) -> tuple[MlpTrainee, Frozen]:
    embedding, _, _ = random_inputs()
    info = ModelInfo(
        name="toy", architecture="toy", vocab_size=VOCAB, max_model_len=64, num_layers=2, hidden_size=HIDDEN
    )
    table = torch.from_numpy(embedding).to(dtype)
    ops = TorchOps(dtype)
    frozen = Frozen(ops=ops, info=info, embedding=table, head=table, norm=torch.ones(HIDDEN, dtype=dtype), eps=1e-5)
    rng = np.random.default_rng(4)
    tensors = {n: torch.from_numpy(v) for n, v in random_tensors(dtype=np.float64).items()}
    tensors = {n: v if n == TOKEN_IDS else v.to(dtype) for n, v in tensors.items()}
    for name, width in (("start", (TAPS + 1) * HIDDEN), ("advance", 2 * HIDDEN)):
        tensors[f"{name}.mean"] = torch.from_numpy(rng.normal(0, 2, width)).to(dtype)
        tensors[f"{name}.std"] = torch.from_numpy(rng.uniform(0.3, 2, width)).to(dtype)
    return MlpTrainee(CONFIG, frozen, tensors), frozen


def make_batch(lengths: tuple[int, ...] = (9, 4), dtype: Any = torch.float32) -> Batch:
    rng = np.random.default_rng(8)
    total, ends = sum(lengths), np.cumsum(lengths)
    return Batch(
        tokens=rng.integers(0, VOCAB, total).astype(np.int32),
        taps=torch.from_numpy(rng.normal(0, 3, (total, TAPS * HIDDEN))).to(dtype),
        argmax=rng.integers(0, VOCAB, total),
        counts=np.ones(total, np.bool_),
        first=np.repeat(ends - lengths, lengths),
        last=np.repeat(ends - 1, lengths),
    )


def test_unrolled_training_equals_the_drafting_chain_row_by_row() -> None:
    """Step i at row t is the i-th draft behind the taps of t, the token t + 1, and then the text itself."""
    trainee, frozen = make_trainee()
    batch = make_batch()
    exported = trainee.export(np.arange(VOCAB))
    assert exported.config["inner_size"] == INNER
    ops = NativeOps(dtype="float32", threads=1)
    tensors = {**exported.tensors, **exported.kept}
    assert np.array_equal(tensors[TOKEN_IDS], OWN)
    net = MlpSpeculator.load(ops, CONFIG, tensors, ops.weight(frozen.embedding.numpy()), VOCAB)
    with torch.no_grad():
        unrolled = [(rows, features.numpy()) for rows, features in trainee.unroll(batch, 3)]
    assert unrolled[0][0].tolist() == [1, 2, 3, 4, 5, 6, 7, 10, 11]
    assert unrolled[2][0].tolist() == [1, 2, 3, 4, 5]
    for t in unrolled[0][0]:
        states = net.start(batch.taps[t : t + 1].numpy(), batch.tokens[t + 1 : t + 2])
        for step, (rows, features) in enumerate(unrolled):
            if t not in rows:
                break
            if step:
                states = net.advance(states, batch.tokens[t + 1 + step : t + 2 + step])
            assert np.abs(net.features(states)[0] - features[rows.tolist().index(t)]).max() < 1e-4


def test_gradients_are_those_of_finite_differences() -> None:
    trainee, _ = make_trainee(torch.float64)
    batch = make_batch((6,), torch.float64)
    names = list(trainee.parameters)
    direction = torch.randn(HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(*values: Any) -> Any:
        trainee.parameters = dict(zip(names, values, strict=True))
        return torch.stack([(features @ direction).sum() for _, features in trainee.unroll(batch, 3)])

    start = tuple(value.detach().clone().requires_grad_() for value in trainee.parameters.values())
    assert torch.autograd.gradcheck(run, start, atol=1e-5, fast_mode=True)


def test_hidden_inputs_lie_at_their_means() -> None:
    """With everything hidden the first matrix sees its mean and says its bias."""
    trainee, _ = make_trainee()
    batch = make_batch()
    seen = []

    class HideAll(Noise):
        def hide(self, x: Any) -> Any:
            seen.append(x.shape)
            return torch.zeros_like(x)

    with torch.no_grad():
        trainee.parameters["start.tokens"].zero_()
        _, features = next(iter(trainee.unroll(batch, 1, HideAll(0.5, 0))))
        wanted = trainee.frozen.ops.rms_norm(
            trainee.parameters["start.bias"][None], trainee.parameters["norm.weight"], CONFIG.eps
        )
    assert len(seen) == 2
    assert torch.allclose(features, wanted.expand_as(features), atol=1e-4)


@pytest.mark.parametrize("name", [*MATRICES, "norm.weight"])
def test_a_missing_or_misshapen_tensor_is_named(name: str) -> None:
    ops = TorchOps()
    tensors = random_tensors()
    with pytest.raises(CheckpointError, match=f"{name} is of shape"):
        MlpSpeculator.load(ops, CONFIG, tensors | {name: np.ones(3, np.float32)}, None, VOCAB)
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        MlpSpeculator.load(ops, CONFIG, tensors, None, VOCAB)
