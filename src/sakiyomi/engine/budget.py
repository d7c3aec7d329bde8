"""How much to draft and how much of it to check, per sequence and step, from measured costs and acceptance.

Two questions, in this order (see docs/drafters.md):

1. Whom to ask, for how many nodes? A source that costs next to nothing is always asked. Another one is asked for the
   number of nodes whose expected gain is largest, by its acceptance at each depth and the measured cost of drafting and
   of a pass; for none if no number pays. A source that is off is tried now and then.
2. Which of the drafted nodes to check? The most probable ones, as many as are worth their time; where that was none for
   long, one all the same.

Gain and cost meet in the rate: tokens per second of late, so that the speed of the whole run is what is made large. All
times that enter are medians. Nothing depends on what a sampled draft drew: its length is chosen before it is drawn, by
what came before, and it is checked whole. So rules that keep the distribution keep it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from math import ceil
from typing import Literal, Protocol, get_args
from weakref import WeakKeyDictionary

from sakiyomi.decode import Step, num_left, propose
from sakiyomi.engine.acceptance import EDGES, FADE_SHARED, FIRST_OF_DEPTHS, Acceptance, Rates
from sakiyomi.engine.costs import DraftCosts, PassCosts
from sakiyomi.errors import ParameterError
from sakiyomi.ops.base import BurstRules, BurstStep, NoisyChoice, SourceRules
from sakiyomi.plan.speedup import count_worthwhile, survivals
from sakiyomi.tree import ROOT, SAMPLED, Draft, merge_drafts
from sakiyomi.types import Array, BurstSource, Drafter, ModelInfo, Sequence

BudgetName = Literal["auto", "adaptive", "fixed"]
MAX_DRAFT_NODES = 64
"""What a request without a wish of its own allows a drafter; drafters have smaller defaults."""

MAX_ASKED = 16
"""Nodes that a source with a price is asked for at most."""

NEGLIGIBLE = 0.005
"""A node that is right less often is not worth thinking about."""

FIRST_ASKED = 4
"""Nodes that a source is asked for while its price is unknown."""

FREE_SHARE = 0.02
"""A source below this share of a plain step is always asked."""

EXPLORED_SHARE = 0.01
"""The share of the time that trying a source that is off may take, within the two bounds below."""

MIN_PAUSE, MAX_PAUSE = 8, 64
"""Steps between two trials of a source that is off; it is noticed within the latter that it turned good."""

NUM_PLAIN, PLAIN_PAUSE = 3, 256
"""Plain steps of one sequence that are made at first (of several one), and steps behind which there is another.

Without them a run that always drafts would not know what its drafts cost."""

CHECK_PAUSE = 64
"""Steps without a checked node behind which the most probable of those drafted is checked, whatever rows seem to cost.

Without it a run whose first checks were disturbed would not learn that rows are cheap, and never draft again."""

MAX_BURST_STEPS = 64
"""Steps for which what is known holds."""

FADE_RATE = 0.97
"""Of the run's speed: some thirty steps count."""


def check_budget(name: str) -> None:
    """Raise ParameterError unless the name is one of a budget."""
    if name not in get_args(BudgetName):
        raise ParameterError(f"budget={name!r} is not allowed; give one of {', '.join(get_args(BudgetName))}.")


@dataclass(eq=False)
class Plan:
    """What one step drafts, and what must be known to learn from it."""

    drafts: list[Draft]
    asked: list[_Asked] = field(default_factory=list)
    context: float = 0.0
    curve: Seq[float] = ()
    draft_s: float = 0.0


@dataclass(eq=False)
class BurstPlan:
    """What a burst goes by; for `first_taps` see `Ops.run_burst`, `curve` as in `Plan`."""

    rules: BurstRules
    first_taps: Array | None = None
    curve: Seq[float] = ()


class Budget(Protocol):
    """Decides how much is drafted and checked."""

    def propose(self, sequences: Seq[Sequence], caps: Seq[int], info: ModelInfo) -> Plan:
        """The drafts of a step, of at most so many nodes each."""
        ...

    def record(self, sequences: Seq[Sequence], plan: Plan, steps: Seq[Step], seconds: float) -> None:
        """What the step did, and how long everything behind the proposal took."""
        ...

    def plan_burst(self, sequence: Sequence, cap: int, max_seconds: float, info: ModelInfo) -> BurstPlan | None:
        """What the next steps of a sequence may go by without asking again; None where the next one has to ask."""
        ...

    def record_burst(self, sequence: Sequence, plan: BurstPlan, found: BurstStep, context: int) -> None:
        """What a step of it did, which has been committed, behind a cache of `context` positions."""
        ...


