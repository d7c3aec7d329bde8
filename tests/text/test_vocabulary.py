"""Two vocabularies over one text: which tokens are the same, and texts of one in the tokens of the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.text.vocabulary import NONE, OPEN_CHARACTERS, Reader, Side, Translation
from sakiyomi.types import TokenizerData

CORPUS = [
    "The cat sat on the mat. The dog sat on the cat, and the cat did not like that at all.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Größe, Straße und Äpfel: das schöne Wort steht hier im Text.",
]
WORDS = ["The", " cat", " sat", "\n\n", "ö", " Straße", "12", " 3", "🙂", " ", "re", "turn", "日本", "."]


def train_bytes(size: int, texts: list[str], end: str) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[end, "<|user|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer.load(TokenizerData(json=backend.to_str()))


def make_pieces(pieces: list[str], *, has_bytes: bool = True, prefix: bool = True) -> Tokenizer:
    """SentencePiece-style pieces by merges of pairs, with or without bytes for what is unknown."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    if has_bytes:
        vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for letter in sorted(set("▁" + "".join(pieces))):
        vocab[letter] = len(vocab)
    merges = []
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            if piece[:end] not in vocab:
                vocab[piece[:end]] = len(vocab)
                merges.append((piece[: end - 1], piece[end - 1]))
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=has_bytes))
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer.load(TokenizerData(json=backend.to_str(), config=config))


def side(tokenizer: Tokenizer, end: str, vocab_size: int | None = None) -> Side:
    end_id = tokenizer.token_to_id(end)
    assert end_id is not None
    return Side(tokenizer=tokenizer, vocab_size=vocab_size or tokenizer.vocab_size, end_ids=(end_id,))


WIDE = side(train_bytes(400, CORPUS, "<end>"), "<end>")
NARROW = side(train_bytes(300, CORPUS[1:2], "<stop>"), "<stop>")
PIECES = side(make_pieces(["▁The", "▁cat", "▁sat", "▁on", "the", "a"]), "</s>")
POOR = side(make_pieces(["▁The", "▁cat", "▁sat"], has_bytes=False), "</s>")
SIDES = {"wide": WIDE, "narrow": NARROW, "pieces": PIECES}
PAIRS = [(a, b) for a in SIDES for b in SIDES if a != b]


def bytes_of(side: Side, tokens: list[int]) -> bytes:
    return b"".join(side.tokenizer.token_bytes(token) for token in tokens)


@pytest.mark.parametrize(("drafting", "target"), PAIRS)
def test_shared_tokens_have_the_same_bytes(drafting: str, target: str) -> None:
    theirs, ours = SIDES[drafting], SIDES[target]
    translation = Translation(theirs, ours)
    assert 100 < translation.num_shared <= theirs.vocab_size
    for token_id, goal in enumerate(translation.to_target):
        data = theirs.tokenizer.token_bytes(token_id)
        if theirs.is_special(token_id):
            continue
        known = data in ours.list_tokens()
        assert (goal != NONE) == known
        if known:
            assert ours.tokenizer.token_bytes(int(goal)) == data
    assert translation.to_target[theirs.end_ids[0]] == ours.end_ids[0]
    assert translation.to_drafting[ours.end_ids[0]] == theirs.end_ids[0]


def test_special_tokens_meet_by_name_and_role() -> None:
    translation = Translation(NARROW, WIDE)
    user = NARROW.tokenizer.token_to_id("<|user|>")
    assert translation.to_target[user] == WIDE.tokenizer.token_to_id("<|user|>")
    translation = Translation(PIECES, POOR)
    assert translation.to_target[1] == 1
    assert translation.to_target[0] == 0


def test_an_ordinary_token_never_means_a_special_one() -> None:
    """The letters of a special token's name are text."""
    ordinary = side(make_pieces(["<end>", "▁The"]), "</s>")
    translation = Translation(ordinary, WIDE)
    assert translation.to_target[ordinary.tokenizer.token_to_id("<end>")] == NONE


def test_doubles_are_added() -> None:
    """A letter and the byte that stands for it are two ids of one meaning."""
    translation = Translation(PIECES, WIDE)
    letter, byte = PIECES.tokenizer.token_to_id("a"), PIECES.tokenizer.token_to_id("<0x61>")
    goal = int(translation.to_target[letter])
    assert goal == translation.to_target[byte] != NONE
    row = np.random.default_rng(0).normal(0, 2, PIECES.vocab_size).astype(np.float32)
    restricted = translation.restrict(row).astype(np.float64)
    assert np.isclose(np.exp(restricted[goal]), np.exp(row[letter]) + np.exp(row[byte]))
    shared = translation.to_target != NONE
    assert np.isclose(np.exp(restricted).sum(), np.exp(row[shared].astype(np.float64)).sum())
    assert np.isneginf(restricted[[i for i in range(WIDE.vocab_size) if i not in set(translation.to_target)]]).all()


def test_rows_that_the_head_lacks_are_no_tokens() -> None:
    translation = Translation(side(WIDE.tokenizer, "<end>", 300), side(NARROW.tokenizer, "<stop>", 280))
    assert translation.to_target.shape == (300,)
    assert translation.to_target.max() < 280
    assert translation.to_drafting.max() < 300
    assert translation.restrict(np.zeros(300, np.float32)).shape == (280,)


