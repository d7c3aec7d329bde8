"""text/detokenizer.py: pieces joined are the decoded whole, characters come out whole, each token is read once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.text.detokenizer import Detokenizer
from sakiyomi.text.tokenizer import Tokenizer


def stream(tokenizer: Any, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]


def test_pieces_of_texts_are_the_texts(tokenizer: Tokenizer, corpus: tuple[str, ...]) -> None:
    for text in corpus:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert "".join(stream(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_in_many_tokens_comes_out_whole(tokenizer: Tokenizer) -> None:
    for text in ("😀", "👨‍👩‍👧", "क्ष", "日", "é"):
        for byte_ids in (ids_of_bytes(tokenizer, text.encode()), tokenizer.encode(text)):
            pieces = stream(tokenizer, byte_ids)
            assert "".join(pieces) == text
            assert not any("\ufffd" in piece for piece in pieces)
        assert stream(tokenizer, ids_of_bytes(tokenizer, "日".encode())) == ["", "", "日", ""]


def test_a_broken_character_is_replaced_as_soon_as_it_is_known(tokenizer: Tokenizer) -> None:
    ids = ids_of_bytes(tokenizer, b"\xf0\x9f!\xff\xe6\x97")
    assert stream(tokenizer, ids) == ["", "", "\ufffd!", "\ufffd", "", "", "\ufffd"]


@given(data=st.data(), skip=st.booleans())
def test_any_ids_give_the_decoded_whole(
    byte_level: Tokenizer, pieces: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    tokenizer = data.draw(st.sampled_from([byte_level, pieces]))
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size), max_size=40))
    parts = stream(tokenizer, ids, skip=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip)
    kept = [i for i in ids if not (skip and tokenizer.is_special(i))]
    whole = b"".join(map(tokenizer.token_bytes, kept))
    if tokenizer.strips_space:
        whole = whole.removeprefix(b" ")
    assert "".join(parts) == whole.decode(errors="replace")


@given(whole=st.binary(max_size=60))
def test_any_bytes_are_replaced_as_in_the_whole(byte_level: Tokenizer, whole: bytes) -> None:
    assert "".join(stream(byte_level, ids_of_bytes(byte_level, whole))) == whole.decode(errors="replace")


@given(text=st.text(max_size=30))
def test_no_replacement_inside_valid_text(byte_level: Tokenizer, text: str) -> None:
    parts = stream(byte_level, ids_of_bytes(byte_level, text.encode()))
    assert "".join(parts) == text
    ends = [len(text[:i].encode()) for i in range(len(text) + 1)]
    sent = [len("".join(parts[: i + 1]).encode()) for i in range(len(parts) - 1)]
    assert all(sent[i] == max(end for end in ends if end <= i + 1) for i in range(len(sent)))  # nothing is late


def test_only_the_first_space_is_dropped(pieces: Tokenizer) -> None:
    word = pieces.token_to_id("▁")
    assert word is not None
    assert pieces.bos_id is not None
    assert stream(pieces, [word, word, word]) == ["", " ", " ", ""]
    assert stream(pieces, [pieces.bos_id, word, word]) == ["", "", " ", ""]
    assert stream(pieces, [pieces.bos_id, word], skip=False) == ["<s>", " ", ""]


def test_each_token_is_read_once(byte_level: Tokenizer, corpus: tuple[str, ...]) -> None:
    """Work is counted in bytes: those asked of the tokenizer, and those kept from one token to the next."""

    class Counting:
        strips_space = False
        num_bytes = 0

        def is_special(self, token_id: int) -> bool:
            return byte_level.is_special(token_id)

        def token_bytes(self, token_id: int) -> bytes:
            found = byte_level.token_bytes(token_id)
            self.num_bytes += len(found)
            return found

    ids = byte_level.encode(" ".join(corpus) * 20, add_special_tokens=False)
    counting = Counting()
    detokenizer = Detokenizer(counting)  # type: ignore[arg-type]
    for token_id in ids:
        detokenizer.push(token_id)
        kept, _ = detokenizer._utf8.getstate()
        assert len(kept) <= 3
    visible = [token_id for token_id in ids if not byte_level.is_special(token_id)]
    assert counting.num_bytes == sum(len(byte_level.token_bytes(token_id)) for token_id in visible)


def ids_of_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    single = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [single[bytes([byte])] for byte in data]
