"""Each native operation against plain float64 numpy, on every instruction set that the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_cache import unpack
from sakiyomi.cores import count_cores
from sakiyomi.errors import MissingExtraError, ParameterError
from sakiyomi.ops import native
from sakiyomi.ops.base import Blocks, Causal, Dense, KVSlots, Past, Tree
from sakiyomi.ops.native import LEAST_PAGED, NativeOps, quantize
from sakiyomi.types import Quantized

SHAPES = [(1, 32), (15, 64), (16, 32), (17, 96), (50, 160), (300, 576)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture(params=["int8", "float32"])
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(dtype=request.param, threads=2)


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def random_quantized(rng: np.random.Generator, n: int, k: int) -> Quantized:
    scales = rng.uniform(1e-4, 1e-2, (n, k // 32)).astype(np.float16)
    return Quantized(rng.integers(0, 256, (n, k), dtype=np.uint8), scales, (-scales * 120).astype(np.float16))


def round_as_llama_does(weights: Any) -> Quantized:
    """Rows [N, K] in four bits with the ends of each group as `llama-quantize` writes them (Q4_1)."""
    groups = weights.reshape(len(weights), -1, 32)
    low, high = groups.min(axis=2), groups.max(axis=2)
    scales = (high - low) / np.float32(15)
    steps = (groups - low[..., None]) / np.where(scales == 0, np.float32(1), scales)[..., None]
    values = np.minimum(steps + np.float32(0.5), 15).astype(np.uint8)
    return Quantized(values.reshape(weights.shape), scales.astype(np.float16), low.astype(np.float16))


def brain_floats(x: Any) -> Any:
    """Numbers rounded to bfloat16."""
    return ((x.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


def rounded_queries(q: Any) -> Any:
    """What attention over bytes makes of queries [R, Q, D]: the same along D, its last group filled with zeros."""
    num_rows, num_heads, dim = q.shape
    if not num_rows:
        return q
    padded = np.zeros((num_rows * num_heads, -(-dim // 32) * 32), np.float32)
    padded[:, :dim] = q.reshape(-1, dim)
    return rounded_inputs(padded)[:, :dim].reshape(q.shape)


def rounded_inputs(x: Any) -> Any:
    """What int8 makes of inputs: groups of 32, symmetric, largest magnitude / 127, ties to even."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return (np.rint(groups * inverse).astype(np.float64) * (largest / np.float32(127))).reshape(x.shape)


