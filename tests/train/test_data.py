"""The stage data: what is written is the target's own, and a run that is cut short goes on to the same files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi.assemble import LoadedModel
from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.llm import LLM
from sakiyomi.models.toy import ToyModel, scripted_law
from sakiyomi.params import SamplingParams
from sakiyomi.train.corpus import Corpus
from sakiyomi.train.data import DataConfig, _is_periodic, load_corpus, pack_text, read_conversations, write_corpus
from sakiyomi.train.estimate import Estimate
from sakiyomi.train.files import describe_seconds
from sakiyomi.train.prompts import PassagePool, PromptBook

SMALL = DataConfig(
    num_tokens=2500, batch=6, unit_documents=10, answer_tokens=24, user_tokens=16, second_turn=0.6, greedy=1.0
)


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def written(chat_target: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in small units."""
    folder = tmp_path_factory.mktemp("text") / "data"
    write_corpus(chat_target, SMALL, folder)
    return folder


def check_answers(corpus: Corpus, target: LoadedModel) -> None:
    llm = LLM.from_loaded(target)
    params = SamplingParams(temperature=0, max_tokens=SMALL.answer_tokens)
    for document, start, stop in corpus.spans.tolist():
        tokens = corpus.tokens_of(document).tolist()
        (output,) = llm.generate(tokens[:start], params, use_tqdm=False)
        assert output.outputs[0].token_ids == tokens[start:stop]
    last = [corpus.spans[corpus.spans[:, 0] == i][-1, 2] for i in range(len(corpus))]
    assert last == corpus.lengths.tolist()


def test_answers_are_what_plain_decoding_says(written: Path, chat_target: LoadedModel) -> None:
    corpus = load_corpus(written)
    check_answers(corpus, chat_target)
    assert len(corpus) > 8


def test_so_are_those_of_second_turns(talking_target: LoadedModel, tmp_path: Path) -> None:
    """Their caches are taken over from the first ones."""
    corpus = write_corpus(talking_target, SMALL, tmp_path)
    check_answers(corpus, talking_target)
    assert len(corpus.spans) > len(corpus) > 8


def test_a_documents_text_is_that_of_its_conversation(talking_target: LoadedModel, tmp_path: Path) -> None:
    corpus = write_corpus(talking_target, SMALL, tmp_path)
    template, tokenizer = talking_target.chat_template, talking_target.tokenizer
    assert template is not None
    assert tokenizer is not None
    text = tokenizer.decode(corpus.tokens_of(0).tolist(), skip_special_tokens=False)
    user = text.partition("<user>")[2].partition("<end>")[0]
    assert len(user.split()) >= 2
    assert text.startswith(template.render([{"role": "user", "content": user}]))


def test_the_mask_is_the_answers(written: Path) -> None:
    corpus = load_corpus(written)
    for index in range(len(corpus)):
        positions = [p for d, a, b in corpus.spans.tolist() if d == index for p in range(a, b)]
        assert np.flatnonzero(corpus.mask_of(index)).tolist() == positions


