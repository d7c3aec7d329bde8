"""From prompts to jobs of the engine, and from finished jobs to results."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, is_dataclass
from numbers import Integral
from typing import Any

import numpy as np

from sakiyomi.assemble import LoadedModel
from sakiyomi.decode import Step
from sakiyomi.engine.engine import Job, Prefix
from sakiyomi.engine.metrics import AcceptanceCounter
from sakiyomi.errors import ContextLengthError, ParameterError
from sakiyomi.noise import derive_seed, fresh_seed
from sakiyomi.params import SamplingParams
from sakiyomi.results import CompletionOutput, Logprob, RequestOutput, SpeculationStats, StreamPiece, Timing
from sakiyomi.sampling.choose import TokenLogprobs
from sakiyomi.text.detokenizer import Detokenizer
from sakiyomi.text.stops import TextStream
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import Drafter, Sequence, Verifier

logger = logging.getLogger("sakiyomi")

Messages = Seq[Mapping[str, Any]]
Prompt = str | Seq[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's {"prompt": ...} / {"prompt_token_ids": ...}."""
Prediction = str | Seq[int]
"""What an answer is expected to be: a text as it would stand in the answer, or token ids."""
Speculation = bool | int
"""False drafts nothing, a number caps the tokens of a draft, True leaves it to the engine."""


@dataclass(frozen=True)
class Conversation:
    """A prompt that the chat template makes out of messages."""

    messages: Messages


@dataclass(eq=False)
class Request:
    """One prompt with its samples, each a job of the engine.

    Attributes:
        error: why it failed, or None.
    """

    id: str
    text: str | None
    ids: list[int]
    params: SamplingParams
    seed: int
    jobs: list[Job] = field(default_factory=list)
    error: Exception | None = None

    @property
    def is_finished(self) -> bool:
        return all(job.is_finished for job in self.jobs)


