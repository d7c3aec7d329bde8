"""One step of decoding: propose, forward, verify, commit, observe. Plain decoding is drafting nothing.

Between steps `cache.length == len(tokens) - 1`: the last committed token has not been fed yet. Its row gives the law
of the next token, the row of a draft node the law of the token behind that node.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sakiyomi.ops.base import BurstStep
from sakiyomi.sampling.choose import TokenLogprobs, bare_choice, log_probs
from sakiyomi.tree import ROOT, Draft
from sakiyomi.types import (
    THE_BEST,
    Array,
    BareChoice,
    Drafter,
    Model,
    ModelInfo,
    Output,
    Sequence,
    Span,
    Verdict,
    Verifier,
)

logger = logging.getLogger("sakiyomi")

PREFILL_CHUNK = 256
"""Rows of a prompt per forward pass: enough to be compute-bound, few enough to keep buffers small."""

EXPECTED_TOKENS = 256
"""Tokens of an answer that a cache has room for at once; most answers are shorter, and some requests name no end."""

SPARE_ROWS = 64
"""Room behind them for drafts."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did to one sequence.

    Attributes:
        tokens: the ids committed now, at least one.
        num_accepted: how many of them, from the first on, were drafted.
        num_draft: drafted nodes that were checked.
        num_tried: how many draft positions were put to the test: the accepted ones, and the one at which the draft
            went wrong. A draft that ended while it was right has none of the latter.
        num_lossy: how many of the accepted ones only a lossy rule accepts.
        logprobs: one entry per token where the request asked for them.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    num_draft: int
    logprobs: tuple[TokenLogprobs, ...] | None
    num_lossy: int = 0
    num_tried: int = 0


def step(model: Model, drafter: Drafter, verifier: Verifier, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Step]:
    """Advance every sequence by at least one token in a single forward pass of the model.

    Args:
        sequences: prefilled and unfinished.
        budgets: for each sequence the number of draft nodes at most.
    """
    return advance(model, drafter, verifier, sequences, propose(drafter, sequences, budgets, model.info))


def advance(
    model: Model, drafter: Drafter, verifier: Verifier, sequences: Seq[Sequence], drafts: Seq[Draft]
) -> list[Step]:
    """The part of a step behind the proposal: forward, verify, commit, observe."""
    spans = [
        _span(sequence, draft, drafter.taps, _choice(verifier, sequence))
        for sequence, draft in zip(sequences, drafts, strict=True)
    ]
    outputs = model.forward(spans)
    # All verdicts before the first commit: a row that cannot be judged leaves every sequence as it was.
    verdicts = [verifier.verify(*judged) for judged in zip(drafts, outputs, sequences, strict=True)]
    steps = []
    for sequence, draft, span, output, verdict in zip(sequences, drafts, spans, outputs, verdicts, strict=True):
        sequence.num_steps += 1
        steps.append(_commit(sequence, draft, verdict, output, model.info))
        _keep(sequence, span, verdict.path[: len(steps[-1].tokens) - 1], output, drafter)
        _observe_probes(drafter, sequence, draft, output)
    return steps


def prefill(model: Model, drafter: Drafter, sequence: Sequence, chunk: int = PREFILL_CHUNK) -> None:
    """Feed every committed token but the last, so that there is one place where tokens are chosen."""
    expected = min(num_left(sequence, model.info), EXPECTED_TOKENS)
    sequence.cache.expect(len(sequence.tokens) + expected + SPARE_ROWS)
    while sequence.cache.length < len(sequence.tokens) - 1:
        prefill_chunk(model, drafter, sequence, chunk)


def prefill_chunk(model: Model, drafter: Drafter, sequence: Sequence, chunk: int = PREFILL_CHUNK) -> None:
    """Feed the next tokens of the prompt, `chunk` at most."""
    start = sequence.cache.length
    tokens = sequence.tokens[start : min(start + chunk, len(sequence.tokens) - 1)]
    span = Span(sequence.cache, tokens, range(-1, len(tokens) - 1), taps=drafter.taps)
    output = model.forward([span])[0]
    sequence.cache.keep(range(len(tokens)))
    _observe(drafter, sequence, start, tokens, output.taps)