texts = st.lists(st.sampled_from(WORDS), max_size=30).map("".join)


@pytest.mark.parametrize(("drafting", "target"), PAIRS)
@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=4))
@settings(max_examples=25)
def test_a_growing_text_is_spelled_as_a_whole_one(drafting: str, target: str, text: str, cuts: list[int]) -> None:
    theirs, ours = SIDES[drafting], SIDES[target]
    tokens = ours.tokenizer.encode(text, add_special_tokens=False)
    reader = Reader(Translation(theirs, ours))
    for cut in sorted(cuts):
        reader.read(tokens[:cut])
    ids = reader.read(tokens)
    assert reader.is_whole
    assert ids == theirs.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("drafting", "target"), PAIRS)
def test_long_texts_are_settled_and_stay_the_same_text(drafting: str, target: str) -> None:
    theirs, ours = SIDES[drafting], SIDES[target]
    text = " ".join(CORPUS * 12)
    tokens = ours.tokenizer.encode(text, add_special_tokens=False)
    reader = Reader(Translation(theirs, ours))
    seen: list[int] = []
    for end in range(0, len(tokens) + 1, 7):
        ids = reader.read(tokens[:end])
        assert ids[: len(seen)] == seen
        seen = ids[: reader.num_settled]
    ids = reader.read(tokens)
    assert theirs.tokenizer.decode(ids) == text
    assert 0 < len(ids) - reader.num_settled <= OPEN_CHARACTERS


def test_a_character_in_pieces_is_waited_for() -> None:
    reader = Reader(Translation(PIECES, WIDE))
    data = "aé".encode()
    single = {WIDE.tokenizer.token_bytes(i): i for i in range(WIDE.vocab_size)}
    tokens = [single[data[i : i + 1]] for i in range(len(data))]
    whole = [(reader.read(tokens[:count]), reader.is_whole)[1] for count in range(1, 4)]
    assert whole == [True, False, True]
    assert bytes_of(PIECES, reader.ids) == b" a\xc3\xa9"


def test_special_tokens_part_the_text() -> None:
    user, end = WIDE.tokenizer.token_to_id("<|user|>"), WIDE.end_ids[0]
    assert user is not None
    tokens = [user, *WIDE.tokenizer.encode("The cat"), end, *WIDE.tokenizer.encode("sat")]
    ids = Reader(Translation(NARROW, WIDE)).read(tokens)
    own, stop = NARROW.tokenizer.token_to_id("<|user|>"), NARROW.end_ids[0]
    assert ids == [own, *NARROW.tokenizer.encode("The cat"), stop, *NARROW.tokenizer.encode("sat")]
    # What the drafting model has no token for is text to it.
    ids = Reader(Translation(PIECES, WIDE)).read(tokens[:3])
    assert bytes_of(PIECES, ids).startswith(b" <|user|>")


@pytest.mark.parametrize(("drafting", "target"), PAIRS)
@given(before=texts, behind=texts)
@settings(max_examples=25)
def test_drafted_text_is_spelled_again_in_full(drafting: str, target: str, before: str, behind: str) -> None:
    theirs, ours = SIDES[drafting], SIDES[target]
    context = ours.tokenizer.encode(before, add_special_tokens=False)
    drafted = theirs.tokenizer.encode("x" + behind, add_special_tokens=False)
    data = bytes_of(theirs, drafted)
    spelled = Translation(theirs, ours).spell(context, drafted)
    assert all(not ours.is_special(token) for token in spelled)
    if ours.tokenizer.strips_space and not data.startswith(b" "):
        assert data.startswith(bytes_of(ours, spelled))  # such a tokenizer cannot spell within a word by itself
    else:
        assert bytes_of(ours, spelled) == data


def test_a_seam_within_a_word_is_spelled_behind_it() -> None:
    translation = Translation(NARROW, WIDE)
    half = [i for letter in " c" for i in WIDE.tokenizer.encode(letter)]
    spelled = translation.spell([*WIDE.tokenizer.encode("The"), *half], NARROW.tokenizer.encode("at sat"))
    assert bytes_of(WIDE, spelled) == b"at sat"


def test_what_the_target_cannot_spell_ends_the_draft() -> None:
    translation = Translation(WIDE, POOR)
    spelled = translation.spell([], WIDE.tokenizer.encode(" The cat🙂 sat"))
    assert bytes_of(POOR, spelled) == b" The cat"
    assert translation.spell([], WIDE.tokenizer.encode("🙂")) == []


def test_half_a_character_is_not_drafted() -> None:
    drafted = WIDE.tokenizer.encode("a🙂")
    assert len(drafted) == 5
    spelled = Translation(WIDE, NARROW).spell([], drafted[:3])
    assert bytes_of(NARROW, spelled) == b"a"


def test_ends_end_the_draft() -> None:
    translation = Translation(NARROW, WIDE)
    drafted = [*NARROW.tokenizer.encode("The"), NARROW.end_ids[0], *NARROW.tokenizer.encode("more")]
    assert translation.spell([], drafted) == [*WIDE.tokenizer.encode("The"), WIDE.end_ids[0]]
    other = NARROW.tokenizer.token_to_id("<|user|>")
    assert other is not None
    assert Translation(NARROW, PIECES).spell([], [*NARROW.tokenizer.encode(" The"), other]) != []
