"""The adaptive budget in a simulated world, where a pass and a draft take what the test says."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter, make_verifier
from sakiyomi.decode import Step, advance
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.planted import PlantedDrafter, stray
from sakiyomi.engine.budget import MAX_PAUSE, AdaptiveBudget, Budget, FixedBudget
from sakiyomi.errors import ParameterError
from sakiyomi.llm import LLM
from sakiyomi.models.toy import TokenCache, ToyModel, random_law
from sakiyomi.params import SamplingParams
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, ModelInfo, Sequence

VOCAB = 50
INFO = ModelInfo(name="toy", architecture="toy", vocab_size=VOCAB, max_model_len=1 << 20, num_layers=1, hidden_size=3)
PASS_S = 1.0


class World:
    """A clock, and the text that every sequence will have."""

    def __init__(self, *, row_cost: float = 0.06, noise: float = 0.0, seed: int = 0) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.text = [self.rng.randrange(VOCAB) for _ in range(20_000)]
        self.row_cost = row_cost
        self.noise = noise

    def clock(self) -> float:
        return self.now

    def sequence(self, num_tokens: int | None = None) -> Sequence:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        return Sequence("0", self.text[:1], 1, params, 0, TokenCache())

    def pass_s(self, num_rows: int) -> float:
        spike = 30.0 if self.rng.random() < self.noise else 1.0
        return PASS_S * (1 + self.row_cost * (num_rows - 1)) * spike * (1 + self.noise * self.rng.uniform(-0.3, 0.3))

    def step(self, budget: Budget, sequences: Seq[Sequence], caps: Seq[int] | None = None) -> list[Draft]:
        """One step of the engine; the text goes on as it must."""
        for sequence in sequences:
            sequence.cache.tokens = sequence.tokens[:-1]  # type: ignore[attr-defined]
        plan = budget.propose(sequences, caps or [64] * len(sequences), INFO)
        num_rows = len(sequences) + sum(map(len, plan.drafts))
        seconds = self.pass_s(num_rows)
        self.now += seconds
        steps = []
        for sequence, draft in zip(sequences, plan.drafts, strict=True):
            ahead = self.text[len(sequence.tokens) :]
            path, tokens = draft.follow(lambda node, so_far, ahead=ahead: ahead[len(so_far)])  # type: ignore[misc]
            sequence.tokens += tokens
            sequence.num_steps += 1
            steps.append(Step(tokens, len(path), len(draft), None, 0, 0))
        budget.record(sequences, plan, steps, seconds)
        return plan.drafts

    def run(self, budget: Budget, num_tokens: int) -> float:
        """Time to emit so many tokens with one sequence, over that of plain decoding."""
        sequence, started = self.sequence(), self.now
        while sequence.num_new < num_tokens:
            self.step(budget, [sequence])
        return (self.now - started) / (sequence.num_new * PASS_S)


class Guesser(Drafter):
    """Right with a chance that may change with the position, at a cost of its own."""

    def __init__(
        self,
        world: World,
        chance: Callable[[int], float] | float,
        *,
        call_s: float = 0.0,
        token_s: float = 0.0,
        limit: int = 8,
        tells: bool = False,
    ) -> None:
        self.world = world
        self.chance = chance if callable(chance) else lambda position: chance  # type: ignore[return-value]
        self.call_s, self.token_s, self.limit, self.tells = call_s, token_s, limit, tells
        self.asked: list[tuple[int, int]] = []

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        if budget <= 0:
            return Draft.empty()
        self.asked.append((sequence.num_steps, budget))
        length = min(budget, self.limit)
        self.world.now += self.call_s + self.token_s * length
        start = len(sequence.tokens)
        tokens, confidences = [], []
        confidence = 1.0
        for position in range(start, start + length):
            chance = self.chance(position)
            is_right = self.world.rng.random() < chance
            tokens.append(self.world.text[position] if is_right else (self.world.text[position] + 1) % VOCAB)
            confidence *= max(chance, 1e-3)
            confidences.append(confidence)
        draft = Draft.chain(tokens)
        return Draft(draft.tokens, draft.parents, confidences=tuple(confidences)) if self.tells else draft


def adaptive(world: World, drafter: Drafter) -> AdaptiveBudget:
    return AdaptiveBudget(drafter, clock=world.clock)


# ---------------------------------------------------------------------------------------------- never slower


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("call_s", "token_s"), [(0.3, 0.0), (0.0, 0.3), (0.0, 0.05), (1.0, 0.0)])
def test_a_drafter_that_is_always_wrong_costs_little(call_s: float, token_s: float, noise: float) -> None:
    world = World()
    guesser = Guesser(world, 0.0, call_s=call_s, token_s=token_s, limit=4)
    world.noise = noise
    cost = world.run(adaptive(world, guesser), 512)
    if not noise:
        assert cost <= (1.05 if call_s < 1 else 1.06)
    assert len(guesser.asked) <= 30


def test_a_request_that_allows_nothing_asks_nobody() -> None:
    world = World()
    guesser = Guesser(world, 1.0)
    sequence = world.sequence()
    for _ in range(50):
        assert world.step(adaptive(world, guesser), [sequence], [0]) == [Draft.empty()]
    assert not guesser.asked


@pytest.mark.parametrize("turn", [100, 137, 300, 700, 1500])
@pytest.mark.parametrize("call_s", [0.0, 0.3])
def test_a_drafter_that_turns_good_is_back_within_200_steps(turn: int, call_s: float) -> None:
    world = World()
    guesser = Guesser(world, lambda position: 0.9 if position > turn else 0.0, call_s=call_s, limit=4)
    budget, sequence = adaptive(world, guesser), world.sequence()
    drafted = []
    while sequence.num_new < turn + 1500:
        drafted.append(len(world.step(budget, [sequence])[0]))
    # Until the turn each step emits one token.
    late = drafted[turn + 200 : turn + 300]
    assert sum(count > 0 for count in late) >= 95


def test_trials_keep_their_distance() -> None:
    world = World()
    guesser = Guesser(world, 0.0, call_s=0.3, limit=4)
    budget, sequence = adaptive(world, guesser), world.sequence()
    for _ in range(2000):
        world.step(budget, [sequence])
    late = [step for step, _ in guesser.asked if step > 500]
    gaps = {b - a for a, b in zip(late, late[1:], strict=False)}
    assert gaps == {MAX_PAUSE}


# ---------------------------------------------------------------------------------------------- as fast as the best


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.85, 0.97])
@pytest.mark.parametrize("token_s", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("tells", [False, True])
def test_no_fixed_length_is_much_better(chance: float, token_s: float, tells: bool) -> None:
    fixed = []
    for length in (1, 2, 3, 4, 6, 8):
        world = World(seed=1)
        guesser = Guesser(world, chance, token_s=token_s, limit=length, tells=tells)
        fixed.append(world.run(FixedBudget(guesser), 1500))
    world = World(seed=1)
    cost = world.run(adaptive(world, Guesser(world, chance, token_s=token_s, tells=tells)), 1500)
    assert cost <= 1.06 * min(1.0, *fixed)


def test_a_mixture_is_faster_than_every_fixed_length() -> None:
    """Stretches where the drafter knows, and says so, and stretches where it does not."""

    def chance(position: int) -> float:
        return 0.95 if position // 40 % 2 else 0.15

    fixed = []
    for length in (1, 2, 3, 4, 6, 8):
        world = World(seed=2)
        fixed.append(world.run(FixedBudget(Guesser(world, chance, limit=length, tells=True)), 2000))
    world = World(seed=2)
    assert world.run(adaptive(world, Guesser(world, chance, tells=True)), 2000) < 0.97 * min(fixed)


def test_dear_rows_are_learnt() -> None:
    """A backend on which a second row costs as much as a second pass: nothing is worth checking."""
    world = World(row_cost=1.0)
    guesser = Guesser(world, 0.8, limit=4, tells=True)
    assert world.run(adaptive(world, guesser), 512) <= 1.03
    cheap = World(row_cost=0.0)
    assert cheap.run(adaptive(cheap, Guesser(cheap, 0.8, limit=8, tells=True)), 512) < 0.3


@pytest.mark.parametrize("num_disturbed", [1, 3])
@pytest.mark.parametrize("call_s", [0.0, 0.1])
def test_disturbed_first_checks_do_not_end_drafting(num_disturbed: int, call_s: float) -> None:
    """They find cold what plain steps do not use; rows must not look dear for ever."""
    world = World(seed=7)
    plain = world.pass_s
    disturbed = [30.0] * num_disturbed

    def pass_s(num_rows: int) -> float:
        return plain(num_rows) * (disturbed.pop() if num_rows > 1 and disturbed else 1.0)

    world.pass_s = pass_s  # type: ignore[method-assign]
    budget, sequence = adaptive(world, Guesser(world, 0.9, call_s=call_s, limit=4)), world.sequence()
    lengths = [len(world.step(budget, [sequence])[0]) for _ in range(1200)]
    assert not disturbed
    assert sum(lengths[-300:]) / 300 > 3.5


def test_disturbed_times_do_not_mislead() -> None:
    world = World(noise=0.1, seed=3)
    budget, sequence = adaptive(world, Guesser(world, 0.9, call_s=0.1, limit=4)), world.sequence()
    lengths = [len(world.step(budget, [sequence])[0]) for _ in range(400)]
    assert sum(lengths[100:]) / 300 > 3.5


# ---------------------------------------------------------------------------------------------- whom to ask


class Parts(Drafter):
    def __init__(self, *parts: Drafter) -> None:
        self.parts = parts

    def sources(self) -> Seq[Drafter]:
        return self.parts

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        raise AssertionError("the parts are asked apart")


def test_a_dear_part_is_asked_where_the_cheap_one_knows_nothing() -> None:
    world = World(seed=4)
    knows = [position // 30 % 2 == 1 for position in range(20_000)]
    cheap = Guesser(world, lambda position: 0.97 if knows[position] else 0.02, tells=True)
    dear = Guesser(world, 0.6, token_s=0.1, limit=4)
    budget, sequence = adaptive(world, Parts(cheap, dear)), world.sequence()
    asked_at, known_at = [], []
    for _ in range(600):
        before = len(dear.asked)
        position = len(sequence.tokens)
        world.step(budget, [sequence])
        (asked_at if len(dear.asked) > before else known_at).append(knows[position])
    assert sum(asked_at[20:]) <= 0.1 * len(asked_at)
    assert sum(known_at) >= 0.8 * len(known_at)


def test_a_part_that_is_no_use_is_left_out_and_the_other_stays() -> None:
    world = World(seed=5)
    cheap, dear = Guesser(world, 0.8, tells=True), Guesser(world, 0.0, call_s=0.3, limit=4)
    alone = World(seed=5)
    expected = alone.run(adaptive(alone, Guesser(alone, 0.8, tells=True)), 1000)
    assert world.run(adaptive(world, Parts(cheap, dear)), 1000) <= 1.03 * expected


def test_sequences_of_a_batch_have_budgets_of_their_own() -> None:
    world = World(seed=6)
    good, bad = world.sequence(), world.sequence()

    class ByIdentity(Guesser):
        def _draft(self, sequence: Sequence, budget: int) -> Draft:
            self.chance = lambda position: 0.9 if sequence is good else 0.0
            return super()._draft(sequence, budget)

    guesser = ByIdentity(world, 0.0, token_s=0.05)
    budget = adaptive(world, guesser)
    lengths = [list(map(len, world.step(budget, [good, bad]))) for _ in range(300)]
    assert sum(one[0] for one in lengths[100:]) / 200 > 3
    assert sum(one[1] for one in lengths[100:]) / 200 < 0.2


def test_caps_hold() -> None:
    world = World(seed=7, row_cost=0.0)
    budget, sequences = adaptive(world, Guesser(world, 0.99, tells=True)), [world.sequence() for _ in range(3)]
    for _ in range(60):
        lengths = list(map(len, world.step(budget, sequences, [0, 2, 64])))
        assert lengths[0] == 0
        assert lengths[1] <= 2
    assert lengths == [0, 2, 8]


def test_a_dear_source_without_drafts_is_left_out() -> None:
    world = World()

    class Silent(Guesser):
        def _draft(self, sequence: Sequence, budget: int) -> Draft:
            super()._draft(sequence, budget)
            return Draft.empty()

    silent = Silent(world, 1.0, call_s=0.3)
    assert world.run(adaptive(world, silent), 512) <= 1.05
    assert len(silent.asked) < 30


# ---------------------------------------------------------------------------------------------- sampled drafts


class Sampling(Drafter):
    """Draws from a law, and believes what it drew with the law's own probability."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.rng = world, np.random.default_rng(seed)
        self.budgets: list[int] = []

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        self.world.now += 0.05
        self.budgets += budgets
        law = np.full(VOCAB, 0.1 / (VOCAB - 1))
        law[0] = 0.9
        drafts = []
        for budget in budgets:
            tokens = tuple(int(token) for token in self.rng.choice(VOCAB, min(budget, 4), p=law))
            confidences = tuple(np.cumprod(law[list(tokens)]).tolist())
            parents = tuple(range(-1, len(tokens) - 1))
            drafts.append(Draft(tokens, parents, "independent", [law] * len(tokens), confidences=confidences))
        return drafts