def propose(drafter: Drafter, sequences: Seq[Sequence], budgets: Seq[int], info: ModelInfo) -> list[Draft]:
    """One valid draft per sequence, none deeper than what the sequence may still emit.

    A drafter that raises, or whose draft is invalid, costs speed and nothing else: that step is a plain one.
    """
    depths = [num_left(sequence, info) - 1 for sequence in sequences]
    budgets = [max(min(budget, depth), 0) for budget, depth in zip(budgets, depths, strict=True)]
    if info.draft_shape == "none" or not any(budgets):
        return [Draft.empty() for _ in sequences]
    try:
        return _checked_drafts(drafter, sequences, budgets, info)
    except Exception as error:
        report_once(drafter, error)
    return [_propose_alone(drafter, *pair, info) for pair in zip(sequences, budgets, strict=True)]


def _checked_drafts(drafter: Drafter, sequences: Seq[Sequence], budgets: Seq[int], info: ModelInfo) -> list[Draft]:
    drafts = drafter.propose(sequences, budgets)
    if len(drafts) != len(sequences):
        raise ValueError(f"{len(drafts)} drafts for {len(sequences)} sequences")
    return [_checked_draft(draft, budget, info) for draft, budget in zip(drafts, budgets, strict=True)]


def _checked_draft(draft: Draft, budget: int, info: ModelInfo) -> Draft:
    if len(draft) or draft.probes is not None:
        draft = draft.trim(budget, budget)
        if info.draft_shape == "chains":
            draft = draft.best_chain()
        draft.check(info.vocab_size)
    return draft


def _propose_alone(drafter: Drafter, sequence: Sequence, budget: int, info: ModelInfo) -> Draft:
    """The draft of one of several sequences that could not be drafted for together."""
    try:
        return _checked_drafts(drafter, [sequence], [budget], info)[0]
    except Exception as error:
        report_once(drafter, error)
        return Draft.empty()


def num_left(sequence: Sequence, info: ModelInfo) -> int:
    """Tokens that the sequence may still emit."""
    left = info.max_model_len - len(sequence.tokens)
    if sequence.params.max_tokens is not None:
        left = min(left, sequence.params.max_tokens - sequence.num_new)
    return left


def commit_burst(sequence: Sequence, found: BurstStep, info: ModelInfo) -> Step:
    """Commit what a step of a burst emitted, up to the first token that finishes the sequence."""
    sequence.num_steps += 1
    num_emitted = _emit(sequence, found.tokens, info)
    num_accepted, num_tried = min(found.num_accepted, num_emitted), min(found.num_tried, num_emitted)
    return Step(found.tokens[:num_emitted], num_accepted, found.num_draft, None, 0, num_tried)


def observe_burst(drafter: Drafter, sequence: Sequence, start: int, taps: Array | None) -> None:
    """Tell the drafter of the positions from `start` on that a burst fed.

    Positions behind the end of the sequence, which a stop string may have brought forward, are dropped.
    """
    length = len(sequence.tokens) - 1
    is_longer = sequence.cache.length > length
    if is_longer:
        sequence.cache.truncate(length)
    if length > start:
        _observe(
            drafter, sequence, start, sequence.tokens[start:length], None if taps is None else taps[: length - start]
        )
    if is_longer:
        rewind(drafter, sequence, length)


def _choice(verifier: Verifier, sequence: Sequence) -> BareChoice | None:
    """How the tokens of a sequence are chosen, where the rule will ask for nothing else of the rows."""
    choice = bare_choice(sequence.history()) if verifier.is_lossless != "no" else None
    return choice if choice == THE_BEST or verifier.follows_choices else None


def _span(sequence: Sequence, draft: Draft, taps: tuple[int, ...], choice: BareChoice | None = None) -> Span:
    tail = sequence.tokens[sequence.cache.length :]
    root = len(tail) - 1
    if root == 0 and not len(draft) and draft.probes is None:
        return Span(sequence.cache, tail, (-1,), (0,), taps, draft.computed, choice)
    parents = [*range(-1, root), *(root if parent == ROOT else root + 1 + parent for parent in draft.parents)]
    tokens, rows = [*tail, *draft.tokens], [*range(root, len(parents))]
    if draft.probes is not None:
        first = len(parents)
        tokens += draft.probes.tokens
        parents += (root if parent == ROOT else first + parent for parent in draft.probes.parents)
        rows += (first + row for row in draft.probes.asked)
    return Span(sequence.cache, tokens, parents, rows, taps, draft.computed, choice)


