"""text/stops.py: stop strings by their definition, and streams that never take back a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.params import SamplingParams
from sakiyomi.requests import AnswerText
from sakiyomi.text import stops
from sakiyomi.text.detokenizer import Detokenizer
from sakiyomi.text.stops import TextStream
from sakiyomi.text.tokenizer import Tokenizer

from .test_detokenizer import ids_of_bytes


class Pieces:
    """A detokenizer whose ids index given texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def push(self, token_id: int) -> str:
        return self.texts[token_id]

    def flush(self) -> str:
        return ""


def run(
    texts: Sequence[str], strings: Sequence[str], include: bool = False, min_tokens: int = 0
) -> tuple[str, str | None, int]:
    """The text, the stop string and the number of tokens read."""
    watcher = TextStream(Pieces(texts), tuple(strings), include, min_tokens)  # type: ignore[arg-type]
    for index in range(len(texts)):
        if (stop := watcher.push(index)) is not None:
            return watcher.text, stop, index + 1
    return watcher.text, None, len(texts)


def define(texts: Sequence[str], strings: Sequence[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """The definition, by brute force: the first end of a match after the first `min_tokens` tokens."""
    text = ""
    for index, piece in enumerate(texts):
        for letter in piece:
            text += letter
            matches = [string for string in strings if text.endswith(string)]
            if matches and index >= min_tokens:
                longest = max(matches, key=len)
                return (text if include else text.removesuffix(longest)), longest, index + 1
    return text, None, len(texts)


@pytest.mark.parametrize(
    ("texts", "strings", "expected"),
    [
        (["Hello", " wor", "ld and"], ["world"], ("Hello ", "world", 3)),
        (["ab", "ab", "abc", "d"], ["ababc"], ("ab", "ababc", 3)),  # starts again inside itself
        (["xabc"], ["bc", "abc"], ("x", "abc", 1)),  # both end together: the one that starts first
        (["xabc"], ["abc", "b"], ("xa", "b", 1)),  # one ends earlier
        (["a", "b"], ["b", "b"], ("a", "b", 2)),
        (["aaa"], ["aa"], ("", "aa", 1)),
        (["\n", "\n"], ["\n\n"], ("", "\n\n", 2)),
        (["one two"], ["three"], ("one two", None, 1)),
        (["ab"], [], ("ab", None, 1)),
        ([], ["a"], ("", None, 0)),
    ],
)
def test_examples(texts: list[str], strings: list[str], expected: tuple[str, str | None, int]) -> None:
    assert run(texts, strings) == expected
    text, stop, count = expected
    assert run(texts, strings, include=True) == (text + (stop or ""), stop, count)


def test_the_first_tokens_do_not_stop() -> None:
    texts = ["x", ".", "y", ".", "z"]
    assert run(texts, ["."], min_tokens=0) == ("x", ".", 2)
    assert run(texts, ["."], min_tokens=1) == ("x", ".", 2)
    assert run(texts, ["."], min_tokens=2) == ("x.y", ".", 4)
    assert run(["x", "en", "d"], ["end"], min_tokens=2) == ("x", "end", 3)  # begun before, completed after
    assert run(texts, ["."], min_tokens=9) == ("x.y.z", None, 5)


LETTERS = st.text(alphabet="aab\u00e9😀", max_size=4)


@given(
    texts=st.lists(LETTERS, max_size=12),
    strings=st.lists(st.text(alphabet="aab\u00e9😀", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    takes=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_stream_and_definition(
    texts: list[str], strings: list[str], include: bool, min_tokens: int, takes: list[bool]
) -> None:
    """What is streamed, whenever it is taken, joins to the text by the definition."""
    watcher = TextStream(Pieces(texts), tuple(strings), include, min_tokens)  # type: ignore[arg-type]
    streamed, stop, count = "", None, 0
    for index, may_take in zip(range(len(texts)), takes, strict=False):
        stop = watcher.push(index)
        count = index + 1
        if may_take:
            streamed += watcher.take()
            assert watcher.text.startswith(streamed)
            if stop is None:  # held back: exactly the longest suffix that may still become a stop string
                held = watcher.text[len(streamed) :]
                prefixes = {string[:i] for string in strings for i in range(1, len(string))}
                longest = max((p for p in prefixes if "".join(texts[:count]).endswith(p)), key=len, default="")
                assert held == longest
        if stop is not None:
            break
    streamed += watcher.finish()
    assert (streamed, stop, count) == define(texts, strings, include, min_tokens)
    assert watcher.text == streamed
    assert watcher.stop == stop
    assert watcher.finish() == ""


@given(text=st.text(alphabet="ab日😀", max_size=20), stop=st.text(alphabet="ab日😀", min_size=1, max_size=3))
def test_tokens_that_end_inside_characters(byte_level: Tokenizer, text: str, stop: str) -> None:
    watcher = TextStream(Detokenizer(byte_level), (stop,))
    streamed = ""
    for token_id in ids_of_bytes(byte_level, text.encode()):
        if watcher.push(token_id):
            break
        streamed += watcher.take()
    streamed += watcher.finish()
    assert streamed == watcher.text == text.split(stop)[0]


def test_an_unfinished_character_is_released_at_the_end(byte_level: Tokenizer) -> None:
    watcher = TextStream(Detokenizer(byte_level), ("日本",))
    for token_id in ids_of_bytes(byte_level, "x日".encode() + b"\xe6\x9c"):
        assert watcher.push(token_id) is None
    assert watcher.take() == "x"
    assert watcher.finish() == "日\ufffd"
    assert watcher.text == "x日\ufffd"


def test_every_character_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transitions of the automaton: at most two per character, with stop strings made to backtrack."""
    num_steps = 0

    class CountingDict(dict):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            nonlocal num_steps
            num_steps += 1
            return super().__contains__(key)

    strings = tuple("a" * n + "b" for n in range(1, 200))
    matcher = stops._Matcher(strings)
    matcher._next = [CountingDict(edges) for edges in matcher._next]
    num_chars = 20_000
    for start in range(0, num_chars, 4):
        assert matcher.scan("aaac" if start % 400 == 0 else "aaaa", may_match=True) is None
    assert num_steps <= 2 * num_chars


@pytest.mark.parametrize("asks_early", [False, True])
@pytest.mark.parametrize("stop", [None, "\x00never"])
def test_pieces_are_the_same_whenever_somebody_asks(byte_level: Tokenizer, asks_early: bool, stop: str | None) -> None:
    """Without stop strings tokens become text when it is asked for; one piece per token, and the rest at the end."""
    text = "Grüße 日本 🙂, x" * 3
    ids = ids_of_bytes(byte_level, text.encode())[:-1] + ids_of_bytes(byte_level, "日".encode())[:2]
    answer = AnswerText(byte_level, SamplingParams(stop=stop))
    for index, token in enumerate(ids):
        assert answer.push(token) is None
        if asks_early:
            answer.piece(index)
            assert len(answer.pieces) == index + 1
    assert len(answer.pieces) == len(ids)
    answer.finish()
    answer.finish()
    assert "".join(answer.pieces) == text[:-1] + "\ufffd"
    assert [answer.piece(index) for index in range(len(ids) + 1)] == answer.pieces
    assert answer.piece(len(ids) + 1) == ""
