"""The closed-form start: it finds the map that made the data, centred and scaled."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

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
