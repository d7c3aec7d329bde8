"""LLM: a model with a drafter, offline. `generate`, `chat`, `stream`, and chat sessions of several turns."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from numbers import Integral
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sakiyomi.assemble import (
    Backend,
    LoadedModel,
    ModelOptions,
    check_drafter,
    choose_drafter,
    load_model,
    make_drafter,
    make_verifier,
)
from sakiyomi.engine.budget import AdaptiveBudget, Budget, BudgetName, FixedBudget, check_budget
from sakiyomi.engine.burst import BURST_SECONDS, LONG_BURST_SECONDS
from sakiyomi.engine.engine import Engine
from sakiyomi.errors import ParameterError
from sakiyomi.params import MAX_SEED, SamplingParams
from sakiyomi.requests import Conversation, Messages, Prediction, Prompt, Request, Requests, Speculation
from sakiyomi.results import RequestOutput, StreamPiece
from sakiyomi.session import ChatSession
from sakiyomi.text.chat import ChatTemplate
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import Drafter, ModelInfo, Verifier

logger = logging.getLogger("sakiyomi")


class LLM:
    """A language model that emits its own tokens, several at a time.

    Args:
        model: "smollm2", a folder in transformers' layout, a .gguf file, or a hub id.
        drafter: `name` or `name:key=value,...`, or a Drafter; None takes `auto`.
        verifier: the acceptance rule, `name` or `name:key=value,...`. `match` keeps every token as plain decoding has
            it; `rejection`, `block`, `tree` and `traversal` keep the distribution; `typical`, `lenient` and `relaxed`
            keep neither and need the consent `lossy=true` among their options.
        dtype, device, backend, threads, max_model_len: see `assemble.ModelOptions`.
        seed: base of the seeds of requests that bring none; None draws each afresh.
        max_num_seqs: sequences that share a step at most.
        budget: "adaptive" measures while it decodes and drafts and checks what pays; "fixed" lets the drafter draft
            what its options say; "auto" is adaptive for the drafter `auto` and fixed for all others.
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
        budget: BudgetName = "auto",
        speculative_config: Mapping[str, Any] | None = None,
        **legacy: Any,
    ) -> None:
        started = time.perf_counter()
        name, more = choose_drafter(drafter, speculative_config, legacy, _option_names(LLM))
        options = ModelOptions(
            dtype=dtype, device=device, backend=backend, threads=threads, max_model_len=max_model_len
        )
        rule = make_verifier(verifier)
        check_budget(budget)
        if isinstance(name, str):
            check_drafter(name, more)  # before anything is loaded
        loaded = load_model(model, options)
        built = make_drafter(name, loaded, options, more, rule.draw) if isinstance(name, str) else name
        self._setup(loaded, built, rule, seed, max_num_seqs, budget)
        self.requests.load_seconds = time.perf_counter() - started

    @classmethod
    def from_loaded(
        cls,
        loaded: LoadedModel,
        *,
        drafter: str | Drafter = "none",
        verifier: str = "match",
        seed: int | None = None,
        max_num_seqs: int = 16,
        budget: BudgetName = "auto",
    ) -> LLM:
        """An LLM over a model that is loaded already (shared weights, toys)."""
        llm = cls.__new__(cls)
        rule = make_verifier(verifier)
        built = make_drafter(drafter, loaded, ModelOptions(), draw=rule.draw) if isinstance(drafter, str) else drafter
        llm._setup(loaded, built, rule, seed, max_num_seqs, budget)
        return llm

    def _setup(
        self,
        loaded: LoadedModel,
        drafter: Drafter,
        verifier: Verifier,
        seed: int | None,
        max_num_seqs: int,
        budget: BudgetName,
    ) -> None:
        check_budget(budget)
        if type(max_num_seqs) is not int or max_num_seqs < 1:
            raise ParameterError(f"max_num_seqs={max_num_seqs!r} is not allowed; give an integer of at least 1.")
        if seed is not None and not (type(seed) is int and 0 <= seed <= MAX_SEED):
            raise ParameterError(f"seed={seed!r} is not allowed; give an integer from 0 to {MAX_SEED} or None.")
        if isinstance(drafter, type) or not callable(getattr(drafter, "propose", None)):
            raise ParameterError(f"drafter={drafter!r} is not allowed; give a name or an object with `propose`.")
        self.loaded = loaded
        self.drafter = drafter
        self.verifier = verifier
        self.requests = Requests(loaded, drafter, verifier, seed)
        self._max_num_seqs = max_num_seqs
        is_adaptive = drafter.wants_budget if budget == "auto" else budget == "adaptive"
        self._budget: Budget = AdaptiveBudget(drafter) if is_adaptive else FixedBudget(drafter)

    @property
    def info(self) -> ModelInfo:
        return self.loaded.model.info

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.loaded.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.loaded.chat_template

    @property
    def load_seconds(self) -> float:
        return self.requests.load_seconds

    # ------------------------------------------------------------------------------------------ many prompts

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prediction: Prediction | Seq[Prediction | None] | None = None,
        speculation: Speculation | Seq[Speculation] = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer prompts, up to `max_num_seqs` sequences in each step.

        Args:
            prompts: one prompt or a list of them; no chat template is applied.
            sampling_params: one for all, or one per prompt.
            prediction: a text that the answer is expected to be close to, as in edits; one for all, or one per prompt.
                Drafters that look texts up (`suffix`, `ngram`) draft from it; the answer stays the same.
            speculation: False drafts nothing, a number caps the tokens of a draft; one for all, or one per prompt.
            use_tqdm: show a progress bar on a terminal.

        Returns:
            One RequestOutput per prompt, in order. In a list, a prompt that fails has its `error` set and the others
            go on; a single prompt raises.
        """
        is_single = _is_single(prompts)
        many: Seq[Any] = [prompts] if is_single else cast(Seq[Prompt], prompts)
        return self._answer(many, sampling_params, prediction, speculation, use_tqdm, is_single)

    def chat(
        self,
        messages: Messages | Seq[Messages],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        prediction: Prediction | Seq[Prediction | None] | None = None,
        speculation: Speculation | Seq[Speculation] = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        The other arguments and the result are those of `generate`.
        """
        is_single = not messages or isinstance(messages[0], Mapping)
        many = [Conversation(cast(Messages, one)) for one in ([messages] if is_single else messages)]
        return self._answer(many, sampling_params, prediction, speculation, use_tqdm, is_single)

    def render(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, ready for the answer.

        Raises:
            ParameterError: if the model has no chat template.
        """
        return self.requests.render(messages)

    def _answer(
        self,
        prompts: Seq[Prompt | Conversation],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        prediction: Prediction | Seq[Prediction | None] | None,
        speculation: Speculation | Seq[Speculation],
        use_tqdm: bool,
        raises: bool,
    ) -> list[RequestOutput]:
        params = _params_of(sampling_params, len(prompts))
        wishes = _wishes_of(len(prompts), prediction, speculation)
        requests: list[Request] = []
        for prompt, own, wish in zip(prompts, params, wishes, strict=True):
            try:
                requests.append(self.requests.build(prompt, own, *wish))
            except Exception as error:
                if raises:
                    raise
                requests.append(self.requests.fail(prompt, own, error))
        self.run(requests, use_tqdm)
        for index, request in enumerate(requests):
            request.error = request.error or next((job.error for job in request.jobs if job.error is not None), None)
            if request.error is not None:
                if raises:
                    raise request.error
                logger.warning("Prompt %d failed: %s", index, request.error)
        return [self.requests.result(request) for request in requests]

    def run(self, requests: Seq[Request], use_tqdm: bool = False) -> None:
        """Run requests that are built to their ends."""
        engine = self._engine(LONG_BURST_SECONDS)
        for request in requests:
            for job in request.jobs:
                engine.add(job)
        with _progress(len(requests), use_tqdm) as show:
            while engine.has_work:
                engine.step()
                show(sum(request.is_finished for request in requests))

    def _engine(self, burst_seconds: float) -> Engine:
        return Engine(
            self.loaded.model,
            self.drafter,
            self.verifier,
            max_num_seqs=self._max_num_seqs,
            budget=self._budget,
            burst_seconds=burst_seconds,
        )

    # ------------------------------------------------------------------------------------------ streams

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
        speculation: Speculation = True,
    ) -> Iterator[StreamPiece]:
        """Answer one prompt token by token; each piece says whether its token was drafted.

        Closing the iterator frees the cache. The other arguments are those of `generate`.
        """
        (params,) = _params_of(sampling_params, 1)
        if params.n != 1:
            raise ParameterError(f"a stream has one answer, but n={params.n}; use generate.")
        return self.run_stream(self.requests.build(prompt, params, prediction, speculation))

    def run_stream(self, request: Request) -> Iterator[StreamPiece]:
        """Run a request with one answer and yield its tokens."""
        engine = self._engine(BURST_SECONDS)
        (job,) = request.jobs
        engine.add(job)
        num_shown = 0
        try:
            while engine.has_work:
                for _, step in engine.step():
                    yield from self.requests.pieces(request, step, num_shown)
                    num_shown += len(step.tokens)
            if job.error is not None:
                raise job.error
        finally:
            if not job.is_finished:
                engine.abort(job)

    def session(self, system: str | None = None) -> ChatSession:
        """A chat of several turns."""
        return ChatSession(self, system)


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Seq | np.ndarray):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], Integral)


def _params_of(params: SamplingParams | Seq[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams per prompt."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, Seq) or any(not isinstance(own, SamplingParams) for own in params):
        raise ParameterError(f"sampling_params={params!r} is not allowed; give a SamplingParams or a list of them.")
    if len(params) != num_prompts:
        raise ParameterError(f"{len(params)} sampling parameters for {num_prompts} prompts; give one or as many.")
    return list(params)


def _wishes_of(
    num_prompts: int,
    prediction: Prediction | Seq[Prediction | None] | None,
    speculation: Speculation | Seq[Speculation],
) -> list[tuple[Prediction | None, Speculation]]:
    """Prediction and speculation of each prompt."""
    is_shared = (
        prediction is None or isinstance(prediction, str) or all(hasattr(one, "__index__") for one in prediction)
    )
    predictions: Any = [prediction] * num_prompts if is_shared else prediction
    speculations = [speculation] * num_prompts if isinstance(speculation, int) else speculation
    for name, values in (("predictions", predictions), ("values of speculation", speculations)):
        if len(values) != num_prompts:
            raise ParameterError(f"{len(values)} {name} for {num_prompts} prompts; give one or as many.")
    return list(zip(predictions, speculations, strict=True))


def _option_names(owner: type) -> list[str]:
    """The keywords of a class, for messages."""
    parameters = inspect.signature(owner).parameters.values()
    return [one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]


@contextmanager
def _progress(num_prompts: int, is_wanted: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar over prompts on stderr, where that is a terminal; it takes how many are done."""
    console = Console(stderr=True)
    if not (is_wanted and console.is_terminal):
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("answering", total=num_prompts)
        yield lambda done: progress.update(task, completed=done)