class Requests:
    """Makes requests for one model and drafter, and their results."""

    def __init__(self, loaded: LoadedModel, drafter: Drafter, verifier: Verifier, seed: int | None) -> None:
        self.load_seconds = 0.0
        self._model = loaded.model
        self._tokenizer = loaded.tokenizer
        self._template = loaded.chat_template
        self._drafter = drafter
        self._verifier = verifier
        self._seed = seed
        self._numbers = itertools.count()
        self._is_prediction_reported = False

    # ------------------------------------------------------------------------------------------ prompts

    def build(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams,
        prediction: Prediction | None = None,
        speculation: Speculation = True,
    ) -> Request:
        """A request that is ready to run.

        Raises:
            ContextLengthError, ParameterError
        """
        number = next(self._numbers)
        text, ids = self._encode(prompt)
        self._check(ids, params)
        predicted = None if prediction is None else self._encode_prediction(prediction)
        if not isinstance(speculation, int) or speculation < 0:
            raise ParameterError(f"speculation={speculation!r} is not allowed; give True, False or a number of tokens.")
        seed = self._seed_of(params, number)
        prefix = Prefix() if params.n > 1 else None
        jobs = [
            Job(self._sequence(f"{number}-{i}", ids, params, derive_seed(seed, i), predicted, speculation), prefix)
            for i in range(params.n)
        ]
        return Request(str(number), text, ids, params, seed, jobs)

    def fail(self, prompt: Any, params: SamplingParams, error: Exception) -> Request:
        """A request that could not be built; it keeps what is known of its prompt."""
        text = prompt if isinstance(prompt, str) else None
        try:
            ids = [] if isinstance(prompt, Conversation) else self._encode(prompt)[1]
        except Exception:
            ids = []
        return Request(str(next(self._numbers)), text, ids, params, 0, [], error)

    def render(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the answer.

        Raises:
            ParameterError: if the model has no chat template.
        """
        if self._template is None or self._tokenizer is None:
            raise ParameterError(f"{self._model.info.name} has no chat template; use generate with a plain prompt.")
        return self._tokenizer.encode(self._template.render(list(messages)), add_special_tokens=False)

    def _encode(self, prompt: Prompt | Conversation) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Conversation):
            return None, self.render(prompt.messages)
        if isinstance(prompt, Mapping):
            if prompt.get("prompt_token_ids") is not None:
                return prompt.get("prompt"), _ids_of(prompt["prompt_token_ids"], "prompt_token_ids")
            if "prompt" not in prompt:
                raise ParameterError(f"a prompt with keys {sorted(prompt)}; give prompt or prompt_token_ids.")
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            return None, _ids_of(prompt, "the prompt")
        if self._tokenizer is None:
            raise ParameterError(f"{self._model.info.name} has no tokenizer; give token ids.")
        return prompt, self._tokenizer.encode(prompt)

    def _encode_prediction(self, prediction: Prediction) -> list[int]:
        if not getattr(self._drafter, "reads_prediction", False) and not self._is_prediction_reported:
            self._is_prediction_reported = True
            logger.warning("The drafter in use does not read predictions; take suffix or ngram.")
        if isinstance(prediction, str):
            if self._tokenizer is None:
                raise ParameterError(f"{self._model.info.name} has no tokenizer; give the prediction as token ids.")
            return self._tokenizer.encode(prediction, add_special_tokens=False)
        ids = _ids_of(prediction, "the prediction")
        self._check_ids(ids, "the prediction")
        return ids

    def _check(self, ids: Seq[int], params: SamplingParams) -> None:
        limit = self._model.info.max_model_len
        if not ids:
            raise ContextLengthError("the prompt is empty; give at least one token.")
        if len(ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the context {limit}, of which one is for the answer; "
                "shorten the prompt, start a conversation anew, or raise max_model_len."
            )
        self._check_ids(ids, "the prompt")
        self._check_ids(params.logit_bias or (), "logit_bias")

    def _check_ids(self, ids: Any, what: str) -> None:
        vocab_size = self._model.info.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ParameterError(f"{what} holds id {wrong}; ids are 0 to {vocab_size - 1}.")

    def _seed_of(self, params: SamplingParams, number: int) -> int:
        if params.seed is not None:
            return params.seed
        if params.is_greedy:
            return 0
        return fresh_seed() if self._seed is None else derive_seed(self._seed, number)

    def _sequence(
        self,
        name: str,
        ids: Seq[int],
        params: SamplingParams,
        seed: int,
        prediction: Seq[int] | None,
        speculation: Speculation,
    ) -> Sequence:
        ends = () if params.ignore_eos else self._model.info.end_token_ids
        return Sequence(
            id=name,
            tokens=list(ids),
            num_prompt=len(ids),
            params=params,
            seed=seed,
            cache=self._model.new_cache(),
            end_ids=frozenset((*ends, *(params.stop_token_ids or ()))),
            watcher=AnswerText(self._tokenizer, params),
            prediction=prediction,
            speculation=speculation,
        )

    # ------------------------------------------------------------------------------------------ results

    def pieces(self, request: Request, step: Step, first: int) -> list[StreamPiece]:
        """The tokens that a step added to the only answer of a request, from its `first` token on."""
        (job,) = request.jobs
        text = text_of(job)
        if job.is_finished:
            text.finish()
        pieces = []
        for offset, token in enumerate(step.tokens):
            index = first + offset
            is_last = job.is_finished and index == job.sequence.num_new - 1
            pieces.append(
                StreamPiece(
                    token_id=token,
                    text="".join(text.pieces[index:]) if is_last else text.piece(index),
                    source="draft" if offset < step.num_accepted else "target",
                    index=index,
                    output=self.result(request) if is_last else None,
                )
            )
        return pieces

    def result(self, request: Request) -> RequestOutput:
        """What became of a request, finished or not."""
        counter = AcceptanceCounter()
        for job in request.jobs:
            counter.merge(job.counter)
        decode_s = max((job.decode_s for job in request.jobs), default=0.0)
        num_new = sum(job.sequence.num_new for job in request.jobs)
        return RequestOutput(
            request_id=request.id,
            prompt=request.text,
            prompt_token_ids=request.ids,
            outputs=[self._completion(index, job) for index, job in enumerate(request.jobs)],
            speculation=self._stats(counter),
            timing=Timing(
                load_s=self.load_seconds,
                prefill_s=sum(job.prefill_s for job in request.jobs),
                decode_s=decode_s,
                tokens_per_s=num_new / decode_s if decode_s else 0.0,
                draft_s=max((job.draft_s for job in request.jobs), default=0.0),
            ),
            seed=request.seed,
            finished=request.is_finished,
            error=request.error,
        )

    def _completion(self, index: int, job: Job) -> CompletionOutput:
        sequence, text = job.sequence, text_of(job)
        text.finish()
        entries = [entry for step in job.steps for entry in step.logprobs or ()]
        has_logprobs = sequence.params.logprobs is not None
        ids = sequence.tokens[sequence.num_prompt :]
        return CompletionOutput(
            index=index,
            text="".join(text.pieces),
            token_ids=ids,
            cumulative_logprob=sum(entry.logprob for entry in entries) if has_logprobs else None,
            logprobs=[self._logprobs(*pair) for pair in zip(ids, entries, strict=True)] if has_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            seed=sequence.seed,
            drafted=_drafted(job.steps),
        )

    def _logprobs(self, token: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        found = {token: (entry.logprob, entry.rank)}
        found |= {other: (logprob, rank) for rank, (other, logprob) in enumerate(entry.top, 1) if other != token}
        return {
            other: Logprob(logprob=logprob, rank=rank, decoded_token=self._decode_one(other))
            for other, (logprob, rank) in found.items()
        }

    def _decode_one(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token).decode(errors="replace")

    def _stats(self, counter: AcceptanceCounter) -> SpeculationStats:
        return SpeculationStats(
            drafter=type(self._drafter).__module__.rpartition(".")[2],
            verifier=type(self._verifier).__module__.rpartition(".")[2],
            is_lossless=self._verifier.is_lossless,
            verifier_options=_options_of(self._verifier),
            num_steps=counter.num_steps,
            num_draft_tokens=counter.num_draft_tokens,
            num_accepted_tokens=counter.num_accepted_tokens,
            num_lossy_tokens=counter.num_lossy_tokens,
            mean_acceptance_length=counter.mean_acceptance_length,
            acceptance_per_position=counter.acceptance_per_position,
            tried_per_position=counter.tried_per_position,
        )


class AnswerText:
    """The text of one answer, a piece per token.

    Where no stop string can end it, tokens become text when somebody asks for it: between two passes of the model every
    line of code is slow, since its weights have taken the caches.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._pieces: list[str] = []
        self._unread: list[int] = []
        self._has_stops = bool(params.stop_strings)
        self._stream: TextStream | None = None
        if tokenizer is not None:
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            self._stream = TextStream(
                detokenizer, params.stop_strings, params.include_stop_str_in_output, params.min_tokens
            )
        elif params.stop_strings:
            raise ParameterError("this model has no tokenizer, so stop strings cannot be seen; use stop_token_ids.")

    @property
    def pieces(self) -> list[str]:
        """One for each token, and what `finish` released."""
        self._read()
        return self._pieces

    def push(self, token_id: int) -> str | None:
        self._unread.append(token_id)
        return self._read() if self._has_stops else None

    def piece(self, index: int) -> str:
        pieces = self.pieces
        return pieces[index] if index < len(pieces) else ""

    def finish(self) -> None:
        """Release what was held back; further calls do nothing."""
        self._read()
        if self._stream is not None:
            self._pieces.append(self._stream.finish())
            self._stream = None

    def _read(self) -> str | None:
        """Make pieces of the tokens that have none; the stop string that the last one completes, or None."""
        stop = None
        for token_id in self._unread:
            stop = None if self._stream is None else self._stream.push(token_id)
            self._pieces.append("" if self._stream is None else self._stream.take())
        self._unread.clear()
        return stop


def text_of(job: Job) -> AnswerText:
    """The text of a job that `Requests.build` made."""
    watcher = job.sequence.watcher
    assert isinstance(watcher, AnswerText)
    return watcher


def _drafted(steps: Seq[Step]) -> list[int]:
    """Indices of the drafted tokens among the emitted ones."""
    drafted: list[int] = []
    start = 0
    for step in steps:
        drafted.extend(range(start, start + step.num_accepted))
        start += len(step.tokens)
    return drafted


def _options_of(verifier: Verifier) -> dict[str, Any]:
    """The knobs of the rule."""
    config = getattr(verifier, "config", None)
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}


def _ids_of(values: Any, what: str) -> list[int]:
    """Token ids as plain integers, from any sequence or array of integers."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        values = values.tolist()
    if not isinstance(values, Seq) or isinstance(values, str | bytes):
        raise ParameterError(f"{what} is {type(values).__name__}; give a text or a list of token ids.")
    for token in values:
        if type(token) is bool or not isinstance(token, Integral):
            raise ParameterError(f"{what} holds {token!r}; token ids are integers.")
    return [int(token) for token in values]