def test_what_was_drawn_decides_neither_how_much_is_drafted_nor_what_is_checked() -> None:
    """The budgets of a step are those of the same past, whatever this step draws, and every draw is checked."""
    for num_steps in (4, 5, 9, 30):
        found = set()
        for seed in range(6):
            world = World(seed=8)
            world.text = [0] * len(world.text)
            sampling = Sampling(world, seed)
            budget, sequence = adaptive(world, sampling), world.sequence()
            sampling.rng = np.random.default_rng(0)  # the same past
            for _ in range(num_steps):
                world.step(budget, [sequence])
            sampling.rng = np.random.default_rng(seed)
            sequence.cache.tokens = sequence.tokens[:-1]  # type: ignore[attr-defined]
            plan = budget.propose([sequence], [64], INFO)
            found.add((sampling.budgets[-1], len(plan.drafts[0])))
        assert len(found) == 1, found
        asked, checked = found.pop()
        assert checked == min(asked, 4)


# ---------------------------------------------------------------------------------------------- the same tokens


def _loaded(seed: int = 0) -> LoadedModel:
    model = ToyModel(random_law(12, seed, order=2, scale=2.0), 12, end_token_ids=(11,))
    return LoadedModel(model=model, tokenizer=None, chat_template=None, path=Path("toy"))


