"""The closed-form start: it finds the map that made the data, centred and scaled."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sakiyomi.train.centred import Centring  # noqa: E402
from sakiyomi.train.eagle_start import _Map  # noqa: E402
from sakiyomi.train.ridge import RidgeSums  # noqa: E402


def test_a_linear_map_is_found_in_pieces() -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(0, 1, (400, 5)) * [1, 0.1, 3, 1, 1] + [0, 7, -20, 0, 1]).astype(np.float32)
    true = rng.normal(0, 1, (3, 5)).astype(np.float32)
    y = x @ true.T + np.float32(2)
    sums = RidgeSums(5, 3)
    for start in range(0, 400, 150):
        sums.add(torch.from_numpy(x[start : start + 150]), torch.from_numpy(y[start : start + 150]))
    found = sums.solve(1e-9)
    assert np.allclose(found.moments.mean, x.mean(0), atol=1e-3)
    assert np.allclose(found.moments.std, x.std(0), rtol=1e-2)
    guessed = (x - found.moments.mean) / found.moments.std @ found.weight.T + found.bias
    assert np.allclose(guessed, y, atol=1e-2)
    assert np.allclose(found.weight / found.moments.std, true, atol=1e-2)


def test_the_ridge_shrinks_and_keeps_constant_inputs_harmless() -> None:
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.normal(0, 1, (50, 4)).astype(np.float32))
    x[:, 3] = 5.0
    y = x[:, :1] * 2
    sums = RidgeSums(4, 1)
    sums.add(x, y)
    weak, strong = sums.solve(1e-6), sums.solve(1.0)
    assert np.isfinite(weak.weight).all()
    assert abs(strong.weight[0, 0]) < abs(weak.weight[0, 0])


def test_a_direction_in_which_all_inputs_are_near_1_stands_in_for_a_bias() -> None:
    rng = np.random.default_rng(2)
    x = torch.from_numpy((rng.normal(0, 1, (4000, 12)) + [8, -6, *[0.5] * 10]).astype(np.float32))
    sums = RidgeSums(12, 2)
    sums.add(x, x[:, :2])
    ones = x @ torch.from_numpy(sums.solve_constant(1e-6))
    assert float(ones.mean()) == pytest.approx(1, abs=1e-3)
    assert float(ones.std()) < 0.12
    centring, weight, bias = Centring.of(sums), torch.randn(3, 12), torch.tensor([5.0, -3, 0])
    # On inputs in which that direction is 1 exactly, the matrix without a bias is the one with it.
    x += torch.outer(1 - x @ centring.constant, centring.constant / centring.constant.square().sum())
    wanted = ((x - centring.mean) / centring.std) @ weight.T + bias
    assert torch.allclose(x @ centring.fold(weight, bias).T, wanted, atol=1e-3)


def test_a_map_cut_in_rank_is_the_nearest_on_such_inputs() -> None:
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(8, 8, generator=generator, dtype=torch.float64) * torch.tensor([5.0, *[1.0] * 6, 0.1])
    correlation = mix.T @ mix / 8
    whole = _Map(torch.randn(6, 8, generator=generator), torch.randn(6, generator=generator))

    def loss(outputs, values) -> float:  # type: ignore[no-untyped-def]
        rest = torch.cat((whole.weight - outputs @ values.weight, (whole.bias - outputs @ values.bias)[:, None]), 1)
        return float((rest[:, :-1].double() @ correlation * rest[:, :-1]).sum() + rest[:, -1].square().sum())

    exact, cut = whole.factor(9, correlation), whole.factor(2, correlation)
    assert loss(*exact) < 1e-6
    best = loss(*cut)
    for _ in range(200):
        shaken = cut[0] + 0.02 * torch.randn(cut[0].shape, generator=generator)
        assert loss(shaken, cut[1]) >= best - 1e-6
