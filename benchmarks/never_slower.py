"""Is anything ever slower with the adaptive budget than without speculation?

    python benchmarks/never_slower.py planted
    python benchmarks/never_slower.py groups --prompts path/to/question.jsonl --group qa

`planted`: a drafter that is always wrong and costs 0.3 passes of the target, over 512 tokens; the same drafter when a
request allows it nothing; and one that turns good after some time and must be asked again within 200 steps.

`groups`: `auto` and fixed drafters beside plain decoding on each group of prompts, interleaved, with the bounds of a
bootstrap over prompts and rounds. A machine that does other things beside needs more rounds.

Prints tables and, as its last line, one JSON object. Exit code 0 only if every requirement holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict
from pathlib import Path

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model
from sakiyomi.bench.prompts import read_prompts
from sakiyomi.bench.run import ALL, Row, Settings, encoder, run_benchmark
from sakiyomi.decode import prefill
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter
from sakiyomi.measure import Comparison, SharedPrompt, Trial, Way, compare_speeds
from sakiyomi.tree import Draft
from sakiyomi.types import Sequence, Span

PROMPT = "Write a long story about a lighthouse keeper who finds a message in a bottle."
DRAFT_SHARE = 0.3
NUM_DRAFTED = 4
MAX_COST_WRONG, MAX_COST_ZERO, MAX_STEPS_BACK = 1.05, 1.02, 200
MIN_GROUP, MIN_OF_BEST = 0.98, 0.97


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=("planted", "groups"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, help="512 for planted, 128 for groups")
    parser.add_argument("--prompts", type=Path, help="question.jsonl of Spec-Bench; by default our own prompts")
    parser.add_argument("--group", nargs="*")
    parser.add_argument("--per-group", type=int, default=4)
    parser.add_argument("--fixed", nargs="*", default=["ngram", "suffix"])
    args = parser.parse_args()
    options = ModelOptions(threads=args.threads)
    loaded = load_model(args.model, options)
    return check_planted(loaded, args) if args.part == "planted" else check_groups(loaded, options, args)


# ---------------------------------------------------------------------------------------------- a planted drafter


class CostlyDrafter(PlantedDrafter):
    """Waits a fixed time, then drafts the known answer, or what is surely wrong."""

    def __init__(self, answer: Seq[int], num_prompt: int, seconds: float, good_from: int | None = None) -> None:
        super().__init__(self.Config(script=self._draft))
        self.asked_at: list[int] = []
        self._answer, self._num_prompt, self._seconds = answer, num_prompt, seconds
        self._good_from = len(answer) if good_from is None else good_from

    def _draft(self, sequence: Sequence, budget: int) -> Draft:
        until = time.perf_counter() + self._seconds
        self.asked_at.append(sequence.num_steps)
        right = self._answer[sequence.num_new :][: min(NUM_DRAFTED, budget)]
        is_good = sequence.num_new >= self._good_from
        draft = Draft.chain(right if is_good else [(token + 1) % 1000 for token in right])
        while time.perf_counter() < until:
            pass
        return draft


def check_planted(loaded: LoadedModel, args: argparse.Namespace) -> int:
    num_tokens = args.tokens or 512
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompt = encoder(loaded)(PROMPT)
    plain = LLM.from_loaded(loaded)
    answer = list(plain.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    pass_s = time_pass(loaded, prompt)
    shared = SharedPrompt()

    def way(good_from: int | None, speculation: bool, is_plain: bool = False) -> Way[Seq[int]]:
        def run(ids: Seq[int]) -> Trial:
            drafter = CostlyDrafter(answer, len(ids), DRAFT_SHARE * pass_s, good_from)
            llm = LLM.from_loaded(
                loaded, drafter="none" if is_plain else drafter, budget="auto" if is_plain else "adaptive"
            )
            request = llm.requests.build(ids, params, speculation=speculation)
            request.jobs[0].prefix = shared.of(ids)
            llm.run([request])
            assert request.jobs[0].sequence.tokens[len(ids) :] == answer, "the draft changed the text"
            return Trial(request.jobs[0].decode_s, num_tokens, drafter.asked_at)

        return run

    ways = {
        "plain": way(None, False, is_plain=True),
        "always wrong": way(None, True),
        "allowed nothing": way(None, False),
    }
    trials = Comparison(ways, num_rounds=args.rounds, num_warm_ups=0).run([prompt])
    result = {name: 1 / compare_speeds(trials["plain"], trials[name]).value for name in ways}
    asked = statistics.median(len(trial.output) for trial in trials["always wrong"][0])
    turn = num_tokens // 2
    (asked_at,) = (way(turn, True)(prompt).output,)
    back = steps_until_back(asked_at, turn)
    print(
        f"a pass takes {1e3 * pass_s:.2f} ms, a draft {DRAFT_SHARE} of it; the wrong drafter was asked {asked:g} times"
    )
    for name, cost in result.items():
        print(f"{name:16} {cost:.3f} of plain decoding's time")
    print(f"back {back} steps after it turned good")
    holds = (
        result["always wrong"] <= MAX_COST_WRONG
        and result["allowed nothing"] <= MAX_COST_ZERO
        and back <= MAX_STEPS_BACK
    )
    print(json.dumps({"cost": result, "times_asked": asked, "steps_until_back": back, "holds": holds}))
    return 0 if holds else 1


def time_pass(loaded: LoadedModel, prompt: Seq[int]) -> float:
    """Median seconds of a plain pass behind the prompt."""
    cache = loaded.model.new_cache()
    sequence = Sequence("0", list(prompt), len(prompt), SamplingParams(), 0, cache)
    prefill(loaded.model, NoneDrafter(), sequence)
    seconds = []
    for _ in range(30):
        started = time.perf_counter()
        loaded.model.forward([Span(cache, [prompt[-1]], [-1], [0])])[0].argmax()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def steps_until_back(asked_at: Seq[int], turn: int) -> int:
    """Steps from the turn to the first of five in a row that asked; before it each step emits one token."""
    steps = set(asked_at)
    found = (step for step in asked_at if step >= turn and all(step + i in steps for i in range(5)))
    return next(found, 10**6) - turn


# ---------------------------------------------------------------------------------------------- groups of prompts


def check_groups(loaded: LoadedModel, options: ModelOptions, args: argparse.Namespace) -> int:
    groups = read_prompts(args.prompts, args.per_group, args.group)
    settings = Settings(drafters=(*args.fixed, "auto"), num_tokens=args.tokens or 128, num_rounds=args.rounds)
    print("| group | drafter | tokens per step | tokens/s | ratio to plain | 95 % |\n|---|---|---|---|---|---|")
    result = run_benchmark(loaded, options, groups, settings, show=_show)
    whole = [row for row in result.rows if row.group == ALL] or result.rows
    best = max(row.speedup.value for row in whole if row.drafter in args.fixed)
    autos = [row for row in result.rows if row.drafter == "auto"]
    holds = all(row.speedup.low >= MIN_GROUP for row in autos if row.group != ALL)
    holds &= all(row.speedup.value >= MIN_OF_BEST * best for row in whole if row.drafter == "auto")
    holds &= all(row.is_identical for row in result.rows)
    print(json.dumps({"holds": holds, "rows": [asdict(row) for row in result.rows]}))
    return 0 if holds else 1


def _show(row: Row) -> None:
    fields = (row.group, row.drafter, f"{row.mean_acceptance_length:.2f}", f"{row.tokens_per_s:.0f}")
    spread = row.speedup
    print("| " + " | ".join(fields) + f" | {spread.value:.3f} | {spread.low:.3f}-{spread.high:.3f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
