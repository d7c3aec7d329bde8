"""The drafter at work: the real loop, and the same text once more from every place with one thing changed.

Files often tell the wrong layers, flags or angles, and none of that makes a pass fail: acceptance falls, that is all.
So the text that the target wrote is gone through again with the neighbours of what the file tells, and a neighbour that
is right significantly more often names the fault.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter, read_checkpoint
from sakiyomi.decode import prefill
from sakiyomi.doctor.findings import Probe, Trial
from sakiyomi.doctor.weights import EAGLE
from sakiyomi.llm import LLM
from sakiyomi.nets.binding import resolve_taps
from sakiyomi.params import SamplingParams
from sakiyomi.plugins import find_class
from sakiyomi.types import Array, Drafter, DrafterContext, DrafterFile, Model, Sequence

Report = Callable[[str, int, int], None]

DRAFTER_OF = {"eagle1": "eagle3"}
"""Kinds of files that a drafter of another name reads."""
CHANCE_LEVEL = 0.01
"""An agreement that mere chance would reach this often is not above it."""
TRIAL_LEVEL = 0.001
TRIAL_GAIN = 0.05
"""A changed reading names a fault if it is right longer by this many tokens, and by chance this seldom."""
CONTEXT = 3
"""Starts with this many equal tokens before and behind them count once: a text in a loop would count for many."""


def make(stored: DrafterFile, path: str, target: LoadedModel) -> Drafter:
    """The drafter of a file that was read, without a look at whether it was made for the target."""
    name = DRAFTER_OF.get(stored.kind, stored.kind)
    if stored.kind not in (*EAGLE, "medusa"):
        return make_drafter(name, target, ModelOptions(), {"path": path})
    drafter = find_class("sakiyomi.drafters", "sakiyomi.drafters", "drafter", name)
    context = DrafterContext(target.model, _load_nothing, open_drafter=lambda kinds, path: stored)
    built: Drafter = drafter(drafter.Config(), context)
    return built


def _load_nothing(name: str) -> Model:
    raise AssertionError(f"a trained head loads no other model, and not {name}")


# ---------------------------------------------------------------------------------------------- the probe


def run_probe(
    stored: DrafterFile,
    path: str,
    target: LoadedModel,
    prompts: Seq[Seq[int]],
    num_tokens: int,
    report: Report = lambda what, done, total: None,
) -> Probe:
    """Draft for answers of `num_tokens` tokens to each prompt, in the loop and from every place."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    report("plain decoding", 0, 0)
    plain = LLM.from_loaded(target).generate(requests, params, use_tqdm=False)
    report("drafting", 0, 0)
    drafter = make(stored, path, target)
    drafted = LLM.from_loaded(target, drafter=drafter, budget="fixed").generate(requests, params, use_tqdm=False)
    others = list(find_readings(stored, target))
    drafters = {key: make(changed, path, target) for key, changed in others}
    layers = sorted({layer for one in (drafter, *drafters.values()) for layer in one.taps})
    answers = [list(output.outputs[0].token_ids) for output in plain]
    texts = [
        Text.record(target.model, list(p), answer, layers) for p, answer in zip(prompts, answers, strict=True) if answer
    ]
    own = replay(drafter, target.model, texts)
    trials = []
    for number, (reading, changed) in enumerate(drafters.items(), 1):
        report("other readings", number, len(drafters))
        trials.append(own.compare(reading, replay(changed, target.model, texts)))
    trials += own.compare_shifts()
    return _summarize(drafted, own, trials)


def _summarize(drafted: Seq[Any], own: Replay, trials: Seq[Trial]) -> Probe:
    stats = [output.speculation for output in drafted]
    num_steps = sum(one.num_steps for one in stats)
    depth = max(len(one.acceptance_per_position) for one in stats)
    accepted = [0.0] * depth
    for one in stats:
        for place, share in enumerate(one.acceptance_per_position):
            accepted[place] += share * one.num_steps / num_steps
    guesses = Counter(start.draft[0] for start in own.starts if start.draft)
    truths = Counter(start.truth[0] for start in own.starts)
    num_starts = len(own.starts)
    chance = sum(count * truths[token] for token, count in guesses.items()) / num_starts**2
    num_right = sum(start.length > 0 for start in own.starts)
    return Probe(
        num_tokens=sum(len(output.outputs[0].token_ids) for output in drafted),
        mean_acceptance_length=1 + sum(one.num_accepted_tokens for one in stats) / num_steps,
        acceptance_per_position=tuple(accepted),
        num_starts=num_starts,
        agreement=num_right / num_starts,
        chance=chance,
        is_chance=binomial_tail(num_right, num_starts, chance) > CHANCE_LEVEL,
        mean_length=own.mean_length,
        trials=tuple(trials),
    )


