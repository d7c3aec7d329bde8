"""The text of the default model that is kept in the repository."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sakiyomi.train.corpus import Corpus
from sakiyomi.train.data import hash_user_turn

TEXT = Path(__file__).resolve().parents[2] / "data" / "smollm2-text.safetensors.xz"
MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def text() -> Corpus:
    if not TEXT.is_file():
        pytest.skip("the kept text is not part of what was unpacked here")
    return Corpus.load(TEXT)


def test_it_is_whole_and_small(text: Corpus) -> None:
    assert TEXT.stat().st_size <= MAX_BYTES
    assert text.num_tokens == text.offsets[-1] > 500_000
    assert text.about["counts"]["documents"] == len(text)
    assert len(set(text.user_hashes.tolist())) == len(text)
    assert (text.spans[:, 2] <= text.lengths[text.spans[:, 0]]).all()
    assert (np.diff(text.spans[:, 0]) >= 0).all()


def test_it_holds_no_prompt_of_the_benchmark(text: Corpus, spec_bench_path: Path) -> None:
    questions = [json.loads(line) for line in spec_bench_path.read_text(encoding="utf-8").splitlines()]
    asked = {hash_user_turn(question["turns"][0]) for question in questions}
    assert len(asked) > 100
    assert not asked & set(text.user_hashes.tolist())
