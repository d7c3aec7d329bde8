"""The stage capture: the states that a drafter meets when it serves, at the very positions."""

from __future__ import annotations

import shutil
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from sakiyomi.assemble import LoadedModel
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.llm import LLM
from sakiyomi.params import SamplingParams
from sakiyomi.train.capture import CaptureConfig, OnlineShards, capture
from sakiyomi.train.corpus import Corpus
from sakiyomi.train.data import DataConfig, write_corpus
from sakiyomi.train.shards import Document
from sakiyomi.types import Array, Sequence

CONFIG = CaptureConfig(taps=(0.5, 1.0), shard_tokens=300, rows=100)


@pytest.fixture(scope="module")
def corpus(chat_target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    config = DataConfig(num_tokens=1500, batch=8, unit_documents=12, answer_tokens=24, user_tokens=16, greedy=1.0)
    return write_corpus(chat_target, config, tmp_path_factory.mktemp("text"))


class Listener(NoneDrafter):
    """Keeps what a drafter is shown."""

    taps = (1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[npt.NDArray[np.float32]] = []

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
        assert taps is not None
        self.rows.append(np.array(taps))


def same(one: Document, other: Document) -> bool:
    names = ("tokens", "taps", "argmax", "loss_mask")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_states_are_those_that_a_drafter_is_shown(chat_target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    shards = capture(chat_target, corpus, CONFIG, tmp_path)
    assert shards.taps == (1, 2)
    for document, start, stop in corpus.spans[:6].tolist():
        listener = Listener()
        tokens = corpus.tokens_of(document).tolist()
        params = SamplingParams(temperature=0, max_tokens=stop - start)
        LLM.from_loaded(chat_target, drafter=listener).generate(tokens[:start], params, use_tqdm=False)
        shown = np.concatenate(listener.rows).astype(np.float16)
        assert len(shown) == stop - 1
        np.testing.assert_array_equal(shards.document(document).taps[: len(shown)], shown)


def test_choices_are_the_greedy_answers(chat_target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    shards = capture(chat_target, corpus, CONFIG, tmp_path)
    for document in shards.documents():
        answered = np.flatnonzero(document.loss_mask)
        np.testing.assert_array_equal(document.argmax[answered - 1], document.tokens[answered])


def test_files_memory_and_resumption_agree(chat_target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    shards = capture(chat_target, corpus, CONFIG, tmp_path / "a")
    online = OnlineShards(corpus, chat_target.model, (1, 2))
    assert len(shards) == len(corpus) == len(list(shards.documents()))
    assert shards.lengths.tolist() == [len(document) for document in shards.documents()]
    assert all(same(shards.document(i), online.document(i)) for i in range(len(corpus)))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    files = sorted((tmp_path / "b").iterdir())
    assert len(files) > 3
    for path in (files[1], files[-1]):
        path.unlink()
    capture(chat_target, corpus, CONFIG, tmp_path / "b")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_another_text_other_taps_another_target(chat_target: LoadedModel, corpus: Corpus, tmp_path: Path) -> None:
    capture(chat_target, corpus, CONFIG, tmp_path / "a")
    with pytest.raises(ParameterError, match="another text"):
        capture(chat_target, corpus.subset(range(1, len(corpus))), CONFIG, tmp_path / "a")
    with pytest.raises(ParameterError, match="other taps"):
        capture(chat_target, corpus, replace(CONFIG, taps=(0.0, 1.0)), tmp_path / "a")
    changed = shutil.copytree(chat_target.path, tmp_path / "changed")
    data = bytearray((changed / "model.safetensors").read_bytes())
    data[-40] ^= 1
    (changed / "model.safetensors").write_bytes(data)
    with pytest.raises(ParameterError, match="weights differ"):
        capture(replace(chat_target, path=changed), corpus, CONFIG, tmp_path / "a")


def test_a_subset_keeps_its_answers(corpus: Corpus) -> None:
    chosen = [5, 2, 7]
    part = corpus.subset(chosen)
    assert len(part) == 3
    for new, old in enumerate(chosen):
        assert np.array_equal(part.tokens_of(new), corpus.tokens_of(old))
        assert np.array_equal(part.mask_of(new), corpus.mask_of(old))
        assert part.group_of(new) == corpus.group_of(old)
    assert len(corpus.subset([])) == 0