def _commit(sequence: Sequence, draft: Draft, verdict: Verdict, output: Output, info: ModelInfo) -> Step:
    """Append the verdict's tokens, up to the first that finishes the sequence."""
    num_emitted = _emit(sequence, verdict.tokens, info)
    tokens, num_logprobs = verdict.tokens[:num_emitted], sequence.params.logprobs
    logprobs: tuple[TokenLogprobs, ...] | None = None
    if num_logprobs is not None:
        rows = (0, *(node + 1 for node in verdict.path))
        logprobs = tuple(
            log_probs(output.row(row), token, num_logprobs) for row, token in zip(rows, tokens, strict=False)
        )
    num_accepted = min(len(verdict.path), num_emitted)
    last = verdict.path[-1] if verdict.path else ROOT
    return Step(
        tokens,
        num_accepted,
        len(draft),
        logprobs,
        sum(index < num_emitted for index in verdict.lossy) if verdict.lossy else 0,
        num_accepted + (num_emitted > num_accepted and last in draft.parents),
    )


def _emit(sequence: Sequence, tokens: Seq[int], info: ModelInfo) -> int:
    """Append tokens one by one, up to the first that finishes the sequence; returns how many."""
    for number, token in enumerate(tokens, 1):
        sequence.tokens.append(token)
        if _finish(sequence, token, info):
            return number
    return len(tokens)


def _finish(sequence: Sequence, token: int, info: ModelInfo) -> bool:
    """Whether `token`, just appended, ends the sequence: end ids first, then stop strings, then the lengths."""
    params = sequence.params
    if token in sequence.end_ids and sequence.num_new > params.min_tokens:
        sequence.finish_reason = "stop"
        sequence.stop_reason = token if token in (params.stop_token_ids or ()) else None
        if sequence.watcher is not None and params.include_stop_str_in_output:
            sequence.watcher.push(token)
        return True
    stop = None if sequence.watcher is None else sequence.watcher.push(token)
    if stop is not None:
        sequence.finish_reason, sequence.stop_reason = "stop", stop
    elif num_left(sequence, info) <= 0:
        sequence.finish_reason = "length"
    return sequence.finish_reason is not None


def _keep(sequence: Sequence, span: Span, path: Seq[int], output: Output, drafter: Drafter) -> None:
    """Commit the rows of the root and of `path`: all committed tokens but the last."""
    num_tail = span.logit_rows[0] + 1
    rows = [*range(num_tail), *(num_tail + node for node in path)]
    start = sequence.cache.length
    sequence.cache.keep(rows)
    # A slice where the rows stand together, as those of a chain do: choosing rows by a list is slow by comparison.
    taps = None if output.taps is None else output.taps[: len(rows)] if rows[-1] < len(rows) else output.taps[rows]
    _observe(drafter, sequence, start, [span.tokens[row] for row in rows], taps)


def _observe(drafter: Drafter, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
    try:
        drafter.observe(sequence, start, tokens, taps)
    except Exception as error:
        report_once(drafter, error)


def _observe_probes(drafter: Drafter, sequence: Sequence, draft: Draft, output: Output) -> None:
    if draft.probes is None:
        return
    try:
        drafter.observe_probes(sequence, draft.probes, output.argmax()[len(draft) + 1 :])
    except Exception as error:
        report_once(drafter, error)


def rewind(drafter: Drafter, sequence: Sequence, length: int) -> None:
    """Tell the drafter that the tokens from `length` on were replaced."""
    try:
        drafter.rewind(sequence, length)
    except Exception as error:
        sequence.memo = None
        report_once(drafter, error)


def forget(drafter: Drafter, sequence: Sequence) -> None:
    """Tell the drafter that the sequence is over."""
    try:
        drafter.forget(sequence)
    except Exception as error:
        sequence.memo = None
        report_once(drafter, error)


_reported: dict[int, weakref.ref[Drafter]] = {}
"""Drafters whose failure was reported, by identity: they need not be hashable."""


def report_once(drafter: Drafter, error: Exception) -> None:
    """Log the first failure of a drafter."""
    known = _reported.get(id(drafter))
    if known is None or known() is not drafter:
        _reported[id(drafter)] = weakref.ref(drafter)
        logger.warning(
            "The drafter %s failed (%s); decoding goes on without its drafts.", type(drafter).__name__, error
        )
        logger.debug("Where it failed:", exc_info=error)
