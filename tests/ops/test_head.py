"""The ids that rows choose over a head without its logits: the very ids of the logits, and bounds that are bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sakiyomi._native", reason="the native kernels are not built")

from sakiyomi.ops.base import THE_BEST_ROW, Ops, RowChoice
from sakiyomi.ops.native import NativeOps, Packed, list_isas
from sakiyomi.types import Quantized

native = import_module("sakiyomi._native")
Floats = npt.NDArray[np.float32]
EPS = 1e-5
SHARE = 64


def make_head(rng: np.random.Generator, n: int, k: int, top: int = 256, spread: float = 1.0) -> Quantized:
    """Random weights; `spread` is the ratio between the longest rows and the shortest."""
    scales = rng.uniform(1e-3, 2e-3, (n, k // 32)) * spread ** rng.uniform(0, 1, (n, 1))
    mins = -scales * (top / 2) * rng.uniform(0.8, 1.2, scales.shape)
    return Quantized(rng.integers(0, top, (n, k), dtype=np.uint8), scales.astype(np.float16), mins.astype(np.float16))


def normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def count_decided(ops: NativeOps, x: Floats, norm: Floats, head: Any) -> tuple[list[int], int]:
    """The ids, and how many pairs of a row and a share of 64 outputs needed both terms."""
    ids = np.empty(len(x), np.int64)
    count = native.best_ids(np.ascontiguousarray(x), head, norm, EPS, ids, ops.threads)
    return ids.tolist(), count


def assert_best(x: Floats, norm: Floats, head: Any, *, may_ask: bool = False) -> None:
    """The ids are those of the logits for any number of threads, and for the rows one by one.

    Args:
        may_ask: whether a row may be left to its logits.
    """
    for threads in (1, 2):
        ops = NativeOps(threads=threads)
        with np.errstate(invalid="ignore"):
            expected = Ops.best_ids(ops, x, norm, EPS, head)
        for got in (ops.best_ids(x, norm, EPS, head), [int(ops.best_ids(row[None], norm, EPS, head)[0]) for row in x]):
            wrong = [(a, b) for a, b in zip(got, expected, strict=True) if a != b and not (may_ask and a == -1)]
            assert not wrong, (threads, wrong)
        if head.is_quantized and len(x):
            assert_noisy(ops, x, norm, head, may_ask)


def assert_noisy(ops: NativeOps, x: Floats, norm: Floats, head: Any, may_ask: bool) -> None:
    """By noise, too, what the logits choose, but where they are too large for bounds in floats."""
    with np.errstate(invalid="ignore"):
        logits = ops.logits(ops.rms_norm(x, norm, EPS), head)
    temperatures = (0.01, 0.3, 1.0, 0.0, 4.0, 100.0)
    for first in range(len(temperatures)):
        mixed = [temperatures[(first + i) % len(temperatures)] for i in range(len(x))]
        choices = [RowChoice(first, heat, (1 << 33) + 3 * i) if heat else THE_BEST_ROW for i, heat in enumerate(mixed)]
        chosen = ops.chosen_ids(x, norm, EPS, head, choices).tolist()
        for got, choice, row in zip(chosen, choices, logits, strict=True):
            wanted = native.choose(row, choice.seed, choice.position, choice.temperature, 0, 1.0, 0.0)
            is_left = got == -1 and (may_ask or np.abs(row).max() > 1e4 * choice.temperature > 0)
            assert got == wanted or is_left, (choice, got, wanted)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize(("n", "k"), [(1, 32), (15, 64), (64, 96), (65, 32), (1000, 64), (5003, 576), (2100, 1568)])
@pytest.mark.parametrize("top", [16, 256])
def test_ids_are_those_of_the_largest_logits(rng: np.random.Generator, n: int, k: int, top: int) -> None:
    for spread in (1.0, 30.0):
        head = NativeOps().weight(make_head(rng, n, k, top, spread))
        assert_best(normal(rng, 21, k) * 3, normal(rng, k), head)


def test_float_heads(rng: np.random.Generator) -> None:
    ops = NativeOps(dtype="float32", threads=2)
    for n, k in ((1, 5), (63, 32), (700, 47)):
        matrix = normal(rng, n, k)
        matrix[n // 2 :: 3] = matrix[n // 2]
        assert_best(normal(rng, 9, k), normal(rng, k), ops.weight(matrix))


def test_no_rows(rng: np.random.Generator) -> None:
    head = NativeOps().weight(normal(rng, 70, 64))
    assert NativeOps(threads=2).best_ids(normal(rng, 0, 64), normal(rng, 64), EPS, head).shape == (0,)


def test_few_outputs_are_computed_twice(rng: np.random.Generator) -> None:
    """Otherwise every test here would pass by computing everything; and not none, or the bounds were not needed."""
    head, norm, x = NativeOps().weight(make_head(rng, 20_000, 576)), normal(rng, 576), normal(rng, 40, 576)
    _, count = count_decided(NativeOps(threads=2), x, norm, head)
    assert 40 < count < 0.25 * 40 * 20_000 / SHARE


@pytest.mark.parametrize("temperature", [0.009, 101.0, 1.0])
def test_noise_that_has_no_bounds_is_left_to_the_logits(rng: np.random.Generator, temperature: float) -> None:
    head = NativeOps(dtype="float32" if temperature == 1 else "int8").weight(normal(rng, 70, 64))
    ops, x, norm = NativeOps(threads=1), normal(rng, 2, 64), normal(rng, 64)
    choices = [THE_BEST_ROW, RowChoice(3, temperature, 5)]
    assert ops.chosen_ids(x, norm, EPS, head, choices).tolist() == [-1, -1]
    assert Ops.chosen_ids(ops, x, norm, EPS, head, choices).tolist() == [int(ops.best_ids(x, norm, EPS, head)[0]), -1]


def test_wrong_choices_are_refused(rng: np.random.Generator) -> None:
    ops, head, norm = NativeOps(threads=1), NativeOps().weight(normal(rng, 70, 64)), normal(rng, 64)
    for choices, told in (([THE_BEST_ROW], "choices"), ([RowChoice(0, -1.0, 0)] * 2, "temperature")):
        with pytest.raises(ValueError, match=told):
            ops.chosen_ids(normal(rng, 2, 64), norm, EPS, head, choices)


def test_equal_logits_give_the_lowest_id(rng: np.random.Generator) -> None:
    source = make_head(rng, 900, 96)
    x, norm = normal(rng, 12, 96), normal(rng, 96)
    best = NativeOps().best_ids(x, norm, EPS, NativeOps().weight(source))
    for lowest in (0, 17, 400):
        rows = np.arange(900)
        for other, token in enumerate(best):  # copies of the best rows in several shares
            rows[[lowest + other, 500 + other, 880 + other]] = token
        head = NativeOps().weight(source.rows(rows))
        assert_best(x, norm, head)
    assert_best(x, norm, NativeOps().weight(source.rows(np.zeros(900, int))))


def test_rows_that_only_the_second_term_tells_apart(rng: np.random.Generator) -> None:
    """Outputs with the same first term: weights differ where the inputs round to 0."""
    k = 64
    x = np.full((7, k), 1e-3, np.float32) * (1 + rng.uniform(0, 0.9, (7, k)).astype(np.float32))
    x[:, ::32] = 1.0  # the largest of each group: 1e-3 is below half a step of 1 / 127
    values = np.full((800, k), 100, np.uint8)
    values[:, 1:32] = rng.integers(0, 200, (800, 31))
    head = Quantized(values, np.full((800, 2), 0.01, np.float16), np.full((800, 2), -1.0, np.float16))
    ops, norm = NativeOps(threads=1), np.ones(k, np.float32)
    weight = ops.weight(head)
    normed = ops.rms_norm(x, norm, EPS)
    assert len(np.unique(ops.linear(normed, weight)[0])) == 1
    assert len(np.unique(ops.logits(normed, weight)[0])) > 300
    assert_best(x, norm, weight)


def test_nearly_equal_rows(rng: np.random.Generator) -> None:
    source = make_head(rng, 1, 320).rows(np.zeros(3000, int))
    values = source.values.copy()
    for row in range(3000):
        values[row, rng.integers(0, 320)] ^= 1
    head = NativeOps().weight(Quantized(values, source.scales, source.mins))
    assert_best(normal(rng, 10, 320), normal(rng, 320), head)


def test_outliers_and_zeros(rng: np.random.Generator) -> None:
    head, norm = NativeOps().weight(make_head(rng, 1500, 320, spread=100.0)), normal(rng, 320)
    x = normal(rng, 12, 320)
    x[0] = 0
    x[1, 7] = 3e4
    x[2, ::33] = 1e6
    x[3] *= 1e-20
    x[4] *= 1e15
    x[5, :] = 1e-38
    x[6, 0] = 1e-30
    x[7, 31] = -3e18
    assert_best(x, norm, head, may_ask=True)
    assert_best(x[:4], norm, head)
    assert_best(x[8:], norm * np.float32(1e25), head, may_ask=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_damaged_rows_are_left_to_their_logits(rng: np.random.Generator, bad: float) -> None:
    head, norm = NativeOps().weight(make_head(rng, 300, 96)), normal(rng, 96)
    x = normal(rng, 6, 96)
    x[1, 5], x[4] = bad, bad
    ops = NativeOps(threads=2)
    got = ops.best_ids(x, norm, EPS, head)
    assert got[1] == got[4] == -1
    keep = [0, 2, 3, 5]
    assert got[keep].tolist() == ops.best_ids(x[keep], norm, EPS, head).tolist()
    float_head = NativeOps(dtype="float32").weight(normal(rng, 300, 96))
    with np.errstate(invalid="ignore"):
        expected = Ops.best_ids(ops, x, norm, EPS, float_head)
    assert ops.best_ids(x, norm, EPS, float_head).tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_damaged_weights_are_left_to_their_logits(rng: np.random.Generator, bad: float) -> None:
    """A file may hold any halves."""
    for place in (0, 130, 299):
        source = make_head(rng, 300, 96)
        source.scales[place, 1] = bad
        norm, x = normal(rng, 96), normal(rng, 9, 96)
        assert_best(x, norm, NativeOps().weight(source), may_ask=True)
        got = NativeOps(threads=2).best_ids(x, norm, EPS, NativeOps().weight(source))
        logits = NativeOps(threads=2).normed_logits(x, norm, EPS, NativeOps().weight(source))
        for token, row in zip(got, logits, strict=True):
            assert token == -1 or not np.isnan(row).any()


def bounds_of(x: Floats, norm: Floats, head: Any) -> tuple[Floats, Floats]:
    """What the second term adds at most to the outputs of each share [R, N], and what it adds."""
    ops = NativeOps(threads=2)
    n = head.shape[0]
    bounds, ids = np.empty((len(x), -(-n // SHARE)), np.float32), np.empty(len(x), np.int64)
    native.best_ids(x, head, norm, EPS, ids, 2, bounds)
    normed = ops.rms_norm(x, norm, EPS)
    added = ops.logits(normed, head).astype(np.float64) - ops.linear(normed, head)
    return np.repeat(bounds, SHARE, axis=1)[:, :n], added


@pytest.mark.parametrize("top", [16, 256])
@pytest.mark.parametrize("k", [32, 320, 2048])
def test_bounds_hold(rng: np.random.Generator, top: int, k: int) -> None:
    source = make_head(rng, 700, k, top, spread=20.0)
    x, norm = normal(rng, 20, k), normal(rng, k)
    x[3] = 0
    x[5, ::40] *= 1e4
    bounds, added = bounds_of(x, norm, NativeOps().weight(source))
    # The sum of both terms is rounded once, relative to the logit.
    slack = 2.0**-23 * np.abs(NativeOps().normed_logits(x, norm, EPS, NativeOps().weight(source)))
    assert np.all(np.abs(added) <= bounds + slack)
    assert np.median(np.abs(added) / bounds) > 1e-3  # not a bound for its own sake


@pytest.mark.parametrize("top", [16, 256])
def test_bounds_are_nearly_reached_by_weights_along_the_rest(rng: np.random.Generator, top: int) -> None:
    """The worst case: an output that points where the first rounding went wrong."""
    k, half = 320, (top - 1) / 2
    x, norm = normal(rng, 8, k), np.ones(k, np.float32)
    ops = NativeOps(threads=1)
    groups = ops.rms_norm(x, norm, EPS).reshape(8, -1, 32)
    steps = np.abs(groups).max(axis=2, keepdims=True) / 127
    rest = (groups - np.rint(groups / steps) * steps).reshape(8, k)
    along = np.rint(half + half * rest / np.abs(rest).max(axis=1, keepdims=True))
    values = np.concatenate([along, 2 * half - along]).astype(np.uint8)
    scales = np.full((16, k // 32), 0.01, np.float16)
    source = Quantized(values, scales, (-scales * np.float16(half)).astype(np.float16))
    bounds, added = bounds_of(x, norm, ops.weight(source))
    own = np.abs(np.concatenate([np.diag(added[:, :8]), np.diag(added[:, 8:])]))
    lengths = np.linalg.norm(source.dequantize(), axis=1)
    limits = np.concatenate([bounds[:, 0], bounds[:, 0]]) * (lengths / lengths.max())  # a share has the longest one's
    assert np.all(own <= limits)
    assert np.all(own >= 0.95 * limits)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 400),
    groups=st.integers(1, 6),
    top=st.sampled_from([2, 16, 256]),
    rows=st.integers(1, 12),
    spread=st.sampled_from([1.0, 10.0, 1000.0]),
    tied=st.integers(0, 400),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_any_head(seed: int, n: int, groups: int, top: int, rows: int, spread: float, tied: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    source = make_head(rng, n, 32 * groups, top, spread)
    order = np.arange(n)
    order[rng.integers(0, n, min(tied, n))] = rng.integers(0, n, min(tied, n))
    x = normal(rng, rows, 32 * groups) * np.float32(scale) * np.exp(3 * normal(rng, rows, 32 * groups))
    assert_best(x, normal(rng, 32 * groups), NativeOps().weight(source.rows(order)))


def screened(ops: NativeOps, source: Quantized, norm: Floats) -> Any:
    """A head with its coarse copy."""
    head = native.PackedWeight.from_quantized([(source.values, source.scales, source.mins)], "bytes")
    native.set_screen(head, native.make_screen(head, norm, ops.threads))
    return head


def heavy_norm(rng: np.random.Generator, k: int) -> Floats:
    """As models have it: a few columns outweigh the others."""
    norm = np.abs(normal(rng, k)) + np.float32(0.5)
    norm[rng.permutation(k)[: k // 8]] *= 12
    return norm


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 700),
    groups=st.integers(8, 20),
    top=st.sampled_from([2, 17, 256]),
    rows=st.integers(1, 9),
    spread=st.sampled_from([1.0, 10.0, 1000.0]),
    tied=st.integers(0, 400),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_any_screened_head(
    seed: int, n: int, groups: int, top: int, rows: int, spread: float, tied: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    source = make_head(rng, n, 32 * groups, top, spread)
    order = np.arange(n)
    order[rng.integers(0, n, min(tied, n))] = rng.integers(0, n, min(tied, n))
    x = normal(rng, rows, 32 * groups) * np.float32(scale) * np.exp(3 * normal(rng, rows, 32 * groups))
    norm = heavy_norm(rng, 32 * groups)
    assert_best(x, norm, screened(NativeOps(threads=2), source.rows(order), norm))


def round_coarsely(row: Floats) -> Floats:
    """As the coarse copy rounds runs of 64 numbers to 4 bits."""
    groups = row.reshape(-1, 64)
    low = groups.min(axis=1, keepdims=True).astype(np.float16).astype(np.float32)
    steps = ((groups.max(axis=1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float32)
    return (np.clip(np.rint((groups - low) / steps), 0, 15) * steps + low).reshape(row.shape)


class Contest:
    """Outputs of which two matter, `target` and `decoy`; the norm keeps columns in their order, 128 fine ones first."""

    k, fine, n = 384, 128, 4 * SHARE

    def __init__(self, rng: np.random.Generator, target: int, decoy: int) -> None:
        self.source = make_head(rng, self.n, self.k)
        self.target, self.decoy = target, decoy
        self.source.scales[:], self.source.mins[:] = np.float16(1e-6), np.float16(-1.28e-4)
        self.norm = np.linspace(2, 1, self.k, dtype=np.float32)

    def put(self, row: int, values: npt.NDArray[np.float64], step: float, middle: float) -> Floats:
        self.source.values[row] = values
        self.source.scales[row] = np.float16(step)
        self.source.mins[row] = -np.float16(step) * np.float16(middle)
        return self.source.dequantize()[row]

    def run(self, normed: Floats, share: float) -> None:
        """Give the decoy that share of the target's logit by its scale, and find the target nevertheless.

        Args:
            normed: the row that the head reads, up to a factor.
        """
        ops = NativeOps(threads=1)
        x = (normed / self.norm)[None].astype(np.float32)
        # The columns' lengths are those of this output, whose logit is below 0.
        self.put(self.n - 1, np.full(self.k, 255.0 if normed.sum() < 0 else 0.0), 2.0**-6, 127.5)
        largest, unit = ops.normed_logits(x, self.norm, EPS, ops.weight(self.source))[0, [self.target, self.decoy]]
        scale = np.float16(self.source.scales[self.decoy, 0] * share * largest / unit)
        self.source.mins[self.decoy] *= scale / self.source.scales[self.decoy]
        self.source.scales[self.decoy] = scale
        head = screened(ops, self.source, self.norm)
        logits = ops.normed_logits(x, self.norm, EPS, head)[0]
        assert logits.argmax() == self.target
        assert logits[self.decoy] > (share - 0.01) * logits[self.target]
        assert_best(x, self.norm, head)


def test_an_output_along_what_rounding_took_away(rng: np.random.Generator) -> None:
    """The worst case: the copy sees little of the largest logit, and all of one that is hardly smaller."""
    num_tried = 0
    for trial in range(60):
        contest = Contest(rng, SHARE * (trial % 3) + trial, SHARE * ((trial + 1) % 3) + 2)
        weight = contest.put(contest.target, rng.integers(0, 256, contest.k).astype(float), 2.0**-10, 127.5)
        rest = weight - round_coarsely(weight)
        rest[: contest.fine] = 0
        if not -0.5 < ((weight - rest) @ rest) / (rest @ rest) < 0.05:
            continue  # the copy sees much of it, or it is not the largest
        num_tried += 1
        contest.put(contest.decoy, np.rint(127.5 + 127.5 * rest / np.abs(rest).max()), 2.0**-10, 127.5)
        contest.run(rest, 0.995)
    assert num_tried >= 5


def test_an_output_along_what_the_copy_reads_wrongly_of_a_row(rng: np.random.Generator) -> None:
    """Its weights have 16 values, so that the copy holds them exactly; the row's inputs are what it rounds."""
    num_tried = 0
    for trial in range(40):
        contest = Contest(rng, trial, SHARE + trial)
        normed = normal(rng, contest.k)
        normed[: contest.fine] = 0
        normed[contest.fine :: 32] *= 8
        groups = normed.reshape(-1, 32)
        steps = np.maximum(np.abs(groups).max(axis=1, keepdims=True), 1e-9) / 127
        read = (np.rint(groups / steps) * steps).reshape(-1)
        missed = (normed - read).reshape(-1, 64)
        low, high = missed.min(axis=1, keepdims=True), missed.max(axis=1, keepdims=True)
        levels = np.rint(15 * (missed - low) / np.maximum(high - low, 1e-9)).reshape(-1)
        weight = contest.put(contest.target, levels * 17, 2.0**-10, 127.5)
        contest.put(contest.decoy, np.rint(128 + 127 * read / np.abs(read).max()), 2.0**-10, 128)
        gap, logit = weight @ missed.reshape(-1), weight @ normed
        if gap < 0.02 * logit or logit < 0.05:
            continue  # too near to tell apart in half precision, or not the largest
        num_tried += 1
        contest.run(normed, 1 - 0.2 * gap / logit)
    assert num_tried >= 5


