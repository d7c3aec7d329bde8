"""Small targets for the stages of training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from sakiyomi.assemble import LoadedModel, ModelOptions, load_model
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.text.chat import ChatTemplate
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import TokenizerData

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory, write_llama: Callable[..., Path]) -> Path:
    """A tiny random Llama with a chat template."""
    folder = write_llama(tmp_path_factory.mktemp("chat") / "tiny", seed=3)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<end>"}))
    return folder


@pytest.fixture(scope="session")
def talking_target(byte_tokenizer_json: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A toy that writes letters and spaces, and ends its turns: its text has the tokens that it was written in."""
    data = TokenizerData(json=byte_tokenizer_json, chat_template=TEMPLATE)
    tokenizer = Tokenizer.load(data)
    end = tokenizer.vocab_size - 1
    letters = [tokenizer.encode(letter)[0] for letter in "abcdefg     "]
    base = random_law(tokenizer.vocab_size, 1, order=3, scale=1.0)

    def law(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        logits = np.full(tokenizer.vocab_size, -30, np.float32)
        spoken = [*letters, end]
        logits[spoken] = base(tokens)[spoken]
        return logits

    path = tmp_path_factory.mktemp("talking") / "toy"
    path.write_bytes(b"")
    model = ToyModel(law, tokenizer.vocab_size, end_token_ids=(end,))
    return LoadedModel(model=model, tokenizer=tokenizer, chat_template=ChatTemplate(data), path=path)


@pytest.fixture(scope="session")
def chat_target(chat_folder: Path) -> LoadedModel:
    return load_model(chat_folder, ModelOptions(threads=1))