class FixedBudget:
    """Asks the drafter for as much as it is allowed, always."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, sequences: Seq[Sequence], caps: Seq[int], info: ModelInfo) -> Plan:
        return Plan(propose(self._drafter, sequences, caps, info))

    def record(self, sequences: Seq[Sequence], plan: Plan, steps: Seq[Step], seconds: float) -> None:
        return None

    def plan_burst(self, sequence: Sequence, cap: int, max_seconds: float, info: ModelInfo) -> BurstPlan | None:
        rules = _burst_rules(sequence, info, [0.0] * (cap + 2), 0.0, max_seconds)
        if cap <= 0 or not self._drafter.sources():
            return BurstPlan(rules)
        own = self._drafter.burst_source(sequence)
        if own is None:
            return None
        whole = _free_rules(own, cap, [0.0] * FIRST_OF_DEPTHS, [1.0] * FIRST_OF_DEPTHS)
        return BurstPlan(rules._replace(sources=(whole,)), own.taps)

    def record_burst(self, sequence: Sequence, plan: BurstPlan, found: BurstStep, context: int) -> None:
        return None


@dataclass(eq=False)
class _Source:
    """A drafter that can be asked apart, and what is known of it over all sequences."""

    drafter: Drafter
    costs: DraftCosts = field(default_factory=DraftCosts)
    rates: Rates = field(default_factory=lambda: Rates(FADE_SHARED))


@dataclass(eq=False)
class _Outlook:
    """What is known of one source for one sequence.

    Attributes:
        last_asked: the sequence's step at which it was asked last.
        pause: steps until it is tried again, while it is off.
        is_trial: whether it was asked last although it did not seem to pay.
    """

    acceptance: Acceptance
    last_asked: int = -1
    pause: int = MIN_PAUSE
    is_trial: bool = False


@dataclass(eq=False)
class _Asked:
    """A draft that was made: by whom, for which of the step's sequences, and what its nodes are believed with."""

    outlook: _Outlook
    index: int
    draft: Draft
    gains: list[float]
    kinds: list[int]


