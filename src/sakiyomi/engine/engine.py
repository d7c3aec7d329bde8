"""Engine: runs up to `max_num_seqs` sequences in each step; a finished one makes room for the next at once."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from sakiyomi.decode import Step, advance, forget, prefill
from sakiyomi.engine.budget import MAX_DRAFT_NODES, Budget, FixedBudget
from sakiyomi.engine.burst import BURST_SECONDS, makes_bursts, run_burst
from sakiyomi.engine.metrics import AcceptanceCounter
from sakiyomi.types import Cache, Drafter, Model, Sequence, Verifier

logger = logging.getLogger("sakiyomi")


@dataclass(eq=False)
class Prefix:
    """A prompt that several samples share: computed for the first, forked for the others."""

    cache: Cache | None = None


@dataclass(eq=False)
class Job:
    """A sequence on its way through the engine, with its measurements.

    Attributes:
        prefix: what the job shares with the other samples of its prompt.
        keeps_cache: whether the cache outlives the job (a chat goes on from it).
        prefill_s, decode_s: seconds from admission to the end of the prompt, and from there to the end.
        draft_s: seconds of `decode_s` in which its steps drafted.
        error: what ended the job early, or None.
    """

    sequence: Sequence
    prefix: Prefix | None = None
    keeps_cache: bool = False
    counter: AcceptanceCounter = field(default_factory=AcceptanceCounter)
    steps: list[Step] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    error: Exception | None = None
    started: float = 0.0

    @property
    def is_finished(self) -> bool:
        return self.sequence.finish_reason is not None


class Engine:
    """A queue of jobs over one model. Not thread-safe: each thread has its own, over the same model.

    Args:
        budget: decides how much is drafted and checked, and learns from it; None drafts what the drafter likes.
        burst_seconds: for how long a call of `step` may make further steps of a single job; 0: one step.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        verifier: Verifier,
        *,
        max_num_seqs: int,
        budget: Budget | None = None,
        burst_seconds: float = BURST_SECONDS,
    ) -> None:
        self._model = model
        self._drafter = drafter
        self._verifier = verifier
        self._budget = budget or FixedBudget(drafter)
        self._max_num_seqs = max_num_seqs
        self._burst_seconds = burst_seconds
        self._bursting = model if burst_seconds > 0 and makes_bursts(model, verifier) else None
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, job: Job) -> None:
        """Queue a job."""
        self._waiting.append(job)

    def step(self) -> list[tuple[Job, Step]]:
        """Admit what fits, advance every running job by one step, and retire the finished ones.

        A single job may make several steps at once, where its tokens are chosen greedily (engine/burst.py).
        """
        self._admit()
        jobs = list(self._running)
        if not jobs:
            return []
        try:
            if len(jobs) == 1 and (done := self._burst(jobs[0])):
                return done
            steps = self._advance(jobs)
        except Exception as error:
            logger.debug("A step failed:", exc_info=error)
            if len(jobs) == 1:
                self._fail(jobs[0], error)
                return []
        else:
            return self._record(jobs, steps)
        return self._step_apart(jobs)

    def abort(self, job: Job) -> None:
        """Take a job out, finished or not, and free what it holds."""
        if job in self._waiting:
            self._waiting.remove(job)
        self._retire(job)
        if not job.is_finished:
            job.sequence.finish_reason = "abort"

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            job = self._waiting.popleft()
            job.started = time.perf_counter()
            try:
                self._prefill(job)
            except Exception as error:
                self._fail(job, error)
                continue
            job.prefill_s = time.perf_counter() - job.started
            self._running.append(job)

    def _prefill(self, job: Job) -> None:
        sequence = job.sequence
        prefix = None if self._drafter.taps else job.prefix
        job.prefix = None
        if prefix is not None and prefix.cache is not None:
            sequence.cache = prefix.cache.fork()
        prefill(self._model, self._drafter, sequence)
        if prefix is not None and prefix.cache is None:
            prefix.cache = sequence.cache.fork()

    def _step_apart(self, jobs: Seq[Job]) -> list[tuple[Job, Step]]:
        """One of several jobs made the step fail: step each alone, so that only the guilty one is lost."""
        results = []
        for job in jobs:
            try:
                steps = self._advance([job])
            except Exception as error:
                self._fail(job, error)
            else:
                results.extend(self._record([job], steps))
        return results

    def _burst(self, job: Job) -> list[tuple[Job, Step]]:
        """Several steps of the only job, where it is one whose steps may be made together."""
        if self._bursting is None:
            return []
        sequence = job.sequence
        cap = _cap(sequence.speculation)
        found = run_burst(self._bursting, self._drafter, self._budget, sequence, cap, self._burst_seconds)
        job.draft_s += sum(one.draft_s for _, one in found)
        return [done for step, _ in found for done in self._record([job], [step])]

    def _advance(self, jobs: Seq[Job]) -> list[Step]:
        sequences = [job.sequence for job in jobs]
        started = time.perf_counter()
        plan = self._budget.propose(sequences, [_cap(sequence.speculation) for sequence in sequences], self._model.info)
        proposed = time.perf_counter()
        steps = advance(self._model, self._drafter, self._verifier, sequences, plan.drafts)
        self._budget.record(sequences, plan, steps, time.perf_counter() - proposed)
        for job in jobs:
            job.draft_s += proposed - started
        return steps

    def _record(self, jobs: Seq[Job], steps: Seq[Step]) -> list[tuple[Job, Step]]:
        for job, done in zip(jobs, steps, strict=True):
            job.counter.add(done)
            job.steps.append(done)
            job.decode_s = time.perf_counter() - job.started - job.prefill_s
            if job.is_finished:
                self._retire(job)
        return list(zip(jobs, steps, strict=True))

    def _fail(self, job: Job, error: Exception) -> None:
        # The frames of the traceback hold caches, which must not live as long as the result.
        error.__context__ = error.__cause__ = None
        job.error = error.with_traceback(None)
        job.sequence.finish_reason = "error"
        self._retire(job)

    def _retire(self, job: Job) -> None:
        if job in self._running:
            self._running.remove(job)
        if not job.keeps_cache:
            forget(self._drafter, job.sequence)
            job.sequence.cache = self._model.new_cache()


def _cap(wish: bool | int) -> int:
    """The nodes of a draft that a request allows."""
    if isinstance(wish, bool):
        return MAX_DRAFT_NODES if wish else 0
    return wish
