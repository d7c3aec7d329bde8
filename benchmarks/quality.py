"""What does int8 cost? Next-token laws of the native backend in int8 against float32 on the same model file.

    python benchmarks/quality.py --spec-bench path/to/question.jsonl

Prints the perplexity of both, the mean KL divergence from float32 to int8, and how often the most probable token is the
same; the last line is one JSON object. Exit code 0 only within the limits: KL 0.006, perplexity 0.3 % above float32.
Float32 takes the values of the file as they are, so the difference is the rounding of activations and of the cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.assemble import ModelOptions, load_model
from sakiyomi.types import Model, Span

MAX_KL = 0.006
MAX_LOSS = 0.003
CHUNK = 128


@dataclass(frozen=True)
class Quality:
    """Means over the positions of all windows; logarithms are natural."""

    num_tokens: int
    window: int
    perplexity_float32: float
    perplexity_int8: float
    kl: float
    same_choice: float

    @property
    def loss(self) -> float:
        """How much the perplexity rises."""
        return self.perplexity_int8 / self.perplexity_float32 - 1

    @property
    def is_good(self) -> bool:
        return self.kl <= MAX_KL and self.loss <= MAX_LOSS


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    reference = load_model(options.model, ModelOptions(dtype="float32", backend="native", threads=options.threads))
    tested = load_model(options.model, ModelOptions(dtype="int8", backend="native", threads=options.threads))
    assert reference.tokenizer is not None
    ids = reference.tokenizer.encode(read_text(options))[: options.max_tokens]
    quality = measure(reference.model, tested.model, ids, options.window)
    print(f"tokens                 {quality.num_tokens} in windows of {quality.window}")
    print(f"perplexity float32     {quality.perplexity_float32:.4f}")
    print(f"perplexity int8        {quality.perplexity_int8:.4f}  ({quality.loss:+.3%}, at most {MAX_LOSS:+.1%})")
    print(f"KL(float32 || int8)    {quality.kl:.5f}  (at most {MAX_KL})")
    print(f"same most probable id  {quality.same_choice:.2%}")
    print(json.dumps({"model": options.model, **asdict(quality), "is_good": quality.is_good}))
    return 0 if quality.is_good else 1


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--spec-bench", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="more text files")
    parser.add_argument("--max-tokens", type=int, default=24576)
    parser.add_argument("--window", type=int, default=512, help="tokens that see each other")
    parser.add_argument("--threads", type=int)
    return parser.parse_args(arguments)


def read_text(options: argparse.Namespace) -> str:
    """Our own documents, then the given files, then the first turns of Spec-Bench, group by group in turn."""
    root = Path(__file__).resolve().parent.parent
    parts = [path.read_text() for path in (root / "README.md", *sorted((root / "docs").glob("*.md")), *options.text)]
    if options.spec_bench:
        groups: dict[str, list[str]] = {}
        for line in options.spec_bench.read_text().splitlines():
            question = json.loads(line)
            groups.setdefault(question["category"], []).append(question["turns"][0])
        for index in range(max(map(len, groups.values()))):
            parts += [prompts[index] for prompts in groups.values() if index < len(prompts)]
    return "\n\n".join(parts)


def measure(reference: Model, tested: Model, ids: list[int], window: int) -> Quality:
    """Compare the laws of the token after every position of windows [i, i + window) of the text."""
    totals = np.zeros(4)
    num_tokens = 0
    for start in range(0, len(ids) - 1, window):
        text = ids[start : start + window + 1]
        rows = zip(run_rows(reference, text[:-1]), run_rows(tested, text[:-1]), text[1:], strict=True)
        for expected, got, token in rows:
            totals += (-expected[token], -got[token], compute_kl(expected, got), expected.argmax() == got.argmax())
            num_tokens += 1
    means = totals / num_tokens
    return Quality(
        num_tokens, window, float(np.exp(means[0])), float(np.exp(means[1])), float(means[2]), float(means[3])
    )


def run_rows(model: Model, ids: list[int]) -> Iterator[npt.NDArray[np.float64]]:
    """Log-probabilities [V] after each position."""
    cache = model.new_cache()
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        output: Any = model.forward([Span(cache, part, range(-1, len(part) - 1), range(len(part)))])[0]
        cache.keep(range(len(part)))
        for row in range(len(part)):
            logits = output.row(row).astype(np.float64)
            logits -= logits.max()
            yield logits - np.log(np.exp(logits).sum())


def compute_kl(expected: npt.NDArray[np.float64], got: npt.NDArray[np.float64]) -> float:
    return float(np.exp(expected) @ (expected - got))


if __name__ == "__main__":
    sys.exit(main())
