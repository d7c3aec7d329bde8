"""How much does each acceptance rule accept, on a real model with its first layers as the drafter?

    python benchmarks/acceptance.py --layers 27 --contexts 200

Nothing here is a sampled outcome of a rule. At each context drafts are drawn, and for every draft the expected number
of accepted tokens is computed exactly:

- `rejection` and `block` from the laws along a drawn chain, as sum over i of the probability that at least i of the
  drawn tokens are kept (given the first i);
- `tree` and `traversal` by going through every outcome of the rule's coins over a drawn tree;
- `match` with an argmax chain from the target's laws along it; with a coupled chain by whether plain decoding's own
  tokens are those of the draft, which is one fact per seed and so is averaged over more seeds.

Beside them stand, for the first position, the bounds that theory gives: 1 - TV for the token rule, (1 - TV) / (1 + TV)
for coupled drafts, and the exact probability of a coupled match. Prints tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model
from sakiyomi.bench.prompts import read_prompts
from sakiyomi.decode import prefill
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.noise import NoiseKey, Randomness
from sakiyomi.sampling.distributions import Law, SampledRule, TargetLaws, draft_law
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, DrawMode, Output, Sequence, Span
from sakiyomi.verify.block import joint_ratios
from sakiyomi.verify.match import MatchVerifier
from sakiyomi.verify.traversal import TraversalVerifier
from sakiyomi.verify.tree import TreeVerifier

sys.path.insert(0, str(Path(__file__).parent))
from identity import OWN_PROMPTS  # a script beside this one

DEPTH, WIDTH, MAX_NODES = 5, 2, 14
JOINT_RULES = {"block": "rejection", "traversal": "tree"}
MORE_SEEDS = 4  # for coupled drafts, whose match is a fact and not an expectation


class CoinTosser:
    """Goes through every outcome of a rule's coins; the token behind the last accepted one is not of interest."""

    def __init__(self) -> None:
        self._turns: list[bool] = []

    def outcomes(self, run: Callable[[], int]) -> Iterator[tuple[float, int]]:
        """Results of `run` with their probabilities."""
        while True:
            self._position, self._probability = 0, 1.0
            result = run()
            yield self._probability, result
            while self._turns and not self._turns[-1]:
                self._turns.pop()
            if not self._turns:
                return
            self._turns[-1] = False

    def flip(self, key: NoiseKey, p: float, q: float = 1.0) -> bool:
        chance = min(1.0, p / q) if q > 0 else float(p > 0)
        if chance in (0.0, 1.0):
            return chance == 1.0
        if self._position == len(self._turns):
            self._turns.append(True)
        is_heads = self._turns[self._position]
        self._position += 1
        self._probability *= chance if is_heads else 1 - chance
        return is_heads

    def draw(self, key: NoiseKey, ids: npt.NDArray[Any], probs: npt.NDArray[Any], count: int = 1) -> list[int]:
        return [int(ids[0])]


@dataclass(frozen=True)
class Context:
    """A place in a text of the model's own, with as many drafts as there are seeds."""

    tokens: tuple[int, ...]
    num_prompt: int


