"""A drafting model with another tokenizer: small BPEs and bigram models of a small corpus, and the real model."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from sakiyomi.decode import Step, prefill, rewind, step
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import ParameterError, VocabularyError
from sakiyomi.models.toy import Law, ToyModel
from sakiyomi.params import SamplingParams
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.text.vocabulary import Side, Translation
from sakiyomi.types import Drafter, DrafterContext, Model, Sequence, TokenizerData, Verifier
from sakiyomi.verify.block import BlockVerifier
from sakiyomi.verify.match import MatchVerifier
from sakiyomi.verify.rejection import RejectionVerifier
from sakiyomi.verify.traversal import TraversalVerifier

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = [(ROOT / "LICENSE").read_text("utf-8")]
PROMPT = "You may reproduce and distribute copies of the Work"


def train(size: int, texts: Seq[str], end: str, *, digits: bool = False) -> Side:
    backend = Backend(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = Tokenizer.load(TokenizerData(json=backend.to_str()))
    return Side(tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, end_ids=(0,))


def bigrams(side: Side, texts: Seq[str]) -> Law:
    """What followed each token in the texts, all but surely."""
    counts = np.full((side.vocab_size, side.vocab_size), 1e-3, np.float32)
    for text in texts:
        ids = side.tokenizer.encode(text, add_special_tokens=False)
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    logits = np.log(counts)
    return lambda tokens: logits[tokens[-1]]


@pytest.fixture(scope="module")
def target_side() -> Side:
    return train(900, CORPUS, "<end>", digits=True)


@pytest.fixture(scope="module")
def drafting_side() -> Side:
    return train(600, [CORPUS[0][:4000]], "<stop>")


@pytest.fixture(scope="module")
def target(target_side: Side) -> ToyModel:
    return ToyModel(bigrams(target_side, CORPUS), target_side.vocab_size, end_token_ids=(0,))


@pytest.fixture(scope="module")
def drafting(drafting_side: Side) -> ToyModel:
    return ToyModel(bigrams(drafting_side, CORPUS), drafting_side.vocab_size, end_token_ids=(0,))


@pytest.fixture(scope="module")
def translation(drafting_side: Side, target_side: Side) -> Translation:
    return Translation(drafting_side, target_side)


def make(target: Model, drafting: Model, translation: Translation, **options: object) -> ModelDrafter:
    context = DrafterContext(target, lambda name: drafting, translate=lambda name: translation)
    return ModelDrafter(ModelDrafter.Config(model="other", **options), context)


def start(target: Model, side: Side, params: SamplingParams, text: str = PROMPT, seed: int = 3) -> Sequence:
    tokens = side.tokenizer.encode(text)
    return Sequence("0", tokens, len(tokens), params, seed, target.new_cache(), frozenset(side.end_ids))


def run(target: Model, drafter: Drafter, sequence: Sequence, verifier: Verifier | None = None) -> list[Step]:
    prefill(target, drafter, sequence)
    steps: list[Step] = []
    while sequence.finish_reason is None:
        steps += step(target, drafter, verifier or MatchVerifier(), [sequence], [64])
    return steps


def count(steps: Seq[Step]) -> tuple[int, int]:
    return sum(s.num_draft for s in steps), sum(s.num_accepted for s in steps)


SHAPES = {"chain": {"num_speculative_tokens": 4}, "tree": {"num_speculative_tokens": 3, "width": 3, "max_nodes": 12}}
GREEDY = SamplingParams(temperature=0, max_tokens=80)
WARM = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.3, max_tokens=80)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocabulary", ["auto", "tokens", "text"])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_no_token_changes(target, drafting, translation, target_side, params, vocabulary, shape) -> None:
    plain = start(target, target_side, params)
    run(target, NoneDrafter(), plain)
    sequence = start(target, target_side, params)
    steps = run(target, make(target, drafting, translation, vocabulary=vocabulary, **SHAPES[shape]), sequence)
    assert sequence.tokens == plain.tokens
    drafted, accepted = count(steps)
    assert accepted > 5
    assert drafted >= accepted


@pytest.mark.parametrize("vocabulary", ["tokens", "text"])
@pytest.mark.parametrize("rule", [RejectionVerifier, BlockVerifier, TraversalVerifier])
def test_rules_of_distribution_are_exact_at_temperature_0(
    target, drafting, translation, target_side, vocabulary, rule
) -> None:
    plain, sequence = (start(target, target_side, GREEDY) for _ in range(2))
    run(target, NoneDrafter(), plain)
    drafter = make(target, drafting, translation, vocabulary=vocabulary, draw="independent")
    assert count(run(target, drafter, sequence, rule()))[1] > 10
    assert sequence.tokens == plain.tokens


def test_sampled_drafts_report_the_law_over_shared_tokens(target, drafting, translation, target_side) -> None:
    """At a temperature above 0 a rule that keeps the distribution gets laws over the target's ids."""
    drafter = make(target, drafting, translation, draw="independent")
    sequence = start(target, target_side, replace(WARM, max_tokens=400))
    prefill(target, drafter, sequence)
    accepted = 0
    for _ in range(60):
        (draft,) = drafter.propose([sequence], [4])
        draft.check(target_side.vocab_size)
        assert draft.drawn == "independent"
        for ids in draft.probs_ids or ():
            assert set(ids) <= set(translation.to_target)
        accepted += step(target, drafter, RejectionVerifier(), [sequence], [4])[0].num_accepted
    assert accepted > 20