def test_a_screen_leaves_few_outputs(rng: np.random.Generator) -> None:
    """Otherwise these tests would pass by deciding everything; and it must be the copy that is asked."""
    norm = heavy_norm(rng, 576)
    source, x, ops = make_head(rng, 20_000, 576), normal(rng, 40, 576), NativeOps(threads=2)
    plain, head = ops.weight(source), screened(ops, source, norm)
    counts = [[count_decided(ops, row[None], norm, weight)[1] for row in x] for weight in (plain, head)]
    assert np.median(counts[1]) < 20_000 / 16 / 10
    assert counts[0] != counts[1]
    assert count_decided(ops, x[:9], norm, head) == count_decided(ops, x[:9], norm, plain)  # too many rows for it


def test_a_screen_that_decides_little_is_left_out_for_a_while(rng: np.random.Generator) -> None:
    """All outputs but one are nearly the same: where that one is no rival, it costs more than it saves.

    Each search in which it does leaves it out of twice as many, until one in which it decides. The ids are the head's.
    """
    ops, norm = NativeOps(threads=2), np.ones(960, np.float32)
    source = make_head(rng, 3000, 960)
    values = source.values[:1].clip(50, 200) + rng.integers(0, 3, source.values.shape).astype(np.uint8)
    signs = rng.choice([-1, 1], 960)
    values[7] += (40 * signs).astype(np.uint8)
    source = Quantized(values, np.full_like(source.scales, 0.01), np.full_like(source.mins, -1.28))
    head, plain = screened(ops, source, norm), ops.weight(source)
    good = signs[None].astype(np.float32)
    asked = []
    for x in [-good] * 40 + [good] * 70 + [-good] * 4 + [good, good] + [-good] * 3:
        ids, count = count_decided(ops, x, norm, head)
        assert (ids, x is good) == (count_decided(ops, x, norm, plain)[0], ids == [7])
        asked.append(count != count_decided(ops, x, norm, plain)[1])
    assert [i for i in range(40) if asked[i]] == [0, 2, 5, 10, 19, 36]
    assert asked[40:69] == [False] * 29
    assert asked[69:] == [True] * 42 + [False, True, False] + [False, True] + [True, False, True]


