"""Every op, and the composed decoder stack, on each implementation against torch in double precision."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sakiyomi.ops.base import (
    THE_BEST_ROW,
    Blocks,
    Causal,
    Dense,
    KVSlots,
    LanguageHead,
    LayerWeights,
    Past,
    RowChoice,
    StackSpec,
    Tree,
)
from sakiyomi.types import Quantized

torch = pytest.importorskip("torch")
from sakiyomi.ops.torch import TorchOps  # noqa: E402


def torch_ops():
    torch.set_num_threads(1)
    return TorchOps(torch.float32)


def native_ops():
    from sakiyomi.ops.native import NativeOps

    return NativeOps(dtype="float32", threads=1)


needs_native = pytest.mark.skipif(
    importlib.util.find_spec("sakiyomi._native") is None, reason="the native kernels are not built"
)


@pytest.fixture(params=[pytest.param(torch_ops, id="torch"), pytest.param(native_ops, id="native", marks=needs_native)])
def ops(request):
    return request.param()


@pytest.fixture
def exact():
    return TorchOps(torch.float64)


cases = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 40)


def assert_same(ours, reference, tolerance=2e-5):
    reference = np.asarray(reference)
    scale = max(1.0, float(np.abs(reference).max()))
    np.testing.assert_allclose(ours, reference, rtol=0, atol=tolerance * scale)


def compare(ops, exact, call, *arrays, tolerance=2e-5):
    """Run `call(ops, *arrays)` on both, with arrays of the implementation's own."""
    ours, reference = (call(side, *(side.array(array) for array in arrays)) for side in (ops, exact))
    assert_same(ops.to_numpy(ours), exact.to_numpy(reference), tolerance)


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


@cases
@given(seeds, sizes, st.integers(1, 70), st.integers(1, 4), st.booleans())
def test_linear_and_embed(ops, exact, seed, rows, outputs, groups, with_bias):
    rng = np.random.default_rng(seed)
    inputs = 32 * groups
    plain = normal(rng, outputs, inputs)
    quantized = Quantized(
        rng.integers(0, 256, (3, inputs), np.uint8),
        (rng.random((3, groups)) * 0.01).astype(np.float16),
        -rng.random((3, groups)).astype(np.float16),
    )
    ids = rng.integers(0, outputs + 3, rows).astype(np.int32)

    def call(side, x, bias):
        return side.linear(x, side.weight([plain, quantized]), bias if with_bias else None)

    compare(ops, exact, call, normal(rng, rows, inputs), normal(rng, outputs + 3))
    compare(ops, exact, lambda side: side.embed(side.weight([plain, quantized]), ids), tolerance=1e-6)
    compare(ops, exact, lambda side: side.embed(side.weight(plain), ids % outputs), tolerance=1e-6)


@cases
@given(seeds, sizes, st.integers(1, 5), st.integers(1, 70))
def test_rows_and_heads(ops, exact, seed, rows, heads, half):
    rng = np.random.default_rng(seed)
    x = normal(rng, rows, heads, 2 * half)
    flat = x.reshape(rows, -1)
    weight = normal(rng, 2 * half)
    wide = normal(rng, flat.shape[1])
    compare(ops, exact, lambda side, x, w: side.rms_norm(x, w, 1e-5), x, weight)
    compare(ops, exact, lambda side, x, w: side.rms_norm(x, w, 1e-6), flat, wide)
    positions = rng.integers(0, 10000, rows).astype(np.int32)
    inv_freq = (10000.0 ** -rng.random(half)).astype(np.float32)
    compare(ops, exact, lambda side, x: side.rope(x, positions, inv_freq, 1.3), x)
    compare(ops, exact, lambda side, x: side.silu_mul(x), flat * 10)
    compare(ops, exact, lambda side, x, y: side.add(x, y), flat, flat[::-1].copy())
    compare(ops, exact, lambda side, x, y: side.concat([x, y, x]), flat, flat[:, :1].copy())


@cases
@given(seeds, sizes, st.integers(1, 300))
def test_argmax_with_ties(ops, seed, rows, width):
    x = np.random.default_rng(seed).integers(0, 4, (rows, width)).astype(np.float32)
    assert ops.argmax(ops.array(x)).tolist() == x.argmax(1).tolist()


