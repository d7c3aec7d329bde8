"""What a request returns: vLLM's shapes, plus what speculation did and how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sakiyomi.types import FinishReason


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """Log-probability of one token, from the model's own logits before any change by the sampling parameters."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample of the answer to one prompt.

    Attributes:
        logprobs: for each token a table from id to Logprob, where asked for.
        finish_reason: "stop" (end id or stop string), "length", "abort", or "error".
        stop_reason: the stop string or the id of `stop_token_ids` that ended the answer.
        seed: the key of the sample's noise.
        drafted: which tokens came from a draft: their indices in `token_ids`.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    seed: int = 0
    drafted: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SpeculationStats:
    """What drafting and verifying did, over all samples of a request (vLLM's definitions).

    Attributes:
        is_lossless: what the verifier keeps: "tokens", "distribution" or "no".
        verifier_options: the verifier's knobs.
        mean_acceptance_length: 1 + accepted / steps, the bonus token included.
        num_lossy_tokens: accepted tokens that only a lossy rule accepts.
        acceptance_per_position: for each draft position the share of steps that accepted it.
        tried_per_position: for each draft position the share of steps that put it to the test, that is whose draft
            was right before it and went on.
    """

    drafter: str
    verifier: str
    is_lossless: str
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    acceptance_per_position: list[float]
    tried_per_position: list[float] = field(default_factory=list)
    num_lossy_tokens: int = 0
    verifier_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds, and new tokens per second of decoding; `draft_s` is the drafter's part of `decode_s`."""

    load_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float
    draft_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt.

    Attributes:
        error: why the request failed, or None; a failed request has no finished outputs.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    speculation: SpeculationStats
    timing: Timing
    seed: int
    finished: bool = True
    error: Exception | None = None


@dataclass(frozen=True, kw_only=True)
class StreamPiece:
    """One token of a streamed answer.

    Attributes:
        text: what became certain with this token; may be empty while characters or stop strings are incomplete.
        source: whether the token was drafted and accepted, or chosen by the target after the draft.
        output: the whole result, with the last piece.
    """

    token_id: int
    text: str
    source: Literal["target", "draft"]
    index: int
    output: RequestOutput | None = None
