"""What all tests share: where the real model and the prompts are, and how hard hypothesis tries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import TokenizerData

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


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes in the order of the byte-level alphabet, 256 is <end>."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return Tokenizer.load(TokenizerData(json=backend.to_str()))
