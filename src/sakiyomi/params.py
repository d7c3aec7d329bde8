"""SamplingParams: what a request asks of the choice of its tokens (names and defaults as in vLLM)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sakiyomi.errors import ParameterError

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_REAL = sys.float_info.max  # nan, infinities and integers that no float holds are outside


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Args:
        n: number of samples for one prompt; sample 0 uses `seed` itself, sample i a seed derived from it.
        temperature: 0 chooses the most probable token; larger values flatten the law.
        top_p: keep the smallest set of most probable tokens whose probability reaches this, in (0, 1].
        top_k: keep the k most probable tokens; 0 or -1 keeps all.
        min_p: drop tokens less probable than this fraction of the most probable one, in [0, 1].
        seed: 64-bit seed of the keyed noise; None draws one, which the result reports.
        max_tokens: number of new tokens at most; None means up to the context.
        min_tokens: end ids are forbidden before this many new tokens.
        stop: strings that end the answer as soon as its text contains one.
        stop_token_ids: further ids that end the answer.
        include_stop_str_in_output: keep the stop string in the text.
        ignore_eos: do not end at the model's end ids.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, in [-2, 2].
        repetition_penalty: divides (multiplies) positive (negative) logits of tokens seen in prompt or answer, > 0.
        logit_bias: added to the logits of the given ids, in [-100, 100].
        logprobs: report this many most probable tokens per position (0: the chosen one alone); None reports none.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ParameterError: with the value received and the allowed range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, None)
        _real("temperature", self.temperature, 0.0, None)
        _real("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1, None)
        _real("min_p", self.min_p, 0.0, 1.0)
        _integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _integer("min_tokens", self.min_tokens, 0, None)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, None, low_open=True)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it.")
        if not isinstance(self.logit_bias, Mapping | None):
            raise ParameterError(f"logit_bias={self.logit_bias!r} is not allowed; give a mapping of ids to numbers.")
        for token_id, bias in (self.logit_bias or {}).items():
            _integer("an id in logit_bias", token_id, 0, None)
            _real(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if not isinstance(self.stop_token_ids, Sequence | None) or isinstance(self.stop_token_ids, str):
            raise ParameterError(f"stop_token_ids={self.stop_token_ids!r} is not allowed; give a list of ids.")
        for token_id in self.stop_token_ids or ():
            _integer("an id in stop_token_ids", token_id, 0, None)
        object.__setattr__(self, "stop_strings", _stop_strings(self.stop))

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always chosen (temperature 0)."""
        return self.temperature == 0.0

    @cached_property
    def has_penalties(self) -> bool:
        """Whether the choice depends on which tokens came before."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if not isinstance(stop, str | Sequence | None):
        raise ParameterError(f"stop={stop!r} is not allowed; give a text or a list of texts.")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ParameterError(f"stop holds {string!r}; each stop string is a text of at least one character.")
    return strings


def _integer(name: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):  # type: ignore[operator]
        allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise ParameterError(f"{name}={value!r} is not allowed; give {allowed}{' or None' if optional else ''}.")


def _real(name: str, value: object, low: float, high: float | None, *, low_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_REAL
    below = is_number and (value <= low if low_open else value < low)  # type: ignore[operator]
    if not is_number or below or (high is not None and value > high):  # type: ignore[operator]
        floor = f"above {low:g}" if low_open else f"of at least {low:g}"
        allowed = f"a number {floor}" if high is None else f"a number {floor} and at most {high:g}"
        raise ParameterError(f"{name}={value!r} is not allowed; give {allowed}.")