@settings(max_examples=25)
@given(st.integers(0, 1000), st.sampled_from([0.0, 1.0]), st.sampled_from([1, 3]))
def test_tokens_are_those_of_plain_decoding_whatever_the_clock_says(seed: int, temperature: float, batch: int) -> None:
    loaded = _loaded(seed)
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=40)
    prompts = [[1, 2, 1, 2 + number] for number in range(3)]
    plain = LLM.from_loaded(loaded).generate(prompts, params)
    truth = {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in plain}
    rng = random.Random(seed)
    for drafter in (
        make_drafter("auto:parts=suffix+ngram", loaded, ModelOptions()),
        PlantedDrafter(PlantedDrafter.Config(script=stray(truth, 5, 12, seed))),
    ):
        llm = LLM.from_loaded(loaded, drafter=drafter, budget="adaptive", max_num_seqs=batch)
        now = [0.0]

        def clock(now: list[float] = now) -> float:
            now[0] += rng.random() ** 6
            return now[0]

        llm._budget = AdaptiveBudget(drafter, clock=clock)
        answers = llm.generate(prompts, params)
        assert [one.outputs[0].token_ids for one in answers] == [one.outputs[0].token_ids for one in plain]


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal"])
def test_the_distribution_is_kept(verifier: str) -> None:
    """Pairs of tokens, drawn with sampled drafts of adaptive lengths, against the model's own law (chi-square)."""
    from scipy.stats import chisquare

    law = random_law(4, 1, order=1, scale=1.0)
    model, other = ToyModel(law, 4), ToyModel(random_law(4, 2, order=1, scale=0.5), 4)
    context = DrafterContext(model, lambda name: other, "independent")
    drafter = ModelDrafter(ModelDrafter.Config(model="other", num_speculative_tokens=3), context)
    rng, now = random.Random(4), [0.0]

    def clock() -> float:
        now[0] += 0.1 * rng.random()
        return now[0]

    budget, rule = AdaptiveBudget(drafter, clock=clock), make_verifier(verifier)
    counts, lengths = np.zeros((4, 4)), set()
    for seed in range(1000):
        sequence = Sequence(
            "0", [0], 1, SamplingParams(temperature=1, seed=seed, max_tokens=4), seed, model.new_cache()
        )
        while sequence.finish_reason is None:
            plan = budget.propose([sequence], [64], model.info)
            steps = advance(model, drafter, rule, [sequence], plan.drafts)
            budget.record([sequence], plan, steps, 1 + 0.1 * steps[0].num_draft + 0.2 * rng.random())
            lengths.add(steps[0].num_draft)
        counts[sequence.tokens[1], sequence.tokens[2]] += 1
    laws = [np.exp(law([token]).astype(np.float64)) for token in range(4)]
    laws = [row / row.sum() for row in laws]
    assert lengths == {0, 1, 2, 3}
    assert chisquare(counts.ravel(), 1000 * (laws[0][:, None] * np.array(laws)).ravel()).pvalue > 1e-3


