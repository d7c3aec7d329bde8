"""lookahead: the window's mask and positions, what is learnt from it, and that no token changes."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from sakiyomi.decode import Step, _span, prefill, step
from sakiyomi.drafters.combined import CombinedDrafter
from sakiyomi.drafters.lookahead import LookaheadDrafter, Pool, Window
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.models.packing import check_span
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.params import SamplingParams
from sakiyomi.tree import Draft, Probes
from sakiyomi.types import Drafter, DrafterContext, Sequence, Span, Verifier
from sakiyomi.verify.match import MatchVerifier
from sakiyomi.verify.rejection import RejectionVerifier

VOCAB = 17
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=60)
WARM = SamplingParams(temperature=0.7, max_tokens=60)

# W=4, N=4, G=2, one row per line; * the last committed token, then levels a, b, d and the guesses x, y.
NOTE = """
1 . . . . . . . . . . . . . . . . . +0
1 1 . . . . . . . . . . . . . . . . +1
1 1 1 . . . . . . . . . . . . . . . +2
1 1 1 1 . . . . . . . . . . . . . . +3
1 . . . 1 . . . . . . . . . . . . . +1
1 1 . . . 1 . . . . . . . . . . . . +2
1 1 1 . . . 1 . . . . . . . . . . . +3
1 1 1 1 . . . 1 . . . . . . . . . . +4
1 . . . 1 . . . 1 . . . . . . . . . +2
1 1 . . . 1 . . . 1 . . . . . . . . +3
1 1 1 . . . 1 . . . 1 . . . . . . . +4
1 1 1 1 . . . 1 . . . 1 . . . . . . +5
1 . . . . . . . . . . . 1 . . . . . +1
1 . . . . . . . . . . . 1 1 . . . . +2
1 . . . . . . . . . . . 1 1 1 . . . +3
1 . . . . . . . . . . . . . . 1 . . +1
1 . . . . . . . . . . . . . . 1 1 . +2
1 . . . . . . . . . . . . . . 1 1 1 +3
"""


def make(**options: object) -> LookaheadDrafter:
    return LookaheadDrafter(LookaheadDrafter.Config(**options))


def start(model: ToyModel, params: SamplingParams = GREEDY, prompt: Seq[int] = PROMPT, seed: int = 11) -> Sequence:
    ends = frozenset(model.info.end_token_ids)
    return Sequence("0", list(prompt), len(prompt), params, seed, model.new_cache(), ends)


def run(model: ToyModel, drafter: Drafter, sequence: Sequence, verifier: Verifier | None = None) -> list[Step]:
    prefill(model, drafter, sequence)
    steps: list[Step] = []
    while sequence.finish_reason is None:
        steps += step(model, drafter, verifier or MatchVerifier(), [sequence], [200])
    return steps


def filled(width: int, ngram: int, guesses: int) -> tuple[LookaheadDrafter, Sequence]:
    """A drafter whose window is filled, and whose pool knows `guesses` n-grams that begin unlike each other."""
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    drafter = make(window=width, ngram=ngram, guesses=guesses, from_text=False)
    sequence = start(model)
    prefill(model, drafter, sequence)
    for _ in range(ngram):
        step(model, drafter, MatchVerifier(), [sequence], [200])
    assert [len(level) for level in sequence.memo.window.levels] == [width - 1, *[width] * (ngram - 2)]
    for guess in range(guesses):
        sequence.memo.pool.add((sequence.tokens[-1], guess, *range(ngram - 2)))
    return drafter, sequence


def span_of(drafter: LookaheadDrafter, sequence: Sequence) -> Span:
    return _span(sequence, drafter.propose([sequence], [200])[0], ())


def mask_of(span: Span) -> np.ndarray:
    mask = np.eye(len(span.tokens), dtype=bool)
    for row, parent in enumerate(span.parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def test_the_mask_of_the_note() -> None:
    drafter, sequence = filled(4, 4, 2)
    span = span_of(drafter, sequence)
    info = ToyModel(random_law(VOCAB, 2), VOCAB).info
    positions = np.array(check_span(span, info)) - sequence.cache.length
    # The note's order: the root, the window, the guesses. Here the guesses come before the window.
    order = [0, *range(7, 18), *range(1, 7)]
    lines = [
        " ".join([*("1" if sees else "." for sees in row), f"+{position}"])
        for row, position in zip(mask_of(span)[np.ix_(order, order)], positions[order], strict=True)
    ]
    assert "\n".join(lines) == NOTE.strip()
    assert list(span.logit_rows) == [0, *range(1, 7), *range(14, 18)]


@pytest.mark.parametrize("seed", range(8))
def test_each_row_sees_one_token_of_every_position(seed: int) -> None:
    rng = random.Random(seed)
    width, ngram, guesses = rng.randint(1, 7), rng.randint(3, 6), rng.randint(1, 7)
    drafter, sequence = filled(width, ngram, guesses)
    span = span_of(drafter, sequence)
    info = ToyModel(random_law(VOCAB, 2), VOCAB).info
    positions = np.array(check_span(span, info)) - sequence.cache.length
    for row, seen in enumerate(mask_of(span)):
        assert sorted(positions[seen]) == list(range(positions[row] + 1))
    assert len(span.tokens) <= (width + guesses) * (ngram - 1)


def test_the_window_learns_what_the_model_says() -> None:
    """Each completed n-gram ends with the model's own choice behind the window's path to it."""
    model = ToyModel(random_law(VOCAB, 3), VOCAB)
    drafter = make(window=3, ngram=4, guesses=4, from_text=False)
    sequence = start(model)
    prefill(model, drafter, sequence)
    for _ in range(8):
        tokens = list(sequence.tokens)
        (draft,) = drafter.propose([sequence], [200])
        window = [list(level) for level in sequence.memo.window.levels]
        step(model, drafter, MatchVerifier(), [sequence], [200])
        pool = sequence.memo.pool
        if len(window) < 3:
            continue
        assert draft.probes is not None
        assert len(draft.probes.asked) == 3
        first = [tokens[-1], *window[0]]
        for column in range(3):
            path = [*first[: column + 1], window[1][column], window[2][column]]
            truth = int(np.argmax(model.law([*tokens[:-1], *path])))
            assert (window[1][column], window[2][column], truth) in pool.find(first[column])
        assert sequence.memo.window.levels[2] == [
            int(np.argmax(model.law([*tokens[:-1], *first[: c + 1], window[1][c], window[2][c]]))) for c in range(3)
        ]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize(("width", "ngram", "guesses"), [(1, 3, 1), (4, 3, 4), (7, 4, 2), (4, 5, 7)])
def test_no_token_changes(params, width, ngram, guesses) -> None:
    for seed in range(6):
        model = ToyModel(random_law(VOCAB, seed, order=1 + seed % 2), VOCAB, end_token_ids=(0,))
        plain = start(model, params)
        num_plain = len(run(model, NoneDrafter(), plain))
        for verifier in (MatchVerifier(), RejectionVerifier()):
            sequence = start(model, params)
            drafter = make(window=width, ngram=ngram, guesses=guesses, from_text=bool(seed % 3))
            steps = run(model, drafter, sequence, verifier)
            assert sequence.tokens == plain.tokens
            assert len(steps) <= num_plain


def test_a_chain_of_order_one_is_soon_known() -> None:
    """A text that depends on the last token alone is one that the window's n-grams hold true for."""
    model = ToyModel(random_law(VOCAB, 5, order=1), VOCAB)
    sequence = start(model)
    steps = run(model, make(window=5, ngram=4, guesses=3, from_text=False), sequence)
    assert sequence.num_new == 60
    assert len(steps) < 35