def test_what_a_screen_cannot_copy(rng: np.random.Generator) -> None:
    ops, norm = NativeOps(threads=2), np.ones(288, np.float32)
    for place, bad in ((0, np.nan), (130, np.inf), (299, -np.inf), (299, 6e4)):
        source = make_head(rng, 300, 288)
        source.scales[place, 1] = bad
        assert native.make_screen(ops.weight(source), norm, 2) is None
    assert native.make_screen(ops.weight(make_head(rng, 300, 288, top=16)), norm, 2) is None  # has 4 bits already
    assert native.make_screen(ops.weight(make_head(rng, 300, 224)), norm[:224].copy(), 2) is None
    assert native.make_screen(NativeOps(dtype="float32").weight(normal(rng, 300, 288)), norm, 2) is None


def test_mistaken_screens_raise(rng: np.random.Generator) -> None:
    ops, norm = NativeOps(threads=1), np.ones(288, np.float32)
    head = ops.weight(make_head(rng, 300, 288))
    screen = native.make_screen(head, norm, 1)
    damaged = native.new_bytes(screen.size)
    damaged[:] = screen
    damaged[64:68] = 255
    for weight, given_screen, message in (
        (head, screen[:-64], "number of bytes"),
        (head, damaged, "no bytes of a coarse copy"),
        (ops.weight(make_head(rng, 284, 288)), screen, "number of bytes"),
        (ops.weight(make_head(rng, 300, 288, top=16)), screen, "no coarse copy"),
    ):
        with pytest.raises(ValueError, match=message):
            native.set_screen(weight, given_screen)
    with pytest.raises(ValueError, match="norm's weight"):
        native.make_screen(head, norm[:32].copy(), 1)


