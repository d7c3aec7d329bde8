"""What does judging a draft cost beside the forward pass that makes it possible?

    python benchmarks/verification_cost.py

A chain of 5 drafted tokens on the real model. For each rule and setting the median time of `verify` over many contexts
and the median time of the target's pass over the 6 rows. Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import ModelOptions, load_model, make_verifier
from sakiyomi.decode import prefill
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.types import DrafterContext, Sequence, Span

sys.path.insert(0, str(Path(__file__).parent))
from identity import OWN_PROMPTS  # a script beside this one

DEPTH = 5
RULES = {"match": "coupled", "rejection": "independent", "block": "independent", "traversal": "independent"}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0": {"temperature": 0.0},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 1": {"temperature": 1.0},
}


def measure(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Milliseconds, and what the call returns."""
    started = time.perf_counter()
    result = call(*arguments)
    return (time.perf_counter() - started) * 1e3, result


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
            rule = make_verifier(name)
            sequence = Sequence("0", list(context), len(context), params, 1, model.new_cache())
            prefill(model, NoneDrafter(), sequence)
            judging, passing = [], []
            for _ in range(args.steps):
                draft = drafter.propose([sequence], [DEPTH])[0]
                tokens = [sequence.tokens[-1], *draft.tokens]
                span = Span(sequence.cache, tokens, range(-1, len(draft)), range(len(tokens)))
                forward_ms, outputs = measure(model.forward, [span])
                verify_ms, verdict = measure(rule.verify, draft, outputs[0], sequence)
                passing.append(forward_ms)
                judging.append(verify_ms)
                sequence.cache.keep(range(len(verdict.path) + 1))
                sequence.tokens += verdict.tokens
                sequence.num_steps += 1
            verify_ms, forward_ms = statistics.median(judging), statistics.median(passing)
            share = verify_ms / forward_ms
            print(f"{setting:26} {name:10} {verify_ms:6.2f} ms of {forward_ms:6.2f} ms   {share:6.1%}")
            results.append({"setting": setting, "rule": name, "verify_ms": verify_ms, "forward_ms": forward_ms})
    print(json.dumps({"depth": DEPTH, "results": results}))


if __name__ == "__main__":
    main()
