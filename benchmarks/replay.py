"""What would a lookup drafter have done? Its acceptance, found by replaying answers that are known already.

    python benchmarks/replay.py --answers answers.json --spec-bench path/to/question.jsonl --drafters ngram suffix

Under the rule `match` the text is the same with every drafter, so a drafter that looks at the text alone can be judged
without the model: it drafts, the known answer says what is accepted, and so on. The plain answers are computed once and
kept in the file; later runs take seconds. "speed" is tokens per unit of cost, where a forward pass over M rows costs
v(M) plain steps (`--cost`, linear in between) and drafting what it takes here (`--step-ms` of a plain step).

Prints a Markdown table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, make_drafter
from sakiyomi.bench.prompts import read_prompts
from sakiyomi.decode import Step
from sakiyomi.engine.budget import MAX_DRAFT_NODES, AdaptiveBudget, Budget, FixedBudget
from sakiyomi.models.toy import TokenCache, ToyModel, scripted_law
from sakiyomi.types import Drafter, ModelInfo, Sequence

COST = "1:1,2:1.05,4:1.15,8:1.5,16:2.3"


@dataclass(frozen=True)
class Answer:
    """A prompt with the text that the model gives to it."""

    prompt: list[int]
    answer: list[int]


@dataclass
class Replay:
    """Counts of one drafter over some answers."""

    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rows_at_cost: float = 0.0
    draft_s: float = 0.0

    def add(self, other: Replay) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def speed(self, step_s: float) -> float:
        return self.num_tokens / (self.num_rows_at_cost + self.draft_s / step_s)


class Cost:
    """v(M): what a forward pass over M rows costs, in plain steps; the last slope goes on."""

    def __init__(self, text: str) -> None:
        points = sorted((int(rows), float(cost)) for rows, cost in (part.split(":") for part in text.split(",")))
        self._rows = [rows for rows, _ in points]
        self._costs = [cost for _, cost in points]

    def __call__(self, num_rows: int) -> float:
        if num_rows <= self._rows[-1]:
            return float(np.interp(num_rows, self._rows, self._costs))
        slope = (self._costs[-1] - self._costs[-2]) / (self._rows[-1] - self._rows[-2])
        return self._costs[-1] + slope * (num_rows - self._rows[-1])


def replay(drafter: Drafter, budget: Budget, one: Answer, info: ModelInfo, cost: Cost, step_s: float) -> Replay:
    """Let a drafter guess a known answer, step by step."""
    result = Replay(num_tokens=len(one.answer))
    params = SamplingParams(temperature=0, max_tokens=len(one.answer))
    cache = TokenCache()
    sequence = Sequence("0", list(one.prompt), len(one.prompt), params, 0, cache)
    while sequence.num_new < len(one.answer):
        cache.tokens = sequence.tokens[:-1]
        started = time.perf_counter()
        plan = budget.propose([sequence], [MAX_DRAFT_NODES], info)
        result.draft_s += time.perf_counter() - started
        (draft,) = plan.drafts
        truth = one.answer[sequence.num_new :]
        path, tokens = draft.follow(lambda node, tokens, truth=truth: truth[len(tokens)])  # type: ignore[misc]
        sequence.tokens += tokens
        sequence.num_steps += 1
        num_accepted = min(len(path), len(tokens))
        rows = 1 + len(draft)
        budget.record([sequence], plan, [Step(tokens, num_accepted, len(draft), None)], cost(rows) * step_s)
        result.num_accepted += num_accepted
        result.num_steps += 1
        result.num_drafted += len(draft)
        result.num_rows_at_cost += cost(rows)
    drafter.forget(sequence)
    return result


def read_answers(path: Path, args: argparse.Namespace) -> dict[str, list[Answer]]:
    """The answers of the file, computed first where they are not there."""
    if not path.is_file():
        if args.spec_bench is None:
            raise SystemExit(f"{path} does not exist; give --spec-bench to compute the answers.")
        loaded = load_model(args.model, ModelOptions(threads=args.threads))
        llm = LLM.from_loaded(loaded, drafter="ngram")
        groups = {}
        for group, texts in read_prompts(args.spec_bench, args.per_group).items():
            prompts = [llm.render([{"role": "user", "content": text}]) for text in texts]
            outputs = [llm.generate(p, SamplingParams(temperature=0, max_tokens=args.tokens))[0] for p in prompts]
            groups[group] = [{"prompt": o.prompt_token_ids, "answer": list(o.outputs[0].token_ids)} for o in outputs]
        path.write_text(json.dumps(groups))
    groups = json.loads(path.read_text())
    return {group: [Answer(**one) for one in answers[: args.per_group]] for group, answers in groups.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=Path, required=True, help="file of the plain answers; made if it is missing")
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix"], help="name:key=value,...; no models")
    parser.add_argument("--per-group", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128, help="length of answers that are made")
    parser.add_argument("--cost", type=Cost, default=Cost(COST), help=f"rows:cost,... ({COST})")
    parser.add_argument("--budget", choices=("auto", "adaptive", "fixed"), default="auto")
    parser.add_argument("--step-ms", type=float, default=10.0, help="milliseconds of a plain step")
    parser.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    groups = read_answers(args.answers, args)
    vocab_size = 1 + max(max(one.prompt + one.answer) for answers in groups.values() for one in answers)
    model = ToyModel(scripted_law(vocab_size, {}), vocab_size, max_model_len=1 << 20)
    stand_in = LoadedModel(model=model, tokenizer=None, chat_template=None, path=Path("replay"))
    rows = []
    print(
        "| drafter | prompts | tokens per step | drafted per step | speed | µs per draft |\n|---|---|---|---|---|---|"
    )
    for name in args.drafters:
        results = {}
        drafter = make_drafter(name, stand_in, ModelOptions())
        is_adaptive = drafter.wants_budget if args.budget == "auto" else args.budget == "adaptive"
        budget = AdaptiveBudget(drafter) if is_adaptive else FixedBudget(drafter)
        for group, answers in groups.items():
            results[group] = Replay()
            for one in answers:
                results[group].add(replay(drafter, budget, one, model.info, args.cost, args.step_ms / 1000))
        everything = Replay()
        for result in results.values():
            everything.add(result)
        for group, result in {**results, "all": everything}.items():
            rows.append(_row(name, group, result, args.step_ms / 1000))
            print("| " + " | ".join(str(value) for value in rows[-1].values()) + " |", flush=True)
    print(json.dumps({"rows": rows}))
    return 0


def _row(name: str, group: str, result: Replay, step_s: float) -> dict[str, object]:
    return {
        "drafter": name,
        "group": group,
        "mean_acceptance_length": round(1 + result.num_accepted / result.num_steps, 3),
        "drafted_per_step": round(result.num_drafted / result.num_steps, 2),
        "speed": round(result.speed(step_s), 3),
        "draft_us": round(1e6 * result.draft_s / result.num_steps, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