# ---------------------------------------------------------------------------------------------- who has a budget


def test_auto_has_an_adaptive_budget_and_others_a_fixed_one_unless_told_otherwise() -> None:
    loaded = _loaded()
    assert isinstance(LLM.from_loaded(loaded, drafter="auto")._budget, AdaptiveBudget)
    assert isinstance(LLM.from_loaded(loaded, drafter="suffix")._budget, FixedBudget)
    assert isinstance(LLM.from_loaded(loaded, drafter="auto", budget="fixed")._budget, FixedBudget)
    assert isinstance(LLM.from_loaded(loaded, drafter="suffix", budget="adaptive")._budget, AdaptiveBudget)
    with pytest.raises(ParameterError, match="auto, adaptive, fixed"):
        LLM.from_loaded(loaded, budget="generous")  # type: ignore[arg-type]


def test_auto_without_a_budget_takes_the_first_part_that_knows_something() -> None:
    loaded = _loaded()
    drafter = make_drafter("auto:parts=suffix:min_match=3+ngram:num_speculative_tokens=2", loaded, ModelOptions())
    long, short = [5, 6, 7, 8, 5, 6, 7], [5, 9, 6, 9]
    sequences = [
        Sequence(str(i), own, len(own), SamplingParams(), 0, TokenCache()) for i, own in enumerate((long, short))
    ]
    first, second = drafter.propose(sequences, [8, 8])
    assert first.tokens[:1] == (8,)
    assert second.tokens == (6, 9)
    assert [len(draft) for draft in drafter.propose(sequences, [0, 1])] == [0, 1]


def test_the_parts_of_auto_are_checked_before_a_model_is_loaded() -> None:
    with pytest.raises(ParameterError, match="suffix has no option"):
        LLM("nowhere", drafter="auto:parts=suffix:nonsense=1")