def test_it_goes_on_to_the_same_files(written: Path, chat_target: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(written, folder)
    last = sorted(folder.iterdir())[-1]
    last.unlink()
    (folder / f".{last.name}-abc").write_bytes(b"half a file")  # what a killed run leaves
    write_corpus(chat_target, SMALL, folder)
    (folder / f".{last.name}-abc").unlink()
    assert read_all(folder) == read_all(written)


def test_the_batch_decides_nothing(written: Path, chat_target: LoadedModel, tmp_path: Path) -> None:
    corpus = write_corpus(chat_target, replace(SMALL, batch=3, num_tokens=300), tmp_path)
    first = Corpus.load(written / "unit-00000.safetensors")
    assert np.array_equal(corpus.tokens[: first.num_tokens], first.tokens)


def test_other_settings_and_other_targets_are_refused(written: Path, chat_target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="other settings"):
        write_corpus(chat_target, replace(SMALL, seed=5), written)
    changed = shutil.copytree(chat_target.path, tmp_path / "changed")
    data = bytearray((changed / "model.safetensors").read_bytes())
    data[-40] ^= 1
    (changed / "model.safetensors").write_bytes(data)
    with pytest.raises(ParameterError, match="weights differ"):
        write_corpus(replace(chat_target, path=changed), SMALL, written)


def test_more_tokens_go_on_from_what_is_there(written: Path, chat_target: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(written, folder)
    before = load_corpus(folder)
    after = write_corpus(chat_target, replace(SMALL, num_tokens=SMALL.num_tokens + 1000), folder)
    assert after.num_tokens > SMALL.num_tokens + 1000 > before.num_tokens
    assert np.array_equal(after.tokens[: before.num_tokens], before.tokens)


def test_a_packed_text_can_be_gone_on_from(written: Path, chat_target: LoadedModel, tmp_path: Path) -> None:
    packed = tmp_path / "text.safetensors.xz"
    before = pack_text(written, packed)
    assert packed.stat().st_size < before.num_tokens * 2 + 4000
    more = replace(SMALL, num_tokens=before.num_tokens + 500, start_from=str(packed))
    after = write_corpus(chat_target, more, tmp_path / "data")
    assert np.array_equal(after.tokens[: before.num_tokens], before.tokens)
    assert after.num_tokens >= before.num_tokens + 500
    assert not set(after.user_hashes[len(before) :].tolist()) & set(before.user_hashes.tolist())


def test_conversations_of_the_users_own(chat_target: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    turns = [{"role": "user", "content": "first thing"}, {"role": "assistant", "content": "never read"}]
    lines = [
        {"messages": turns},
        {"prompt": "Second  THING here", "group": "mine"},
        {"prompt": "second thing here"},  # the same but for case and spaces
        {"messages": [*turns, {"role": "user", "content": "and more"}, {"role": "user", "content": "still"}]},
        {"prompt": "word"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    corpus = write_corpus(chat_target, replace(SMALL, conversations=str(path), num_tokens=10**6), tmp_path / "data")
    counts = corpus.about["counts"]
    assert (counts["documents"], counts["duplicates"], counts["empty"]) == (2, 2, 1)
    assert {corpus.group_of(i) for i in range(2)} == {"own", "mine"}
    text = chat_target.tokenizer.decode(corpus.tokens_of(0).tolist())  # type: ignore[union-attr]
    assert "first thing" in text
    assert "never read" not in text


@pytest.mark.parametrize("line", ["{", "[]", '{"messages": []}', '{"prompt": ""}', '{"prompt": 3}', '{"text": "a"}'])
def test_a_line_that_is_no_conversation_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(ParameterError, match="line 2"):
        read_conversations(path)


def test_loops_are_cut_and_counted(tmp_path: Path) -> None:
    model = ToyModel(scripted_law(11, [1 + i % 3 for i in range(900)]), 11, max_model_len=900)
    (tmp_path / "toy").write_bytes(b"")
    target = LoadedModel(model=model, tokenizer=None, chat_template=None, path=tmp_path / "toy")
    config = DataConfig(num_tokens=300, batch=2, unit_documents=2, answer_tokens=600, loop_tokens=60, greedy=1.0)
    corpus = write_corpus(target, config, tmp_path / "data")
    counts = corpus.about["counts"]
    assert counts["loops"] == counts["cut_loops"] == counts["answers"] == len(corpus)
    assert ((corpus.lengths >= 60) & (corpus.lengths <= 70)).all()


@pytest.mark.parametrize(
    ("tokens", "expected"), [([1, 2] * 16, True), ([1, 2] * 15 + [1, 3], False), (list(range(32)), False)]
)
def test_what_a_loop_is(tokens: list[int], expected: bool) -> None:
    assert _is_periodic(tokens, 16) is expected


def test_a_full_disk_ends_it_with_what_is_needed(
    chat_target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(ParameterError, match=r"needs about .* free"):
        write_corpus(chat_target, SMALL, tmp_path / "data")


def test_a_disk_that_fills_up_leaves_what_was_finished(
    written: Path, chat_target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    real = os.replace

    def fill_up(source: Any, target: Any) -> None:
        if str(target).endswith("00001.safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", fill_up)
    with pytest.raises(ParameterError, match=r"No space left on device.*run the same command again"):
        write_corpus(chat_target, SMALL, folder)
    assert [path.name for path in folder.iterdir()] == ["unit-00000.safetensors"]
    monkeypatch.undo()
    write_corpus(chat_target, SMALL, folder)
    assert read_all(folder) == read_all(written)


def test_a_damaged_unit_is_named(written: Path, chat_target: LoadedModel, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(written, folder)
    unit = folder / "unit-00001.safetensors"
    unit.write_bytes(unit.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="unit-00001"):
        write_corpus(chat_target, SMALL, folder)


def test_it_says_beforehand_what_it_will_take(chat_target: LoadedModel, tmp_path: Path) -> None:
    told: list[Estimate] = []
    write_corpus(chat_target, replace(SMALL, num_tokens=400), tmp_path, announce=told.append)
    write_corpus(chat_target, replace(SMALL, num_tokens=400), tmp_path, announce=told.append)
    assert len(told) == 1  # nothing is left to do the second time
    assert told[0].seconds > 0
    assert told[0].disk_bytes > 800
    assert "on disk" in str(told[0])


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.4, "0 s"), (89.4, "89 s"), (95, "1 min 35 s"), (119.7, "2 min 0 s"), (1200, "20 min"), (7200, "2.0 h")],
)
def test_durations_are_told_closely(seconds: float, told: str) -> None:
    assert describe_seconds(seconds) == told


def test_tasks_are_of_all_kinds() -> None:
    book, pool, rng = PromptBook(), PassagePool(), np.random.default_rng(0)
    for group in ("chat", "qa", "german", "french", "summarization"):
        for number in range(5):
            pool.add(group, f"{group} {number}. " + "A sentence of some length. " * 30, 200)
    tasks = [book.draw(rng, pool) for _ in range(600)]
    assert {task.group for task in tasks} == set(book.groups) - {"own"}
    for task in tasks:
        assert "{" not in task.head
        if task.tail is not None:
            assert not task.is_complete
    numbered = [task for task in tasks if "[2]" in task.head + (task.tail or "")]
    assert numbered
