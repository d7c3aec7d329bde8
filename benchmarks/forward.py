"""How fast is a forward pass over M rows, how near to the machine's limits, and how far from other engines?

    python benchmarks/forward.py
    python benchmarks/forward.py --peer llama-cpp --peer-python path/to/python --json out.json

Every engine does a small part in turn, round after round, so that all meet the same noise of the machine. A figure is
the median over the rounds, a ratio the median of the ratios within the rounds. docs/performance.md explains the
columns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import numpy.typing as npt

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model
from sakiyomi.decode import prefill
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.models.native import NativeModel
from sakiyomi.types import Cache, DrafterContext, Output, Sequence, Span

sys.path.insert(0, str(Path(__file__).parent))
from peers import make_ids  # a script beside this one

native = import_module("sakiyomi._native")

ROWS, CONTEXTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 128), (128, 1024)
QUICK_ROWS = (1, 4, 6, 8, 16)
LONG_CONTEXT, LONG_ROWS = 4096, (1, 4, 8)
STEP, STEP_ANSWERS, STEP_SECONDS = "plain step", 4, 0.008
FEATURES = (
    "avx2",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
)
MATRICES = ("qkv", "output", "gate_up", "down")
LLAMA_PRECISIONS = ("Q8_0", "Q4_0", "file")

NUM_PARTS = 32

Request = dict[str, Any]
Bytes = npt.NDArray[np.uint8]


class Engine(Protocol):
    """What takes turns: ours, or a peer's process."""

    name: str

    def ask(self, request: Request) -> list[float] | None:
        """Seconds of each repetition, or None where the engine cannot do it."""
        ...


# ---------------------------------------------------------------------------------------------- machine


@dataclass(frozen=True)
class Machine:
    """The machine and its limits for our threads: bandwidths in GB/s, int8 operations from registers in GOP/s."""

    cpus: int
    features: list[str]
    read_gb_s: float
    copy_gb_s: float
    int8_gop_s: float


class MachineMeter:
    """Measures the limits a little in every round and keeps the best: a limit is what can be reached."""

    def __init__(self, num_bytes: int, threads: int) -> None:
        self.threads = threads
        self.part_bytes = num_bytes // NUM_PARTS
        self.source = np.ones(num_bytes, np.uint8)
        self.target = np.ones(num_bytes, np.uint8)
        self.best: dict[str, float] = defaultdict(float)

    def measure(self) -> None:
        """Bursts of well under a millisecond: some are likely to run undisturbed."""
        for part in range(NUM_PARTS):
            # A part of the buffer has left the near caches by the time that its turn comes again.
            here = slice(part * self.part_bytes, (part + 1) * self.part_bytes)
            source, target = self.source[here], self.target[here]
            self._read(source[:64])  # wakes the threads, which fell asleep while one core multiplied
            self._note("read", partial(self._read, source))
            self._note("copy", partial(self._copy, source, target))
            for _ in range(2):
                self._note("int8", partial(native.multiply, 250_000, 1))

    def result(self) -> Machine:
        return Machine(
            cpus=os.cpu_count() or 1,
            features=cpu_features(),
            read_gb_s=self.best["read"],
            copy_gb_s=self.best["copy"],
            int8_gop_s=self.threads * self.best["int8"],  # cores share no arithmetic units
        )

    def _read(self, source: Bytes) -> int:
        native.read_memory(source, self.threads)
        return len(source)

    def _copy(self, source: Bytes, target: Bytes) -> int:
        native.copy_memory(source, target, self.threads)
        return 2 * len(source)

    def _note(self, name: str, action: Callable[[], int]) -> None:
        start = time.perf_counter()
        amount = action()
        self.best[name] = max(self.best[name], 1e-9 * amount / (time.perf_counter() - start))


def cpu_features() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return [platform.machine()]
    flags = {
        word for line in text.splitlines() if line.lower().startswith(("flags", "features")) for word in line.split()
    }
    return [platform.machine(), *(feature for feature in FEATURES if feature in flags)]


# ---------------------------------------------------------------------------------------------- engines


