"""TorchOps against plain numpy in double precision, one row and one head at a time."""

from __future__ import annotations

import numpy as np
import pytest

from sakiyomi.errors import ParameterError
from sakiyomi.ops.base import Blocks, Causal, Dense, KVSlots, LayerWeights, Past, StackSpec, Tree
from sakiyomi.types import Quantized

torch = pytest.importorskip("torch")
from sakiyomi.ops.torch import TorchOps  # noqa: E402

Q, G, D = 6, 2, 8


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def ops():
    return TorchOps(torch.float64)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def reference_attend(q, k, v, seen):
    """Each row and head on its own; seen[r] lists the (key, value) pairs [G, D] that row r attends to."""
    out = np.zeros((len(q), Q, D))
    for row in range(len(q)):
        for head in range(Q):
            keys = np.array([key[head // (Q // G)] for key, _ in seen[row]])
            values = np.array([value[head // (Q // G)] for _, value in seen[row]])
            scores = keys @ q[row, head] / np.sqrt(D)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values
    return out.reshape(len(q), Q * D)


def random_rows(rng, count):
    return rng.normal(size=(count, Q, D)), rng.normal(size=(count, G, D)), rng.normal(size=(count, G, D))


def random_past(rng, ops, lengths, bounds, layer):
    slots = []
    for length, rows in zip(lengths, np.diff(bounds), strict=True):
        keys, values = ops.new_kv(3, G, D, length + rows + 2)
        keys[:], values[:] = torch.nan, torch.nan
        keys[:, :, :length] = torch.tensor(rng.normal(size=(3, G, length, D)))
        values[:, :, :length] = torch.tensor(rng.normal(size=(3, G, length, D)))
        slots.append(KVSlots(keys, values, length))
    return Past(slots, layer)


def attended(ops, q, k, v, past, mask, window=None):
    q, k, v = ops.array(q), ops.array(k), ops.array(v)
    if past is not None:
        k, v = ops.store(past, k, v, mask.bounds)
    return ops.attend(q, k, v, past, mask, window).numpy()


@pytest.mark.parametrize("window", [None, 1, 3, 7])
@pytest.mark.parametrize("kind", ["tree", "chain", "causal"])
def test_attention_over_caches(ops, rng, kind, window):
    bounds, lengths = (0, 5, 6, 13), (4, 9, 0)
    chain = [np.arange(-1, n - 1) for n in np.diff(bounds)]
    tree = [np.array([-1, 0, 0, 1, -1]), np.array([-1]), np.array([-1, -1, 0, 1, 2, 4, 3])]
    parents = np.concatenate(tree if kind == "tree" else chain).astype(np.int32)
    mask = Causal(bounds) if kind == "causal" else Tree(parents, bounds)
    q, k, v = random_rows(rng, 13)
    past = random_past(rng, ops, lengths, bounds, layer=1)
    seen = []
    for slots, start, stop in zip(past.slots, bounds, bounds[1:], strict=False):
        cached = [(slots.keys[1, :, i].numpy(), slots.values[1, :, i].numpy()) for i in range(slots.length)]
        paths = []
        for row in range(start, stop):
            parent = parents[row]
            paths.append((paths[parent] if parent >= 0 else []) + [(k[row], v[row])])
            whole = cached + paths[-1]
            seen.append(whole if window is None else whole[-window:])
    np.testing.assert_allclose(
        attended(ops, q, k, v, past, mask, window), reference_attend(q, k, v, seen), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("window", [None, 2])
def test_attention_without_a_past(ops, rng, window):
    q, k, v = random_rows(rng, 7)
    doc_ids = np.array([0, 0, 1, 1, 1, 0, 2], np.int32)
    seen = [[(k[c], v[c]) for c in range(row + 1) if doc_ids[c] == doc_ids[row]][-(window or 99) :] for row in range(7)]
    expected = reference_attend(q, k, v, seen)
    np.testing.assert_allclose(attended(ops, q, k, v, None, Blocks(doc_ids), window), expected, atol=1e-12)
    bounds = (0, 2, 7)
    seen = [[(k[c], v[c]) for c in range(0 if row < 2 else 2, row + 1)][-(window or 99) :] for row in range(7)]
    expected = reference_attend(q, k, v, seen)
    np.testing.assert_allclose(attended(ops, q, k, v, None, Causal(bounds), window), expected, atol=1e-12)


def test_attention_with_any_pattern(ops, rng):
    q, k, v = random_rows(rng, 6)
    allowed = rng.random((6, 6)) < 0.5
    allowed |= np.eye(6, dtype=bool)
    seen = [[(k[c], v[c]) for c in np.flatnonzero(allowed[row])] for row in range(6)]
    np.testing.assert_allclose(
        attended(ops, q, k, v, None, Dense(allowed)), reference_attend(q, k, v, seen), rtol=0, atol=1e-12
    )


def test_store_writes_behind_the_length_and_nowhere_else(ops, rng):
    bounds = (0, 3, 4)
    past = random_past(rng, ops, (5, 2), bounds, layer=2)
    before = [slots.keys.clone() for slots in past.slots]
    _, k, v = random_rows(rng, 4)
    ops.store(past, ops.array(k), ops.array(v), bounds)
    for slots, old, start, stop in zip(past.slots, before, bounds, bounds[1:], strict=False):
        room = slice(slots.length, slots.length + stop - start)
        np.testing.assert_array_equal(slots.keys[2, :, room].numpy(), k[start:stop].transpose(1, 0, 2))
        slots.keys[2, :, room] = old[2, :, room]
        np.testing.assert_array_equal(slots.keys.numpy(), old.numpy())


def test_rows_norms_rotations_and_activations(ops, rng):
    x, weight = rng.normal(size=(5, 3, 8)), rng.normal(size=8)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(ops.rms_norm(ops.array(x), ops.array(weight), 1e-5).numpy(), expected, atol=1e-13)

    positions, inv_freq = np.array([0, 7, 3, 4000, 1], np.int32), np.array([1, 0.3, 0.01, 1e-4], np.float32)
    angles = (positions.astype(np.float32)[:, None, None] * inv_freq).astype(np.float64)
    first, second = x[..., :4], x[..., 4:]
    turned = np.concatenate(
        [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)], axis=-1
    )
    for scale in (1.0, 1.25, 1.0):
        rotated = ops.rope(ops.array(x), positions, inv_freq, scale).numpy()
        np.testing.assert_allclose(rotated, scale * turned, atol=1e-13)
    positions[1] = 8
    assert not np.allclose(ops.rope(ops.array(x), positions, inv_freq).numpy(), turned)

    gate_up = rng.normal(size=(5, 12))
    gate, up = gate_up[:, :6], gate_up[:, 6:]
    np.testing.assert_allclose(ops.silu_mul(ops.array(gate_up)).numpy(), gate / (1 + np.exp(-gate)) * up, atol=1e-13)


def test_weights_stack_and_expand(ops, rng):
    quantized = Quantized(
        rng.integers(0, 256, (5, 64), np.uint8),
        rng.normal(size=(5, 2)).astype(np.float16),
        rng.normal(size=(5, 2)).astype(np.float16),
    )
    plain = rng.normal(size=(3, 64)).astype(np.float32)
    plain.flags.writeable = False
    matrix = np.concatenate([quantized.dequantize(), plain])
    weight = ops.weight([quantized, plain])
    np.testing.assert_array_equal(ops.to_numpy(weight), matrix)
    ids = np.array([7, 0, 7], np.int32)
    np.testing.assert_array_equal(ops.to_numpy(ops.embed(weight, ids)), matrix[ids])
    x, bias = rng.normal(size=(4, 64)), rng.normal(size=8)
    np.testing.assert_allclose(
        ops.linear(ops.array(x), weight, ops.array(bias)).numpy(), x @ matrix.T.astype(np.float64) + bias, atol=1e-12
    )


def test_argmax_takes_the_lowest_of_equals(ops):
    x = np.array([[1, 3, 3, 2], [5, 5, 5, 5], [0, 0, 0, 1]], np.float32)
    assert ops.argmax(ops.array(x)).tolist() == [1, 0, 3]


@pytest.mark.parametrize("with_past", [False, True])
def test_gradients_flow_through_a_stack(ops, rng, with_past):
    """Against finite differences, through attention with and without a cache."""
    hidden, inner = 12, 10
    spec = StackSpec(num_heads=2, num_kv_heads=1, head_dim=4, eps=1e-5, inv_freq=np.array([1, 0.1], np.float32))

    def matrix(*shape):
        return torch.tensor(rng.normal(size=shape) * 0.3, requires_grad=True)

    layer = LayerWeights(
        input_norm=matrix(hidden), qkv=matrix(16, hidden), output=matrix(hidden, 8), post_norm=matrix(hidden),
        gate_up=matrix(2 * inner, hidden), down=matrix(hidden, inner),
    )  # fmt: skip
    bounds = (0, 3, 5)
    mask = Tree(np.array([-1, 0, 0, -1, 0], np.int32), bounds)
    past = None
    if with_past:
        slots = [KVSlots(*(torch.tensor(rng.normal(size=(1, 1, 6, 4))) for _ in range(2)), 2) for _ in range(2)]
        past = Past(slots)
    positions = np.array([2, 3, 3, 2, 3], np.int32)

    def run(x, qkv, down):
        weights = LayerWeights(
            input_norm=layer.input_norm, qkv=qkv, output=layer.output, post_norm=layer.post_norm,
            gate_up=layer.gate_up, down=down,
        )  # fmt: skip
        return ops.decoder_stack(x, [weights], spec, positions, past, mask)[0]

    x = torch.tensor(rng.normal(size=(5, hidden)), requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, layer.qkv, layer.down))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_norm_in_float32(dtype):
    ops = TorchOps(getattr(torch, dtype))
    x = ops.array(np.full((1, 64), 300.0, np.float32))  # its square is beyond float16
    assert ops.rms_norm(x, ops.array(np.ones(64, np.float32)), 1e-6).float().tolist() == [[1.0] * 64]


def test_an_unknown_device_is_refused():
    with pytest.raises(ParameterError, match="cpu"):
        TorchOps(torch.float32, "nonsense")
