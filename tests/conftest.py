"""What all tests share: where the real model and the prompts are, and how hard hypothesis tries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# No deadline: the first example of a test often compiles or loads something.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; skips where it was not fetched."""
    named = os.environ.get("SAKIYOMI_TEST_MODEL")
    if named:
        assert Path(named).is_file(), f"SAKIYOMI_TEST_MODEL names {named!r}, which is no file"
        return Path(named)
    from sakiyomi.hub import find_cached

    cached = find_cached("smollm2")
    if cached is None:
        pytest.skip("the real model is not here: run `sakiyomi pull smollm2` or set SAKIYOMI_TEST_MODEL")
    return cached


@pytest.fixture(scope="session")
def spec_bench_path() -> Path:
    """The questions of Spec-Bench; skips where they are not."""
    named = os.environ.get("SAKIYOMI_SPEC_BENCH")
    path = Path(named) if named else ROOT.parent / "shared" / "data" / "spec_bench" / "question.jsonl"
    if not path.is_file():
        pytest.skip(f"Spec-Bench's questions are not here: {path} (SAKIYOMI_SPEC_BENCH names another place)")
    return path