# ---------------------------------------------------------------------------------------------- attention


@st.composite
def attention_cases(draw):
    """Sequences with their trees and past lengths, and the heads."""
    rng = np.random.default_rng(draw(seeds))
    counts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    bounds = tuple(int(bound) for bound in np.cumsum([0, *counts]))
    chained = draw(st.booleans())
    parents = np.concatenate([[row - 1 if chained else rng.integers(-1, row) for row in range(n)] for n in counts])
    groups = draw(st.integers(1, 3))
    return SimpleNamespace(
        rng=rng,
        bounds=bounds,
        parents=parents.astype(np.int32),
        lengths=[int(rng.integers(0, 90)) for _ in counts],
        num_kv_heads=groups,
        num_heads=groups * draw(st.integers(1, 4)),
        head_dim=2 * draw(st.sampled_from([2, 3, 8, 16, 32])),
        window=draw(st.sampled_from([None, None, 1, 5, 40])),
    )


def fill_past(case, num_layers):
    """For each sequence random keys and values [L, G, length, D]."""
    shapes = [(num_layers, case.num_kv_heads, length, case.head_dim) for length in case.lengths]
    return [(normal(case.rng, *shape), normal(case.rng, *shape)) for shape in shapes]


def load_past(side, case, filled, layer=0):
    """The same past in the caches of an implementation; spare slots hold nan."""
    slots = []
    for (cached_keys, cached_values), length, rows in zip(filled, case.lengths, np.diff(case.bounds), strict=True):
        shape = cached_keys.shape
        keys, values = side.new_kv(shape[0], shape[1], shape[3], length + int(rows) + 3)
        for array, cached in ((keys, cached_keys), (values, cached_values)):
            array[:] = float("nan")
            array[:, :, :length] = torch.tensor(cached) if isinstance(array, torch.Tensor) else cached
        slots.append(KVSlots(keys, values, length))
    return Past(slots, layer)


def masks_with_past(case):
    masks = [Tree(case.parents, case.bounds)]
    if all(
        parent == row - start - 1
        for start, stop in zip(case.bounds, case.bounds[1:], strict=False)
        for row, parent in zip(range(start, stop), case.parents[start:stop], strict=True)
    ):
        masks.append(Causal(case.bounds))
    return masks


@cases
@given(attention_cases())
def test_attention_over_caches(ops, exact, case):
    rows = case.bounds[-1]
    q = normal(case.rng, rows, case.num_heads, case.head_dim)
    k, v = (normal(case.rng, rows, case.num_kv_heads, case.head_dim) for _ in "kv")
    filled = fill_past(case, num_layers=2)
    for mask in masks_with_past(case):

        def call(side, q, k, v, mask=mask):
            past = load_past(side, case, filled, layer=1)
            return side.attend(q, *side.store(past, k, v, mask.bounds), past, mask, case.window)

        compare(ops, exact, call, q, k, v)


@cases
@given(attention_cases(), st.sampled_from(["causal", "tree", "blocks", "dense"]))
def test_attention_without_a_past(ops, exact, case, kind):
    rows = case.bounds[-1]
    allowed = (case.rng.random((rows, rows)) < 0.4) | np.eye(rows, dtype=bool)
    mask = {
        "causal": Causal(case.bounds),
        "tree": Tree(case.parents, case.bounds),
        "blocks": Blocks(np.sort(case.rng.integers(0, 3, rows)).astype(np.int32)),
        "dense": Dense(allowed),
    }[kind]
    window = None if kind == "dense" else case.window
    q = normal(case.rng, rows, case.num_heads, case.head_dim)
    k, v = (normal(case.rng, rows, case.num_kv_heads, case.head_dim) for _ in "kv")
    compare(ops, exact, lambda side, q, k, v: side.attend(q, k, v, None, mask, window), q, k, v)


# ---------------------------------------------------------------------------------------------- decoder stack


