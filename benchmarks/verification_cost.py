"""Which share of a step does judging a draft take?

    python benchmarks/verification_cost.py

A chain of 5 drafted tokens on the real model. For each rule and setting the median time of `verify` over many contexts
and that of the whole step - the target's pass over the 6 rows, judging, committing -, drafting left out. Prints a table
and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import ModelOptions, load_model, make_verifier
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, Output, Sequence, Verdict, Verifier

sys.path.insert(0, str(Path(__file__).parent))
from identity import OWN_PROMPTS  # a script beside this one

DEPTH = 5
RULES = {"match": "coupled", "rejection": "independent", "block": "independent", "traversal": "independent"}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 1": {"temperature": 1.0},
}


class Ready(Drafter):
    """Hands over the draft that was made before the clock started."""

    draft = Draft.empty()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self.draft]


class Timed(Verifier):
    """A rule, and the milliseconds that each verdict took."""

    def __init__(self, rule: Verifier) -> None:
        self.rule = rule
        self.is_lossless, self.draw = rule.is_lossless, rule.draw
        self.times: list[float] = []

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        started = time.perf_counter()
        verdict = self.rule.verify(draft, output, sequence)
        self.times.append((time.perf_counter() - started) * 1e3)
        return verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--layers", type=int, default=29)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    loaded = load_model(args.model, ModelOptions(threads=args.threads))
    model, shallow = loaded.model, loaded.model.shallow(args.layers)
    context = LLM.from_loaded(loaded).render([{"role": "user", "content": OWN_PROMPTS[0]}])
    results = []
    for setting, values in SETTINGS.items():
        params = SamplingParams(max_tokens=None, ignore_eos=True, **values)
        for name, draw in RULES.items():
            config = ModelDrafter.Config(model="shallow", num_speculative_tokens=DEPTH, draw=draw)  # type: ignore[arg-type]
            drafter = ModelDrafter(config, DrafterContext(model, lambda _: shallow))
            rule, ready = Timed(make_verifier(name)), Ready()
            sequence = Sequence("0", list(context), len(context), params, 1, model.new_cache())
            prefill(model, NoneDrafter(), sequence)
            steps = []
            for _ in range(args.steps):
                ready.draft = drafter.propose([sequence], [DEPTH])[0]
                started = time.perf_counter()
                step(model, ready, rule, [sequence], [DEPTH])
                steps.append((time.perf_counter() - started) * 1e3)
            verify_ms, step_ms = statistics.median(rule.times), statistics.median(steps)
            print(f"{setting:26} {name:10} {verify_ms:6.2f} ms of {step_ms:6.2f} ms   {verify_ms / step_ms:6.1%}")
            results.append({"setting": setting, "rule": name, "verify_ms": verify_ms, "step_ms": step_ms})
    print(json.dumps({"depth": DEPTH, "results": results}))


if __name__ == "__main__":
    main()
