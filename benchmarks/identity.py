"""Is the text the same with speculation as without, and are the logits the same bits?

    python benchmarks/identity.py --spec-bench path/to/question.jsonl

Every prompt is answered plainly and alone, then by each drafter, at each temperature, alone and in a batch. Each run
must give the ids of the plain one, and every row of logits that chose a token must be the same bits. Prints a table,
and as its last line one JSON object. Exit code 0 only if nothing differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, make_drafter
from sakiyomi.bench.prompts import read_prompts
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.drafters.planted import PlantedDrafter, scatter
from sakiyomi.prove.identity import IdentityResult, Way, answer_plainly
from sakiyomi.prove.identity import compare as hold_against
from sakiyomi.types import Drafter, DrafterContext
from sakiyomi.verify.match import MatchVerifier

OWN_PROMPTS = (
    "Why is the sky blue?",
    "Write a short poem about the sea, then repeat its first line three times.",
    "List the first ten prime numbers, then list them again in reverse order.",
)
LOOKUP_DRAFTERS = ("ngram", "suffix", "combined:mode=merge,parts=suffix+ngram")
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True)
class Row:
    """One run over all prompts against the plain run."""

    drafter: str
    temperature: float
    batch: int
    num_prompts: int
    num_same_ids: int
    num_rows: int
    num_same_rows: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float

    @property
    def is_identical(self) -> bool:
        return self.num_same_ids == self.num_prompts and self.num_same_rows == self.num_rows


def compare(
    loaded: LoadedModel,
    prompts: Seq[Seq[int]],
    *,
    num_tokens: int,
    temperatures: Seq[float] = TEMPERATURES,
    batches: Seq[int] = (1, 8),
    seed: int = 20,
) -> list[Row]:
    """Answer the prompts in every way and compare each with the plain way, one prompt at a time."""
    rows = []
    for temperature in temperatures:
        top_p = 1.0 if temperature == 0 else 0.9
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=num_tokens)
        plains = answer_plainly(loaded.model, prompts, params)
        truth = {plain.prompt: plain.tokens for plain in plains}
        for name, drafter in _drafters(loaded, truth).items():
            for batch in batches:
                if name == "none" and batch == 1:
                    continue
                way = Way(name, drafter, batch=batch)
                rows.append(_row(hold_against(loaded.model, MatchVerifier(), way, plains, params, None)))
                print(_format(rows[-1]), flush=True)
    return rows


def _drafters(loaded: LoadedModel, truth: Mapping[tuple[int, ...], Seq[int]]) -> dict[str, Drafter]:
    model = loaded.model
    itself = ModelDrafter(ModelDrafter.Config(model="itself"), DrafterContext(model, lambda name: model))
    trees = PlantedDrafter(PlantedDrafter.Config(script=scatter(truth, 12, model.info.vocab_size)))
    lookup = {name: make_drafter(name, loaded, ModelOptions()) for name in LOOKUP_DRAFTERS}
    return {"none": NoneDrafter(), **lookup, "model": itself, "planted": trees}


def _row(result: IdentityResult) -> Row:
    return Row(
        drafter=result.way,
        temperature=result.temperature,
        batch=result.batch,
        num_prompts=result.num_prompts,
        num_same_ids=result.num_same_texts,
        num_rows=result.num_rows,
        num_same_rows=result.num_same_rows,
        num_draft_tokens=result.num_draft_tokens,
        num_accepted_tokens=result.num_accepted_tokens,
        mean_acceptance_length=result.mean_acceptance_length,
    )


def _format(row: Row) -> str:
    verdict = "identical" if row.is_identical else "DIFFERENT"
    return (
        f"{row.drafter:38} temperature {row.temperature:3} batch {row.batch}   {verdict}   "
        f"ids {row.num_same_ids}/{row.num_prompts}   rows {row.num_same_rows}/{row.num_rows}   "
        f"accepted {row.num_accepted_tokens}/{row.num_draft_tokens}   tokens per step {row.mean_acceptance_length:.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--spec-bench", type=Path, help="question.jsonl of Spec-Bench; without it three own prompts")
    parser.add_argument("--per-group", type=int, default=4, help="prompts of each of the six groups")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--dtype")
    args = parser.parse_args()
    loaded = load_model(args.model, ModelOptions(threads=args.threads, dtype=args.dtype))
    llm = LLM.from_loaded(loaded)
    groups = read_prompts(args.spec_bench, args.per_group) if args.spec_bench else {"own": list(OWN_PROMPTS)}
    texts = [text for group in groups.values() for text in group]
    prompts = [llm.render([{"role": "user", "content": text}]) for text in texts]
    started = time.perf_counter()
    rows = compare(loaded, prompts, num_tokens=args.tokens)
    is_identical = all(row.is_identical for row in rows)
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"identical": is_identical, "seconds": seconds, "rows": [asdict(row) for row in rows]}))
    return 0 if is_identical else 1


if __name__ == "__main__":
    sys.exit(main())