# ---------------------------------------------------------------------------------------------- other readings

Reading = tuple[str, str]
"""The part that is read otherwise, and how."""


def find_readings(stored: DrafterFile, target: LoadedModel) -> Iterator[tuple[Reading, DrafterFile]]:
    """The neighbours of what a file tells, each with one thing changed."""
    info, config = target.model.info, stored.config
    if stored.kind == "medusa":
        own = {name: tensor for name, tensor in stored.tensors.items() if not name.startswith("lm_heads.")}
        if len(own) < len(stored.tensors) and stored.vocabulary is None:
            yield ("lm_heads", "the target's lm_head in place of their own"), replace(stored, tensors=own)
    if stored.kind not in EAGLE:
        return
    if stored.kind != "eagle1":
        taps = resolve_taps(stored, info.num_layers)
        for step in (-1, 1):
            moved = tuple(tap + step for tap in taps)
            if min(moved) >= 0 and max(moved) <= info.num_layers:
                yield ("layer ids", f"the layers {list(moved)} by our count"), replace(stored, taps=moved)
        for flag in ("norm_before_residual", "norm_output"):
            flipped = not config.get(flag, False)
            if flag != "norm_output" or stored.kind == "eagle3":
                yield (flag, f"{flag} = {str(flipped).lower()}"), _with(stored, **{flag: flipped})
    rope = dict(config["rope"])
    for theta in sorted({10000.0, target_theta(target) or 10000.0} - {float(rope["rope_theta"])}):
        yield ("rope_theta", f"rope_theta = {theta:g}"), _with(stored, rope={**rope, "rope_theta": theta})
    for name, whose in (("lm_head.weight", "lm_head"), ("embed_tokens.weight", "embed_tokens")):
        if name in stored.tensors and config["hidden_size"] == info.hidden_size:
            tensors = {key: tensor for key, tensor in stored.tensors.items() if key != name}
            yield (whose, f"the target's {whose} in place of its own"), replace(stored, tensors=tensors)


def _with(stored: DrafterFile, **changes: Any) -> DrafterFile:
    return replace(stored, config={**stored.config, **changes})


def target_theta(target: LoadedModel) -> float | None:
    """The base of the target's rotary angles, where its file tells."""
    rope = target_config(target).get("rope_parameters") or {}
    theta = rope.get("rope_theta", target_config(target).get("rope_theta"))
    return float(theta) if isinstance(theta, int | float) else None


def target_config(target: LoadedModel) -> Mapping[str, Any]:
    """The target's configuration, empty where it has no file."""
    if not target.path.exists():
        return {}
    return read_checkpoint(target.path, weights=False).config


# ---------------------------------------------------------------------------------------------- a text once more


