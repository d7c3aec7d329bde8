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
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import chi2

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import ModelOptions, load_model, make_verifier
from sakiyomi.decode import step
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.models.toy import TokenCache
from sakiyomi.prove.memo import MemoModel
from sakiyomi.tree import Draft
from sakiyomi.types import DrafterContext, Output, Sequence, Verdict, Verifier

sys.path.insert(0, str(Path(__file__).parent))
from identity import OWN_PROMPTS  # a script beside this one

NUM_TOKENS, NUM_BINS = 3, 4
REJECTED = 0.001
Tokens = tuple[int, ...]
Ids, Float64s = npt.NDArray[np.int64], npt.NDArray[np.float64]
SETTINGS = ((1.0, 1.0, 3), (0.7, 0.9, 1))  # temperature, top_p, tokens of the answer in front
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


def make_context(llm: LLM, num_answered: int) -> list[int]:
    """A place in an answer where the target hesitates between few tokens: each other text costs a pass."""
    prompt = llm.render([{"role": "user", "content": OWN_PROMPTS[2]}])
    answer = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=num_answered), use_tqdm=False)[0]
    return [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


def draw(
    target: MemoModel, drafter: ModelDrafter, rule: Verifier, context: Seq[int], params: SamplingParams, count: int
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

    def __init__(self, target: MemoModel, drafting: MemoModel, context: Seq[int], params: SamplingParams) -> None:
        self._models = target, drafting
        self._context = list(context)
        self._params = params

    def cells(self, draws: Seq[Tokens], shares: Float64s) -> npt.NDArray[np.int64]:
        """The cell of each draw; `shares` [N, NUM_TOKENS] in [0, 1). Draws that begin alike are looked at together."""
        cells = np.zeros(len(draws), np.int64)
        for i in range(NUM_TOKENS):
            beginnings: dict[Tokens, list[int]] = defaultdict(list)
            for number, tokens in enumerate(draws):
                beginnings[tokens[:i]].append(number)
            for beginning, numbers in beginnings.items():
                ids, upper, probs = self._steps_behind(beginning)
                place_of = np.full(self._models[0].info.vocab_size, -1)
                place_of[ids] = np.arange(ids.size)
                places = place_of[[draws[number][i] for number in numbers]]
                assert places.min() >= 0, "a token that the target gives probability 0"
                uniforms = upper[places] - shares[numbers, i] * probs[places]
                bins = np.clip((uniforms * NUM_BINS).astype(np.int64), 0, NUM_BINS - 1)
                cells[numbers] = cells[numbers] * NUM_BINS + bins
        return cells

    def _steps_behind(self, beginning: Tokens) -> tuple[Ids, Float64s, Float64s]:
        tokens = (*self._context, *beginning)
        history = Sequence("0", self._context, len(self._context), self._params, 0, TokenCache()).history(beginning)
        p, q = (model.law(tokens, history) for model in self._models)
        order = np.argsort(q.at(p.ids) / p.probs, kind="stable")
        return p.ids[order], np.cumsum(p.probs[order]), p.probs[order]


def test(cells: npt.NDArray[np.int64]) -> tuple[float, float]:
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
    parser.add_argument("--temperatures", nargs="+", type=float, default=[setting[0] for setting in SETTINGS])
    parser.add_argument("--seed", type=int, default=0, help="of the random shares; the draws have seeds 0, 1, ...")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    args = parser.parse_args()
    loaded = load_model(args.model, ModelOptions(threads=args.threads))
    target = MemoModel(loaded.model)
    drafting = MemoModel(loaded.model.shallow(args.layers))
    results, is_good, rng = [], True, np.random.default_rng(args.seed)
    for temperature, top_p, num_answered in SETTINGS:
        if temperature not in args.temperatures:
            continue
        context = make_context(LLM.from_loaded(loaded), num_answered)
        params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=None, ignore_eos=True)
        uniforms = Uniforms(target, drafting, context, params)
        rules: dict[str, Callable[[], Verifier]] = {name: lambda name=name: make_verifier(name) for name in args.rules}
        rules["control"] = lambda: Flattened(make_verifier(args.rules[0]), 0.5)
        for name, make_rule in rules.items():
            config = ModelDrafter.Config(
                model="shallow", num_speculative_tokens=2, width=RULES.get(name, 1), max_nodes=6, draw="independent"
            )
            drafter = ModelDrafter(config, DrafterContext(target, lambda _: drafting))
            started = time.perf_counter()
            tokens = list(draw(target, drafter, make_rule(), context, params, args.draws))
            statistic, chance = test(uniforms.cells(tokens, rng.random((args.draws, NUM_TOKENS))))
            seconds = round(time.perf_counter() - started, 1)
            is_rejected = chance < REJECTED
            is_good &= is_rejected == (name == "control")
            setting = {"temperature": temperature, "top_p": top_p}
            results.append({"rule": name, **setting, "chi2": statistic, "p": chance, "seconds": seconds})
            verdict = "rejected" if is_rejected else "not rejected"
            where = f"temperature {temperature}, top_p {top_p}"
            print(f"{name:10} {where}   chi2 {statistic:8.1f}   p {chance:.3g}   {verdict}", flush=True)
    print(json.dumps({"good": is_good, "draws": args.draws, "results": results}))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