class TestLinear:
    @pytest.mark.parametrize(("n", "k"), [*SHAPES, (33, 1), (20, 47)])
    def test_float32_is_the_plain_product(self, rng: np.random.Generator, n: int, k: int) -> None:
        ops = NativeOps(dtype="float32", threads=2)
        x, w, bias = normal(rng, 5, k), normal(rng, n, k), normal(rng, n)
        weight = ops.weight(w)
        expected = x.astype(np.float64) @ w.T.astype(np.float64)
        bound = 1e-6 * (np.abs(x) @ np.abs(w).T) + 1e-6
        assert weight.shape == (n, k)
        assert np.all(np.abs(ops.linear(x, weight) - expected) <= bound)
        assert np.all(np.abs(ops.linear(x, weight, bias) - (expected + bias)) <= bound)

    @pytest.mark.parametrize(("n", "k"), SHAPES)
    def test_int8_rounds_the_inputs_and_nothing_else(self, rng: np.random.Generator, n: int, k: int) -> None:
        ops = NativeOps(threads=2)
        x, w = normal(rng, 6, k) * 3, random_quantized(rng, n, k)
        x[1] = 0
        x[2, : k // 2] = 1e-35
        scales, mins = w.scales.astype(np.float64), w.mins.astype(np.float64)
        products = w.values.reshape(n, -1, 32) * scales[:, :, None]
        exact, size = products + mins[:, :, None], products + np.abs(mins)[:, :, None]
        inputs = rounded_inputs(np.where(np.abs(x) < 1e-30, 0, x))
        expected = inputs @ exact.reshape(n, k).T
        bound = 2e-6 * (np.abs(inputs) @ size.reshape(n, k).T)
        assert np.all(np.abs(ops.linear(x, ops.weight(w)) - expected) <= bound + 1e-7)

    def test_logits_keep_sixteen_bits_of_the_inputs(self, rng: np.random.Generator) -> None:
        ops = NativeOps(threads=2)
        x, w = normal(rng, 9, 160) * 3, random_quantized(rng, 50, 160)
        weight, exact = ops.weight(w), w.dequantize().astype(np.float64)
        expected = x.astype(np.float64) @ exact.T
        coarse, fine = (np.abs(y - expected).max() for y in (ops.linear(x, weight), ops.logits(x, weight)))
        assert fine < coarse / 50
        for rows in (1, 2, 5):
            assert ops.logits(x[:rows], weight).tobytes() == ops.logits(x, weight)[:rows].tobytes()

    def test_extreme_values_do_not_saturate(self) -> None:
        w = Quantized(np.full((16, 64), 255, np.uint8), np.ones((16, 2), np.float16), np.zeros((16, 2), np.float16))
        x = np.full((1, 64), -1, np.float32)
        ops = NativeOps(threads=1)
        np.testing.assert_allclose(ops.linear(x, ops.weight(w)), -255.0 * 64, rtol=1e-6)

    def test_stacks_matrices_along_the_outputs(self, rng: np.random.Generator, ops: NativeOps) -> None:
        parts = [normal(rng, 20, 64), random_quantized(rng, 7, 64), normal(rng, 16, 64)]
        x = normal(rng, 3, 64)
        whole = ops.linear(x, ops.weight(parts))
        assert np.array_equal(whole, np.concatenate([ops.linear(x, ops.weight(part)) for part in parts], axis=1))

    def test_wide_float_matrix_is_quantized_finely(self, rng: np.random.Generator) -> None:
        w = normal(rng, 40, 96) * 0.02
        w[3, :32] = 0.25
        w[4, :32] = 0
        error = np.abs(quantize(w).dequantize() - w)
        groups = w.reshape(40, 3, 32)
        step = (groups.max(axis=2) - groups.min(axis=2)) / 255
        assert np.all(error.reshape(40, 3, 32) <= 0.52 * step[:, :, None] + 3e-5)
        assert not error[4, :32].any()

    @pytest.mark.parametrize("values", [np.inf, np.nan, 1e6])
    def test_matrix_beyond_half_precision_stays_float(self, rng: np.random.Generator, values: float) -> None:
        w = normal(rng, 4, 32)
        w[0, 0] = values
        assert not NativeOps(threads=1).weight(w).is_quantized

    def test_no_rows(self, ops: NativeOps, rng: np.random.Generator) -> None:
        assert ops.linear(np.zeros((0, 64), np.float32), ops.weight(normal(rng, 5, 64))).shape == (0, 5)


class TestRowOps:
    @pytest.mark.parametrize(("n", "k"), [(50, 96), (7, 64)])
    def test_embed_reads_rows_back(self, rng: np.random.Generator, ops: NativeOps, n: int, k: int) -> None:
        w = random_quantized(rng, n, k)
        ids = np.array([n - 1, 0, 3, 3], np.int32)
        assert np.array_equal(ops.embed(ops.weight(w), ids), w.dequantize()[ids])
        odd = normal(rng, n, 45)
        assert np.array_equal(ops.embed(ops.weight(odd), ids), odd[ids])

    @pytest.mark.parametrize("shape", [(3, 576), (2, 50), (1, 7), (4, 3, 80), (2, 5, 24)])
    def test_rms_norm(self, rng: np.random.Generator, ops: NativeOps, shape: tuple[int, ...]) -> None:
        x, w = normal(rng, *shape), normal(rng, shape[-1])
        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * w
        np.testing.assert_allclose(ops.rms_norm(x, w, 1e-5), expected, rtol=2e-6, atol=1e-7)

    @pytest.mark.parametrize("dim", [8, 32, 64, 80, 128])
    def test_rope(self, rng: np.random.Generator, ops: NativeOps, dim: int) -> None:
        x = normal(rng, 4, 3, dim)
        positions = np.array([0, 1, 1023, 5000], np.int32)
        inv_freq = (10000.0 ** (-np.arange(dim // 2) * 2 / dim)).astype(np.float32)
        angles = (positions[:, None].astype(np.float32) * inv_freq).astype(np.float64)[:, None, :]
        cosine, sine = np.cos(angles) * 1.25, np.sin(angles) * 1.25
        low, high = x[..., : dim // 2], x[..., dim // 2 :]
        expected = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
        np.testing.assert_allclose(ops.rope(x, positions, inv_freq, 1.25), expected, atol=2e-6)

    def test_rope_does_not_depend_on_how_its_table_grew(self, rng: np.random.Generator) -> None:
        inv_freq = (10000.0 ** (-np.arange(32) / 32)).astype(np.float32)
        x, positions = normal(rng, 3000, 1, 64), np.arange(3000, dtype=np.int32)
        at_once = NativeOps(threads=1).rope(x, positions, inv_freq)
        ops = NativeOps(threads=1)
        pieces = [ops.rope(x[i : i + 500], positions[i : i + 500], inv_freq) for i in range(0, 3000, 500)]
        assert np.array_equal(at_once, np.concatenate(pieces))

    @pytest.mark.parametrize("width", [1, 15, 16, 33, 1536])
    def test_silu_mul(self, rng: np.random.Generator, ops: NativeOps, width: int) -> None:
        x = normal(rng, 3, 2 * width) * 8
        x[0, 0], x[1, 0], x[2, 0] = -200.0, 200.0, 0.0
        gate, up = x[:, :width].astype(np.float64), x[:, width:]
        np.testing.assert_allclose(ops.silu_mul(x), gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)

    def test_add(self, rng: np.random.Generator, ops: NativeOps) -> None:
        x, y = normal(rng, 3, 37), normal(rng, 3, 37)
        assert np.array_equal(ops.add(x, y), x + y)

    @pytest.mark.parametrize("width", [1, 5, 16, 17, 50000])
    def test_argmax_takes_the_lowest_of_ties(self, rng: np.random.Generator, ops: NativeOps, width: int) -> None:
        x = rng.integers(0, 3, (40, width)).astype(np.float32) - 5
        x[0] = -np.inf
        assert np.array_equal(ops.argmax(x), x.argmax(axis=1))


def plain_attention(q: Any, k: Any, v: Any, visible: list[Any]) -> Any:
    """Softmax attention in float64; visible[r] = rows of k and v that row r sees."""
    num_rows, num_heads, dim = q.shape
    out = np.zeros((num_rows, num_heads, dim))
    for row, seen in enumerate(visible):
        for head in range(num_heads):
            kv_head = head // (num_heads // k.shape[1])
            scores = k[seen, kv_head].astype(np.float64) @ q[row, head] * dim**-0.5
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v[seen, kv_head] / weights.sum()
    return out.reshape(num_rows, num_heads * dim)


def tree_paths(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    return paths


PARENTS = [-1, 0, 1, 1, 0, -1, 5, 2, 7, 3]


class Filled:
    """A cache of the second of two layers that holds a random prefix; what it holds not is no number."""

    def __init__(
        self, rng: np.random.Generator, ops: NativeOps, kv_heads: int, dim: int, length: int, room: int
    ) -> None:
        self.ops, self.length = ops, length
        self.keys, self.values = ops.new_kv(2, kv_heads, dim, length + room)
        self.keys[:], self.values[:] = 255, 255
        if ops.dtype == "float32":
            self.keys[:], self.values[:] = np.nan, np.nan
        shape = (length, kv_heads, dim)
        past = Past([KVSlots(self.keys, self.values, 0)], layer=1)
        self.k, self.v = ops.store(past, normal(rng, *shape), normal(rng, *shape), (0, length))

    @property
    def slots(self) -> KVSlots:
        return KVSlots(self.keys, self.values, self.length)

    def seen(self, k: Any, v: Any) -> tuple[Any, Any]:
        """All keys and values [C, G, D] once k and v are stored, as the cache holds them."""
        return np.concatenate([self.k, k]), np.concatenate([self.v, v])


def check_attention(ops: NativeOps, got: Any, q: Any, k: Any, v: Any, visible: list[Any]) -> None:
    """Float32 rounds nothing; int8 rounds queries to 8 bits and the softmax's weights to 15."""
    if ops.dtype == "int8":
        np.testing.assert_allclose(got, plain_attention(rounded_queries(q), k, v, visible), atol=2e-4)
    else:
        np.testing.assert_allclose(got, plain_attention(q, k, v, visible), atol=3e-6)


class TestAttend:
    @pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (5, 1), (12, 2)])
    @pytest.mark.parametrize("dim", [20, 64, 80, 128])
    def test_tree_over_a_cache(
        self, rng: np.random.Generator, ops: NativeOps, heads: int, kv_heads: int, dim: int
    ) -> None:
        length, rows = 45, len(PARENTS)
        cache = Filled(rng, ops, kv_heads, dim, length, rows + 3)
        past = Past([cache.slots], layer=1)
        q, k, v = normal(rng, rows, heads, dim), normal(rng, rows, kv_heads, dim), normal(rng, rows, kv_heads, dim)
        k, v = ops.store(past, k, v, (0, rows))
        all_keys, all_values = cache.seen(k, v)
        for window in (None, 1, 7, 40, 1000):
            visible = [
                ([*range(length)] + [length + node for node in path])[-(window or 10**6) :]
                for path in tree_paths(PARENTS)
            ]
            got = ops.attend(q, k, v, past, Tree(np.array(PARENTS, np.int32), (0, rows)), window)
            check_attention(ops, got, q, all_keys, all_values, visible)

    def test_causal_over_caches_of_several_sequences(self, rng: np.random.Generator, ops: NativeOps) -> None:
        bounds = (0, 5, 5, 12)
        caches = [Filled(rng, ops, 2, 32, length, 8) for length in (0, 33, 170)]
        q, k, v = normal(rng, 12, 4, 32), normal(rng, 12, 2, 32), normal(rng, 12, 2, 32)
        past = Past([cache.slots for cache in caches], layer=1)
        k, v = ops.store(past, k, v, bounds)
        got = ops.attend(q, k, v, past, Causal(bounds))
        for cache, start, stop in zip(caches, bounds, bounds[1:], strict=False):
            visible = [list(range(cache.length + row + 1)) for row in range(stop - start)]
            own = slice(start, stop)
            check_attention(ops, got[own], q[own], *cache.seen(k[own], v[own]), visible)

    def test_one_key_outweighs_all_others_together(self, rng: np.random.Generator) -> None:
        """As the first one often does: what is left for the others must not be rounded away."""
        ops, length = NativeOps(threads=2), 400
        cache = Filled(rng, ops, 1, 64, 0, length)
        q, k, v = normal(rng, 1, 1, 64), normal(rng, length, 1, 64) * 0.05, normal(rng, length, 1, 64) + 3
        k[0], v[0] = q[0] * (8 * 7.0 / (q[0] ** 2).sum()), -v[0]  # exp(7) times as much as each other one
        past = Past([cache.slots], layer=1)
        k, v = ops.store(past, k, v, (0, length))
        last = Past([KVSlots(cache.keys, cache.values, length - 1)], layer=1)
        got = ops.attend(q, k[-1:], v[-1:], last, Causal((0, 1)))
        expected = plain_attention(rounded_queries(q), k, v, [list(range(length))])
        np.testing.assert_allclose(got, expected, atol=1e-3)

    def test_without_a_cache(self, rng: np.random.Generator, ops: NativeOps) -> None:
        rows = 40
        q, k, v = normal(rng, rows, 4, 48), normal(rng, rows, 2, 48), normal(rng, rows, 2, 48)
        documents = rng.integers(0, 3, rows).astype(np.int32)
        allowed = rng.random((rows, rows)) < 0.3
        np.fill_diagonal(allowed, True)
        parents = np.array([*PARENTS, *PARENTS, *PARENTS, *PARENTS], np.int32)
        bounds = (0, 10, 20, 30, 40)
        cases: list[tuple[Any, list[Any]]] = [
            (Causal((0, 15, 40)), [list(range(0 if r < 15 else 15, r + 1)) for r in range(rows)]),
            (Blocks(documents), [[c for c in range(r + 1) if documents[c] == documents[r]] for r in range(rows)]),
            (Dense(allowed), [np.flatnonzero(allowed[r]) for r in range(rows)]),
            (Tree(parents, bounds), [[start + i for i in p] for start in bounds[:-1] for p in tree_paths(PARENTS)]),
        ]
        for mask, visible in cases:
            got = ops.attend(q, k, v, None, mask)
            np.testing.assert_allclose(got, plain_attention(q, k, v, visible), atol=3e-6)

    def test_window_without_a_cache(self, rng: np.random.Generator, ops: NativeOps) -> None:
        q, k, v = normal(rng, 50, 2, 32), normal(rng, 50, 2, 32), normal(rng, 50, 2, 32)
        got = ops.attend(q, k, v, None, Causal((0, 50)), window=9)
        visible = [list(range(max(0, row - 8), row + 1)) for row in range(50)]
        np.testing.assert_allclose(got, plain_attention(q, k, v, visible), atol=3e-6)

    @pytest.mark.parametrize("dim", [1, 20, 32, 64, 80, 128])
    def test_bytes_are_as_near_as_bytes_can_be(self, rng: np.random.Generator, dim: int) -> None:
        ops = NativeOps(threads=1)
        keys, values = ops.new_kv(1, 2, dim, 90)
        keys[:], values[:] = 0, 0
        x = normal(rng, 90, 2, dim) * 10.0 ** rng.integers(-6, 6, (90, 2, 1))
        x[3], x[40, 1] = 0, 1e-38
        x = x.astype(np.float32)
        k, v = ops.store(Past([KVSlots(keys, values, 0)]), x, x, (0, 90))
        for rounded, width in ((k, 32), (v, dim)):
            for start in range(0, dim, width):
                part = slice(start, start + width)
                largest = np.abs(x[..., part]).max(axis=2, keepdims=True)
                assert (np.abs(rounded[..., part] - x[..., part]) <= largest / 253.9 + 1e-30).all()
        unpacked = unpack(keys, values, dim)
        for rounded, stored in zip((k, v), unpacked, strict=True):
            assert np.array_equal(stored[0, :, :90].transpose(1, 0, 2), rounded)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_what_is_no_number_shows(self, rng: np.random.Generator, bad: float) -> None:
        ops = NativeOps(threads=1)
        for which in (0, 1):
            keys, values = ops.new_kv(1, 1, 64, 40)
            x = [normal(rng, 40, 1, 64), normal(rng, 40, 1, 64)]
            x[which][7, 0, 33] = bad
            past = Past([KVSlots(keys, values, 0)])
            k, v = ops.store(past, *x, (0, 40))
            with np.errstate(invalid="ignore"):
                out = ops.attend(normal(rng, 40, 1, 64), k, v, past, Causal((0, 40)))
            assert np.isfinite(out[:7]).all()
            assert np.isnan(out[7:]).all(axis=1).all()

    @pytest.mark.parametrize("dim", [20, 64])
    def test_moved_slots_are_the_rows_stored_there(self, rng: np.random.Generator, dim: int) -> None:
        ops = NativeOps(threads=1)
        k, v = normal(rng, 120, 2, dim), normal(rng, 120, 2, dim)
        for count in (1, 5, 40):
            source = np.sort(rng.choice(np.arange(20, 120), count, replace=False)).tolist()
            target = list(range(20, 20 + count))
            moved, direct = (ops.new_kv(1, 2, dim, 120) for _ in range(2))
            for array in (*moved, *direct):
                array[:] = 0
            ops.store(Past([KVSlots(*moved, 0)]), k, v, (0, 120))
            ops.move_slots(moved, dim, source, target)
            rows = [*range(20), *source]
            ops.store(Past([KVSlots(*direct, 0)]), k[rows], v[rows], (0, len(rows)))
            for one, other in zip(unpack(*moved, dim), unpack(*direct, dim), strict=True):
                assert np.array_equal(one[:, :, : len(rows)], other[:, :, : len(rows)])
        with pytest.raises(ValueError, match="outside"):
            ops.move_slots(moved, dim, [128], [3])


class TestMistakesRaise:
    def test_linear(self, rng: np.random.Generator, ops: NativeOps) -> None:
        weight = ops.weight(normal(rng, 8, 64))
        with pytest.raises(ValueError, match="width of x is 32 but must be 64"):
            ops.linear(normal(rng, 2, 32), weight)
        with pytest.raises(ValueError, match="length of bias"):
            ops.linear(normal(rng, 2, 64), weight, normal(rng, 9))
        with pytest.raises(ValueError, match="width of a stacked matrix"):
            ops.weight([normal(rng, 8, 64), normal(rng, 8, 32)])
        with pytest.raises(ParameterError, match="matrix"):
            ops.weight(normal(rng, 8))

    def test_quantized_fields_must_fit(self, rng: np.random.Generator) -> None:
        w = random_quantized(rng, 4, 64)
        with pytest.raises(ValueError, match="scales or mins"):
            NativeOps(threads=1).weight(Quantized(w.values, w.scales[:, :1], w.mins))
        with pytest.raises(ValueError, match="multiple of 32"):
            NativeOps(threads=1).weight(Quantized(w.values[:, :40], w.scales[:, :1], w.mins[:, :1]))

    @pytest.mark.parametrize("bad", [-1, 8])
    def test_embed(self, rng: np.random.Generator, ops: NativeOps, bad: int) -> None:
        with pytest.raises(IndexError, match="ids are 0 to 7"):
            ops.embed(ops.weight(normal(rng, 8, 64)), np.array([0, bad], np.int32))

    def test_row_ops(self, rng: np.random.Generator, ops: NativeOps) -> None:
        with pytest.raises(ValueError, match="weight"):
            ops.rms_norm(normal(rng, 2, 64), normal(rng, 63), 1e-5)
        with pytest.raises(ValueError, match="width"):
            ops.silu_mul(normal(rng, 2, 7))
        with pytest.raises(ParameterError, match="one shape"):
            ops.add(normal(rng, 2, 7), normal(rng, 7))
        with pytest.raises(ValueError, match="position"):
            ops.rope(normal(rng, 1, 2, 64), np.array([-1], np.int32), np.ones(32, np.float32))
        with pytest.raises(ValueError, match="table"):
            ops.rope(normal(rng, 1, 2, 64), np.array([0], np.int32), np.ones(30, np.float32))
        with pytest.raises(ValueError, match="number of positions"):
            ops.rope(normal(rng, 2, 2, 64), np.array([0], np.int32), np.ones(32, np.float32))

    def test_cache(self, rng: np.random.Generator, ops: NativeOps) -> None:
        keys, values = ops.new_kv(2, 2, 32, 64)
        q, k = normal(rng, 3, 4, 32), normal(rng, 3, 2, 32)
        full, fine = Past([KVSlots(keys, values, 62)]), Past([KVSlots(keys, values, 61)])
        for call in (lambda p: ops.store(p, k, k, (0, 3)), lambda p: ops.attend(q, k, k, p, Causal((0, 3)))):
            with pytest.raises(ValueError, match="64 slots is too small for 65"):
                call(full)
            with pytest.raises(ValueError, match="no such layer"):
                call(fine.at(2))
        for bounds in ((0, 2), (1, 3), (0, 2, 1, 3), ()):
            with pytest.raises(ValueError, match="bounds"):
                ops.store(fine, k, k, bounds)
        with pytest.raises(ValueError, match="parent"):
            ops.attend(q, k, k, fine, Tree(np.array([-1, 1, 0], np.int32), (0, 3)))
        with pytest.raises(ParameterError, match="Blocks"):
            ops.attend(q, k, k, fine, Blocks(np.zeros(3, np.int32)))
        with pytest.raises(ValueError, match="at least one row"):
            ops.attend(q, k, k, None, Dense(np.zeros((3, 3), bool)))
        with pytest.raises(ValueError, match="multiple"):
            ops.attend(normal(rng, 3, 3, 32), k, k, fine, Causal((0, 3)))
        with pytest.raises(ParameterError, match="window=0"):
            ops.attend(q, k, k, fine, Causal((0, 3)), window=0)


class TestConstruction:
    def test_wrong_arguments(self) -> None:
        with pytest.raises(ParameterError, match="dtype='int4'"):
            NativeOps(dtype="int4")  # type: ignore[arg-type]
        for threads in (0, -1, 1000, True, 1.5):
            with pytest.raises(ParameterError, match="threads="):
                NativeOps(threads=threads)  # type: ignore[arg-type]

    def test_threads_default_to_the_cores_of_this_process(self) -> None:
        assert NativeOps().threads == min(count_cores(), native.MAX_THREADS) >= 1

    def test_without_the_extension(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, "_native", None)
        with pytest.raises(MissingExtraError, match=r"C\+\+17 compiler.*sakiyomi\[torch\]"):
            NativeOps()


# ---------------------------------------------------------------------------------------------- instruction sets


def run_python(code: str, isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SAKIYOMI_ISA": isa}
    return subprocess.run([sys.executable, *code.split("\0")], env=environment, capture_output=True, text=True)


REPORT_ISA = "-c\0from sakiyomi.ops.native import NativeOps; print(NativeOps(threads=1).isa)"


def test_unknown_instruction_set_is_refused() -> None:
    result = run_python(REPORT_ISA, "mmx")
    assert result.returncode != 0
    assert "SAKIYOMI_ISA=mmx is not available here; use one of: portable" in result.stderr


@pytest.mark.skipif("SAKIYOMI_ISA" in os.environ, reason="already running on a forced instruction set")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "amx", "neon"])
def test_every_instruction_set(isa: str) -> None:
    report = run_python(REPORT_ISA, isa)
    if report.returncode != 0 and "is not available here" in report.stderr:
        pytest.skip(f"this machine has no {isa}")
    assert report.stdout.strip() == isa
    if isa == NativeOps(threads=1).isa:
        return  # this run's own
    folder = Path(__file__).parents[1]
    names = ("ops/test_native.py", "ops/test_bitwise.py", "models/test_native.py")
    files = "\0".join(str(folder / name) for name in names)
    result = run_python(f"-m\0pytest\0-q\0-p\0no:cacheprovider\0{files}", isa)
    assert result.returncode == 0, result.stdout[-3000:]


PRINT_PRODUCTS = """-c\0
import hashlib, os
import numpy as np
from sakiyomi.ops.native import NativeOps
from sakiyomi.types import Quantized
os.environ["SAKIYOMI_STORAGE"] = "spans"
rng, digest = np.random.default_rng(5), hashlib.sha256()
for n, k in [(1, 32), (17, 96), (130, 576), (64, 1568), (48, 4640)]:
    for top, is_span in [(16, False), (256, False), (16, n % 16 == 0)]:
        values = rng.integers(0, top, (n, k), np.uint8)
        scales, mins = (rng.standard_normal((n, k // 32)).astype(np.float16) for _ in range(2))
        if is_span:
            mins = (-rng.integers(64, 128, mins.shape) / 64).astype(np.float16)
            scales = ((1 - mins.astype(np.float32)) / 15).astype(np.float16)
            assert NativeOps(threads=1).weight(Quantized(values, scales, mins)).storage == "spans"
        for threads in (1, 2):
            ops = NativeOps(threads=threads)
            weight = ops.weight(Quantized(values, scales, mins))
            for rows in (1, 11, 47, 48, 49, 64, 129, 200):
                x = rng.standard_normal((rows, k)).astype(np.float32)
                digest.update(ops.linear(x, weight).tobytes())
                digest.update(ops.logits(x, weight).tobytes())
print(digest.hexdigest())
"""


PRINT_ATTENTION = """-c\0
import hashlib
import numpy as np
from sakiyomi.ops.base import Causal, KVSlots, Past, Tree
from sakiyomi.ops.native import NativeOps
rng, digest = np.random.default_rng(5), hashlib.sha256()
for heads, groups, dim in [(9, 3, 64), (4, 4, 64), (4, 2, 128), (8, 2, 64), (8, 2, 128), (3, 1, 80)]:
    keys, values = NativeOps(threads=1).new_kv(1, groups, dim, 800)
    keys[:], values[:] = 255, 255
    past = Past([KVSlots(keys, values, 0)])
    k, v = (rng.standard_normal((700, groups, dim)).astype(np.float32) for _ in range(2))
    NativeOps(threads=1).store(past, k, v, (0, 700))
    for length in (0, 100, 127, 128, 600, 650):
        past = Past([KVSlots(keys, values, length)])
        for rows in (1, 2, 3, 4, 7, 8, 9, 40):
            q = (5 * rng.standard_normal((rows, heads, dim))).astype(np.float32)
            parents = np.array([rng.integers(max(-1, i - 3), i) for i in range(rows)], np.int32)
            causal, tree = Causal((0, rows)), Tree(parents, (0, rows))
            for threads, mask, window in [(1, causal, None), (2, causal, 150), (2, tree, None)]:
                digest.update(NativeOps(threads=threads).attend(q, k[:rows], v[:rows], past, mask, window).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("program", [PRINT_PRODUCTS, PRINT_ATTENTION])
def test_matrix_unit_gives_the_same_bits(program: str) -> None:
    if "amx" not in native.list_isas():
        pytest.skip("this machine has no amx")
    results = [run_python(program, isa) for isa in ("avx512", "amx")]
    assert results[0].returncode == 0, results[0].stderr[-3000:]
    assert len(results[0].stdout.strip()) == 64
    assert results[0].stdout == results[1].stdout


class TestStorage:
    """Four-bit storage of values that fit, against the same values in eight bits."""

    @pytest.mark.parametrize(("n", "k"), [*SHAPES, (130, 1536)])
    def test_four_and_eight_bits_give_the_same_bits(
        self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, n: int, k: int
    ) -> None:
        w = random_quantized(rng, n, k)
        w = Quantized(w.values % 16, w.scales, w.mins)
        small = NativeOps(threads=2)
        monkeypatch.setenv("SAKIYOMI_STORAGE", "8bit")
        large = NativeOps(threads=2)
        four, eight = small.weight(w), large.weight(w)
        assert (four.storage, eight.storage) == ("nibbles", "bytes")
        assert eight.num_bytes > 1.7 * four.num_bytes
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 23, 64):
            x = normal(rng, rows, k) * 3
            assert small.linear(x, four).tobytes() == large.linear(x, eight).tobytes(), rows
        ids = np.arange(n, dtype=np.int32)
        assert small.embed(four, ids).tobytes() == large.embed(eight, ids).tobytes()

    def test_one_large_value_needs_eight_bits(self, rng: np.random.Generator) -> None:
        w = random_quantized(rng, 20, 64)
        values = w.values % 16
        values[19, 63] = 16
        assert NativeOps(threads=1).weight(Quantized(values, w.scales, w.mins)).storage == "bytes"

    @pytest.mark.parametrize("num_groups", [1, 2, 3, 7, 8, 9, 15, 16, 17, 18, 48])
    def test_spans_say_the_same_in_fewer_bytes(
        self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, num_groups: int
    ) -> None:
        """Groups of bfloat16 weights: their ends in place of scale and min, and not a bit of a result changes."""
        for n, scale in [(16, 1.0), (48, 1e-3), (144, 100.0)]:
            w = round_as_llama_does(brain_floats(normal(rng, n, 32 * num_groups) * np.float32(scale)))
            monkeypatch.setenv("SAKIYOMI_STORAGE", "spans")
            small = NativeOps(threads=2)
            monkeypatch.setenv("SAKIYOMI_STORAGE", "8bit")
            large = NativeOps(threads=2)
            spans, eight = small.weight(w), large.weight(w)
            assert (spans.storage, eight.storage) == ("spans", "bytes")
            assert spans.num_bytes == n // 16 * 64 * -(-(num_groups * (256 + 40) + 8) // 64)
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 23, 64):
                x = normal(rng, rows, 32 * num_groups) * 3
                assert small.linear(x, spans).tobytes() == large.linear(x, eight).tobytes(), rows
            ids = np.arange(n, dtype=np.int32)
            assert small.embed(spans, ids).tobytes() == w.dequantize().tobytes()
            norm = np.ones(32 * num_groups, np.float32)
            x = normal(rng, 3, 32 * num_groups)
            assert small.best_ids(x, norm, 1e-5, spans).tolist() == large.best_ids(x, norm, 1e-5, eight).tolist()

    @pytest.mark.parametrize("binades", [7, 8, 9, 12])
    def test_spans_hold_eight_powers_of_two(
        self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, binades: int
    ) -> None:
        monkeypatch.setenv("SAKIYOMI_STORAGE", "spans")
        weights = brain_floats(normal(rng, 32, 96))
        weights[5, 32:64] *= np.float32(2.0**-binades)
        w = round_as_llama_does(weights)
        weight = NativeOps(threads=1).weight(w)
        ends = [w.mins[:16], w.dequantize().reshape(32, 3, 32).max(axis=2)[:16]]
        needed = max(np.log2(np.abs(end)).max() - np.log2(np.abs(end)).min() for end in ends)
        if abs(needed - 8) > 0.2:  # within it depends on the last bits
            assert weight.storage == ("spans" if needed < 8 else "nibbles")
        assert NativeOps(threads=1).embed(weight, np.arange(32)).tobytes() == w.dequantize().tobytes()

    @pytest.mark.parametrize("change", ["rows", "scale", "min", "positive", "flat", "zero", "infinite", "nan", "tiny"])
    def test_what_spans_cannot_say_keeps_its_halves(
        self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, change: str
    ) -> None:
        w = round_as_llama_does(brain_floats(normal(rng, 33 if change == "rows" else 32, 96)))
        scales, mins = w.scales.copy(), w.mins.copy()
        if change == "scale":
            scales.view(np.uint16)[31, 2] ^= 1
        elif change == "min":
            mins.view(np.uint16)[31, 2] ^= 1
        elif change == "positive":
            mins[31, 2] *= -1
        elif change == "flat":
            scales[31, 2] = 0
        elif change == "zero":
            scales[31, 2] = mins[31, 2] = 0
        elif change == "infinite":
            scales[31, 2] = np.inf
        elif change == "nan":
            mins[31, 2] = np.nan
        elif change == "tiny":
            mins[:16] *= np.float16(2.0**-14)
            scales[:16] *= np.float16(2.0**-14)
        changed = Quantized(w.values, scales, mins)
        monkeypatch.setenv("SAKIYOMI_STORAGE", "spans")
        small = NativeOps(threads=1)
        monkeypatch.setenv("SAKIYOMI_STORAGE", "8bit")
        large = NativeOps(threads=1)
        halves, eight = small.weight(changed), large.weight(changed)
        assert halves.storage == "nibbles"
        x = normal(rng, 3, 96)
        assert small.linear(x, halves).tobytes() == large.linear(x, eight).tobytes()

    def test_the_fastest_storage_is_the_default(
        self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        w = round_as_llama_does(brain_floats(normal(rng, 16, 32)))
        fastest = "spans" if NativeOps(threads=1).isa == "avx512" else "nibbles"
        for named, storage in {"": fastest, "8bit": "bytes", "4bit": "nibbles", "spans": "spans"}.items():
            monkeypatch.setenv("SAKIYOMI_STORAGE", named)
            ops = NativeOps(threads=1)
            assert (ops.weight(w).storage, ops.packing) == (storage, f"int8-{storage}")
            assert NativeOps(threads=1, dtype="float32").packing == "float32"
        monkeypatch.setenv("SAKIYOMI_STORAGE", "bytes")
        with pytest.raises(ParameterError, match="SAKIYOMI_STORAGE='bytes' is not allowed; give 8bit, 4bit, spans"):
            NativeOps()

    def test_selected_rows_of_spans_are_the_rows(
        self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SAKIYOMI_STORAGE", "spans")
        ops = NativeOps(threads=1)
        w = round_as_llama_does(brain_floats(normal(rng, 64, 320)))
        for count in (1, 16, 31, 48):
            ids = rng.integers(0, 64, count).astype(np.int32)
            chosen = ops.select_rows(ops.weight(w), ids)
            assert chosen.storage == ("spans" if count % 16 == 0 else "nibbles")
            assert ops.embed(chosen, np.arange(count)).tobytes() == w.dequantize()[ids].tobytes()


@pytest.mark.parametrize("bits", [8, 4])
def test_selected_rows_are_the_rows(ops: NativeOps, rng: np.random.Generator, bits: int) -> None:
    matrix = quantize(normal(rng, 50, 96), bits)
    weight = ops.weight(matrix)
    ids = np.array([0, 49, 17, 17, 31, 2, 48] * 3, np.int32)
    chosen = ops.select_rows(weight, ids)
    x = normal(rng, 3, 96)
    assert chosen.shape == (21, 96)
    storage = "floats" if ops.dtype == "float32" else "bytes" if bits == 8 else "nibbles"
    assert chosen.storage == weight.storage == storage
    assert np.array_equal(ops.linear(x, chosen), ops.linear(x, weight)[:, ids])
    assert np.array_equal(ops.embed(chosen, np.arange(21)), ops.embed(weight, ids))
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match=f"row {wrong} is out of range"):
            ops.select_rows(weight, np.array([wrong], np.int32))


def test_four_bits_are_as_near_as_four_bits_can_be(rng: np.random.Generator) -> None:
    matrix = normal(rng, 20, 64)
    for bits, steps in ((8, 255), (4, 15)):
        rounded = quantize(matrix, bits)
        assert rounded.values.max() == steps
        spans = np.ptp(matrix.reshape(20, 2, 32), axis=2)
        error = np.abs(rounded.dequantize() - matrix).reshape(20, 2, 32).max(axis=2)
        assert (error < spans / steps * 0.52 + 2e-3).all()


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("capacity", [0, 1, 40, 200, 900])
def test_room_for_a_cache_is_its_own_whatever_its_size(dtype: str, capacity: int) -> None:
    """Large caches have pages of their own: they begin with one, overlap with nothing, go when the last view goes."""
    ops = NativeOps(dtype=dtype, threads=1)
    pairs = [ops.new_kv(12, 3, 64, capacity) for _ in range(2)]
    arrays = [array for pair in pairs for array in pair]
    if sum(array.nbytes for array in pairs[0]) >= LEAST_PAGED:
        assert all(keys.ctypes.data % (2 << 20) == 0 for keys, _ in pairs)
        assert all(values.ctypes.data % 64 == 0 for _, values in pairs)
        assert not any(array.any() for array in arrays)
    for number, array in enumerate(arrays):
        assert array.flags.c_contiguous
        array[...] = number
    last = arrays[-1].copy()
    del pairs
    for number, array in enumerate(arrays):
        assert (array == number).all()
    kept = arrays.pop()
    del array, arrays
    np.testing.assert_array_equal(kept, last)
