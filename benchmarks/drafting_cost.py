"""What does a proposal cost, as a share of a plain step?

    python benchmarks/drafting_cost.py
    python benchmarks/drafting_cost.py --drafter eagle3:path=head.safetensors --drafter mlp:num_speculative_tokens=2

By default heads of realistic sizes with random weights (random_heads.py), 3,072 ids, matrices in 4 bits: EAGLE-3
with 3 tokens, P-EAGLE with 5, Medusa with 4, beside `mlp` with 2 (where one comes with the package) and `suffix`. A
plain step and one with the drafter take turns on the same answer; drafting is `propose` plus `observe`, medians of
all steps. Random heads are never right, so each proposal begins with one new row; more rows cost little more. For
drafters that draft within bursts (`suffix`, `ngram`, `mlp`) the same of whole answers, drafting as they tell it. Prints
a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence as Seq
from pathlib import Path

from sakiyomi import SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, make_drafter
from sakiyomi.checkpoints.drafter import write_drafter
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.llm import LLM
from sakiyomi.tree import Draft
from sakiyomi.types import Array, Drafter, Sequence
from sakiyomi.verify.match import MatchVerifier

sys.path.insert(0, str(Path(__file__).parent))
from random_heads import KINDS, random_head, round_head  # a script beside this one

DEPTHS = {"eagle3": 3, "peagle": 5, "medusa": 4}
LIMITS = {"eagle3": 0.22, "peagle": 0.18, "medusa": 0.10, "mlp": 0.05}
PROMPT = "Describe a long walk through an old town: its streets, its people and what they do in the morning."
NUM_IDS = 3072
NUM_ANSWERS = 9


class Timed(Drafter):
    """A drafter, and the milliseconds that each step's proposal and look at the outcome took."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.taps, self.needs_all_taps = inner.taps, inner.needs_all_taps
        self.times: list[float] = []

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        started = time.perf_counter()
        drafts = self.inner.propose(sequences, budgets)
        self.times.append((time.perf_counter() - started) * 1e3)
        return drafts

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
        started = time.perf_counter()
        self.inner.observe(sequence, start, tokens, taps)
        if self.times:  # the prompt is not drafting
            self.times[-1] += (time.perf_counter() - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--drafter", action="append", help="repeat; by default those above")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of the random heads' matrices")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    target = load_model(arguments.model, ModelOptions(threads=arguments.threads))
    with tempfile.TemporaryDirectory() as folder:
        specs = arguments.drafter or default_drafters(target, Path(folder), arguments.bits)
        drafters = {spec: make_drafter(spec, target, ModelOptions()) for spec in specs}
        shares = measure(target, drafters, arguments.steps, arguments.temperature)
        bursts = {
            spec: measure_bursts(target, drafter, arguments.temperature)
            for spec, drafter in drafters.items()
            if spec.partition(":")[0] in ("mlp", "suffix", "ngram")
        }
    print(f"{'drafter':40} {'ms':>7} {'share of a plain step':>22} {'limit':>6}  within bursts")
    for spec, (ms, share) in shares.items():
        name = spec.partition(":")[0]
        limit = LIMITS.get(name)
        shown = f"{spec[:38]:40}" if arguments.drafter else f"{name:40}"
        most = "" if limit is None else f"{100 * limit:.0f} %"
        print(f"{shown} {ms:7.3f} {100 * share:20.1f} % {most:>6}  {told(bursts.get(spec))}")
    found = {spec.partition(":")[0]: {"ms": ms, "share": share} for spec, (ms, share) in shares.items()}
    for spec, (ms, share) in bursts.items():
        found[spec.partition(":")[0]] |= {"burst_ms": ms, "burst_share": share}
    print(json.dumps(found))


def told(cost: tuple[float, float] | None) -> str:
    return "" if cost is None else f"{cost[0]:.3f} ms, {100 * cost[1]:.1f} %"


def default_drafters(target: LoadedModel, folder: Path, bits: int) -> list[str]:
    """Random heads in files, and what needs no file of ours."""
    lent = target.model.lend()
    assert lent is not None, "native and torch models lend"
    specs = []
    for kind in KINDS:
        path = folder / f"{kind}.safetensors"
        write_drafter(path, round_head(random_head(kind, target.model.info, lent, num_ids=NUM_IDS), bits))
        specs.append(f"{kind}:num_speculative_tokens={DEPTHS[kind]},path={path}")
    try:
        make_drafter("mlp", target, ModelOptions())
    except ParameterError:
        return [*specs, "suffix"]
    return [*specs, "mlp:num_speculative_tokens=2", "suffix"]


def measure(
    target: LoadedModel, drafters: dict[str, Drafter], num_steps: int, temperature: float
) -> dict[str, tuple[float, float]]:
    """For each drafter the milliseconds of a step's drafting, and their share of a plain step in the same turns."""
    shares, bases = {}, []
    for spec, drafter in drafters.items():
        plain, drafting = _take_turns(target, Timed(drafter), num_steps, temperature)
        shares[spec] = (drafting, drafting / plain)
        bases.append(plain)
    print(f"a plain step takes {statistics.median(bases):.3f} ms")
    return shares


def measure_bursts(target: LoadedModel, drafter: Drafter, temperature: float) -> tuple[float, float]:
    """Milliseconds of drafting per step of answers, and their share of a plain step of answers in the same turns."""
    plain, drafted = LLM.from_loaded(target), LLM.from_loaded(target, drafter=drafter)
    params = SamplingParams(temperature=temperature, max_tokens=128, ignore_eos=True, seed=0)
    pairs = []
    for _ in range(NUM_ANSWERS + 1):
        alone, beside = (llm.chat([{"role": "user", "content": PROMPT}], params)[0] for llm in (plain, drafted))
        step_s = alone.timing.decode_s / alone.speculation.num_steps
        draft_s = beside.timing.draft_s / beside.speculation.num_steps
        pairs.append((1e3 * draft_s, draft_s / step_s))
    return statistics.median(ms for ms, _ in pairs[1:]), statistics.median(share for _, share in pairs[1:])


def _take_turns(target: LoadedModel, timed: Timed, num_steps: int, temperature: float) -> tuple[float, float]:
    """Milliseconds of a plain step and of drafting; a tenth of the steps warms up."""
    none = NoneDrafter(NoneDrafter.Config(), None)  # type: ignore[arg-type]
    plain, drafted = (_start(target, drafter, temperature, num_steps) for drafter in (none, timed))
    times: list[float] = []
    verifier = MatchVerifier(MatchVerifier.Config())
    for _ in range(num_steps):
        started = time.perf_counter()
        step(target.model, none, verifier, [plain], [16])
        times.append((time.perf_counter() - started) * 1e3)
        step(target.model, timed, verifier, [drafted], [16])
    first = num_steps // 10
    return statistics.median(times[first:]), statistics.median(timed.times[first:])


def _start(target: LoadedModel, drafter: Drafter, temperature: float, num_steps: int) -> Sequence:
    llm = LLM.from_loaded(target)
    ids = llm.render([{"role": "user", "content": PROMPT}]) if target.chat_template else [1, 2, 3]
    params = SamplingParams(temperature=temperature, max_tokens=20 * num_steps, ignore_eos=True)
    sequence = Sequence("cost", list(ids), len(ids), params, 0, target.model.new_cache())
    prefill(target.model, drafter, sequence)
    return sequence


if __name__ == "__main__":
    main()