@cases
@given(attention_cases(), st.booleans(), st.booleans(), st.booleans())
def test_decoder_stack(ops, exact, case, with_bias, with_head_norms, with_past):
    rng, hidden, inner = case.rng, 64, 96
    q_size, kv_size = case.num_heads * case.head_dim, case.num_kv_heads * case.head_dim
    num_layers = 3
    raw = [
        {
            "input_norm": normal(rng, hidden),
            "qkv": normal(rng, q_size + 2 * kv_size, hidden) / 8,
            "qkv_bias": normal(rng, q_size + 2 * kv_size) if with_bias else None,
            "q_norm": normal(rng, case.head_dim) if with_head_norms else None,
            "k_norm": normal(rng, case.head_dim) if with_head_norms else None,
            "output": normal(rng, hidden, q_size) / 8,
            "output_bias": normal(rng, hidden) if with_bias else None,
            "post_norm": normal(rng, hidden),
            "gate_up": normal(rng, 2 * inner, hidden) / 8,
            "down": normal(rng, hidden, inner) / 8,
        }
        for _ in range(num_layers)
    ]
    spec = StackSpec(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        eps=1e-5,
        inv_freq=(1000.0 ** -np.linspace(0, 1, case.head_dim // 2)).astype(np.float32),
        rope_scale=1.1,
        windows=(None, case.window, None),
    )
    mask = Tree(case.parents, case.bounds)
    filled = fill_past(case, num_layers)
    positions = rng.integers(0, 90, case.bounds[-1]).astype(np.int32)
    x = normal(rng, case.bounds[-1], hidden)
    results = []
    for side in (ops, exact):
        layers = [
            LayerWeights(
                **{
                    name: None if values is None else side.weight(values) if values.ndim == 2 else side.array(values)
                    for name, values in layer.items()
                }
            )
            for layer in raw
        ]
        past = load_past(side, case, filled) if with_past else None
        out, taps = side.decoder_stack(side.array(x), layers, spec, positions, past, mask, (0, 2, 3))
        check_pass(
            side,
            layers,
            spec,
            positions,
            case,
            load_past(side, case, filled) if with_past else None,
            normal(rng, 50, hidden),
        )
        written = [] if past is None else [side.to_numpy(slots.keys) for slots in past.slots]
        results.append((side.to_numpy(out), [side.to_numpy(tap) for tap in taps], written))
    (out, taps, written), (expected, expected_taps, expected_written) = results
    assert_same(out, expected, 1e-4)
    assert len(taps) == 3
    for tap, expected_tap in zip(taps, expected_taps, strict=True):
        assert_same(tap, expected_tap, 1e-4)
    for keys, expected_keys, length, rows in zip(
        written, expected_written, case.lengths, np.diff(case.bounds), strict=with_past
    ):
        assert_same(keys[:, :, : length + rows], expected_keys[:, :, : length + rows], 1e-4)
        assert np.isnan(keys[:, :, length + rows :]).all(), "slots behind the rows were written"


def check_pass(side, layers, spec, positions, case, past, table) -> None:
    """A pass from token ids on is the very embedding, stack and choice of rows that it stands for."""
    ids = [(7 * i + 3) % 50 for i in range(case.bounds[-1])]
    rows, mask, embedding = range(0, len(ids), 2), Tree(case.parents, case.bounds), side.weight(table)
    head = LanguageHead(side.array(np.ones(table.shape[1], np.float32)), 1e-5, embedding)
    given = ids, embedding, layers, spec, positions.tolist(), past, mask
    choices = [THE_BEST_ROW if row % 4 else RowChoice(5, 0.7, row) for row in rows]
    states, taps, chosen = side.decoder_pass(*given, rows, (0, 2), head, choices)
    x = side.embed(embedding, np.array(ids, np.int32))
    expected, tapped = side.decoder_stack(x, layers, spec, positions, past, mask, (0, 2))
    assert np.array_equal(side.to_numpy(states), side.to_numpy(expected)[list(rows)])
    assert np.array_equal(side.to_numpy(taps), np.concatenate([side.to_numpy(tap) for tap in tapped], axis=1))
    assert chosen.tolist() == side.chosen_ids(states, *head, choices).tolist()
    best = side.best_ids(states, *head).tolist()
    assert all(
        one in (-1, other) for one, other, choice in zip(chosen, best, choices, strict=True) if choice == THE_BEST_ROW
    )
    everything, no_taps, none_chosen = side.decoder_pass(*given, range(len(ids)))
    assert np.array_equal(side.to_numpy(everything), side.to_numpy(expected))
    assert no_taps is None
    assert none_chosen is None
    assert side.decoder_pass(*given, (), ())[0] is None