@pytest.mark.parametrize("garbage", [False, True])
def test_the_pool_is_only_a_guess(garbage: bool) -> None:
    """An oracle's n-grams give N tokens a step; garbage gives none and changes nothing."""
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    plain = start(model)
    run(model, NoneDrafter(), plain)
    drafter = make(window=1, ngram=4, guesses=1, from_text=False)
    sequence = start(model)
    prefill(model, drafter, sequence)
    rng = random.Random(1)
    num_steps = 0
    while sequence.finish_reason is None and sequence.num_new < 50:
        drafter.propose([sequence], [200])
        at = len(sequence.tokens)
        truth = plain.tokens[at : at + 3]
        known = [rng.randrange(VOCAB) for _ in truth] if garbage else truth
        sequence.memo.pool.add((sequence.tokens[-1], *known))
        (done,) = step(model, drafter, MatchVerifier(), [sequence], [200])
        num_steps += 1
        if not garbage:
            assert len(done.tokens) == 4
    assert sequence.tokens == plain.tokens[: len(sequence.tokens)]


def test_the_pool_keeps_the_latest() -> None:
    pool = Pool(3, 2)
    pool.add_all([(1, 2, 3), (1, 4, 5), (1, 2, 3), (2, 9, 9)])
    assert pool.find(1) == [(2, 3), (4, 5)]
    pool.add((1, 6, 7))
    assert pool.find(1) == [(6, 7), (2, 3)]
    assert pool.find(7) == []


