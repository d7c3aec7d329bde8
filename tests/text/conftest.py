"""Texts of many kinds, and small tokenizers trained on them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import TokenizerData

CORPUS = (
    "",
    " ",
    "Hello",
    " Hello world, how's it going? I'LL say: we've DONE it.",
    "def f(x: int = 3) -> str:\n    return f'{x!r:>10}'  # comment\n\n\nclass A:\n\tpass\n",
    'int main() { printf("%d\\n", 0xFF); return 0; } // 100% \u00b5s',
    "emoji: 😀👍🏽 family 👨‍👩‍👧‍👦 flag 🇯🇵 heart ❤️ done",
    "日本語のテキスト。「先読み」は一度に複数のトークンを出す。カタカナ、漢字、１２３。",
    "हिन्दी में लिखा हुआ एक वाक्य है। क्षत्रिय ज्ञान",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤٥",
    "Привет, мир! Ελληνικά ñandú naïve cafe\u0301 café Ǆ ß ﬁ",
    "a  b   c    d     e          f",
    "lines\n\nmore\n\n\n\r\nwindows\r\n\ttabs\t\t\tend   \n",
    "1 12 123 1234 12345 3.14159 1,000,000 2024-05-17 x1y22z333  42",
    "½ ² Ⅷ ४२ 四 ①",
    "\x00\x01\x1f\x7f\x85\xa0\u200b\u2028\ufeff\ufffd",
    "!!!???... --- === ~~~ `code` <b>&amp;</b> $x^2_1$ C++ #1 @me",
    "mixed 日本 and हिन्दी and العربية 123abc日本456",
    "<|im_start|>user\nHi<|im_end|>\n<s> </s> <unk> [INST] <0x0A> ▁ ▁▁x",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
)


@pytest.fixture(scope="session")
def corpus() -> tuple[str, ...]:
    return CORPUS


def train_byte_level() -> Backend:
    """A byte-level BPE with BOS in front, two special tokens and one that is merely added."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return backend


def train_sentencepiece(add_dummy_prefix: bool = True) -> Any:
    """A SentencePiece BPE model with byte fallback; most of the corpus' characters are left to the bytes."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentences = [line for text in CORPUS[3:13] for line in text.split("\n") if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def to_gguf_fields(processor: Any, **more: Any) -> dict[str, Any]:
    """The metadata that a GGUF file of this SentencePiece model holds."""
    size = processor.get_piece_size()

    def type_of(i: int) -> int:
        if processor.is_unknown(i):
            return 2
        if processor.is_control(i):
            return 3
        if processor.is_byte(i):
            return 6
        return 4 if processor.id_to_piece(i) == "<tool>" else 1

    return {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in range(size)],
        "scores": [processor.get_score(i) for i in range(size)],
        "token_type": [type_of(i) for i in range(size)],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
    } | more


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer.load(TokenizerData(json=train_byte_level().to_str()))


@pytest.fixture(scope="session")
def processor() -> Any:
    return train_sentencepiece()


@pytest.fixture(scope="session")
def pieces(processor: Any) -> Tokenizer:
    """The tokenizer of a SentencePiece model in GGUF metadata."""
    return Tokenizer.load(TokenizerData(gguf=to_gguf_fields(processor)))


@pytest.fixture(params=["byte_level", "pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Both kinds in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found