def make_contexts(loaded: LoadedModel, texts: Seq[str], count: int, temperature: float) -> list[Context]:
    """Places inside sampled answers, spread over all prompts."""
    llm = LLM.from_loaded(loaded)
    prompts = [llm.render([{"role": "user", "content": text}]) for text in texts]
    per_prompt = -(-count // len(prompts))
    params = SamplingParams(temperature=temperature, max_tokens=4 * per_prompt + 4, seed=1, ignore_eos=True)
    contexts = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        answer = output.outputs[0].token_ids
        for place in range(per_prompt):
            contexts.append(Context((*output.prompt_token_ids, *answer[: 4 * place + 2]), len(output.prompt_token_ids)))
    return contexts[:count]


class Bench:
    """The target, its first layers as drafters, and what they make of a context."""

    def __init__(self, loaded: LoadedModel, num_layers: int) -> None:
        self.model = loaded.model
        shallow = loaded.model.shallow(num_layers)
        self._context = DrafterContext(self.model, lambda name: shallow)
        self.gains: dict[str, list[float]] = defaultdict(list)
        """What the joint rule accepts more than the other, for each drawn chain and each drawn tree."""

    def drafter(self, draw: DrawMode, width: int = 1) -> ModelDrafter:
        config = ModelDrafter.Config(
            model="shallow", num_speculative_tokens=DEPTH, width=width, max_nodes=MAX_NODES, draw=draw
        )
        return ModelDrafter(config, self._context)

    def measure(self, context: Context, temperature: float, num_seeds: int, num_trees: int) -> dict[str, float]:
        """Expected accepted tokens per rule, over the drafts of `num_seeds` seeds, and `num_trees` trees."""
        params = SamplingParams(temperature=temperature, max_tokens=None, ignore_eos=True)
        sequence = Sequence("0", list(context.tokens), context.num_prompt, params, 0, self.model.new_cache())
        prefill(self.model, NoneDrafter(), sequence)
        sums: dict[str, float] = defaultdict(float)
        for name, drafter in self._drafters().items():
            count = {"coupled": MORE_SEEDS * num_seeds, "argmax": 1, "tree": num_trees}.get(name, num_seeds)
            for seed in range(count):
                sequence.seed = seed
                draft = drafter.propose([sequence], [64])[0]
                judged = self._judge(name, draft, sequence)
                for rule, value in judged.items():
                    sums[rule] += value / count
                for joint, other in JOINT_RULES.items():
                    if joint in judged:
                        self.gains[joint].append(judged[joint] - judged[other])
            # The drafter's memo stays with the sequence: the cache in it serves the next kind of draft as well.
        return dict(sums)

    def _drafters(self) -> dict[str, Drafter]:
        return {
            "chain": self.drafter("independent"),
            "tree": self.drafter("independent", WIDTH),
            "coupled": self.drafter("coupled"),
            "argmax": self.drafter("argmax"),
        }

    def _judge(self, name: str, draft: Draft, sequence: Sequence) -> dict[str, float]:
        span = Span(
            sequence.cache,
            [sequence.tokens[-1], *draft.tokens],
            [-1, *(parent + 1 for parent in draft.parents)],
            range(len(draft) + 1),
        )
        output = _Kept(self.model.forward([span])[0], len(draft) + 1)
        if name == "chain":
            return judge_chain(draft, TargetLaws(draft, output, sequence))
        if name == "tree":
            laws = TargetLaws(draft, output, sequence)
            rules = {"tree": TreeVerifier, "traversal": TraversalVerifier}
            return {rule: expect_accepted(make, draft, laws, sequence) for rule, make in rules.items()}
        if name == "argmax":
            laws = TargetLaws(draft, output, sequence)
            probabilities = [laws.after(node - 1).probability(token) for node, token in enumerate(draft.tokens)]
            return {"match, argmax": float(np.cumprod(probabilities).sum())}
        return {"match, coupled": float(len(MatchVerifier().verify(draft, output, sequence).path))}


class _Kept:
    """An output whose rows are looked up once."""

    taps = None

    def __init__(self, output: Output, num_rows: int) -> None:
        self._rows = [output.row(i) for i in range(num_rows)]
        self.row = self._rows.__getitem__
        self.argmax = output.argmax
        self.choose = output.choose


def judge_chain(draft: Draft, laws: TargetLaws) -> dict[str, float]:
    """What the rules for chains are expected to keep of a drawn chain, and the theory of its first position."""
    product, kept = 1.0, 0.0
    for node, token in enumerate(draft.tokens):
        p = laws.after(node - 1)
        product *= min(1.0, p.probability(token) / draft_law(draft, node, p.vocab_size).probability(token))
        kept += product
    p = laws.after(-1)
    q = draft_law(draft, 0, p.vocab_size)
    distance = float(np.abs(p.row() - q.row()).sum() / 2)
    return {
        "rejection": kept,
        "block": sum(joint_ratios(draft, laws)[1:]),
        "first: 1 - TV": 1 - distance,
        "first: (1 - TV) / (1 + TV)": (1 - distance) / (1 + distance),
        "first: coupled": match_probability(p, q),
        "first: argmax": p.probability(int(q.ids[np.argmax(q.probs)])),
    }


def match_probability(p: Law, q: Law) -> float:
    """The probability that argmax(log p + noise) is argmax(log q + noise) for the same Gumbel noise.

    It is the sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i). With r = q / p that inner sum splits at
    r_j = r_i: the ids with smaller r count p_j / p_i, the others q_j / q_i.
    """
    p_row, q_row = p.row(), q.row()
    both = np.flatnonzero((p_row > 0) & (q_row > 0))
    ratio = q_row[both] / p_row[both]
    order = np.argsort(ratio, kind="stable")
    p_sorted, q_sorted = p_row[both][order], q_row[both][order]
    p_below = np.cumsum(p_sorted) - p_sorted + p_row[q_row == 0].sum()  # of ids with a smaller ratio
    q_above = q_sorted[::-1].cumsum()[::-1] + q_row[p_row == 0].sum()
    return float((1 / (p_below / p_sorted + q_above / q_sorted)).sum())


def expect_accepted(make_rule: Callable[..., SampledRule], draft: Draft, laws: TargetLaws, sequence: Sequence) -> float:
    """The expected number of accepted tokens of a drawn draft, over all outcomes of the rule's coins."""
    tosser = CoinTosser()
    randomness: Randomness = tosser
    rule = make_rule(randomness=randomness)
    outcomes = tosser.outcomes(lambda: len(rule.judge(draft, laws, sequence).path))
    return sum(probability * length for probability, length in outcomes)


def summarize(rows: Seq[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Mean over contexts and its standard error, for each rule and for the differences that must not be negative."""
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    for joint, other in JOINT_RULES.items():
        columns[f"{joint} - {other}"] = columns[joint] - columns[other]
    return {name: (float(v.mean()), float(v.std() / np.sqrt(len(v)))) for name, v in columns.items()}


def run(
    loaded: LoadedModel,
    texts: Seq[str],
    num_layers: int,
    temperature: float,
    num_contexts: int,
    num_seeds: int,
    num_trees: int,
) -> tuple[dict[str, tuple[float, float]], dict[str, list[float]]]:
    """The summary of one setting, and what each joint rule gains at each draft."""
    bench = Bench(loaded, num_layers)
    contexts = make_contexts(loaded, texts, num_contexts, temperature)
    rows = []
    for number, context in enumerate(contexts):
        rows.append(bench.measure(context, temperature, num_seeds, num_trees))
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{len(contexts)}", end="", file=sys.stderr)
    return summarize(rows), bench.gains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layers", type=int, nargs="+", default=[27], help="first layers that draft")
    parser.add_argument("--contexts", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=4, help="drafts per context and kind")
    parser.add_argument("--trees", type=int, default=16, help="drawn trees per context")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench; without it three own prompts")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    loaded = load_model(args.model, ModelOptions(threads=args.threads))
    texts = list(OWN_PROMPTS)
    if args.spec_bench:
        groups = read_prompts(args.spec_bench, 20).values()
        texts = [text for group in groups for text in sorted(group, key=len)[:4]]  # short ones: prompts cost time
    results = []
    for num_layers in args.layers:
        for temperature in args.temperatures:
            summary, gains = run(loaded, texts, num_layers, temperature, args.contexts, args.seeds, args.trees)
            print(f"\nfirst {num_layers} layers, temperature {temperature}: accepted tokens of {DEPTH}, per step")
            for name, (mean, error) in summary.items():
                print(f"  {name:28} {mean:7.4f} +- {error:.4f}")
            losses = {}
            for joint, values in gains.items():
                losses[joint] = {"smallest": min(values), "share": float(np.mean(np.array(values) < -1e-12))}
                print(f"  {joint}, drafts where it accepts less: {losses[joint]['share']:.1%} of {len(values)}", end="")
                print(f", the smallest difference {min(values):.2e}")
            results.append({"layers": num_layers, "temperature": temperature, "summary": summary, "losses": losses})
    settings = {
        "contexts": args.contexts,
        "seeds": args.seeds,
        "trees": args.trees,
        "depth": DEPTH,
        "width": WIDTH,
        "nodes": MAX_NODES,
    }
    print(json.dumps({"results": results, "settings": settings, "machine": platform.processor() or platform.machine()}))


if __name__ == "__main__":
    main()