def test_ends_do_not_fill_the_window() -> None:
    window = Window(3, 3, PROMPT)
    for _ in range(4):
        probes = window.probe(5)
        assert probes is not None
        ngrams = window.advance([0] * len(probes.asked), frozenset([0]))
    assert all(0 not in level for level in window.levels)
    assert all(ngram[-1] == 0 for ngram in ngrams)


def test_small_budgets_drop_the_window_first() -> None:
    drafter, sequence = filled(4, 4, 2)
    probes = len(drafter.propose([sequence], [200])[0].probes or ())
    assert probes == 11
    for budget, nodes, rows in ((0, 0, 0), (5, 5, 0), (10, 6, 0), (11, 0, 11), (13, 2, 11), (17, 6, 11)):
        draft = drafter.propose([sequence], [budget])[0]
        assert (len(draft), len(draft.probes or ())) == (nodes, rows)


def test_a_new_turn_begins_anew() -> None:
    drafter, sequence = filled(4, 4, 2)
    drafter.rewind(sequence, 5)
    assert sequence.memo is None


def test_sequences_of_a_batch_have_windows_of_their_own() -> None:
    model = ToyModel(random_law(VOCAB, 2), VOCAB)
    plain = [start(model, WARM, prompt, seed) for seed, prompt in enumerate([PROMPT, [1, 2], [5]])]
    for sequence in plain:
        run(model, NoneDrafter(), sequence)
    drafter = make(window=3, ngram=3, guesses=3)
    sequences = [start(model, WARM, prompt, seed) for seed, prompt in enumerate([PROMPT, [1, 2], [5]])]
    for sequence in sequences:
        prefill(model, drafter, sequence)
    while open_ones := [sequence for sequence in sequences if sequence.finish_reason is None]:
        step(model, drafter, MatchVerifier(), open_ones, [200, 200, 4][: len(open_ones)])
    assert [s.tokens for s in sequences] == [s.tokens for s in plain]


@pytest.mark.parametrize("mode", ["first", "merge"])
def test_combined_lets_the_window_run_beside_other_drafts(mode: str) -> None:
    model = ToyModel(random_law(VOCAB, 5, order=1), VOCAB)
    plain = start(model)
    run(model, NoneDrafter(), plain)
    parts = [
        make(window=3, ngram=3, guesses=2, from_text=False),
        PlantedDrafter(PlantedDrafter.Config(script=lambda s, b: Draft.chain(plain.tokens[len(s.tokens) :][:2]))),
    ]
    context = DrafterContext(model, lambda name: model, make_drafters=lambda text: list(parts))
    config = CombinedDrafter.Config(parts="a+b", mode=mode, num_speculative_tokens=30, min_expected=9.0)
    sequence = start(model)
    run(model, CombinedDrafter(config, context), sequence)
    assert sequence.tokens == plain.tokens
    assert len(sequence.memo.parts[0].window.levels) == 2
    assert sequence.memo.parts[0].pool.find(sequence.tokens[-5]) is not None


@pytest.mark.parametrize(
    "probes",
    [Probes((99,), (-1,), (0,)), Probes((1,), (0,), (0,)), Probes((1, 2), (-1,), ()), Probes((1,), (-1,), (1,))],
)
def test_wrong_probes_are_refused(probes: Probes) -> None:
    with pytest.raises(ParameterError, match="probe"):
        Draft((), (), probes=probes).check(VOCAB)


@pytest.mark.parametrize("wrong", [{"window": 0}, {"ngram": 2}, {"guesses": 0}, {"window": 64, "ngram": 20}])
def test_wrong_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ParameterError, match="window|ngram|guesses"):
        LookaheadDrafter.Config(**wrong)