@pytest.mark.parametrize("vocabulary", ["tokens", "text"])
def test_tokens_that_the_target_lacks_are_handled(target_side, target, vocabulary) -> None:
    """A drafting model that wants to say nothing but a token of its own."""
    side = train(700, ["incomprehensibility"] * 50, "<stop>")
    token = side.tokenizer.token_to_id("incomprehensibility")
    assert token is not None
    translation = Translation(side, target_side)
    assert translation.to_target[token] == -1

    def law(tokens: Seq[int]) -> np.ndarray:
        row = np.zeros(side.vocab_size, np.float32)
        row[token] = 20
        return row

    drafter = make(target, ToyModel(law, side.vocab_size), translation, vocabulary=vocabulary)
    sequence = start(target, target_side, GREEDY)
    prefill(target, drafter, sequence)
    (draft,) = drafter.propose([sequence], [64])
    text = target_side.tokenizer.decode(draft.tokens)
    assert len(draft) > 0
    assert text.startswith("incomprehensibility") == (vocabulary == "text")
    plain = start(target, target_side, GREEDY)
    run(target, NoneDrafter(), plain)
    run(target, drafter, sequence)
    assert sequence.tokens == plain.tokens


def test_a_character_in_the_making_is_not_drafted_behind(target, drafting, translation, target_side) -> None:
    drafter = make(target, drafting, translation)
    sequence = start(target, target_side, GREEDY)
    prefill(target, drafter, sequence)
    single = {target_side.tokenizer.token_bytes(i): i for i in range(target_side.vocab_size)}
    for byte, expected in ((b"\xf0", 0), (b"\x9f", 0), (b"\x99", 0), (b"\x82", 4)):
        sequence.tokens.append(single[byte])
        (draft,) = drafter.propose([sequence], [4])
        assert (len(draft) > 0) == (expected > 0)


def test_a_new_turn_reads_the_text_again(target, drafting, translation, target_side) -> None:
    params = replace(GREEDY, max_tokens=30)
    drafter = make(target, drafting, translation)
    sequence = start(target, target_side, params)
    run(target, drafter, sequence)
    tokens = [*sequence.tokens[:12], *target_side.tokenizer.encode(" unless required by")]
    fresh, resumed = start(target, target_side, params), start(target, target_side, params)
    for one in (fresh, resumed):
        one.tokens, one.num_prompt = list(tokens), len(tokens)
    resumed.memo = sequence.memo
    rewind(drafter, resumed, 12)
    assert [s.tokens for s in run(target, drafter, resumed)] == [s.tokens for s in run(target, drafter, fresh)]


def test_little_in_common_is_said(target, target_side, caplog: pytest.LogCaptureFixture) -> None:
    side = train(4000, ["".join(chr(0x4E00 + (i * j) % 997) for j in range(40)) for i in range(200)], "<stop>")
    translation = Translation(side, target_side)
    model = ToyModel(lambda tokens: np.zeros(side.vocab_size, np.float32), side.vocab_size)
    with caplog.at_level(logging.WARNING, logger="sakiyomi"):
        drafter = make(target, model, translation)
    assert "shares only" in caplog.text
    assert "%" in caplog.text
    assert drafter._writes_text(translation, start(target, target_side, WARM))
    nothing = Translation(replace(side, vocab_size=1, end_ids=()), replace(target_side, end_ids=()))
    with pytest.raises(VocabularyError, match="no token"):
        make(target, model, nothing, vocabulary="tokens")


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ParameterError, match="vocabulary"):
        ModelDrafter.Config(model="other", vocabulary="letters")  # type: ignore[arg-type]


@pytest.mark.parametrize(("temperature", "vocabulary"), [(0.0, "text"), (1.0, "tokens")])
def test_the_real_model_with_a_bigram_drafter(model_path, drafting, drafting_side, temperature, vocabulary) -> None:
    """SmolLM2 drafted for by a toy of another tokenizer: token for token plain decoding."""
    pytest.importorskip("sakiyomi._native")
    from sakiyomi.assemble import ModelOptions, load_model

    loaded = load_model(str(model_path), ModelOptions())
    assert loaded.tokenizer is not None
    info = loaded.model.info
    side = Side(tokenizer=loaded.tokenizer, vocab_size=info.vocab_size, end_ids=info.end_token_ids)
    params = SamplingParams(temperature=temperature, max_tokens=24)
    text = CORPUS[0][-900:] + CORPUS[0][-900:-600]
    plain, sequence = (start(loaded.model, side, params, text) for _ in range(2))
    run(loaded.model, NoneDrafter(), plain)
    drafter = make(loaded.model, drafting, Translation(drafting_side, side), vocabulary=vocabulary)
    drafted, accepted = count(run(loaded.model, drafter, sequence))
    assert sequence.tokens == plain.tokens
    assert drafted > 10
    assert accepted > 0
