"""Do the rules that keep the distribution keep it on a real model? Draws of the first tokens, tested by chi-square.

    python benchmarks/chi_square.py --draws 20000

From one fixed context the first 3 tokens are drawn many times, by speculation with the model's first layers as the
drafter. Each token becomes a number in [0, 1): the target's probability of all ids that are ordered before it, plus a
random share of its own. If and only if the tokens have the target's law, these numbers are independent and uniform,
whatever the vocabulary; ids are ordered by q / p, where a rule that leans to its drafter shows most. 4 x 4 x 4 cells
are compared with equal counts. As a control the same is done with a rule that takes wrong laws for q (at temperature 1
where they were drawn at the request's), which must be rejected.

Prints one line per rule and, as its last line, one JSON object. Exit code 0 only if every rule passes (p > 0.001) and
every control fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import ModelOptions, load_model, make_verifier
from sakiyomi.decode import step
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.models.toy import TokenCache, ToyModel
from sakiyomi.sampling.distributions import law_of
from sakiyomi.tree import Draft
from sakiyomi.types import DrafterContext, Model, Output, Sequence, Span, Verdict, Verifier

sys.path.insert(0, str(Path(__file__).parent))
from identity import OWN_PROMPTS  # a script beside this one

NUM_TOKENS, NUM_BINS = 3, 4
REJECTED = 0.001
Tokens = tuple[int, ...]
RULES = {"rejection": 1, "block": 1, "tree": 2, "traversal": 2}  # name -> width of the drafts


class Flattened(Verifier):
    """A rule that is told wrong laws of the drafter: each of q's probabilities to the power `exponent`."""

    is_lossless = "no"

    def __init__(self, inner: Verifier, exponent: float) -> None:
        self.inner = inner
        self.exponent = exponent

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        if draft.probs is not None:
            raised = [probs**self.exponent for probs in draft.probs]
            draft = replace(draft, probs=[probs / probs.sum() for probs in raised])
        return self.inner.verify(draft, output, sequence)


def remember(model: Model, context: Seq[int]) -> ToyModel:
    """A model whose rows behind the context are computed once, since the same few prefixes return."""
    cache = model.new_cache()
    model.forward([Span(cache, context[:-1], range(-1, len(context) - 2))])
    cache.keep(range(len(context) - 1))

    @lru_cache(maxsize=1500)
    def row(path: Tokens) -> npt.NDArray[np.float32]:
        span = Span(cache, [context[-1], *path], range(-1, len(path)), [len(path)])
        return model.forward([span])[0].row(0).copy()

    return ToyModel(lambda tokens: row(tuple(tokens[len(context) :])), model.info.vocab_size)


def draw(
    target: ToyModel, drafter: ModelDrafter, rule: Verifier, context: Seq[int], params: SamplingParams, count: int
) -> Iterator[Tokens]:
    """The first tokens for each of `count` seeds."""
    for seed in range(count):
        cache = TokenCache(context[:-1])
        sequence = Sequence("0", list(context), len(context), params, seed, cache)
        while sequence.num_new < NUM_TOKENS:
            # The last step may draft past what is looked at: the rule must not know where we stop looking.
            step(target, drafter, rule, [sequence], [8])
        yield tuple(sequence.tokens[len(context) : len(context) + NUM_TOKENS])


class Uniforms:
    """Turns tokens into numbers that are uniform under the target's law."""

    def __init__(self, target: ToyModel, drafting: ToyModel, context: Seq[int], params: SamplingParams) -> None:
        self._models = target, drafting
        self._context = list(context)
        self._params = params
        self._rng = np.random.default_rng(0)
        self.steps_of = lru_cache(maxsize=20000)(self._steps_of)

    def cell(self, tokens: Tokens) -> int:
        cell = 0
        for i, token in enumerate(tokens):
            ids, upper, probs = self.steps_of(tokens[:i])
            place = int(np.flatnonzero(ids == token)[0])
            number = upper[place] - self._rng.random() * probs[place]
            cell = cell * NUM_BINS + min(int(number * NUM_BINS), NUM_BINS - 1)
        return cell

    def _steps_of(self, path: Tokens) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        tokens = [*self._context, *path]
        history = Sequence("0", self._context, len(self._context), self._params, 0, TokenCache()).history(path)
        p, q = (law_of(model.law(tokens), history) for model in self._models)
        order = np.argsort(q.at(p.ids) / p.probs, kind="stable")
        return p.ids[order], np.cumsum(p.probs[order]), p.probs[order]


def test(cells: Seq[int]) -> tuple[float, float]:
    """Chi-square of equal counts, and the probability of one as large."""
    counts = np.bincount(cells, minlength=NUM_BINS**NUM_TOKENS)
    expected = len(cells) / counts.size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic, float(chi2.sf(statistic, counts.size - 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--draws", type=int, default=20000)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    args = parser.parse_args()
    loaded = load_model(args.model, ModelOptions(threads=args.threads))
    context = LLM.from_loaded(loaded).render([{"role": "user", "content": OWN_PROMPTS[1]}])
    target = remember(loaded.model, context)
    drafting = remember(loaded.model.shallow(args.layers), context)
    results, is_good = [], True
    for temperature in (1.0, 0.7):
        params = SamplingParams(temperature=temperature, top_p=0.9, max_tokens=None, ignore_eos=True)
        uniforms = Uniforms(target, drafting, context, params)
        rules: dict[str, Callable[[], Verifier]] = {name: lambda name=name: make_verifier(name) for name in args.rules}
        rules["control"] = lambda: Flattened(make_verifier(args.rules[0]), 0.5)
        for name, make_rule in rules.items():
            config = ModelDrafter.Config(
                model="shallow", num_speculative_tokens=2, width=RULES.get(name, 1), max_nodes=6, draw="independent"
            )
            drafter = ModelDrafter(config, DrafterContext(target, lambda _: drafting))
            tokens = draw(target, drafter, make_rule(), context, params, args.draws)
            statistic, chance = test([uniforms.cell(one) for one in tokens])
            is_rejected = chance < REJECTED
            is_good &= is_rejected == (name == "control")
            results.append({"rule": name, "temperature": temperature, "chi2": statistic, "p": chance})
            verdict = "rejected" if is_rejected else "not rejected"
            print(
                f"{name:10} temperature {temperature}   chi2 {statistic:8.1f}   p {chance:.3g}   {verdict}", flush=True
            )
    print(json.dumps({"good": is_good, "draws": args.draws, "results": results}))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
