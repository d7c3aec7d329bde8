"""The store of texts: its bound, what it finds, and its file."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sakiyomi.errors import ParameterError
from sakiyomi.lookup import store as module
from sakiyomi.lookup.store import END_OF_TEXT, MIN_BYTES, StoreReader, TextStore, open_store


def longest_suffix(texts: Seq[Seq[int]], other: Seq[int]) -> int:
    """Length of the longest suffix of `other` that lies in one of `texts`."""
    for size in range(len(other), 0, -1):
        wanted = list(other[len(other) - size :])
        if any(list(text[i : i + size]) == wanted for text in texts for i in range(len(text) - size + 1)):
            return size
    return 0


def find_longest(store: TextStore, tokens: Seq[int]) -> int:
    with store.lock:
        return StoreReader(store).match(list(tokens))[2]


def held(store: TextStore, stream: Seq[int]) -> list[list[int]]:
    """What each automaton holds, the newest first: its share of the end of all that came."""
    parts, end = [], len(stream)
    for _, automaton in store.automata():
        parts.append(list(stream[end - len(automaton) : end]))
        end -= len(automaton)
    return parts


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(2, 5), num_texts=st.integers(1, 40))
def test_any_traffic_keeps_the_bound_and_what_is_found_is_there(seed: int, size: int, num_texts: int) -> None:
    rng = random.Random(seed)
    store = TextStore(MIN_BYTES)
    reader, growing = StoreReader(store), []
    stream: list[int] = []
    for _ in range(num_texts):
        text = [rng.randrange(size) for _ in range(rng.randrange(120))]
        store.add(text)
        stream += [*text, END_OF_TEXT] if text else []
        assert store.num_bytes <= MIN_BYTES
        assert store.num_tokens <= len(stream)
        growing += [rng.randrange(size) for _ in range(rng.randrange(1, 4))]
        with store.lock:
            automaton, state, length = reader.match(growing)
            match = growing[len(growing) - length :]
            assert length == 0 or any(longest_suffix([part], match) == length for part in held(store, stream))
        other = [rng.randrange(size) for _ in range(12)]
        assert find_longest(store, other) == longest_suffix(held(store, stream), other)


def test_the_oldest_goes_first() -> None:
    store = TextStore(MIN_BYTES)
    rng = random.Random(0)
    texts = [[rng.randrange(1000) for _ in range(50)] for _ in range(60)]
    for text in texts:
        store.add(text)
    found = [find_longest(store, text[:20]) == 20 for text in texts]
    assert found == sorted(found)
    assert found[0] is False
    assert found[-1] is True
    assert sum(found) >= 5


def test_a_text_longer_than_the_store_leaves_its_end() -> None:
    store = TextStore(MIN_BYTES)
    rng = random.Random(1)
    text = [rng.randrange(1000) for _ in range(5000)]
    store.add(text)
    assert store.num_bytes <= MIN_BYTES
    assert find_longest(store, text[-100:-1]) == 99
    assert find_longest(store, text[:100]) < 100


def test_texts_are_not_joined() -> None:
    store = TextStore(MIN_BYTES)
    store.add([1, 2, 3])
    store.add([4, 5, 6])
    assert find_longest(store, [1, 2, 3]) == 3
    assert find_longest(store, [2, 3, 4, 5]) == 2


def test_a_reader_goes_on_where_it_was() -> None:
    store = TextStore(MIN_BYTES)
    store.add([1, 2, 3, 4, 5, 6])
    reader = StoreReader(store)
    assert [reader.match([0, 1, 2, 3, 4][:n])[2] for n in range(1, 6)] == [0, 1, 2, 3, 4]
    store.add([3, 4, 5, 7])
    assert reader.match([0, 1, 2, 3, 4, 5, 7])[2] == 4


def test_a_store_too_small_is_refused() -> None:
    with pytest.raises(ParameterError, match="give at least"):
        TextStore(1000)


def test_many_threads() -> None:
    store = TextStore(MIN_BYTES)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        reader, tokens = StoreReader(store), [0]
        try:
            for _ in range(200):
                store.add([rng.randrange(4) for _ in range(30)])
                tokens.append(rng.randrange(4))
                with store.lock:
                    automaton, state, length = reader.match(tokens)
                    automaton.grow_tree(state, length, 8, 8, 2, 1, 0.1, 2.0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.num_bytes <= MIN_BYTES


# ---------------------------------------------------------------------------------------------- files


def test_a_file_survives(tmp_path: Path) -> None:
    path = tmp_path / "below" / "texts"
    store = TextStore(MIN_BYTES, path, 100)
    store.add([1, 2, 3, 4])
    store.add([5, 6, 7])
    again = TextStore(MIN_BYTES, path, 100)
    assert again.num_tokens == store.num_tokens == 9
    assert find_longest(again, [1, 2, 3, 4]) == 4


@pytest.mark.parametrize("damage", ["cut", "changed", "more"])
def test_a_damaged_end_is_left_out(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "texts"
    store = TextStore(MIN_BYTES, path, 100)
    store.add([1, 2, 3, 4])
    store.add([5, 6, 7, 8])
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-3], "changed": data[:-1] + b"\x07", "more": data + b"\xff" * 7}[damage])
    again = TextStore(MIN_BYTES, path, 100)
    assert find_longest(again, [1, 2, 3, 4]) == 4
    assert find_longest(again, [5, 6, 7, 8]) == (4 if damage == "more" else 0)
    again.add([9, 10, 11])
    assert find_longest(TextStore(MIN_BYTES, path, 100), [9, 10, 11]) == 3


def test_a_file_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_REWRITE_TOKENS", 100)
    path = tmp_path / "texts"
    store = TextStore(MIN_BYTES, path, 1000)
    rng = random.Random(2)
    for _ in range(150):
        text = [rng.randrange(1000) for _ in range(100)]
        store.add(text)
        assert path.stat().st_size <= 4 * (2 * store.num_tokens + 100) * 1.1 + 100
    assert find_longest(TextStore(MIN_BYTES, path, 1000), text) == 100
    assert [file.name for file in tmp_path.iterdir()] == ["texts"]


def test_a_file_of_another_vocabulary_or_kind_is_refused(tmp_path: Path) -> None:
    TextStore(MIN_BYTES, tmp_path / "texts", 100).add([1])
    with pytest.raises(ParameterError, match="vocabulary"):
        TextStore(MIN_BYTES, tmp_path / "texts", 101)
    (tmp_path / "other").write_text("my diary")
    with pytest.raises(ParameterError, match="delete it"):
        TextStore(MIN_BYTES, tmp_path / "other", 100)
    assert (tmp_path / "other").read_text() == "my diary"
    with pytest.raises(ParameterError, match="cannot keep texts"):
        TextStore(MIN_BYTES, tmp_path, 100)


def test_a_file_that_cannot_be_written_any_more_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "texts"
    store = TextStore(MIN_BYTES, path, 100)
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING, logger="sakiyomi"):
        store.add([1, 2, 3])
        store.add([4, 5, 6])
    assert find_longest(store, [4, 5, 6]) == 3
    assert len(caplog.records) == 1


def test_one_file_is_one_store_in_a_process(tmp_path: Path) -> None:
    first = open_store(MIN_BYTES, tmp_path / "texts", 100)
    assert open_store(MIN_BYTES, tmp_path / "texts", 100) is first
    assert open_store(MIN_BYTES) is not open_store(MIN_BYTES)
