"""A row's result is the same bits whatever is computed beside it: rows, chunks, sequences, threads, fused or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sakiyomi.ops.base import Causal, KVSlots, LayerWeights, Ops, Past, StackSpec, Tree
from sakiyomi.ops.native import NativeOps

NUM_ROWS = [*range(1, 18), 31, 33, 128]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def same_bits(x: Any, y: Any) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


# ---------------------------------------------------------------------------------------------- linear


@pytest.mark.parametrize(("n", "k"), [(1, 32), (15, 64), (17, 96), (50, 64), (130, 576), (960, 320)])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_linear_rows(rng: np.random.Generator, dtype: Any, n: int, k: int) -> None:
    one = NativeOps(dtype=dtype, threads=1)
    weight, bias, x = one.weight(normal(rng, n, k)), normal(rng, n), normal(rng, 128, k)
    alone = np.concatenate([one.linear(x[i : i + 1], weight, bias) for i in range(128)])
    for threads in (1, 2, 3):
        ops = NativeOps(dtype=dtype, threads=threads)
        for count in NUM_ROWS:
            assert same_bits(ops.linear(x[:count], weight, bias), alone[:count]), (threads, count)
        assert same_bits(ops.linear(x[5:42], weight, bias), alone[5:42])


def test_linear_columns_do_not_depend_on_their_neighbours(rng: np.random.Generator) -> None:
    for dtype in ("int8", "float32"):
        ops = NativeOps(dtype=dtype, threads=2)  # type: ignore[arg-type]
        w, x = normal(rng, 200, 96), normal(rng, 5, 96)
        whole = ops.linear(x, ops.weight(w))
        for begin, end in ((0, 1), (3, 20), (16, 64), (150, 200)):
            assert same_bits(ops.linear(x, ops.weight(w[begin:end])), np.ascontiguousarray(whole[:, begin:end]))


# ---------------------------------------------------------------------------------------------- attention


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


def random_parents(rng: np.random.Generator, count: int) -> Any:
    return np.array([rng.integers(max(-1, i - 6), i) for i in range(count)], np.int32)


class Rows:
    """q, k and v of a call, and a cache that holds a prefix of random keys."""

    def __init__(self, rng: np.random.Generator, ops: NativeOps, length: int, count: int, dim: int) -> None:
        self.ops, self.length = ops, length
        self.q, self.k, self.v = normal(rng, count, 6, dim), normal(rng, count, 2, dim), normal(rng, count, 2, dim)
        self.keys, self.values = ops.new_kv(1, 2, dim, length + count)
        self.keys[:], self.values[:] = 255, 255  # in bytes: scales that are no numbers
        before = Past([KVSlots(self.keys, self.values, 0)])
        ops.store(before, normal(rng, length, 2, dim), normal(rng, length, 2, dim), (0, length))

    def past(self, length: int) -> Past:
        return Past([KVSlots(self.keys, self.values, length)])

    def attend(self, rows: Any, length: int, mask: Any, window: int | None) -> Any:
        past = self.past(length)
        k, v = self.ops.store(past, self.k[rows], self.v[rows], mask.bounds)
        return self.ops.attend(self.q[rows], k, v, past, mask, window)

    def one_by_one(self, path: Sequence[int], window: int | None) -> Any:
        """The last row of a path, its rows decoded one after the other."""
        for depth, row in enumerate(path):
            out = self.attend(slice(row, row + 1), self.length + depth, Causal((0, 1)), window)
        return out


@pytest.mark.parametrize("length", [0, 1, 15, 30, 31, 32, 33, 63, 64, 65, 200])
@pytest.mark.parametrize("dim", [24, 32, 64, 80, 128])
def test_tree_row_equals_its_own_chain(rng: np.random.Generator, length: int, dim: int) -> None:
    for dtype, window in (("int8", None), ("int8", 20), ("float32", None)):
        rows = Rows(rng, NativeOps(dtype=dtype, threads=2), length, 12, dim)  # type: ignore[arg-type]
        parents = random_parents(rng, 12)
        together = rows.attend(slice(None), length, Tree(parents, (0, 12)), window)
        for row, path in enumerate(paths_of(parents)):
            assert same_bits(rows.one_by_one(path, window), together[row : row + 1]), (row, path)


@pytest.mark.parametrize("count", [*NUM_ROWS])
def test_causal_rows_in_chunks(rng: np.random.Generator, count: int) -> None:
    rows = Rows(rng, NativeOps(threads=3), 20, count, 64)
    together = rows.attend(slice(None), 20, Causal((0, count)), None)
    for size in (1, 5, 32):
        parts = [
            rows.attend(slice(i, min(i + size, count)), 20 + i, Causal((0, min(size, count - i))), None)
            for i in range(0, count, size)
        ]
        assert same_bits(np.concatenate(parts), together)


@pytest.mark.parametrize("length", [380, 520, 1100])
@pytest.mark.parametrize("window", [None, 130, 600])
def test_long_contexts_in_any_items(rng: np.random.Generator, length: int, window: int | None) -> None:
    rows = Rows(rng, NativeOps(threads=1), length, 9, 64)
    together = rows.attend(slice(None), length, Causal((0, 9)), window)
    assert same_bits(np.concatenate([rows.one_by_one(range(i), window) for i in range(1, 10)]), together)
    for threads in (2, 3, 8):
        rows.ops = NativeOps(threads=threads)
        for count in range(1, 10):
            part = rows.attend(slice(count), length, Causal((0, count)), window)
            assert same_bits(part, together[:count]), (threads, count)


def test_chain_without_a_cache_equals_the_cache(rng: np.random.Generator) -> None:
    ops = NativeOps(dtype="float32", threads=2)
    rows = Rows(rng, ops, 0, 70, 64)
    cached = rows.attend(slice(None), 0, Causal((0, 70)), None)
    assert same_bits(ops.attend(rows.q, rows.k, rows.v, None, Causal((0, 70))), cached)


# ---------------------------------------------------------------------------------------------- decoder stacks


class Net:
    """A small random decoder with a head."""

    def __init__(
        self,
        ops: NativeOps,
        *,
        hidden: int = 64,
        inner: int = 96,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 32,
        extras: bool = False,
        windows: tuple[int | None, ...] = (),
    ) -> None:
        rng = np.random.default_rng(5)
        self.ops, self.hidden = ops, hidden
        qkv = (heads + 2 * kv_heads) * dim

        def matrix(n: int, k: int) -> Any:
            return ops.weight(normal(rng, n, k) * np.float32(1.5 / np.sqrt(k)))

        def vector(n: int) -> Any:
            return ops.array(normal(rng, n) * 0.2 + 1)

        self.layers = [
            LayerWeights(
                input_norm=vector(hidden),
                qkv=matrix(qkv, hidden),
                qkv_bias=vector(qkv) if extras else None,
                q_norm=vector(dim) if extras else None,
                k_norm=vector(dim) if extras else None,
                output=matrix(hidden, heads * dim),
                output_bias=vector(hidden) if extras else None,
                post_norm=vector(hidden),
                gate_up=matrix(2 * inner, hidden),
                down=matrix(hidden, inner),
            )
            for _ in range(3)
        ]
        self.table, self.norm, self.head = matrix(50, hidden), vector(hidden), matrix(50, hidden)
        inv_freq = (10000.0 ** (-np.arange(dim // 2) * 2 / dim)).astype(np.float32)
        self.spec = StackSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            eps=1e-5,
            inv_freq=inv_freq,
            windows=windows,
        )

    def new_cache(self, capacity: int = 300) -> KVSlots:
        keys, values = self.ops.new_kv(3, self.spec.num_kv_heads, self.spec.head_dim, capacity)
        keys[:], values[:] = 0, 0
        return KVSlots(keys, values, 0)

    def run(self, spans: Sequence[tuple[KVSlots, Any, Any]], *, fused: bool = True) -> tuple[list[Any], list[Any]]:
        """Logits and taps per span (cache, tokens, parents or None for a chain)."""
        bounds = np.cumsum([0, *(len(tokens) for _, tokens, _ in spans)]).tolist()
        parents = np.concatenate(
            [np.arange(-1, len(t) - 1) if p is None else np.asarray(p) for _, t, p in spans]
        ).astype(np.int32)
        positions = np.concatenate(
            [
                slots.length
                + np.array([len(path) - 1 for path in paths_of([*slots.pending, *parents[a:b].tolist()])])[-(b - a) :]
                for (slots, _, _), a, b in zip(spans, bounds, bounds[1:], strict=False)
            ]
        ).astype(np.int32)
        mask = Causal(tuple(bounds)) if all(p is None for _, _, p in spans) else Tree(parents, tuple(bounds))
        x = self.ops.embed(self.table, np.concatenate([t for _, t, _ in spans]).astype(np.int32))
        stack = self.ops.decoder_stack if fused else lambda *a: Ops.decoder_stack(self.ops, *a)
        past = Past([slots for slots, _, _ in spans])
        x, taps = stack(x, self.layers, self.spec, positions, past, mask, (0, 1, 3))
        logits = self.ops.linear(self.ops.rms_norm(x, self.norm, 1e-5), self.head)
        width = np.concatenate(taps, axis=1)
        pairs = list(zip(bounds, bounds[1:], strict=False))
        return [logits[a:b] for a, b in pairs], [width[a:b] for a, b in pairs]

    def decode(self, tokens: Any, size: int) -> tuple[Any, KVSlots]:
        """Logits of a text fed in chunks."""
        slots, logits = self.new_cache(), []
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            logits += self.run([(slots, part, None)])[0]
            slots = KVSlots(slots.keys, slots.values, slots.length + len(part))
        return np.concatenate(logits), slots


NETS: list[dict[str, Any]] = [
    {},
    {"extras": True, "windows": (None, 10, 40)},
    {"hidden": 96, "inner": 64, "heads": 4, "kv_heads": 4, "dim": 80},
    {"dim": 16, "heads": 10, "kv_heads": 2},
    {"hidden": 40, "inner": 50, "dim": 12, "heads": 3, "kv_heads": 1},
]


@pytest.fixture(params=range(len(NETS)))
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    return NETS[request.param]


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_stack_in_any_chunks_and_threads(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> None:
    tokens = rng.integers(0, 50, 128)
    expected, cache = Net(NativeOps(dtype=dtype, threads=1), **shape).decode(tokens, 1)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    for threads in (1, 2, 3):
        net = Net(NativeOps(dtype=dtype, threads=threads), **shape)
        for size in (2, 7, 33, 128):
            logits, slots = net.decode(tokens, size)
            assert same_bits(logits, expected), (threads, size)
            assert same_bits(slots.keys, cache.keys)
            assert same_bits(slots.values, cache.values)


def test_stack_rows_at_once(rng: np.random.Generator) -> None:
    tokens = rng.integers(0, 50, 160)
    net = Net(NativeOps(threads=2))
    expected, _ = net.decode(tokens, 1)
    _, prefix = net.decode(tokens[:30], 30)
    for count in NUM_ROWS:
        (logits,), _ = net.run([(prefix, tokens[30 : 30 + count], None)])
        assert same_bits(logits, expected[30 : 30 + count]), count


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_fused_stack_equals_the_composed_one(rng: np.random.Generator, shape: dict[str, Any], dtype: Any) -> None:
    net = Net(NativeOps(dtype=dtype, threads=2), **shape)
    for count in (1, 2, 9):
        for parents in (None, random_parents(rng, count)):
            spans = [
                (net.decode(rng.integers(0, 50, length), 64)[1], rng.integers(0, 50, count), parents)
                for length in (1, 31, 70)
            ]
            fused_logits, fused_taps = net.run(spans)
            fused_caches = [slots.keys.copy() for slots, _, _ in spans]
            logits, taps = net.run(spans, fused=False)
            for got, wanted in zip([*fused_logits, *fused_taps], [*logits, *taps], strict=True):
                assert same_bits(got, wanted)
            assert all(same_bits(a, slots.keys) for a, (slots, _, _) in zip(fused_caches, spans, strict=True))


def test_stack_tree_rows_equal_their_chains(rng: np.random.Generator, shape: dict[str, Any]) -> None:
    for length in (1, 25, 31, 32, 60):
        net = Net(NativeOps(threads=2), **shape)
        text, tokens, parents = rng.integers(0, 50, length), rng.integers(0, 50, 14), random_parents(rng, 14)
        (logits,), (taps,) = net.run([(net.decode(text, 64)[1], tokens, parents)])
        for row, path in enumerate(paths_of(parents)):
            expected, _ = net.decode(np.concatenate([text, tokens[path]]), 1 if row % 2 else 64)
            assert same_bits(expected[-1], logits[row]), (length, row)


def test_stack_goes_on_from_pending_rows(rng: np.random.Generator, shape: dict[str, Any]) -> None:
    """A tree in two or three passes, each over the rows that are new, beside a tree in one; fused and composed."""
    net = Net(NativeOps(threads=2), **shape)
    for length in (1, 31, 60):
        (_, slots), (_, other) = (net.decode(rng.integers(0, 50, size), 64) for size in (length, 33))
        tokens, parents = rng.integers(0, 50, 14), random_parents(rng, 14)
        beside = (other, rng.integers(0, 50, 5), random_parents(rng, 5))
        (expected, _), (expected_taps, _) = net.run([(slots, tokens, parents), beside])
        expected_keys = slots.keys.copy()
        for cuts in ((0, 6, 14), (0, 1, 9, 14)):
            for fused in (True, False):
                slots.keys[:, :, length:], slots.values[:, :, length:] = 0, 0
                for start, stop in zip(cuts, cuts[1:], strict=False):
                    here = KVSlots(slots.keys, slots.values, length, tuple(parents[:start].tolist()))
                    span = (here, tokens[start:stop], parents[start:stop])
                    logits, taps = net.run([beside, span], fused=fused)
                    assert same_bits(logits[1], expected[start:stop])
                    assert same_bits(taps[1], expected_taps[start:stop])
                assert same_bits(slots.keys, expected_keys)


def test_stack_beside_other_sequences(rng: np.random.Generator, shape: dict[str, Any]) -> None:
    net = Net(NativeOps(threads=2), **shape)
    spans = []
    for length, count in ((40, 1), (1, 9), (33, 4), (64, 2)):
        _, slots = net.decode(rng.integers(0, 50, length), 64)
        parents = random_parents(rng, count) if count > 3 else None
        spans.append((slots, rng.integers(0, 50, count), parents))
    together, taps = net.run(spans)
    for span, logits, tap in zip(spans, together, taps, strict=True):
        (alone,), (alone_tap,) = net.run([span])
        assert same_bits(alone, logits)
        assert same_bits(alone_tap, tap)


def test_stack_mistakes_raise() -> None:
    net = Net(NativeOps(threads=2))
    slots, tokens = net.new_cache(32), np.zeros(33, int)
    with pytest.raises(ValueError, match="too small"):
        net.run([(slots, tokens, None)])
    with pytest.raises(ValueError, match="too few layers"):
        net.run([(KVSlots(*net.ops.new_kv(2, 2, 32, 40), 0), tokens, None)])
    with pytest.raises(ValueError, match="heads of a cache"):
        net.run([(KVSlots(*net.ops.new_kv(3, 1, 32, 40), 0), tokens, None)])
    first, past, mask = np.zeros(1, np.int32), Past([slots]), Causal((0, 1))
    with pytest.raises(ValueError, match="width of x"):
        net.ops.decoder_stack(np.zeros((1, 32), np.float32), net.layers, net.spec, first, past, mask)
    layers = [net.layers[0], Net(net.ops, inner=64).layers[0]]
    with pytest.raises(ValueError, match="gate_up is"):
        net.ops.decoder_stack(np.zeros((1, 64), np.float32), layers, net.spec, first, past, mask)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [50]}, "id is out of range"),
        ({"token_ids": [-1]}, "id is out of range"),
        ({"positions": [0, 1]}, "number of positions"),
        ({"positions": [-1]}, "outside the table"),
        ({"mask": Tree([0], (0, 1))}, "parent"),
        ({"mask": Causal((0, 2))}, "bounds"),
        ({"rows": [1]}, "rows asked for"),
        ({"rows": [0, 0]}, "rows asked for"),
        ({"taps": [4]}, "taps"),
        ({"past": Past([])}, "pending"),
    ],
)
def test_mistakes_of_a_whole_pass_raise(change: dict[str, Any], message: str) -> None:
    net = Net(NativeOps(threads=2))
    table = net.ops.weight(np.ones((50, 64), np.float32))
    given = {"token_ids": [1], "positions": [0], "past": Past([net.new_cache(32)]), "mask": Causal((0, 1)), "rows": [0]}
    given |= change
    with pytest.raises(ValueError, match=message):
        net.ops.decoder_pass(embedding=table, layers=net.layers, spec=net.spec, **given)  # type: ignore[arg-type]


def test_results_do_not_depend_on_flushing_of_subnormals(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    ops = NativeOps(dtype="float32", threads=2)
    weight, x = ops.weight(normal(rng, 700, 64) * np.float32(1e-3)), normal(rng, 40, 64) * np.float32(1e-36)
    expected = ops.linear(x, weight)
    assert np.any((expected != 0) & (np.abs(expected) < 1e-38))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormals")
    try:
        assert same_bits(ops.linear(x, weight), expected)
    finally:
        torch.set_flush_denormal(False)