class Ours:
    """This project's native model, asked the same things as the peers."""

    name = "sakiyomi"

    def __init__(self, loaded: LoadedModel) -> None:
        assert isinstance(loaded.model, NativeModel), "this benchmark measures the native kernels"
        self.model = loaded.model
        self.loaded = loaded
        self.threads: int = loaded.model.decoder.ops.threads  # type: ignore[attr-defined]  # NativeOps
        self.llm = LLM.from_loaded(loaded)
        self.caches: dict[int, Cache] = {}

    def ask(self, request: Request) -> list[float]:
        actions: dict[str, Callable[..., list[float]]] = {
            "verify": self._verify,
            "forward": self._forward,
            "decode": self._decode,
            "prompt": self._prompt,
        }
        return actions[request["do"]](**{key: value for key, value in request.items() if key != "do"})

    def one_pass(self, rows: int, context: int) -> None:
        """A chain of `rows` rows behind `context` positions, and the best id of each row: greedy verification."""
        self._run(rows, context).argmax()

    def one_pass_with_logits(self, rows: int, context: int) -> None:
        """The same with the logits of each row, as sampling needs them."""
        output = self._run(rows, context)
        for i in range(rows):
            output.row(i)
        output.argmax()

    def _run(self, rows: int, context: int) -> Output:
        return self.model.forward([Span(self._at(context), make_ids(rows), range(-1, rows - 1), range(rows))])[0]

    def count_work(self, rows: int, context: int) -> tuple[float, float]:
        """Bytes that a pass must read (weights, keys and values), and its int8 operations (all matrices)."""
        config, ops = self.model.decoder.config, self.model.decoder.ops
        matrices = [getattr(layer, name) for layer in self.model.decoder.layers for name in MATRICES]
        matrices.append(self.model.decoder.head)
        kv = ops.new_kv(config.num_layers, config.num_kv_heads, config.head_dim, context + rows)
        num_bytes = sum(matrix.num_bytes for matrix in matrices) + sum(array.nbytes for array in kv)
        return float(num_bytes), 2.0 * rows * sum(n * k for n, k in (matrix.shape for matrix in matrices))

    def _verify(self, rows: int, context: int, repeats: int) -> list[float]:
        self._at(context)
        return [_timed(lambda: self.one_pass(rows, context)) for _ in range(repeats)]

    def _forward(self, rows: int, context: int, repeats: int) -> list[float]:
        self._at(context)
        return [_timed(lambda: self.one_pass_with_logits(rows, context)) for _ in range(repeats)]

    def _decode(self, prompt: int, tokens: int) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [self.llm.generate(make_ids(prompt), params, use_tqdm=False)[0].timing.decode_s]

    def _prompt(self, prompt: int) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        timing = self.llm.generate(make_ids(prompt), params, use_tqdm=False)[0].timing
        return [timing.prefill_s + timing.decode_s]

    def _at(self, context: int) -> Cache:
        if context not in self.caches:
            ids = make_ids(context + 1)
            sequence = Sequence("context", ids, len(ids), SamplingParams(), 0, self.model.new_cache())
            drafter = NoneDrafter(NoneDrafter.Config(), DrafterContext(self.model, lambda name: self.model))
            prefill(self.model, drafter, sequence)
            self.caches[context] = sequence.cache
        return self.caches[context]


class PeerProcess:
    """An engine in a process of its own (peers.py), under an interpreter that has it."""

    def __init__(self, engine: str, precision: str, python: str, model: Path, threads: int, work: Path) -> None:
        self.name = f"{engine} {precision}" if engine == "llama-cpp" else engine
        self.is_slow = engine == "transformers"
        script = Path(__file__).with_name("peers.py")
        options = ["--precision", precision, "--threads", str(threads), "--work", str(work)]
        self.log = (work / f"{self.name.replace(' ', '-')}.log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [python, str(script), engine, str(model), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        try:
            self.facts = self._read()
        except PeerError:
            self.close()
            raise

    def ask(self, request: Request) -> list[float] | None:
        if request["do"] == "verify":
            return None  # peers have one call, which makes the logits
        if self.is_slow and "repeats" in request:
            request = request | {"repeats": 1}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        seconds: list[float] | None = self._read().get("seconds")
        return seconds

    def close(self) -> None:
        with self.process, self.log:
            self.process.terminate()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"the process ended; see {self.log.name}"}
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer


class PeerError(Exception):
    """A peer that cannot be measured here; the text says why."""


# ---------------------------------------------------------------------------------------------- rounds


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    rows: Seq[int]
    contexts: Seq[int]
    prompts: Seq[int] = (64, 1000)
    """Prompts behind which `tokens` tokens are decoded."""
    first: int = 512
    """The prompt whose first token is timed."""
    tokens: int = 128
    rounds: int = 7
    repeats: int = 7
    batch_tokens: int = 64
    starts: int = 3
    long_context: int | None = LONG_CONTEXT

    def requests(self) -> Iterator[tuple[str, Request]]:
        for context in self.contexts:
            for rows in self.rows:
                repeats = self.repeats if rows <= 16 else max(1, self.repeats // 3)
                shape = {"rows": rows, "context": context, "repeats": repeats}
                yield verify_key(rows, context), {"do": "verify"} | shape
                yield forward_key(rows, context), {"do": "forward"} | shape
        for prompt in self.prompts:
            yield f"decode {prompt}", {"do": "decode", "prompt": prompt, "tokens": self.tokens}
        yield f"prompt {self.first}", {"do": "prompt", "prompt": self.first}


FULL = Plan(ROWS, CONTEXTS)
QUICK = Plan(QUICK_ROWS, CONTEXTS, tokens=32, rounds=3, repeats=3, batch_tokens=16, starts=1, long_context=None)


def verify_key(rows: int, context: int) -> str:
    """A pass that finds the best id of each row."""
    return f"verify {rows} at {context}"


def forward_key(rows: int, context: int) -> str:
    """A pass that makes the logits of each row."""
    return f"forward {rows} at {context}"


class Times:
    """Seconds by engine and task: the median of each round, and the best of all repetitions."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.bests: dict[str, dict[str, float]] = defaultdict(dict)

    def add(self, engine: str, task: str, seconds: Seq[float]) -> None:
        self.rounds[engine][task].append(statistics.median(seconds))
        self.bests[engine][task] = min(*seconds, self.best(engine, task) or seconds[0])

    def best(self, engine: str, task: str) -> float | None:
        return self.bests[engine].get(task)

    def median(self, engine: str, task: str) -> float | None:
        seconds = self.rounds[engine].get(task)
        return statistics.median(seconds) if seconds else None

    def ratio(self, above: tuple[str, str], below: tuple[str, str]) -> float | None:
        """Median over the rounds of the time of one (engine, task) over the time of another."""
        pairs = zip(self.rounds[above[0]].get(above[1], ()), self.rounds[below[0]].get(below[1], ()), strict=False)
        ratios = [one / other for one, other in pairs]
        return statistics.median(ratios) if ratios else None

    def best_ratio(self, above: tuple[str, str], below: tuple[str, str]) -> float | None:
        """The same of the best times: what a quiet machine would show, as far as the noise has gaps."""
        one, other = self.best(*above), self.best(*below)
        return None if one is None or other is None else one / other


def run_rounds(engines: Seq[Engine], plan: Plan, meter: MachineMeter) -> Times:
    times = Times()
    tasks = list(plan.requests())
    for engine in engines:  # caches are filled and code is warm before anything counts
        for _, request in tasks:
            if request["do"] in ("verify", "forward"):
                engine.ask(request | {"repeats": 1})
    for number in range(plan.rounds):
        meter.measure()
        for task, request in tasks:
            for engine in engines:
                seconds = engine.ask(request)
                if seconds is not None:
                    times.add(engine.name, task, seconds)
        print(f"round {number + 1} of {plan.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return times


# ---------------------------------------------------------------------------------------------- profiles


@dataclass(frozen=True)
class Profile:
    """Where the time of a call goes, in milliseconds.

    Attributes:
        phases: work of the kernels, the mean of the threads.
        sync: threads waiting for one another, waking included.
        python: everything outside the kernels.
    """

    phases: dict[str, float]
    sync: float
    python: float

    @property
    def total(self) -> float:
        return sum(self.phases.values()) + self.sync + self.python

    def share(self, *names: str) -> float:
        return sum(self.phases[name] for name in names) / self.total


def profile(action: Callable[[], object], threads: int, repeats: int) -> Profile:
    """Profile calls one by one: the lower quartile of each part by itself, so that a disturbed part spoils no other."""
    return _quartiles([_profile_once(action, threads) for _ in range(repeats)])


def _profile_once(action: Callable[[], object], threads: int) -> Profile:
    native.start_profile()
    return _read_profile(_timed(action), threads)


def _quartiles(calls: Seq[Profile]) -> Profile:
    def quartile(values: Iterable[float]) -> float:
        return statistics.quantiles(values, n=4)[0]

    phases = {phase: quartile(one.phases[phase] for one in calls) for phase in calls[0].phases}
    return Profile(phases, quartile(one.sync for one in calls), quartile(one.python for one in calls))


def profile_steps(ours: Ours, prompt: int, tokens: int) -> Profile:
    """A step of plain decoding through the public interface, text included; the prompt is left out.

    Several steps are made at once, with the first of their tokens: each counts as the mean of its like. They are made
    for 8 milliseconds in place of 40, so that what disturbs some spoils few; by that Python's share is told too large.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True)
    bursts: list[list[Profile]] = []
    with mock.patch("sakiyomi.llm.BURST_SECONDS", STEP_SECONDS):
        for _ in range(STEP_ANSWERS):
            pieces = ours.llm.stream(make_ids(prompt), params)
            next(pieces)
            for _ in range(tokens):
                one = _profile_once(partial(next, pieces), ours.threads)
                if any(one.phases.values()):
                    bursts.append([])
                bursts[-1].append(one)
    return _quartiles([_mean(burst) for burst in bursts])


def _mean(calls: Seq[Profile]) -> Profile:
    phases = {phase: statistics.fmean(one.phases[phase] for one in calls) for phase in calls[0].phases}
    return Profile(phases, statistics.fmean(one.sync for one in calls), statistics.fmean(one.python for one in calls))


def _read_profile(seconds: float, threads: int) -> Profile:
    ranks = native.stop_profile(threads)
    in_kernels = 1000 * sum(values[0] for values in ranks.values())
    phases = {name: 1000 * statistics.fmean(values) for name, values in ranks.items() if name != "wait"}
    waiting = max(in_kernels - sum(phases.values()), 0.0)  # rounding may leave less than nothing to one thread
    return Profile(phases, waiting, 1000 * seconds - in_kernels)


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------- batch, start

STARTER = """
import sys
from sakiyomi import LLM, SamplingParams
llm = LLM(sys.argv[1], threads=int(sys.argv[2]))
next(llm.stream("The sky is", SamplingParams(temperature=0, max_tokens=2)))
try:
    status = open("/proc/self/status").read().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1000 for line in status if line.startswith("Vm")}
except OSError:
    import resource
    sizes = {"VmRSS": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
print(sizes["VmRSS"], sizes.get("VmHWM", sizes["VmRSS"]), flush=True)
"""


@dataclass(frozen=True)
class Start:
    """A start of the whole program: seconds to the first token; megabytes resident behind it, and at most."""

    seconds: float
    resident_mb: float
    peak_mb: float


def measure_start(model: Path, threads: int, repeats: int) -> Start:
    """The median of the starts that follow a first one."""
    starts = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        command = [sys.executable, "-c", STARTER, str(model), str(threads)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.perf_counter() - start
        if process.returncode != 0:
            raise RuntimeError("the program did not start; see its message above")
        starts.append(Start(seconds, *map(float, line.split())))
    return sorted(starts[1:], key=lambda one: one.seconds)[repeats // 2]


def measure_batch(loaded: LoadedModel, tokens: int, size: int = 64, prompt: int = 64) -> float:
    """Tokens per second of greedy generation over `size` sequences at once, the prompts left out."""
    llm = LLM.from_loaded(loaded, max_num_seqs=size)
    ids = make_ids(size + prompt)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    answers = llm.generate([ids[i : i + prompt] for i in range(size)], params, use_tqdm=False)
    # The last sequence joins when all prompts are in, and decodes from there to the end.
    return size * tokens / min(answer.timing.decode_s for answer in answers)


# ---------------------------------------------------------------------------------------------- requirements


@dataclass(frozen=True)
class Check:
    """A line of the requirements.

    Attributes:
        value: what was measured, or None.
        best: the same from the best times instead of the medians, where both exist.
    """

    line: str
    text: str
    value: float | None
    limit: float
    is_minimum: bool
    best: float | None = None

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.is_minimum else self.value <= self.limit

    def __str__(self) -> str:
        verdict = {None: "not measured", True: "holds", False: "DOES NOT HOLD"}[self.holds]
        relation, value, best = ">=" if self.is_minimum else "<=", _cell(self.value), _cell(self.best)
        return f"{self.line:2} {self.text:49} {value:>6} {best:>8}   {relation} {self.limit:<6g} {verdict}"


@dataclass
class Results:
    """Everything measured.

    Attributes:
        load: the machine's load average at the start and at the end.
        profiles: by what was run; `STEP` is plain decoding, "M at C" one forward pass.
        failures: peers that could not be measured, with the reason.
    """

    load: tuple[float, float]
    machine: Machine
    times: Times
    profiles: dict[str, Profile]
    batch_tokens_s: float
    start: Start
    peers: dict[str, dict[str, Any]]
    failures: dict[str, str]


DECODING_LIMITS = (
    ("decode 64", "llama-cpp Q8_0", 2.2),
    ("decode 64", "openvino", 2.0),
    ("decode 64", "transformers", 7.0),
    ("decode 64", "llama-cpp Q4_0", 1.4),
    ("decode 64", "llama-cpp file", 1.9),
    ("decode 1000", "llama-cpp Q8_0", 4.0),
)
COST_LIMITS = {128: {4: 1.2, 6: 1.45, 8: 1.7, 16: 3.0}, 1024: {4: 1.35, 8: 2.2, 16: 3.8}}


def check_requirements(results: Results) -> list[Check]:
    times, ours = results.times, Ours.name

    def compare(
        line: str, text: str, above: tuple[str, str], below: tuple[str, str], limit: float, *, is_minimum: bool
    ) -> Check:
        return Check(line, text, times.ratio(above, below), limit, is_minimum, times.best_ratio(above, below))

    checks = [
        compare("1", f"{task}, speed over {peer}", (peer, task), (ours, task), limit, is_minimum=True)
        for task, peer, limit in DECODING_LIMITS
    ]
    llama, eight = "llama-cpp Q8_0", forward_key(8, 128)
    checks.append(compare("2", f"{eight}, time over {llama}", (ours, eight), (llama, eight), 0.3, is_minimum=False))
    for context, limits in COST_LIMITS.items():
        for rows, limit in limits.items():
            many, one = (ours, verify_key(rows, context)), (ours, verify_key(1, context))
            checks.append(compare("2", f"v({rows})/v(1) at {context}", many, one, limit, is_minimum=False))
    prompt = "prompt 512"
    checks.append(compare("3", f"{prompt}, speed over {llama}", (llama, prompt), (ours, prompt), 1, is_minimum=True))
    long = [one.share("attention") for name, one in results.profiles.items() if name.endswith(f" at {LONG_CONTEXT}")]
    step, start = results.profiles[STEP], results.start
    return [
        *checks,
        Check("3", f"attention's share at {LONG_CONTEXT}, M up to 8", max(long, default=None), 0.5, False),
        Check("4", "64 sequences, tokens/s", results.batch_tokens_s, 1500, True),
        Check("6", "Python and synchronisation in a plain step", (step.python + step.sync) / step.total, 0.12, False),
        Check("7", "second start to first token, s", start.seconds, 1.0, False),
        Check("7", "resident memory, MB", start.resident_mb, 350, False),
    ]


# ---------------------------------------------------------------------------------------------- tables


def table(head: Seq[str], rows: Seq[Seq[object]]) -> str:
    """A Markdown table; floats get three digits."""
    lines = [head, ["---:"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return str(cell)


FORWARD_HEAD = (
    "context",
    "M",
    "ms",
    "best ms",
    "v(M)/v(1)",
    "logits ms",
    "logits v(M)/v(1)",
    "MB",
    "GB/s",
    "GOP/s",
    "limit ms",
    "of limit %",
    "sync %",
    "Python %",
)


def forward_row(ours: Ours, results: Results, rows: int, context: int) -> list[object]:
    num_bytes, operations = ours.count_work(rows, context)
    machine, times = results.machine, results.times
    here, one, logits = verify_key(rows, context), verify_key(1, context), forward_key(rows, context)
    seconds = times.median(ours.name, here)
    assert seconds is not None
    limit = max(num_bytes / machine.read_gb_s, operations / machine.int8_gop_s) * 1e-9
    shape = results.profiles[f"{rows} at {context}"]
    costs = [
        *(1000 * seconds, _ms(times.best(ours.name, here)), times.ratio((ours.name, here), (ours.name, one))),
        _ms(times.median(ours.name, logits)),
        times.ratio((ours.name, logits), (ours.name, forward_key(1, context))),
    ]
    rates = [num_bytes / 1e6, num_bytes / seconds / 1e9, operations / seconds / 1e9]
    shares = [100 * limit / seconds, 100 * shape.sync / shape.total, 100 * shape.python / shape.total]
    return [context, rows, *costs, *rates, 1000 * limit, *shares]


def peer_rows(times: Times, peers: Seq[str], tasks: Seq[str]) -> list[list[object]]:
    rows: list[list[object]] = []
    for task in tasks:
        row: list[object] = [task, _ms(times.median(Ours.name, task))]
        for peer in peers:
            row += [_ms(times.median(peer, task)), times.ratio((peer, task), (Ours.name, task))]
        rows.append(row)
    return rows


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


PROFILE_HEAD = ("pass", "ms", "matrices", "head", "attention", "rotate, store", "norms", "other", "sync", "Python")


def profile_row(name: str, one: Profile) -> list[object]:
    parts = [MATRICES, ("head",), ("attention",), ("rotate",), ("norm",), ("other",)]
    work = [sum(one.phases[phase] for phase in phases) for phases in parts]
    return [name, one.total, *work, one.sync, one.python]


# ---------------------------------------------------------------------------------------------- main


class AddPeer(argparse.Action):
    """`--peer NAME`, and `--peer-python PATH` for the peer named before it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        peers: list[list[str]] = getattr(namespace, "peers", None) or []
        if option_string == "--peer":
            peers.append([values, sys.executable])
        elif peers:
            peers[-1][1] = values
        else:
            parser.error("--peer-python follows the --peer that it belongs to")
        namespace.peers = peers


def start_peers(
    wishes: Seq[Seq[str]], model: Path, threads: int, work: Path
) -> tuple[list[PeerProcess], dict[str, str]]:
    """The peers that start, and why others do not."""
    peers, failures = [], {}
    for engine, python in wishes:
        for precision in (
            LLAMA_PRECISIONS if engine == "llama-cpp" else ("int8" if engine == "openvino" else "float32",)
        ):
            try:
                peers.append(PeerProcess(engine, precision, python, model, threads, work))
            except (PeerError, OSError) as error:
                failures[f"{engine} {precision}"] = str(error)
                print(f"not measured: {error}", file=sys.stderr)
    return peers, failures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="a name or a .gguf file (peers need a .gguf file)")
    parser.add_argument("--threads", type=int, help="for every engine; default: one per core")
    parser.add_argument("--dtype", help="int8 (default) or float32, for our model")
    parser.add_argument("--peer", action=AddPeer, choices=("llama-cpp", "openvino", "transformers"), dest="peers")
    parser.add_argument("--peer-python", action=AddPeer, dest="peers", metavar="PATH", help="its interpreter")
    parser.add_argument("--work", type=Path, help="folder that keeps converted models; default: a temporary one")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds, under two minutes")
    parser.add_argument("--rounds", type=int, help="rounds of the interleaved run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE ('-': stdout)")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    plan = QUICK if args.quick else FULL
    if args.rounds:
        plan = replace(plan, rounds=args.rounds)
    loaded = load_model(args.model, ModelOptions(backend="native", threads=args.threads, dtype=args.dtype))
    ours = Ours(loaded)
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        peers, failures = start_peers(args.peers or [], loaded.path, ours.threads, work)
        try:
            results = measure(plan, ours, peers, failures)
        finally:
            for peer in peers:
                peer.close()
    show(plan, ours, results)
    if args.json:
        text = json.dumps(to_document(plan, ours, results))
        print(text) if str(args.json) == "-" else args.json.write_text(text + "\n", encoding="utf-8")
    return 0


def measure(plan: Plan, ours: Ours, peers: Seq[PeerProcess], failures: dict[str, str]) -> Results:
    load = os.getloadavg()[0]
    meter = MachineMeter(int(ours.count_work(1, 0)[0]), ours.threads)
    times = run_rounds([ours, *peers], plan, meter)
    shapes = [(rows, context) for context in plan.contexts for rows in plan.rows]
    if plan.long_context:
        shapes += [(rows, plan.long_context) for rows in LONG_ROWS]
    profiles = {STEP: profile_steps(ours, plan.prompts[0], plan.tokens)}
    for rows, context in shapes:
        ours.one_pass(rows, context)
        repeats = 40 if rows <= 16 else 8
        profiles[f"{rows} at {context}"] = profile(partial(ours.one_pass, rows, context), ours.threads, repeats)
    return Results(
        load=(load, os.getloadavg()[0]),
        machine=meter.result(),
        times=times,
        profiles=profiles,
        batch_tokens_s=measure_batch(ours.loaded, plan.batch_tokens),
        start=measure_start(ours.loaded.path, ours.threads, plan.starts),
        peers={peer.name: peer.facts for peer in peers},
        failures=failures,
    )


def show(plan: Plan, ours: Ours, results: Results) -> None:
    """Print the tables and the requirements."""
    machine, start = results.machine, results.start
    print(f"\n{machine.cpus} CPUs ({', '.join(machine.features)}), {ours.threads} threads, kernels {native.isa()}")
    print(f"load of the machine from {results.load[0]:.1f} to {results.load[1]:.1f}")
    print(
        f"limits: read {machine.read_gb_s:.1f}, copy {machine.copy_gb_s:.1f} GB/s, int8 {machine.int8_gop_s:.0f} GOP/s"
    )
    shapes = [(rows, context) for context in plan.contexts for rows in plan.rows]
    print("\n" + table(FORWARD_HEAD, [forward_row(ours, results, *shape) for shape in shapes]))
    print("\nmilliseconds of a call\n")
    print(table(PROFILE_HEAD, [profile_row(name, one) for name, one in results.profiles.items()]))
    for name, facts in results.peers.items():
        print(f"\n{name}: {json.dumps(facts)}")
    for name, reason in results.failures.items():
        print(f"\n{name}: not measured: {reason}")
    names = list(results.peers)
    head = ["task", "ours ms", *(column for name in names for column in (f"{name} ms", "ratio"))]
    print(f"\n{plan.tokens} tokens per decoding; a ratio is the peer's time over ours\n")
    print(
        table(
            head,
            peer_rows(results.times, names, [task for task, request in plan.requests() if request["do"] != "verify"]),
        )
    )
    print(f"\n64 sequences: {results.batch_tokens_s:.0f} tokens/s")
    print(f"second start: {start.seconds:.2f} s to the first token", end=", ")
    print(f"{start.resident_mb:.0f} MB resident, {start.peak_mb:.0f} MB at most")
    print("\nrequired                                             median  of bests")
    print("\n".join(str(check) for check in check_requirements(results)))


def to_document(plan: Plan, ours: Ours, results: Results) -> dict[str, Any]:
    """Everything measured, with what is needed to repeat it, ready for JSON."""
    shapes = [(rows, context) for context in plan.contexts for rows in plan.rows]
    rows = [forward_row(ours, results, *shape) for shape in shapes]
    checks = check_requirements(results)
    return {
        "command": sys.argv,
        "versions": {"python": platform.python_version(), "sakiyomi": _version("sakiyomi"), "numpy": np.__version__},
        "commit": _commit(),
        "threads": ours.threads,
        "isa": native.isa(),
        "plan": asdict(plan),
        "load": results.load,
        "machine": asdict(results.machine),
        "forward": [dict(zip(FORWARD_HEAD, row, strict=True)) for row in rows],
        "profiles_ms": {name: asdict(one) | {"total": one.total} for name, one in results.profiles.items()},
        "peers": results.peers,
        "not_measured": results.failures,
        "seconds_by_round": results.times.rounds,
        "best_seconds": results.times.bests,
        "batch_tokens_s": results.batch_tokens_s,
        "start": asdict(results.start),
        "checks": [asdict(check) | {"holds": check.holds} for check in checks],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