class AdaptiveBudget:
    """Makes the speed of the run large; see the top of this file.

    Args:
        drafter: its `sources` are asked in order, the later ones where the earlier ones leave room.
        clock: seconds; tests bring their own.
    """

    def __init__(self, drafter: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sources = [_Source(source) for source in drafter.sources()]
        self._passes = PassCosts()
        self._outlooks: WeakKeyDictionary[Sequence, list[_Outlook]] = WeakKeyDictionary()
        self._num_plain: Counter[int] = Counter()
        self._since_plain = self._since_checked = 0
        self._has_checked = False
        self._tokens = self._steps = 1.0  # of late, in tokens per sequence and in plain steps' time

    # ------------------------------------------------------------------------------------------ before a step

    def propose(self, sequences: Seq[Sequence], caps: Seq[int], info: ModelInfo) -> Plan:
        plan = Plan([Draft.empty()] * len(sequences))
        plan.context = sum(sequence.cache.length for sequence in sequences) / len(sequences)
        plan.curve = curve = self._passes.curve(plan.context, 32 * len(sequences))
        if not any(caps):
            return plan
        started = self._clock()
        if self._must_be_plain(len(sequences)):
            return plan
        outlooks = [self._outlooks_of(sequence) for sequence in sequences]
        for number in range(len(self._sources)):
            self._ask(number, sequences, caps, outlooks, info, plan)
        if plan.asked:
            self._choose(plan, caps, len(sequences), curve)
        plan.draft_s = self._clock() - started
        return plan

    def _must_be_plain(self, num_sequences: int) -> bool:
        """Whether too little is known of steps without drafts."""
        needed = NUM_PLAIN if num_sequences == 1 else 1
        return self._num_plain[num_sequences] < needed or self._since_plain >= PLAIN_PAUSE

    def _rate(self, num_sequences: int, curve: Seq[float]) -> float:
        """Tokens per second of late, as they would be with today's times."""
        return self._tokens / self._steps * num_sequences / curve[num_sequences]

    def _ask(
        self,
        number: int,
        sequences: Seq[Sequence],
        caps: Seq[int],
        outlooks: Seq[Seq[_Outlook]],
        info: ModelInfo,
        plan: Plan,
    ) -> None:
        """Let one source draft for the sequences for which that pays."""
        source, curve = self._sources[number], plan.curve
        wanted = []
        for index, (sequence, cap) in enumerate(zip(sequences, caps, strict=True)):
            outlook = outlooks[index][number]
            count = self._count(source, outlook, sequence, cap, _missing(plan, index), len(sequences), curve)
            if count > 0:
                wanted.append((index, outlook, count))
        if not wanted:
            return
        started = self._clock()
        chosen = [sequences[index] for index, *_ in wanted]
        drafts = propose(source.drafter, chosen, [count for *_, count in wanted], info)
        seconds = (self._clock() - started) / len(wanted)
        for sequence, (index, outlook, count), draft in zip(chosen, wanted, drafts, strict=True):
            if outlook.last_asked in (-1, sequence.num_steps - 1) or not source.costs.is_known:
                source.costs.record(count, seconds)  # behind a pause a drafter may have to catch up
            outlook.last_asked = sequence.num_steps
            # That a source with a price had nothing to say counts against it.
            if len(draft) or not self._is_free(source, curve):
                plan.asked.append(_Asked(outlook, index, draft, *outlook.acceptance.judge(draft)))

    def _count(
        self,
        source: _Source,
        outlook: _Outlook,
        sequence: Sequence,
        cap: int,
        missing: float,
        num_sequences: int,
        curve: Seq[float],
    ) -> int:
        """For how many nodes to ask a source."""
        if cap <= 0 or missing <= 0:
            return 0
        if not source.costs.is_known:
            return min(cap, FIRST_ASKED)
        outlook.is_trial = False
        if self._is_free(source, curve):
            return min(cap, MAX_DRAFT_NODES)
        rate = self._rate(num_sequences, curve)
        best, best_worth, gain = 0, 0.0, 0.0
        conditionals = outlook.acceptance.conditionals(min(cap, MAX_ASKED))
        for count, survival in enumerate(survivals(conditionals, NEGLIGIBLE / missing), 1):
            gain += survival * missing
            verify_s = curve[num_sequences + count] - curve[num_sequences]
            worth = gain - rate * (source.costs.seconds(count) + verify_s)
            if worth > best_worth:
                best, best_worth = count, worth
        if best > 0:
            outlook.pause = MIN_PAUSE
            return best
        outlook.is_trial = self._is_due(source, outlook, sequence, curve)
        return int(outlook.is_trial)

    def _is_free(self, source: _Source, curve: Seq[float]) -> bool:
        return source.costs.is_known and source.costs.least <= FREE_SHARE * curve[1]

    def _is_due(self, source: _Source, outlook: _Outlook, sequence: Sequence, curve: Seq[float]) -> bool:
        """Whether to try a source that does not seem to pay."""
        return sequence.num_steps - outlook.last_asked >= self._rest(source, outlook, curve)

    def _rest(self, source: _Source, outlook: _Outlook, curve: Seq[float]) -> int:
        """Steps behind which a source is tried again."""
        if outlook.pause == 1:  # the trial before went well
            return 0
        fair = source.costs.seconds(1) / (EXPLORED_SHARE * curve[1])
        return max(outlook.pause, ceil(min(fair, MAX_PAUSE)))

    def _choose(self, plan: Plan, caps: Seq[int], num_sequences: int, curve: Seq[float]) -> None:
        """Keep the nodes that are worth their time."""
        pools: dict[int, list[_Asked]] = {}
        num_rows = num_sequences
        for asked in plan.asked:
            if asked.draft.drawn in SAMPLED:
                num_rows += len(asked.draft)
                plan.drafts[asked.index] = asked.draft
        for asked in plan.asked:
            if plan.drafts[asked.index].drawn not in SAMPLED:
                pools.setdefault(asked.index, []).append(asked)
        trees = {index: _merge(pool, caps[index]) for index, pool in pools.items()}
        gains = sorted((gain for _, own in trees.values() for gain in own), reverse=True)
        if not gains:
            return
        if num_rows + len(gains) >= len(curve):
            curve = self._passes.curve(plan.context, num_rows + len(gains))
        count = self._num_checked(gains, curve[num_rows : num_rows + len(gains) + 1], self._rate(num_sequences, curve))
        if count == 0:
            return
        least = gains[count - 1]
        for index, (tree, own) in trees.items():
            keep = count if len(trees) == 1 else sum(gain >= least for gain in own)
            plan.drafts[index] = tree.trim(keep, keep)

    def _num_checked(self, gains: Seq[float], seconds: Seq[float], rate: float) -> int:
        """How many nodes to check, the most probable first; see `count_worthwhile`."""
        return count_worthwhile(gains, seconds, rate) or int(self._since_checked >= CHECK_PAUSE and len(gains) > 0)

    # ------------------------------------------------------------------------------------------ behind a step

    def record(self, sequences: Seq[Sequence], plan: Plan, steps: Seq[Step], seconds: float) -> None:
        num_rows = len(sequences) + sum(step.num_draft for step in steps)
        is_plain = num_rows == len(sequences)
        # The first step of a text finds cold what the prompt did not use, and the first check of all what checks use.
        if all(sequence.num_steps > 1 for sequence in sequences) and (is_plain or self._has_checked):
            self._passes.record(num_rows, plan.context, seconds)
        self._has_checked |= not is_plain
        self._since_checked = self._since_checked + 1 if is_plain else 0
        self._num_plain[len(sequences)] += is_plain
        self._since_plain = 0 if is_plain else self._since_plain + 1
        for asked in plan.asked:
            step, outlook = steps[asked.index], asked.outlook
            depth = outlook.acceptance.learn(asked.draft, asked.kinds, step.tokens, step.num_accepted)
            if outlook.is_trial:
                outlook.pause = 1 if depth else min(max(2 * outlook.pause, MIN_PAUSE), MAX_PAUSE)
        curve = plan.curve
        spent = curve[num_rows] if num_rows < len(curve) else seconds
        num_tokens = sum(len(step.tokens) for step in steps)
        self._tokens = FADE_RATE * self._tokens + num_tokens / len(sequences)
        self._steps = FADE_RATE * self._steps + (spent + plan.draft_s) / curve[len(sequences)]

    # ------------------------------------------------------------------------------------------ bursts

    def plan_burst(self, sequence: Sequence, cap: int, max_seconds: float, info: ModelInfo) -> BurstPlan | None:
        curve = self._passes.curve(sequence.cache.length, 32)
        rate = self._rate(1, curve)
        rules = _burst_rules(sequence, info, curve[: cap + 2], rate, max_seconds, self._since_checked)
        plan = BurstPlan(rules, curve=curve)
        if cap <= 0:
            return plan
        if self._must_be_plain(1):
            needed = max(NUM_PLAIN - self._num_plain[1], 1)
            plan.rules = rules._replace(max_steps=min(rules.max_steps, needed))
            return plan
        sources = []
        for source, outlook in zip(self._sources, self._outlooks_of(sequence), strict=True):
            own = source.drafter.burst_source(sequence)
            if not source.costs.is_known or (own is None and self._is_free(source, curve)):
                return None
            if own is not None and own.taps is not None:
                plan.first_taps = own.taps
            sources.append(self._source_rules(source, outlook, own, cap, sequence, curve))
        plan.rules = rules._replace(
            sources=tuple(sources), max_steps=min(rules.max_steps, PLAIN_PAUSE - self._since_plain)
        )
        return plan

    def _source_rules(
        self,
        source: _Source,
        outlook: _Outlook,
        own: BurstSource | None,
        cap: int,
        sequence: Sequence,
        curve: Seq[float],
    ) -> SourceRules:
        offsets, slopes = outlook.acceptance.lines()
        if own is not None and self._is_free(source, curve):
            return _free_rules(own, cap, offsets, slopes)
        most = min(cap, MAX_ASKED)
        chances = survivals(outlook.acceptance.conditionals(most))
        return SourceRules(
            drafts=None if own is None else own.drafts,
            max_depth=most if own is None else own.max_depth,
            max_nodes=most if own is None else own.max_nodes,
            survivals=chances,
            seconds=[source.costs.seconds(count) for count in range(1, len(chances) + 1)],
            num_rested=sequence.num_steps - outlook.last_asked,
            rest=self._rest(source, outlook, curve),
            offsets=offsets,
            slopes=slopes,
            is_coupled=own is not None and own.is_coupled,
        )

    def record_burst(self, sequence: Sequence, plan: BurstPlan, found: BurstStep, context: int) -> None:
        outlooks, number = self._outlooks_of(sequence), sequence.num_steps - 1
        asked = []
        for draft in found.drafts:
            source, outlook = self._sources[draft.source], outlooks[draft.source]
            if outlook.last_asked in (-1, number - 1):
                source.costs.record(draft.num_asked, draft.seconds)
            outlook.last_asked, outlook.is_trial = number, draft.is_trial
            if not draft.is_trial:
                outlook.pause = MIN_PAUSE
            if len(draft.draft) or not self._is_free(source, plan.curve):
                asked.append(_Asked(outlook, 0, draft.draft, draft.gains, draft.kinds))
        step = Step(found.tokens, found.num_accepted, found.num_draft, None)
        self.record([sequence], Plan([], asked, context, plan.curve, found.draft_s), [step], found.pass_s)

    def _outlooks_of(self, sequence: Sequence) -> list[_Outlook]:
        outlooks = self._outlooks.get(sequence)
        if outlooks is None:
            outlooks = [_Outlook(Acceptance(source.rates)) for source in self._sources]
            self._outlooks[sequence] = outlooks
        return outlooks


def _burst_rules(
    sequence: Sequence, info: ModelInfo, seconds: Seq[float], rate: float, max_seconds: float, num_unchecked: int = 0
) -> BurstRules:
    """The rules of plain steps; `seconds` of a pass, for as many rows as a step may have."""
    return BurstRules(
        sources=(),
        seconds=seconds,
        rate=rate,
        least=NEGLIGIBLE,
        edges=EDGES,
        end_ids=[token for token in sequence.end_ids if 0 <= token < info.vocab_size],
        num_left=num_left(sequence, info),
        max_steps=MAX_BURST_STEPS if sequence.num_steps else 1,  # nobody shall wait longer for the first token
        max_seconds=max_seconds,
        choice=_noisy_choice(sequence),
        num_unchecked=num_unchecked,
        pause=CHECK_PAUSE,
    )


def _noisy_choice(sequence: Sequence) -> NoisyChoice | None:
    """How the tokens of a sequence are chosen; None: the most probable ones."""
    params = sequence.params
    if params.is_greedy:
        return None
    return NoisyChoice(sequence.seed, params.temperature, params.top_k, params.top_p, params.min_p)


def _free_rules(own: BurstSource, cap: int, offsets: list[float], slopes: list[float]) -> SourceRules:
    """The rules of a source that is always asked."""
    return SourceRules(
        drafts=own.drafts,
        max_depth=min(cap, own.max_depth),
        max_nodes=min(cap, own.max_nodes),
        survivals=(),
        seconds=(),
        num_rested=0,
        rest=0,
        offsets=offsets,
        slopes=slopes,
        is_coupled=own.is_coupled,
    )


def _missing(plan: Plan, index: int) -> float:
    """The probability that none of what is drafted so far goes on with the right token."""
    missing = 1.0
    for asked in plan.asked:
        if asked.index == index:
            if asked.draft.drawn in SAMPLED:
                return 0.0
            firsts = zip(asked.gains, asked.draft.parents, strict=True)
            missing -= sum(gain for gain, parent in firsts if parent == ROOT)
    return missing


def _merge(pool: Seq[_Asked], cap: int) -> tuple[Draft, Seq[float]]:
    """One tree with the survivals of its nodes, the most probable first."""
    if len(pool) == 1 and pool[0].gains == sorted(pool[0].gains, reverse=True):
        return pool[0].draft, pool[0].gains
    drafts = [
        Draft(asked.draft.tokens, asked.draft.parents, asked.draft.drawn, confidences=tuple(asked.gains))
        for asked in pool
    ]
    merged = merge_drafts(drafts, cap)
    return merged, merged.confidences or ()