class Recorder(Drafter):
    """Keeps the hidden states of a text."""

    def __init__(self, layers: Seq[int]) -> None:
        self.taps = tuple(layers)
        self.parts: list[Array] = []

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Any]:
        raise AssertionError("nobody asks a recorder")

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
        if taps is not None:
            self.parts.append(taps)


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer to it, with the hidden states of all positions but the last.

    Attributes:
        states: for each layer [rows, D].
    """

    prompt: list[int]
    answer: list[int]
    states: dict[int, Array]

    @classmethod
    def record(cls, model: Model, prompt: list[int], answer: list[int], layers: Seq[int]) -> Text:
        recorder = Recorder(layers)
        sequence = _sequence(model, [*prompt, *answer])
        prefill(model, recorder, sequence)
        width = model.info.hidden_size
        states: dict[int, list[Any]] = {}
        if layers:
            lent = model.lend()
            assert lent is not None, "a drafter with taps was built, so its target lends"
            whole = [lent.ops.to_numpy(part) for part in recorder.parts]
            for place, layer in enumerate(layers):
                states[layer] = [part[:, place * width : (place + 1) * width] for part in whole]
        return cls(prompt, answer, {layer: np.concatenate(parts) for layer, parts in states.items()})

    def taps(self, layers: Seq[int], first: int, end: int, model: Model) -> Array | None:
        """What a drafter with these taps observes of the positions from `first` to `end`."""
        if not layers:
            return None
        lent = model.lend()
        assert lent is not None
        return lent.ops.array(np.concatenate([self.states[layer][first:end] for layer in layers], axis=1))


@dataclass(frozen=True, slots=True)
class Start:
    """One place at which a drafter was asked."""

    draft: tuple[int, ...]
    before: tuple[int, ...]
    truth: tuple[int, ...]

    @property
    def length(self) -> int:
        """Leading tokens of the draft that are right."""
        return _common(self.draft, self.truth)


class Replay:
    """What a drafter drafts at every place of known texts."""

    def __init__(self, starts: Seq[Start]) -> None:
        self.starts = list(starts)

    @property
    def mean_length(self) -> float:
        return sum(start.length for start in self.starts) / len(self.starts)

    def compare(self, reading: Reading, other: Replay) -> Trial:
        """How another reading did at the same places."""
        return self._compare(reading, [start.length for start in other.starts])

    def compare_shifts(self) -> list[Trial]:
        """How the same drafts would do if they were meant one place further on, or back."""
        further = [_common(start.draft, start.truth[1:]) for start in self.starts]
        back = [_common(start.draft, (start.before[-1], *start.truth)) for start in self.starts]
        words = "each draft moved one token {}"
        return [
            self._compare(("alignment", words.format("further")), further),
            self._compare(("alignment", words.format("back")), back),
        ]

    def _compare(self, reading: Reading, lengths: Seq[int]) -> Trial:
        own = [start.length for start in self.starts]
        return Trial(
            part=reading[0],
            change=reading[1],
            mean_length=sum(lengths) / len(lengths),
            num_better=sum(other > mine for other, mine in zip(lengths, own, strict=True)),
            num_worse=sum(other < mine for other, mine in zip(lengths, own, strict=True)),
        )


def replay(drafter: Drafter, model: Model, texts: Seq[Text]) -> Replay:
    """Ask a drafter at every place of the answers, as often as they differ."""
    starts: dict[tuple[tuple[int, ...], tuple[int, ...]], Start] = {}
    for text in texts:
        sequence = _sequence(model, text.prompt)
        first = len(text.prompt) - 1
        drafter.observe(sequence, 0, text.prompt[:-1], text.taps(drafter.taps, 0, first, model))
        for place, token in enumerate(text.answer):
            draft = drafter.propose([sequence], [64])[0]
            before, truth = tuple(sequence.tokens[-CONTEXT:]), tuple(text.answer[place:])
            starts.setdefault((before, truth[:CONTEXT]), Start(draft.tokens, before, truth))
            at = len(sequence.tokens) - 1
            sequence.tokens.append(token)
            if place + 1 < len(text.answer):
                drafter.observe(sequence, at, [sequence.tokens[at]], text.taps(drafter.taps, at, at + 1, model))
    return Replay(list(starts.values()))


def _sequence(model: Model, tokens: Seq[int]) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    return Sequence("doctor", list(tokens), len(tokens), params, 0, model.new_cache())


def _common(left: Seq[int], right: Seq[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


def binomial_tail(count: int, num: int, share: float) -> float:
    """How probable at least `count` of `num` are, if each has the probability `share`."""
    if count <= 0 or share >= 1:
        return 1.0
    if share <= 0:
        return 0.0
    logs = [
        math.lgamma(num + 1) - math.lgamma(k + 1) - math.lgamma(num - k + 1)
        + k * math.log(share) + (num - k) * math.log1p(-share)
        for k in range(count, num + 1)
    ]  # fmt: skip
    return min(math.fsum(map(math.exp, logs)), 1.0)
