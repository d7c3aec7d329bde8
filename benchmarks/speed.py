"""How fast does each drafter decode, on which kind of prompt?

    python benchmarks/speed.py --spec-bench path/to/question.jsonl --drafters none ngram

Each prompt is answered greedily by every drafter in turn, several rounds over, so that all drafters meet the same noise
of the machine. A drafter's ratio is the median over prompts and rounds of (its speed / the first drafter's speed in
the same round). Prints a Markdown table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence as Seq
from pathlib import Path

from sakiyomi import LLM, RequestOutput, SamplingParams
from sakiyomi.assemble import ModelOptions, load_model, make_drafter
from sakiyomi.bench.prompts import read_prompts

sys.path.insert(0, str(Path(__file__).parent))
from identity import OWN_PROMPTS  # a script beside this one

Answers = dict[str, list[RequestOutput]]
"""Drafter -> its answers to one prompt, round by round."""


def measure(llms: dict[str, LLM], prompt: Seq[int], params: SamplingParams, num_rounds: int) -> Answers:
    """Answer one prompt by all drafters in turn, `num_rounds` times."""
    answers: Answers = defaultdict(list)
    for _ in range(num_rounds):
        for name, llm in llms.items():
            answers[name] += llm.generate(prompt, params)
    texts = {tuple(one.outputs[0].token_ids) for runs in answers.values() for one in runs}
    assert len(texts) == 1, "drafters changed the text"
    return answers


def summarize(group: str, prompts: Seq[Answers], names: Seq[str]) -> list[dict[str, object]]:
    """One row per drafter: mean acceptance length, median tokens/s, and the ratio to the first drafter."""
    rows = []
    for name in names:
        runs = [one for answers in prompts for one in answers[name]]
        ratios = [
            one.timing.tokens_per_s / base.timing.tokens_per_s
            for answers in prompts
            for one, base in zip(answers[name], answers[names[0]], strict=True)
        ]
        steps = sum(one.speculation.num_steps for one in runs)
        accepted = sum(one.speculation.num_accepted_tokens for one in runs)
        rows.append(
            {
                "group": group,
                "drafter": name,
                "mean_acceptance_length": round(1 + accepted / steps, 2),
                "tokens_per_s": round(statistics.median(one.timing.tokens_per_s for one in runs), 1),
                "ratio": round(statistics.median(ratios), 2),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench; without it three own prompts")
    parser.add_argument("--per-group", type=int, default=4)
    parser.add_argument("--groups", nargs="*", help="only these groups")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--drafters", nargs="+", default=["none", "ngram"], help="name:key=value,...; the first is the base"
    )
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    options = ModelOptions(threads=args.threads)
    loaded = load_model(args.model, options)
    llms = {name: LLM.from_loaded(loaded, drafter=make_drafter(name, loaded, options)) for name in args.drafters}
    groups = read_prompts(args.spec_bench, args.per_group) if args.spec_bench else {"own": list(OWN_PROMPTS)}
    params = SamplingParams(temperature=0, max_tokens=args.tokens)
    table: list[dict[str, object]] = []
    everything: list[Answers] = []
    print("| prompts | drafter | tokens per step | tokens/s | ratio |\n|---|---|---|---|---|")
    for group, texts in groups.items():
        if args.groups and group not in args.groups:
            continue
        first = next(iter(llms.values()))
        prompts = [first.render([{"role": "user", "content": text}]) for text in texts]
        answers = [measure(llms, prompt, params, args.rounds) for prompt in prompts]
        everything += answers
        table += _show(summarize(group, answers, args.drafters))
    table += _show(summarize("all", everything, args.drafters))
    print(json.dumps({"machine": platform.processor() or platform.machine(), "rows": table}))
    return 0


def _show(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
