"""text/tokenizer.py: the ids of transformers and of sentencepiece, the exact bytes of every id."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers

from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import TokenizerData

from .conftest import to_gguf_fields, train_byte_level, train_sentencepiece

# ---------------------------------------------------------------------------------------------- tokenizer.json


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder as transformers writes it, its tokenizer there, and ours from its files."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("saved")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_byte_level(), bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    theirs.save_pretrained(folder)
    data = TokenizerData(
        json=(folder / "tokenizer.json").read_text(), config=json.loads((folder / "tokenizer_config.json").read_text())
    )
    return theirs, Tokenizer.load(data)


def test_json_encodes_as_transformers(saved: Any, corpus: tuple[str, ...]) -> None:
    theirs, ours = saved
    for text in corpus:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (0, 2, len(theirs))
    assert ours.is_special(2)
    assert ours.is_special(theirs.pad_token_id)
    assert not ours.is_special(theirs.convert_tokens_to_ids("<tool>"))


def test_json_decodes_any_ids_as_transformers(saved: Any) -> None:
    theirs, ours = saved
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(1, 30))]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_tokens_that_only_the_config_declares() -> None:
    backend = train_byte_level()
    size = backend.get_vocab_size()
    extra = {"content": "<think>", "special": False, "normalized": False}
    config = {
        "added_tokens_decoder": {str(size): extra, "2": {"content": "<|im_end|>", "special": True}},
        "eos_token": {"content": "<|im_end|>"},
        "additional_special_tokens": ["<tool>"],
    }
    ours = Tokenizer.load(TokenizerData(json=backend.to_str(), config=config))
    assert ours.encode("a<think>", add_special_tokens=False)[-1] == size
    assert ours.vocab_size == size + 1
    assert ours.eos_id == 2
    tool = ours.token_to_id("<tool>")
    assert tool is not None
    assert ours.is_special(tool)


def test_stored_truncation_and_padding_do_not_apply() -> None:
    backend = train_byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    ours = Tokenizer.load(TokenizerData(json=backend.to_str()))
    text = "Hello world, this is long"
    assert ours.decode(ours.encode(text)) == text


def test_a_sentencepiece_style_json(processor: Any, pieces: Tokenizer, corpus: tuple[str, ...]) -> None:
    """The same tokenizer as tokenizer.json, in both spellings that are in use for the leading space."""
    backend = Backend.from_str(pieces._backend.to_str())
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    text = backend.to_str()
    metaspace = json.loads(text)
    metaspace["normalizer"] = None
    metaspace["pre_tokenizer"] = {
        "type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False
    }  # fmt: skip
    for source in (text, json.dumps(metaspace)):
        ours = Tokenizer.load(TokenizerData(json=source))
        for sample in corpus:
            if "<" in sample or sample[:1] in ("", " "):
                continue  # Metaspace adds no space before a space
            ids = ours.encode(sample, add_special_tokens=False)
            assert ids == processor.encode(sample)
            assert ours.decode(ids) == sample
        assert ours.describe_mismatch(pieces) is None


# ---------------------------------------------------------------------------------------------- SentencePiece in GGUF


def test_pieces_encode_as_sentencepiece(processor: Any, pieces: Tokenizer, corpus: tuple[str, ...]) -> None:
    for text in corpus:
        if "<s>" in text:
            continue  # sentencepiece does not look for control tokens in text
        ids = pieces.encode(text, add_special_tokens=False)
        assert ids == processor.encode(text)
        assert pieces.encode(text) == [processor.bos_id(), *ids]
        assert pieces.decode([processor.bos_id(), *ids]) == processor.decode(ids) == text


@given(text=st.text(alphabet=st.one_of(st.characters(exclude_categories=("Cs",)), st.sampled_from(" aeinot12\n日本"))))
def test_any_text_encodes_as_sentencepiece(processor: Any, pieces: Tokenizer, text: str) -> None:
    assert pieces.encode(text, add_special_tokens=False) == processor.encode(text)
    assert pieces.decode(pieces.encode(text)) == text.replace("▁", " ")


def test_pieces_without_a_leading_space(corpus: tuple[str, ...]) -> None:
    processor = train_sentencepiece(add_dummy_prefix=False)
    fields = to_gguf_fields(processor, add_space_prefix=False, add_bos_token=False)
    ours = Tokenizer.load(TokenizerData(gguf=fields))
    for text in corpus:
        if "<s>" not in text:
            ids = ours.encode(text)
            assert ids == processor.encode(text)
            assert ours.decode(ids) == text


def test_pieces_find_special_tokens_in_text(processor: Any, pieces: Tokenizer) -> None:
    ids = pieces.encode("<s>Hello</s>", add_special_tokens=False)
    assert ids == [processor.bos_id(), *processor.encode("Hello"), processor.eos_id()]
    assert pieces.decode(ids) == "Hello"
    assert pieces.decode(ids, skip_special_tokens=False) == "<s> Hello</s>"
    tool = pieces.token_to_id("<tool>")
    assert tool is not None
    assert tool in pieces.encode("a <tool> b")
    assert not pieces.is_special(tool)


def test_bytes_of_pieces(pieces: Tokenizer) -> None:
    newline, word = pieces.token_to_id("<0x0A>"), pieces.token_to_id("▁")
    assert newline is not None
    assert word is not None
    assert pieces.token_bytes(newline) == b"\n"
    assert pieces.token_bytes(word) == b" "
    assert pieces.bos_id is not None
    assert pieces.token_bytes(pieces.bos_id) == b"<s>"
    with_eos = Tokenizer.load(TokenizerData(gguf=to_gguf_fields(train_sentencepiece(), add_eos_token=True)))
    assert with_eos.encode("a")[-1] == with_eos.eos_id


# ---------------------------------------------------------------------------------------------- byte-level in GGUF


def byte_fields(pre: str | None, **more: Any) -> dict[str, Any]:
    """GGUF metadata of the small byte-level BPE."""
    state = json.loads(train_byte_level().to_str())
    vocab = sorted(state["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab] + ["<tool>", "[PAD421]"]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3, 3, 3] + [1] * (len(tokens) - 5) + [4, 5],
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    if pre is None:
        del fields["pre"]
    return fields | more


def test_gguf_and_json_of_one_tokenizer_agree(byte_level: Tokenizer, corpus: tuple[str, ...]) -> None:
    ours = Tokenizer.load(TokenizerData(gguf=byte_fields("gpt-2", add_bos_token=True)))
    for text in corpus:
        assert ours.encode(text) == byte_level.encode(text)
    assert ours.describe_mismatch(byte_level) is None
    assert ours.vocab_size == byte_level.vocab_size + 1


TEXT = "I'LL pay don't 12345  €x\n\n  naïveLY, 日本語!\r\n ٣٤ a1"
SPLITS = {
    "gpt-2": "I|'|LL| pay| don|'t| 12345| | €|x|\n\n | naïveLY|,| 日本語|!|\r\n| ٣٤| a|1",
    "smollm": "I|'|LL| pay| don|'t| |1|2|3|4|5| | €|x|\n\n | naïveLY|,| 日本語|!|\r\n |٣|٤| a|1",
    "llama-bpe": "I|'LL| pay| don|'t| |123|45| | €|x|\n\n| | naïveLY|,| 日本語|!\r\n| |٣٤| a|1",
    "qwen2": "I|'LL| pay| don|'t| |1|2|3|4|5| | €|x|\n\n| | naïveLY|,| 日本語|!\r\n| |٣|٤| a|1",
    "default": "I|'|LL| pay| don|'|t| |123|45| | €|x|\n\n | naïveLY|,| 日本語|!|\r\n| |٣٤| a|1",
    "deepseek-coder": "I|'|LL| pay| don|'|t| |1|2|3|4|5|  |€|x|\n|\n| | naïveLY|,| |日本語|!|\r|\n| |٣|٤| a|1",
    "tekken": "I|'LL| pay| don|'t| |1|2|3|4|5| | €|x|\n\n| | naïve|LY|,| 日本語|!\r\n| |٣|٤| a|1",
}


@pytest.mark.parametrize("pre", SPLITS)
def test_pre_tokenizers_split_as_their_models_do(pre: str) -> None:
    ours = Tokenizer.load(TokenizerData(gguf=byte_fields(pre)))
    found = ours._backend.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in found] == SPLITS[pre].split("|")
    assert ours.decode(ours.encode(TEXT)) == TEXT


def test_which_files_start_with_bos() -> None:
    starts = {
        (pre, add): Tokenizer.load(
            TokenizerData(gguf=byte_fields(pre) if add is None else byte_fields(pre, add_bos_token=add))
        ).encode("a")[0]
        == 0
        for pre in ("gpt-2", "llama-bpe", "qwen2")
        for add in (None, True, False)
    }
    assert {key for key, has_bos in starts.items() if has_bos} == {
        ("llama-bpe", None), ("gpt-2", True), ("llama-bpe", True), ("qwen2", True)
    }  # fmt: skip


def test_qwen_composes_characters() -> None:
    ours = Tokenizer.load(TokenizerData(gguf=byte_fields("qwen2")))
    assert ours.encode("cafe\u0301") == ours.encode("café")
    assert Tokenizer.load(TokenizerData(gguf=byte_fields(None))).encode("cafe\u0301") != ours.encode("café")


# ---------------------------------------------------------------------------------------------- the default model


@pytest.fixture(scope="module")
def real(model_path: Path) -> tuple[Tokenizer, Any]:
    """Ours, and transformers' with the pre-tokenizer of the model's own tokenizer.json.

    transformers' reading of the file knows no pre-tokenizer "smollm" and splits as GPT-2, with numbers in one piece
    and the space before them; the model was trained on single digits.
    """
    transformers = pytest.importorskip("transformers")
    from sakiyomi.checkpoints.gguf import read_gguf

    data = read_gguf(model_path).tokenizer
    assert data is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoTokenizer.from_pretrained(str(model_path.parent), gguf_file=model_path.name)
    return Tokenizer.load(data), theirs


def test_the_default_model_encodes_as_transformers(real: Any, corpus: tuple[str, ...]) -> None:
    ours, theirs = real
    plain = [text for text in corpus if not any(letter.isnumeric() for letter in text)]
    assert len(plain) > 10
    for text in plain:
        assert ours.encode(text) == theirs.encode(text)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    rng = random.Random(2)
    letters = "".join(corpus)
    mixed = ["".join(rng.choice(letters) for _ in range(rng.randrange(200))) for _ in range(200)]
    for text in [*corpus, *mixed, " ".join(corpus)]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert [ours.token_to_id(f"{digit}") for digit in range(3)] == ours.encode("012")


def test_the_default_model_decodes_any_ids_as_transformers(real: Any) -> None:
    ours, theirs = real
    rng = random.Random(4)
    for _ in range(200):
        ids = [rng.randrange(ours.vocab_size) for _ in range(20)]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (1, 2, 49152)


# ---------------------------------------------------------------------------------------------- bytes, both kinds


def test_bytes_of_the_ids_are_the_text(tokenizer: Tokenizer, corpus: tuple[str, ...]) -> None:
    for text in corpus:
        if text and "▁" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
            assert joined == (" " + text if tokenizer.strips_space else text)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_all_256_bytes_have_a_token(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_ids_without_a_token_stand_for_nothing(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size, 10**9):
        assert tokenizer.token_bytes(token_id) == b""
        assert not tokenizer.is_special(token_id)
        assert tokenizer.decode([token_id]) == ""


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ParameterError, match="lone surrogates"):
        tokenizer.encode("bad \ud800")


# ---------------------------------------------------------------------------------------------- do two agree?


def test_padding_is_no_mismatch(byte_level: Tokenizer) -> None:
    fields = byte_fields("gpt-2")
    fields["tokens"] = [*fields["tokens"][:-1], *(f"[PAD{i}]" for i in range(30))]
    fields["token_type"] = [*fields["token_type"][:-1], *[1] * 30]
    padded = Tokenizer.load(TokenizerData(gguf=fields))
    assert padded.vocab_size == byte_level.vocab_size + 30
    assert padded.describe_mismatch(byte_level) is None
    assert byte_level.describe_mismatch(padded) is None


def test_another_tokenizer_is_described(byte_level: Tokenizer, pieces: Tokenizer) -> None:
    found = byte_level.describe_mismatch(pieces)
    assert found == "id 0 is '<|bos|>' in one and '<unk>' in the other"
    fields = byte_fields("gpt-2")
    token_id = fields["tokens"].index("À")  # byte C0, which no merge uses
    fields["tokens"][token_id] = "other"
    changed = Tokenizer.load(TokenizerData(gguf=fields))
    found = changed.describe_mismatch(byte_level)
    assert found == f"id {token_id} is 'other' in one and '\\\\xc0' in the other"


def test_a_real_token_beyond_the_shorter_vocabulary_is_a_mismatch(byte_level: Tokenizer) -> None:
    fields = byte_fields("gpt-2")
    fields["tokens"][-1], fields["token_type"][-1] = "<image>", 3
    longer = Tokenizer.load(TokenizerData(gguf=fields))
    expected = f"id {byte_level.vocab_size} is '<image>' in one and unused in the other"
    assert longer.describe_mismatch(byte_level) == expected


# ---------------------------------------------------------------------------------------------- what is refused


def test_unsupported_kinds_are_named() -> None:
    def load(**fields: Any) -> None:
        Tokenizer.load(TokenizerData(gguf=byte_fields("gpt-2") | fields))

    with pytest.raises(CheckpointError, match="pre-tokenizer 'viking' is not supported; supported are default, gpt-2"):
        load(pre="viking")
    with pytest.raises(CheckpointError, match="kind 't5', which is not supported; supported are gpt2, llama"):
        load(model="t5")
    with pytest.raises(CheckpointError, match="merges do not fit"):
        load(merges=["never seen"])
    with pytest.raises(CheckpointError, match=r"bos_token_id is 99999; .* ids are 0 to"):
        load(bos_token_id=99999)
    with pytest.raises(CheckpointError, match="token_type has 2 entries"):
        load(token_type=[1, 1])
    with pytest.raises(CheckpointError, match="tokenizer.json cannot be read"):
        Tokenizer.load(TokenizerData(json="{"))
    with pytest.raises(CheckpointError, match="has no tokenizer; put its tokenizer.json"):
        Tokenizer.load(TokenizerData())
    backend = train_byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="decoder WordPiece, which is not supported"):
        Tokenizer.load(TokenizerData(json=backend.to_str()))