class Shelf(dict[str, Packed]):
    """Keeps packed weights in memory."""

    def find(self, name: str) -> Packed | None:
        return self.get(name)

    def add(self, name: str, packed: Packed) -> None:
        self[name] = packed


def test_a_screen_is_kept_for_the_next_start(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    source, norm, shelf = make_head(rng, 1000, 288), np.ones(288, np.float32), Shelf()
    x = normal(rng, 1, 288)
    for least, names in ((1 << 30, set()), (1 << 10, {"screen"})):
        monkeypatch.setattr("sakiyomi.ops.native.MIN_SCREENED_BYTES", least)
        ops = NativeOps(threads=2, store=shelf)
        head = ops.weight(source)
        ops.prepare_head("screen", head, norm)
        assert set(shelf) == names
    expected = count_decided(ops, x, norm, head)
    assert expected != count_decided(ops, x, norm, ops.weight(source))
    monkeypatch.setattr(native, "make_screen", None)  # the kept one is taken
    again = ops.weight(source)
    ops.prepare_head("screen", again, norm)
    assert count_decided(ops, x, norm, again) == expected


def test_lengths_of_the_weights_are_found_once_by_whoever_is_first(rng: np.random.Generator) -> None:
    source, x, norm = make_head(rng, 3000, 96), normal(rng, 5, 96), normal(rng, 96)
    ops = NativeOps(threads=2)
    expected = ops.best_ids(x, norm, EPS, ops.weight(source)).tolist()
    for _ in range(10):
        head, results = ops.weight(source), []

        def work(head: Any = head, results: list[Any] = results) -> None:
            results.append(ops.best_ids(x, norm, EPS, head).tolist())

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=60)
        assert results == [expected] * 4


def test_mistakes_raise(rng: np.random.Generator) -> None:
    head, norm, ids = NativeOps().weight(normal(rng, 70, 64)), normal(rng, 64), np.empty(2, np.int64)
    for x, own_norm, own_ids, threads, message in (
        (normal(rng, 2, 32), norm, ids, 1, "width of x"),
        (normal(rng, 2, 64), norm[:32].copy(), ids, 1, "norm's weight"),
        (normal(rng, 3, 64), norm, ids, 1, "length of ids"),
        (normal(rng, 2, 64), norm, ids, 0, "threads=0"),
    ):
        with pytest.raises(ValueError, match=message):
            native.best_ids(x, head, own_norm, EPS, own_ids, threads)


@pytest.mark.skipif("SAKIYOMI_ISA" in os.environ, reason="already running on a forced instruction set")
@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "amx", "neon"])
def test_every_instruction_set(isa: str) -> None:
    if isa not in list_isas():
        pytest.skip(f"this machine has no {isa}")
    if isa == NativeOps(threads=1).isa:
        return  # this run's own
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    result = subprocess.run(command, env={**os.environ, "SAKIYOMI_ISA": isa}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
