"""A small cut of benchmarks/acceptance.py: joint rules accept at least as much on the real model too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.assemble import ModelOptions, load_model
from sakiyomi.noise import gumbel
from sakiyomi.sampling.distributions import Law

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "acceptance.py"


@pytest.fixture(scope="module")
def acceptance() -> ModuleType:
    spec = importlib.util.spec_from_file_location("acceptance", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["acceptance"] = module
    spec.loader.exec_module(module)
    return module


def test_what_the_rules_accept_on_the_real_model(acceptance: ModuleType, model_path: Path) -> None:
    loaded = load_model(str(model_path), ModelOptions())
    counts = {"num_contexts": 6, "num_seeds": 1, "num_trees": 1}
    summary, gains = acceptance.run(loaded, acceptance.OWN_PROMPTS, 28, 1.0, **counts)
    mean = {name: value for name, (value, _) in summary.items()}
    assert len(gains["block"]) == len(gains["traversal"]) == 6
    assert min(gains["block"]) >= -1e-12
    assert 0 < mean["rejection"] <= mean["block"] <= acceptance.DEPTH
    assert mean["first: (1 - TV) / (1 + TV)"] <= mean["first: coupled"] <= mean["first: 1 - TV"]
    assert min(mean["tree"], mean["traversal"]) > 0


def law(weights: list[int]) -> Law:
    row = np.array(weights, np.float64)
    kept = np.flatnonzero(row)
    return Law(kept, row[kept] / row.sum(), row.size)


weights = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any)


@given(p=weights.map(law), q=weights.map(law))
def test_the_probability_of_a_coupled_match(acceptance: ModuleType, p: Law, q: Law) -> None:
    """The sorted form against the double sum of its definition, and between its bounds."""
    p_row, q_row = p.row(), q.row()
    both = [i for i in range(4) if p_row[i] > 0 and q_row[i] > 0]
    expected = sum(1 / sum(max(p_row[j] / p_row[i], q_row[j] / q_row[i]) for j in range(4)) for i in both)
    match = acceptance.match_probability(p, q)
    assert match == pytest.approx(expected, abs=1e-12)
    distance = np.abs(p_row - q_row).sum() / 2
    assert (1 - distance) / (1 + distance) - 1e-12 <= match <= 1 - distance + 1e-12


def test_real_noise_matches_that_often(acceptance: ModuleType) -> None:
    p, q = law([1, 2, 3, 4]), law([4, 3, 2, 1])
    ids = np.arange(4)
    noise = [gumbel(8, t, ids) for t in range(20000)]
    share = np.mean([np.argmax(np.log(p.row()) + n) == np.argmax(np.log(q.row()) + n) for n in noise])
    assert share == pytest.approx(acceptance.match_probability(p, q), abs=0.014)  # 4 standard deviations
