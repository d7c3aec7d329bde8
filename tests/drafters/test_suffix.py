"""The suffix drafter: what it drafts, from which sources, and that the tokens stay those of plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.decode import Step, prefill, step
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.models.toy import TokenCache, ToyModel, random_law, scripted_law
from sakiyomi.params import SamplingParams
from sakiyomi.tree import expected_length
from sakiyomi.types import Drafter, DrafterContext, Sequence
from sakiyomi.verify.match import MatchVerifier

VOCAB = 12


def suffix(**options: object) -> SuffixDrafter:
    return SuffixDrafter(SuffixDrafter.Config(**options))  # type: ignore[arg-type]


def sequence_of(tokens: list[int], **more: object) -> Sequence:
    return Sequence("0", tokens, len(tokens), SamplingParams(), 0, TokenCache(), **more)  # type: ignore[arg-type]


def start(model: ToyModel, params: SamplingParams, prompt: Seq[int], **more: object) -> Sequence:
    return Sequence("0", list(prompt), len(prompt), params, 7, model.new_cache(), **more)  # type: ignore[arg-type]


def run(model: ToyModel, drafter: Drafter, sequences: Seq[Sequence], budget: int = 64) -> list[list[Step]]:
    """Steps of each sequence, all of them together as long as they run."""
    steps: list[list[Step]] = [[] for _ in sequences]
    for sequence in sequences:
        prefill(model, drafter, sequence)
    while running := [i for i, sequence in enumerate(sequences) if sequence.finish_reason is None]:
        done = step(model, drafter, MatchVerifier(), [sequences[i] for i in running], [budget] * len(running))
        for i, one in zip(running, done, strict=True):
            steps[i].append(one)
    for sequence in sequences:
        drafter.forget(sequence)
        assert sequence.memo is None
    return steps


# ---------------------------------------------------------------------------------------------- proposals

texts = st.integers(2, 5).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=50))


@given(text=texts, chunk=st.integers(1, 9), budget=st.integers(1, 9))
def test_a_chain_follows_the_most_frequent_continuation_of_the_longest_match(
    text: list[int], chunk: int, budget: int
) -> None:
    drafter = suffix(width=1, min_confidence=1e-9)
    sequence = sequence_of([])
    for end in range(chunk, len(text) + 1, chunk):
        sequence.tokens.extend(text[end - chunk : end])
        tokens = sequence.tokens
        draft = drafter.propose([sequence], [budget])[0]
        draft.check(5)
        assert draft.parents == tuple(range(-1, len(draft) - 1))
        for size in range(len(tokens) - 1, 0, -1):
            wanted = tokens[len(tokens) - size :]
            followers = [tokens[i + size] for i in range(len(tokens) - size) if tokens[i : i + size] == wanted]
            if followers:
                counts = Counter(followers)
                most = [token for token in counts if counts[token] == max(counts.values())]
                assert draft.tokens[0] == next(token for token in reversed(followers) if token in most)
                break
        else:
            assert len(draft) == 0


def test_length_and_branches_follow_from_match_and_frequency() -> None:
    long = suffix().propose([sequence_of([*range(40), *range(20)])], [64])[0]
    assert long.tokens == tuple(range(20, 36))
    short = suffix().propose([sequence_of([5, 6, 7, 8, 9, 5])], [64])[0]
    assert short.tokens == (6, 7)
    fork = suffix().propose([sequence_of([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3])], [64])[0]
    assert fork.parents[:2] == (-1, -1)
    assert fork.tokens[:2] == (6, 4)
    assert suffix(width=1).propose([sequence_of([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3])], [64])[0].tokens[:1] == (6,)


def test_limits() -> None:
    text = [*range(40), *range(20)]
    assert len(suffix().propose([sequence_of(text)], [3])[0]) == 3
    assert len(suffix(num_speculative_tokens=5).propose([sequence_of(text)], [64])[0]) == 5
    assert len(suffix().propose([sequence_of(text)], [0])[0]) == 0
    assert len(suffix(min_match=3).propose([sequence_of([1, 2, 3, 4, 1, 2])], [8])[0]) == 0
    assert len(suffix(min_match=2).propose([sequence_of([1, 2, 3, 4, 1, 2])], [8])[0]) > 0


def test_a_replaced_tail_is_forgotten() -> None:
    drafter = suffix()
    sequence = sequence_of([1, 2, 3, 1, 2])
    assert drafter.propose([sequence], [1])[0].tokens == (3,)
    sequence.tokens = [1, 2, 7, 1, 2]
    drafter.rewind(sequence, 2)
    assert drafter.propose([sequence], [1])[0].tokens == (7,)


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 0},
        {"width": 0},
        {"min_match": 0},
        {"min_confidence": 0.0},
        {"min_confidence": 1.0},
        {"doubt": 0.0},
        {"store_mb": -1.0},
        {"store_mb": 0.01},
        {"store_mb": float("nan")},
    ],
)
def test_impossible_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match="give"):
        suffix(**options)


# ---------------------------------------------------------------------------------------------- identity

PARAMS = [
    SamplingParams(temperature=0, max_tokens=60),
    SamplingParams(temperature=0.7, max_tokens=60),
    SamplingParams(temperature=1, top_p=0.9, max_tokens=60, frequency_penalty=0.3),
    SamplingParams(temperature=1.5, top_k=4, max_tokens=60, repetition_penalty=1.2),
]
PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8], [1], [9, 9, 9, 9]]


@pytest.mark.parametrize("width", [1, 3], ids=["chains", "trees"])
@pytest.mark.parametrize("law_seed", [1, 2])
def test_the_tokens_are_those_of_plain_decoding(width: int, law_seed: int) -> None:
    model = ToyModel(random_law(VOCAB, law_seed, order=1, scale=1.5), VOCAB)
    drafter = suffix(width=width, min_confidence=0.02)
    plain = [start(model, own, prompt) for own, prompt in zip(PARAMS, PROMPTS, strict=True)]
    alone = [start(model, own, prompt) for own, prompt in zip(PARAMS, PROMPTS, strict=True)]
    together = [start(model, own, prompt) for own, prompt in zip(PARAMS, PROMPTS, strict=True)]
    for sequence in plain:
        run(model, NoneDrafter(), [sequence])
    steps = [run(model, drafter, [sequence])[0] for sequence in alone]
    steps += run(model, drafter, together, budget=6)
    assert [sequence.tokens for sequence in alone] == [sequence.tokens for sequence in plain]
    assert [sequence.tokens for sequence in together] == [sequence.tokens for sequence in plain]
    accepted = sum(one.num_accepted for some in steps for one in some)
    assert 0 < accepted < sum(one.num_draft for some in steps for one in some)


def test_a_copied_text_takes_few_passes() -> None:
    rng = random.Random(3)
    text = [rng.randrange(VOCAB) for _ in range(300)]
    model = ToyModel(scripted_law(VOCAB, text, start=len(text)), VOCAB)
    sequence = start(model, SamplingParams(temperature=0, max_tokens=300), text)
    steps = run(model, suffix(num_speculative_tokens=10), [sequence])[0]
    assert sequence.tokens == text * 2
    assert len(steps) <= 300 / 4


# ---------------------------------------------------------------------------------------------- the store


def answer(model: ToyModel, drafter: Drafter, seed: int, prompt: Seq[int] = (1, 2, 3)) -> tuple[list[int], int]:
    """Tokens, and how many steps they took."""
    sequence = start(model, SamplingParams(temperature=1, max_tokens=60), prompt)
    sequence.seed = seed
    steps = run(model, drafter, [sequence])[0]
    return sequence.tokens, len(steps)


def test_requests_learn_of_each_other_only_through_a_store() -> None:
    model = ToyModel(random_law(200, 4, order=2), 200)
    apart, together = suffix(), suffix(store_mb=1.0)
    assert apart.store is None
    first, num_steps = answer(model, apart, 1)
    assert answer(model, apart, 1) == (first, num_steps)
    assert answer(model, together, 1) == (first, num_steps)
    again, num_steps_again = answer(model, together, 1)
    assert again == first
    assert num_steps_again < num_steps / 3


def test_the_store_survives_in_a_file(tmp_path: Path) -> None:
    model = ToyModel(random_law(200, 4, order=2), 200)
    context = DrafterContext(model, lambda name: model)
    config = SuffixDrafter.Config(store_file=str(tmp_path / "texts"))
    first = SuffixDrafter(config, context)
    assert first.store is not None
    _, num_steps = answer(model, first, 1)
    del first
    assert answer(model, SuffixDrafter(config, context), 1)[1] < num_steps / 3


def test_the_turns_of_a_chat_enter_the_store() -> None:
    drafter = suffix(store_mb=1.0)
    assert drafter.store is not None
    sequence = sequence_of([1, 2, 3])
    drafter.propose([sequence], [4])
    sequence.tokens += [4, 5, 6]
    turn = Sequence("1", [1, 2, 3, 4, 5, 6, 7], 7, SamplingParams(), 0, TokenCache(), memo=sequence.memo)
    drafter.rewind(turn, 6)
    assert drafter.store.num_tokens == len([1, 2, 3, 4, 5, 6]) + 1


# ---------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("num_tokens", [4, 16])
def test_an_exact_prediction_takes_the_fewest_passes(num_tokens: int) -> None:
    rng = random.Random(5)
    text = [rng.randrange(500) for _ in range(200)]
    model = ToyModel(scripted_law(500, text, start=2), 500)
    sequence = start(model, SamplingParams(temperature=0, max_tokens=200), [1, 2], prediction=text)
    steps = run(model, suffix(num_speculative_tokens=num_tokens), [sequence])[0]
    assert sequence.tokens[2:] == text
    assert len(steps) == -(-200 // (num_tokens + 1))


@given(prediction=st.lists(st.integers(0, VOCAB - 1), max_size=30), seed=st.integers(0, 30))
def test_no_prediction_changes_the_text(prediction: list[int], seed: int) -> None:
    model = ToyModel(random_law(VOCAB, seed, order=1), VOCAB)
    params = SamplingParams(temperature=1, max_tokens=25)
    plain, predicted = start(model, params, [1, 2]), start(model, params, [1, 2], prediction=prediction)
    run(model, NoneDrafter(), [plain])
    run(model, suffix(), [predicted])
    assert predicted.tokens == plain.tokens


def test_the_source_that_expects_most_is_drafted() -> None:
    drafter = suffix()
    prompt = [*range(40), *range(20)]
    drafts = drafter.propose(
        [sequence_of(list(prompt)), sequence_of(list(prompt), prediction=[50, 51]), sequence_of([1], prediction=[50])],
        [8, 8, 8],
    )
    assert drafts[0].tokens == drafts[1].tokens == tuple(range(20, 28))
    assert drafts[2].tokens == (50,)
    assert all(expected_length(draft) > 0 for draft in drafts)
