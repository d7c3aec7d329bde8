"""LLM: a model with a drafter, offline. `generate`, `chat`, `stream`, and chat sessions of several turns."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sakiyomi.assemble import (
    Backend,
    LoadedModel,
    ModelOptions,
    load_model,
    make_drafter,
    make_verifier,
    read_speculative_config,
)
from sakiyomi.decode import Step
from sakiyomi.engine.engine import Engine, Job, Prefix
from sakiyomi.engine.metrics import AcceptanceCounter
from sakiyomi.errors import ContextLengthError, ParameterError
from sakiyomi.noise import derive_seed, fresh_seed
from sakiyomi.params import SamplingParams
from sakiyomi.results import CompletionOutput, Logprob, RequestOutput, SpeculationStats, StreamPiece, Timing
from sakiyomi.text.chat import ChatTemplate
from sakiyomi.text.detokenizer import Detokenizer
from sakiyomi.text.stops import TextStream
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import Drafter, ModelInfo, Sequence, Verifier

logger = logging.getLogger("sakiyomi")

Prompt = str | Seq[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's {"prompt": ...} / {"prompt_token_ids": ...}."""
Messages = Seq[Mapping[str, Any]]
Prediction = str | Seq[int]
"""What an answer is expected to be: a text as it would stand in the answer, or token ids."""
Speculation = bool | int
"""False drafts nothing, a number caps the tokens of a draft, True leaves it to the engine."""

DEFAULT_DRAFTER = "ngram"


