"""The table drafter: same tokens as plain decoding, accepted as often as its table is right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter
from sakiyomi.checkpoints.drafter import DrafterFile, write_drafter
from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.llm import LLM
from sakiyomi.lookup.table import TableCounter
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.params import SamplingParams

VOCAB = 23
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6]]


def load(scale: float = 3.0) -> LoadedModel:
    model = ToyModel(random_law(VOCAB, 5, order=2, scale=scale), VOCAB, max_model_len=600)
    return LoadedModel(model=model, tokenizer=None, chat_template=None, path=Path("toy"))


@pytest.fixture(scope="module")
def table_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table counted on the toy's own text."""
    counter = TableCounter(3, VOCAB)
    params = SamplingParams(temperature=1, max_tokens=300, seed=3)
    for output in LLM.from_loaded(load()).generate([[token] for token in range(VOCAB)], params, use_tqdm=False):
        tokens = np.array([*output.prompt_token_ids, *output.outputs[0].token_ids])
        counter.add(tokens, np.append(tokens[1:], -1), np.ones(len(tokens), np.bool_))
    return write(tmp_path_factory.mktemp("table") / "table.safetensors", counter, VOCAB)


def write(path: Path, counter: TableCounter, vocab_size: int) -> Path:
    table = counter.build(10**6, 1)
    target = {"name": "toy", "vocab_size": vocab_size}
    write_drafter(
        path, DrafterFile(kind="table", config={"order": 3}, taps=(), target=target, tensors=table.to_tensors())
    )
    return path


def answer(spec: str, verifier: str, temperature: float) -> tuple[list[list[int]], float]:
    """Token ids, and accepted tokens per step."""
    llm = LLM.from_loaded(load(), drafter=spec, verifier=verifier)
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=9)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    stats = [output.speculation for output in outputs]
    rate = sum(one.num_accepted_tokens for one in stats) / sum(one.num_steps for one in stats)
    return [output.outputs[0].token_ids for output in outputs], rate


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["num_speculative_tokens=4", "width=3,max_nodes=9", "min_confidence=0.3"])
def test_same_tokens_as_plain_decoding_and_many_accepted(table_path: Path, shape: str, temperature: float) -> None:
    plain, _ = answer("none", "match", temperature)
    drafted, rate = answer(f"table:path={table_path},{shape}", "match", temperature)
    assert drafted == plain
    assert rate > 0.5


def test_coupled_drafts_are_accepted_more_often_than_fixed_ones(table_path: Path) -> None:
    _, coupled = answer(f"table:path={table_path}", "match", 1.0)
    _, fixed = answer(f"table:path={table_path},draw=argmax", "match", 1.0)
    assert coupled > fixed + 0.1


@pytest.mark.parametrize("verifier", ["rejection", "block", "tree", "traversal"])
def test_it_tells_its_laws_to_the_rules_that_ask(table_path: Path, verifier: str) -> None:
    width = "width=2,max_nodes=6" if verifier in ("tree", "traversal") else "width=1"
    _, rate = answer(f"table:path={table_path},{width}", verifier, 1.0)
    assert rate > 0.5


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda path: path.with_name("absent.safetensors"), CheckpointError),
        (lambda path: write(path.with_name("other.safetensors"), TableCounter(3, 99), 99), CheckpointError),
    ],
)
def test_a_wrong_file_is_refused(table_path: Path, change: Callable[[Path], Path], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"\."):
        make_drafter(f"table:path={change(table_path)}", load(), ModelOptions())


def test_without_a_file_it_says_what_to_do() -> None:
    with pytest.raises(ParameterError, match="sakiyomi train table"):
        make_drafter("table", load(), ModelOptions())
