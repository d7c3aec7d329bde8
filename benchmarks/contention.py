"""Do our threads and torch's get along in one process?

    python benchmarks/contention.py
    OMP_WAIT_POLICY=PASSIVE python benchmarks/contention.py --threads 2 --torch-threads 2 --json contention.json

Decodes with the native kernels, multiplies matrices with torch in a second thread, and then does both at once, round
after round. Two fair neighbours need together what they need one after the other, and up to 1.3 times that is allowed.
Torch's OpenMP threads wait by turning as long as they believe the cores theirs, and our pool tells them otherwise once
it lacks cores (csrc/openmp.hpp); OMP_WAIT_POLICY=PASSIVE is for comparison. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from sakiyomi import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from peers import make_ids  # a script beside this one

LIMIT = 1.3


@dataclass(frozen=True)
class Round:
    """Seconds of one round.

    Attributes:
        decoding, multiplying: each by itself.
        both: from the start of both to the end of the later one.
        decoding_beside, multiplying_beside: each while the other runs, too.
    """

    decoding: float
    multiplying: float
    both: float
    decoding_beside: float
    multiplying_beside: float

    @property
    def ratio(self) -> float:
        return self.both / (self.decoding + self.multiplying)


def run_round(decode: Callable[[], None], multiply: Callable[[], None]) -> Round:
    seconds: dict[str, float] = {}

    def beside() -> None:
        seconds["beside"] = timed(multiply)

    decoding = timed(decode)
    multiplying = time_in_thread(multiply)  # not in this one: torch's pools differ from thread to thread
    start = time.perf_counter()
    worker = threading.Thread(target=beside)
    worker.start()
    decoding_beside = timed(decode)
    worker.join()
    return Round(decoding, multiplying, time.perf_counter() - start, decoding_beside, seconds["beside"])


def timed(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def time_in_thread(action: Callable[[], None]) -> float:
    seconds: list[float] = []
    worker = threading.Thread(target=lambda: seconds.append(timed(action)))
    worker.start()
    worker.join()
    return seconds[0]


def make_multiplication(size: int, seconds: float, threads: int) -> Callable[[], None]:
    """Products of two square matrices, as many as take about `seconds`."""
    matrix = torch.rand(size, size)

    def multiply(count: int) -> None:
        torch.set_num_threads(threads)  # of the thread that calls it
        for _ in range(count):
            torch.mm(matrix, matrix)

    count = 1
    while (taken := time_in_thread(partial(multiply, count))) < seconds / 4:  # the first ones start its threads
        count *= 2
    count = max(1, round(count * seconds / taken))
    return partial(multiply, count)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a name or a path")
    parser.add_argument("--threads", type=int, help="of our kernels; default: one per core")
    parser.add_argument("--torch-threads", type=int, help="default: as many as ours")
    parser.add_argument("--tokens", type=int, default=256, help="decoded in each part")
    parser.add_argument("--size", type=int, default=512, help="of the matrices")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE ('-': stdout)")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    llm = LLM(args.model, backend="native", threads=args.threads)
    threads: int = llm.loaded.model.decoder.ops.threads  # type: ignore[attr-defined]  # NativeOps
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)

    def decode() -> None:
        llm.generate(make_ids(64), params, use_tqdm=False)

    decode()
    multiply = make_multiplication(args.size, timed(decode), args.torch_threads or threads)
    load = os.getloadavg()[0]
    rounds = [run_round(decode, multiply) for _ in range(args.rounds)]
    ratio = statistics.median(one.ratio for one in rounds)
    shown = sys.stderr if str(args.json) == "-" else sys.stdout
    policy = os.environ.get("OMP_WAIT_POLICY", "not set")
    print(
        f"{threads} threads of ours, {args.torch_threads or threads} of torch (OMP_WAIT_POLICY {policy}), "
        f"load {load:.1f} before",
        file=shown,
    )
    for name in ("decoding", "multiplying", "both", "decoding_beside", "multiplying_beside"):
        print(
            f"{name.replace('_', ' '):20} {statistics.median(getattr(one, name) for one in rounds):7.3f} s", file=shown
        )
    verdict = "holds" if ratio <= LIMIT else "DOES NOT HOLD"
    print(f"both over the sum    {ratio:7.3f}   <= {LIMIT} {verdict}", file=shown)
    if args.json:
        text = json.dumps(
            {
                "threads": threads,
                "policy": policy,
                "load": load,
                "ratio": ratio,
                "rounds": [asdict(one) for one in rounds],
            }
        )
        print(text) if str(args.json) == "-" else args.json.write_text(text + "\n", encoding="utf-8")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