class LLM:
    """A language model that emits its own tokens, several at a time.

    Args:
        model: "smollm2", a folder in transformers' layout, a .gguf file, or a hub id.
        drafter: `name` or `name:key=value,...`, or a Drafter.
        verifier: the acceptance rule, `name` or `name:key=value,...`. `match` keeps every token as plain decoding has
            it; `rejection`, `block`, `tree` and `traversal` keep the distribution; `typical`, `lenient` and `relaxed`
            keep neither and need the consent `lossy=true` among their options.
        dtype, device, backend, threads, max_model_len: see `assemble.ModelOptions`.
        seed: base of the seeds of requests that bring none; None draws each afresh.
        max_num_seqs: sequences that share a step at most.
        speculative_config: vLLM's way to name the drafter.
        legacy: vLLM's older keywords `speculative_model`, `num_speculative_tokens`, `ngram_prompt_lookup_max`,
            `ngram_prompt_lookup_min` and `use_v2_block_manager`.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        drafter: str | Drafter | None = None,
        verifier: str = "match",
        dtype: str | None = None,
        device: str = "cpu",
        backend: Backend = "auto",
        threads: int | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        speculative_config: Mapping[str, Any] | None = None,
        **legacy: Any,
    ) -> None:
        started = time.perf_counter()
        name, more = _choose_drafter(drafter, speculative_config, legacy)
        options = ModelOptions(
            dtype=dtype, device=device, backend=backend, threads=threads, max_model_len=max_model_len
        )
        loaded = load_model(model, options)
        rule = make_verifier(verifier)
        built = make_drafter(name, loaded, options, more, rule.draw) if isinstance(name, str) else name
        self._setup(loaded, built, rule, seed, max_num_seqs)
        self.load_seconds = time.perf_counter() - started

    @classmethod
    def from_loaded(
        cls,
        loaded: LoadedModel,
        *,
        drafter: str | Drafter = "none",
        verifier: str = "match",
        seed: int | None = None,
        max_num_seqs: int = 16,
    ) -> LLM:
        """An LLM over a model that is loaded already (shared weights, toys)."""
        llm = cls.__new__(cls)
        rule = make_verifier(verifier)
        built = make_drafter(drafter, loaded, ModelOptions(), draw=rule.draw) if isinstance(drafter, str) else drafter
        llm._setup(loaded, built, rule, seed, max_num_seqs)
        llm.load_seconds = 0.0
        return llm

    def _setup(
        self, loaded: LoadedModel, drafter: Drafter, verifier: Verifier, seed: int | None, max_num_seqs: int
    ) -> None:
        if max_num_seqs < 1:
            raise ParameterError(f"max_num_seqs={max_num_seqs} is not allowed; give at least 1.")
        self.loaded = loaded
        self.drafter = drafter
        self.verifier = verifier
        self._seed = seed
        self._max_num_seqs = max_num_seqs
        self._request_numbers = itertools.count()
        self._is_prediction_reported = False

    @property
    def info(self) -> ModelInfo:
        return self.loaded.model.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.loaded.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.loaded.chat_template

    # ------------------------------------------------------------------------------------------ many prompts

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prediction: Prediction | Seq[Prediction | None] | None = None,
        speculation: Speculation | Seq[Speculation] = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, up to `max_num_seqs` sequences in each step.

        Args:
            prompts: one prompt or a list of them; no chat template is applied.
            params: one for all, or one per prompt.
            prediction: a text that the answer is expected to be close to, as in edits; one for all, or one per prompt.
                Drafters that look texts up (`suffix`, `ngram`) draft from it; the answer stays the same.
            speculation: False drafts nothing, a number caps the tokens of a draft; one for all, or one per prompt.
            use_tqdm: show a progress bar on a terminal.

        Returns:
            One RequestOutput per prompt, in order. In a list, a prompt that fails has its `error` set and the others
            go on; a single prompt raises.
        """
        if _is_single(prompts):
            single = [cast(Prompt, prompts)]
            wishes = _wishes_of(single, prediction, speculation)
            request = self._request(single[0], _params_of(params, 0), *wishes[0])
            return self._run([request], use_tqdm=use_tqdm, raises=True)
        prompts = cast(Seq[Prompt], prompts)
        if not isinstance(params, SamplingParams | None) and len(params) != len(prompts):
            raise ParameterError(f"{len(params)} sampling parameters for {len(prompts)} prompts; give one or as many.")
        requests: list[_Request] = []
        wishes = _wishes_of(prompts, prediction, speculation)
        for index, prompt in enumerate(prompts):
            own = _params_of(params, index)
            try:
                requests.append(self._request(prompt, own, *wishes[index]))
            except Exception as error:
                logger.warning("Prompt %d failed: %s", index, error)
                requests.append(_Request(str(next(self._request_numbers)), None, [], own, 0, [], error))
        return self._run(requests, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Seq[Messages],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prediction: Prediction | Seq[Prediction | None] | None = None,
        speculation: Speculation | Seq[Speculation] = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        The other arguments are those of `generate`.
        """
        is_single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Seq[Any] = [messages] if is_single else messages
        prompts: list[Prompt] = [self.render(conversation) for conversation in conversations]
        return self.generate(
            prompts[0] if is_single else prompts,
            params,
            prediction=prediction,
            speculation=speculation,
            use_tqdm=use_tqdm,
        )

    def render(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the answer.

        Raises:
            ParameterError: if the model has no chat template.
        """
        if self.chat_template is None or self.tokenizer is None:
            raise ParameterError(f"{self.info.name} has no chat template; use generate with a plain prompt.")
        text = self.chat_template.render([dict(message) for message in messages])
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _run(self, requests: Seq[_Request], *, use_tqdm: bool, raises: bool = False) -> list[RequestOutput]:
        engine = self._engine()
        for request in requests:
            for job in request.jobs:
                engine.add(job)
        with _progress(len(requests), use_tqdm) as advance:
            advance(sum(request.is_finished for request in requests))
            while engine.has_work:
                before = sum(request.is_finished for request in requests)
                engine.step()
                advance(sum(request.is_finished for request in requests) - before)
        for request in requests:
            error = next((job.error for job in request.jobs if job.error is not None), None)
            request.error = request.error or error
            if request.error is not None and raises:
                raise request.error
        return [self._result(request) for request in requests]

    # ------------------------------------------------------------------------------------------ streams

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
        speculation: Speculation = True,
    ) -> Iterator[StreamPiece]:
        """Answer one prompt token by token; each piece says whether its token was drafted.

        Closing the iterator frees the cache. The other arguments are those of `generate`.
        """
        request = self._request(prompt, params or SamplingParams(), prediction, speculation)
        if len(request.jobs) != 1:
            raise ParameterError(f"a stream has one answer, but n={len(request.jobs)}; use generate.")
        return self._stream(request)

    def _stream(self, request: _Request) -> Iterator[StreamPiece]:
        engine = self._engine()
        job = request.jobs[0]
        engine.add(job)
        try:
            while engine.has_work:
                for _, step in engine.step():
                    yield from self._pieces(request, job, step)
            if job.error is not None:
                raise job.error
        finally:
            if not job.is_finished:
                engine.abort(job)

    def _pieces(self, request: _Request, job: Job, step: Step) -> Iterator[StreamPiece]:
        first = job.sequence.num_new - len(step.tokens)
        text = _text_of(job)
        if job.is_finished:
            text.finish()
        for offset, token in enumerate(step.tokens):
            index = first + offset
            is_last = job.is_finished and offset == len(step.tokens) - 1
            yield StreamPiece(
                token_id=token,
                text="".join(text.pieces[index:]) if is_last else text.piece(index),
                source="draft" if offset < step.num_accepted else "target",
                index=index,
                output=self._result(request) if is_last else None,
            )

    def session(self, system: str | None = None) -> ChatSession:
        """A chat of several turns."""
        return ChatSession(self, system)

    # ------------------------------------------------------------------------------------------ requests

    def _engine(self) -> Engine:
        return Engine(self.loaded.model, self.drafter, self.verifier, max_num_seqs=self._max_num_seqs)

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        prediction: Prediction | None = None,
        speculation: Speculation = True,
    ) -> _Request:
        number = next(self._request_numbers)
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
        return _Request(str(number), text, ids, params, seed, jobs)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ParameterError(f"a prompt with keys {sorted(prompt)}; give prompt or prompt_token_ids.")
            prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            return None, [int(token) for token in prompt]
        if self.tokenizer is None:
            raise ParameterError(f"{self.info.name} has no tokenizer; give token ids.")
        return prompt, self.tokenizer.encode(prompt)

    def _encode_prediction(self, prediction: Prediction) -> list[int]:
        if not self.drafter.reads_prediction and not self._is_prediction_reported:
            self._is_prediction_reported = True
            logger.warning("The drafter in use does not read predictions; take suffix or ngram.")
        if isinstance(prediction, str):
            if self.tokenizer is None:
                raise ParameterError(f"{self.info.name} has no tokenizer; give the prediction as token ids.")
            return self.tokenizer.encode(prediction, add_special_tokens=False)
        ids = [int(token) for token in prediction]
        wrong = next((token for token in ids if not 0 <= token < self.info.vocab_size), None)
        if wrong is not None:
            raise ParameterError(f"the prediction holds id {wrong}; ids are 0 to {self.info.vocab_size - 1}.")
        return ids

    def _check(self, ids: Seq[int], params: SamplingParams) -> None:
        limit, vocab_size = self.info.max_model_len, self.info.vocab_size
        if not ids:
            raise ContextLengthError("the prompt is empty; give at least one token.")
        if len(ids) >= limit:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the context {limit}; shorten it to at most {limit - 1}."
            )
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise ParameterError(f"the prompt holds id {wrong}; ids are 0 to {vocab_size - 1}.")
        for token in params.logit_bias or ():
            if token >= vocab_size:
                raise ParameterError(f"logit_bias names id {token}; ids are 0 to {vocab_size - 1}.")

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
        ends = () if params.ignore_eos else self.info.end_token_ids
        return Sequence(
            id=name,
            tokens=list(ids),
            num_prompt=len(ids),
            params=params,
            seed=seed,
            cache=self.loaded.model.new_cache(),
            end_ids=frozenset((*ends, *(params.stop_token_ids or ()))),
            watcher=_AnswerText(self.tokenizer, params),
            prediction=prediction,
            speculation=speculation,
        )

    # ------------------------------------------------------------------------------------------ results

    def _result(self, request: _Request) -> RequestOutput:
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
            ),
            seed=request.seed,
            finished=request.is_finished,
            error=request.error,
        )

    def _completion(self, index: int, job: Job) -> CompletionOutput:
        sequence, text = job.sequence, _text_of(job)
        text.finish()
        entries = [entry for step in job.steps for entry in step.logprobs or ()]
        has_logprobs = sequence.params.logprobs is not None
        ids = sequence.tokens[sequence.num_prompt :]
        return CompletionOutput(
            index=index,
            text="".join(text.pieces),
            token_ids=ids,
            cumulative_logprob=sum(entry[0] for entry in entries) if has_logprobs else None,
            logprobs=[self._logprobs(*pair) for pair in zip(ids, entries, strict=True)] if has_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            seed=sequence.seed,
            drafted=_drafted(job.steps),
        )

    def _logprobs(self, token: int, entry: tuple[float, list[tuple[int, float]]]) -> dict[int, Logprob]:
        chosen, top = entry
        ranks = {id_: rank for rank, (id_, _) in enumerate(top, 1)}
        values = {token: chosen} | dict(top)
        return {
            id_: Logprob(logprob=value, rank=ranks.get(id_), decoded_token=self._decode_one(id_))
            for id_, value in values.items()
        }

    def _decode_one(self, token: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_bytes(token).decode(errors="replace")

    def _stats(self, counter: AcceptanceCounter) -> SpeculationStats:
        return SpeculationStats(
            drafter=type(self.drafter).__module__.rpartition(".")[2],
            verifier=type(self.verifier).__module__.rpartition(".")[2],
            is_lossless=self.verifier.is_lossless,
            verifier_options=_options_of(self.verifier),
            num_steps=counter.num_steps,
            num_draft_tokens=counter.num_draft_tokens,
            num_accepted_tokens=counter.num_accepted_tokens,
            num_lossy_tokens=counter.num_lossy_tokens,
            mean_acceptance_length=counter.mean_acceptance_length,
            acceptance_per_position=counter.acceptance_per_position,
        )


def _options_of(verifier: Verifier) -> dict[str, Any]:
    """The knobs of the rule."""
    config = getattr(verifier, "config", None)
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else {}


class ChatSession:
    """A conversation. Each turn computes only what the turns before have not; the answers equal a fresh start's."""

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self._llm = llm
        self._system = system
        self.messages: list[dict[str, str]] = []
        self._previous: Sequence | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._previous = None

    def stream(
        self,
        text: str,
        params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
        speculation: Speculation = True,
    ) -> Iterator[StreamPiece]:
        """Say `text` and stream the answer.

        An answer that is closed early stays in the conversation as far as it got. The other arguments are those of
        `LLM.generate`.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._llm._request(
            self._llm.render(messages),
            params or SamplingParams(temperature=0, max_tokens=None),
            prediction,
            speculation,
        )
        if len(request.jobs) != 1:
            raise ParameterError(f"a chat has one answer, but n={len(request.jobs)}; leave n at 1.")
        return self._stream(messages, request)

    def _stream(self, messages: list[dict[str, str]], request: _Request) -> Iterator[StreamPiece]:
        job = request.jobs[0]
        job.keeps_cache = True
        self._resume(job.sequence)
        try:
            yield from self._llm._stream(request)
        finally:
            if job.error is None:
                answer = _text_of(job)
                answer.finish()
                self.messages = [*messages, {"role": "assistant", "content": "".join(answer.pieces)}]
                self._previous = job.sequence

    def _resume(self, sequence: Sequence) -> None:
        """Take over cache and drafter state from the last turn, up to where the tokens differ."""
        previous, self._previous = self._previous, None
        if previous is None:
            return
        pairs = zip(previous.tokens[: previous.cache.length], sequence.tokens[:-1], strict=False)
        length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        previous.cache.truncate(length)
        sequence.cache, sequence.memo = previous.cache, previous.memo
        self._llm.drafter.rewind(sequence, length)


# ---------------------------------------------------------------------------------------------- helpers


@dataclass(eq=False)
class _Request:
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


class _AnswerText:
    """The text of one answer, a piece per token."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self.pieces: list[str] = []
        self._stream: TextStream | None = None
        if tokenizer is not None:
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            self._stream = TextStream(
                detokenizer, params.stop_strings, params.include_stop_str_in_output, params.min_tokens
            )
        elif params.stop_strings:
            raise ParameterError("this model has no tokenizer, so stop strings cannot be seen; use stop_token_ids.")

    def push(self, token_id: int) -> str | None:
        if self._stream is None:
            self.pieces.append("")
            return None
        stop = self._stream.push(token_id)
        self.pieces.append(self._stream.take())
        return stop

    def piece(self, index: int) -> str:
        return self.pieces[index] if index < len(self.pieces) else ""

    def finish(self) -> None:
        """Release what was held back; further calls do nothing."""
        if self._stream is not None:
            self.pieces.append(self._stream.finish())
            self._stream = None


def _text_of(job: Job) -> _AnswerText:
    watcher = job.sequence.watcher
    assert isinstance(watcher, _AnswerText)
    return watcher


def _drafted(steps: Seq[Step]) -> list[int]:
    """Indices of the drafted tokens among the emitted ones."""
    drafted: list[int] = []
    start = 0
    for step in steps:
        drafted.extend(range(start, start + step.num_accepted))
        start += len(step.tokens)
    return drafted


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _params_of(params: SamplingParams | Seq[SamplingParams] | None, index: int) -> SamplingParams:
    if params is None:
        return SamplingParams()
    return params if isinstance(params, SamplingParams) else params[index]


def _wishes_of(
    prompts: Seq[Prompt],
    prediction: Prediction | Seq[Prediction | None] | None,
    speculation: Speculation | Seq[Speculation],
) -> list[tuple[Prediction | None, Speculation]]:
    """Prediction and speculation of each prompt."""
    is_shared = (
        prediction is None or isinstance(prediction, str) or all(hasattr(one, "__index__") for one in prediction)
    )
    predictions: Any = [prediction] * len(prompts) if is_shared else prediction
    speculations = [speculation] * len(prompts) if isinstance(speculation, int) else speculation
    for name, values in (("predictions", predictions), ("values of speculation", speculations)):
        if len(values) != len(prompts):
            raise ParameterError(f"{len(values)} {name} for {len(prompts)} prompts; give one or as many.")
    return list(zip(predictions, speculations, strict=True))


LEGACY_KEYS = (
    "speculative_model",
    "num_speculative_tokens",
    "ngram_prompt_lookup_max",
    "ngram_prompt_lookup_min",
    "use_v2_block_manager",
)


def _choose_drafter(
    drafter: str | Drafter | None, config: Mapping[str, Any] | None, legacy: Mapping[str, Any]
) -> tuple[str | Drafter, dict[str, Any]]:
    """The drafter's name and options from whichever of the three ways was used."""
    for key in legacy:
        if key not in LEGACY_KEYS:
            raise ParameterError(
                f"LLM has no option {key!r}; vLLM's older keywords known here: {', '.join(LEGACY_KEYS)}."
            )
    if "use_v2_block_manager" in legacy:
        logger.warning("use_v2_block_manager has no effect here and is ignored.")
    older = {
        "model": legacy.get("speculative_model"),
        "num_speculative_tokens": legacy.get("num_speculative_tokens"),
        "prompt_lookup_max": legacy.get("ngram_prompt_lookup_max"),
        "prompt_lookup_min": legacy.get("ngram_prompt_lookup_min"),
    }
    older = {key: value for key, value in older.items() if value is not None}
    ways = [way for way in (drafter, config, older) if way]
    if len(ways) > 1:
        raise ParameterError("the drafter is named twice; give one of drafter, speculative_config, speculative_model.")
    if config or older:
        return read_speculative_config(config or older)
    return (DEFAULT_DRAFTER if drafter is None else drafter), {}


@contextmanager
def _progress(num_prompts: int, is_wanted: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over prompts on stderr, where that is a terminal."""
    console = Console(stderr=True)
    if not (is_wanted and console.is_terminal):
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("answering", total=num_prompts)
        yield lambda done: progress.advance(task, done)
