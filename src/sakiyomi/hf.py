"""transformers' own call: `wrap(model).generate(...)` takes and returns what `model.generate(...)` does, sooner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sakiyomi.assemble import LoadedModel, ModelOptions, make_drafter, make_verifier
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.engine import Engine, Job, Prefix
from sakiyomi.engine.metrics import AcceptanceCounter
from sakiyomi.errors import MissingExtraError, ParameterError, VocabularyError, advise_extra
from sakiyomi.noise import derive_seed
from sakiyomi.params import SamplingParams
from sakiyomi.plugins import suggest
from sakiyomi.types import Drafter, DrafterContext
from sakiyomi.types import Sequence as Answer

try:
    import torch
    from torch import Tensor
    from transformers import GenerationConfig
    from transformers.generation import GenerateDecoderOnlyOutput
except ImportError as error:
    raise MissingExtraError(
        f"sakiyomi.hf needs torch and transformers ({error}); run {advise_extra('torch')}."
    ) from error

from sakiyomi.models.hf import HFModel

HONOURED = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_return_sequences"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "return_dict_in_generate"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
)
WITHOUT_EFFECT = (
    # Ways to the same tokens.
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("compile_config", "disable_compile", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "target_lookbehind", "is_assistant", "low_memory", "renormalize_logits"),
    # For beams or encoders, which are refused by other names.
    *("early_stopping", "length_penalty", "decoder_start_token_id"),
    *("transformers_version", "_from_model_config"),
)
ONLY_SAMPLING = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""What transformers itself leaves aside without `do_sample`."""
MAX_VOCAB_DIFFERENCE = 128  # padding of a head


def wrap(model: Any, tokenizer: Any = None, *, drafter: str | Drafter = "suffix") -> WrappedModel:
    """A causal language model of transformers whose `generate` drafts and checks several tokens at a time.

    The model is not changed; everything but `generate` is its own.

    Args:
        model: in evaluation mode.
        tokenizer: transformers' tokenizer, needed for `stop_strings` alone.
        drafter: `name` or `name:key=value,...`, or a Drafter; a call with `assistant_model` or
            `prompt_lookup_num_tokens` takes that instead.

    Raises:
        UnsupportedModelError: a model that cannot decode step by step, or whose state cannot be put back.
        ParameterError, UnknownNameError: a model in training mode, or a drafter that does not exist.
    """
    return WrappedModel(model, tokenizer, drafter)


class WrappedModel:
    """What `wrap` returns.

    Attributes:
        last_speculation: the counts of the last call of `generate`, or None.
    """

    def __init__(self, model: Any, tokenizer: Any, drafter: str | Drafter) -> None:
        self._wrapped = model
        self._tokenizer = tokenizer
        self._verifying = HFModel(model)
        self._verifier = make_verifier("match")
        self._drafter = self._make_drafter(drafter)
        self._assistants: dict[int, tuple[Any, HFModel]] = {}
        self.last_speculation: AcceptanceCounter | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":  # not set yet, as in a copy under way
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass."""
        return self._wrapped(*args, **kwargs)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        assistant_model: Any = None,
        streamer: Any = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Continue token ids, as the model's own `generate` does: greedily the same ids, sampled the same law.

        Args:
            inputs: ids [B, S], also called `input_ids`; rows may be padded on the left, as `attention_mask` says.
            generation_config: as in transformers; further keywords override it.
            assistant_model: a smaller model of the same vocabulary that drafts.
            streamer: told of the prompt, then of each token; for one sequence.
            tokenizer: for `stop_strings`.
            kwargs: `attention_mask`, and the keywords of a generation config that `HONOURED` lists.

        Returns:
            Ids [B * num_return_sequences, up to S + max_new_tokens], padded on the right; with
            `return_dict_in_generate` an output with these as `sequences`. Sampling draws its seed from torch's
            generator, so `torch.manual_seed` makes it repeatable.

        Raises:
            ParameterError: an argument that cannot be honoured, by its name, or a value outside its range.
            VocabularyError: an assistant with another vocabulary.
        """
        _refuse_arguments(kwargs)
        has_length = _names_length(kwargs, generation_config, self._wrapped)
        config, others = self._wrapped._prepare_generation_config(generation_config, **kwargs)
        _refuse_settings(config, self._wrapped.generation_config)
        asked = {"generation_config": generation_config, **kwargs}
        ids, mask = _read_inputs(inputs, others, config)
        call = _Call(config, ids, mask, has_length, self._verifying, tokenizer or self._tokenizer)
        if streamer is not None and len(call.answers) > 1:
            raise ParameterError("streamer is told of one sequence; give one row and num_return_sequences=1.")
        drafter = self._drafter_of(config, assistant_model, asked)
        self.last_speculation = call.run(drafter, self._verifier, streamer)
        sequences = call.sequences()
        return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences

    # ------------------------------------------------------------------------------------------ drafters

    def _drafter_of(self, config: Any, assistant: Any, asked: Mapping[str, Any]) -> Drafter:
        if config.prompt_lookup_num_tokens is None:
            return self._drafter if assistant is None else self._assisting_drafter(assistant, asked)
        if assistant is not None:
            raise ParameterError("assistant_model and prompt_lookup_num_tokens both draft; give one of them.")
        longest = config.max_matching_ngram_size or 2
        options = f"num_speculative_tokens={config.prompt_lookup_num_tokens},max_ngram={longest},min_ngram=1"
        return self._make_drafter(f"ngram:{options}")

    def _assisting_drafter(self, assistant: Any, asked: Mapping[str, Any]) -> Drafter:
        assistant = getattr(assistant, "_wrapped", assistant)
        if id(assistant) not in self._assistants:
            self._assistants[id(assistant)] = (assistant, _read_assistant(assistant, self._verifying))
        model = self._assistants[id(assistant)][1]
        sources = (asked, vars(asked["generation_config"] or object), vars(assistant.generation_config))
        count = next((found for one in sources if (found := one.get("num_assistant_tokens")) is not None), None)
        options: dict[str, Any] = {} if count is None else {"num_speculative_tokens": int(count)}
        context = DrafterContext(self._verifying, lambda _: model, self._verifier.draw)
        return ModelDrafter(ModelDrafter.Config(model="assistant_model", **options), context)

    def _make_drafter(self, drafter: str | Drafter) -> Drafter:
        if not isinstance(drafter, str):
            return drafter
        loaded = LoadedModel(model=self._verifying, tokenizer=None, chat_template=None, path=Path())
        return make_drafter(drafter, loaded, ModelOptions(), draw=self._verifier.draw)


def _read_assistant(assistant: Any, target: HFModel) -> HFModel:
    own, theirs = target.info.vocab_size, assistant.config.get_text_config(decoder=True).vocab_size
    if abs(own - theirs) > MAX_VOCAB_DIFFERENCE:
        raise VocabularyError(
            f"assistant_model has a vocabulary of {theirs} ids and the model one of {own}; give a model with the same "
            "tokenizer."
        )
    return HFModel(assistant, vocab_size=own)


# ---------------------------------------------------------------------------------------------- arguments


def _refuse_arguments(kwargs: Mapping[str, Any]) -> None:
    """Refuse what is no setting of a generation config and would change the result."""
    known = set(vars(GenerationConfig())) | {"input_ids", "attention_mask"}
    for name, value in kwargs.items():
        is_nothing = value is None or value is False or (isinstance(value, Sequence) and not value)
        if name not in known and not is_nothing:
            hint = suggest(name, [*HONOURED, "input_ids", "attention_mask"])
            raise ParameterError(f"{name} is not honoured here{hint}; call the model's own generate for it.")


def _refuse_settings(config: Any, own: Any) -> None:
    """Refuse settings of a generation config that would change the result and are not honoured."""
    neutral = GenerationConfig().to_dict() | own._get_default_generation_params()
    for name, value in config.to_dict().items():
        if name in HONOURED or name in WITHOUT_EFFECT or name not in vars(GenerationConfig()):
            continue
        if name in ONLY_SAMPLING and not config.do_sample:
            continue
        if value is not None and value is not False and value != neutral.get(name):
            raise ParameterError(f"{name}={value!r} is not honoured here; call the model's own generate for it.")
    if config.do_sample and config.min_p and config.top_p is not None and config.top_p < 1:
        raise ParameterError("min_p with top_p is not honoured here, since their order differs; give one of them.")


def _names_length(kwargs: Mapping[str, Any], given: Any, model: Any) -> bool:
    """Whether somebody named a `max_length`; if not, 20 tokens are added to the prompt."""
    return any(length is not None for length in (kwargs.get("max_length"), getattr(given, "max_length", None))) or (
        model.generation_config.max_length is not None
    )


def _read_inputs(inputs: Any, others: Mapping[str, Any], config: Any) -> tuple[Tensor, Tensor]:
    """Ids [B, S] and which of them count, [B, S]."""
    named = others.get("input_ids")
    if inputs is not None and named is not None:
        raise ParameterError("inputs and input_ids are the same; give one of them.")
    ids = named if inputs is None else inputs
    if ids is None:
        if config.bos_token_id is None:
            raise ParameterError("input_ids is missing, and the model has no bos_token_id to start from.")
        ids = torch.tensor([[config.bos_token_id]])
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or 0 in ids.shape:
        raise ParameterError(f"input_ids={type(ids).__name__} is not allowed; give a tensor of ids [batch, length].")
    mask = others.get("attention_mask")
    if mask is None:
        mask = _infer_mask(ids, config)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        raise ParameterError("attention_mask must be a tensor of the shape of input_ids.")
    mask = mask.to(ids.device) != 0
    if not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ParameterError("attention_mask leaves out tokens that are no padding on the left; pad on the left alone.")
    return ids, mask


def _infer_mask(ids: Tensor, config: Any) -> Tensor:
    """Without a mask, padding counts as such where it cannot be the end of a text, as in transformers."""
    pad, ends = config.pad_token_id, _end_ids(config)
    return torch.ones_like(ids) if pad is None or pad in ends else ids.ne(pad)


def _end_ids(config: Any) -> tuple[int, ...]:
    ends = config.eos_token_id
    if isinstance(ends, Tensor):
        ends = ends.tolist()
    ids = ends if isinstance(ends, list | tuple) else () if ends is None else (ends,)
    return tuple(token for token in ids if token >= 0)


# ---------------------------------------------------------------------------------------------- one call


class _Call:
    """The answers of one call of `generate`."""

    def __init__(
        self, config: Any, ids: Tensor, mask: Tensor, has_length: bool, model: HFModel, tokenizer: Any
    ) -> None:
        self._config = config
        self._ids = ids
        self._model = model
        self._ends = _end_ids(config)
        self._watcher_of = _stop_watcher(config.stop_strings, tokenizer)
        num_new = self._num_new(has_length)
        params = self._params(num_new)
        seed = int(torch.randint(2**63 - 1, ())) if config.do_sample else 0
        self.answers: list[Job] = []
        for row, counts in zip(ids.tolist(), mask.tolist(), strict=True):
            prompt = [token for token, is_real in zip(row, counts, strict=True) if is_real]
            self._check(prompt, num_new)
            prefix = Prefix() if config.num_return_sequences > 1 else None
            for _ in range(config.num_return_sequences):
                number = len(self.answers)
                self.answers.append(Job(self._answer(number, prompt, params, derive_seed(seed, number)), prefix))

    def run(self, drafter: Drafter, verifier: Any, streamer: Any) -> AcceptanceCounter:
        engine = Engine(self._model, drafter, verifier, max_num_seqs=len(self.answers))
        for job in self.answers:
            engine.add(job)
        if streamer is not None:
            streamer.put(self._ids.cpu())
        try:
            while engine.has_work:
                for _, step in engine.step():
                    for token in step.tokens if streamer is not None else ():
                        streamer.put(torch.tensor([token]))
        finally:
            for job in self.answers:
                if not job.is_finished:
                    engine.abort(job)
        counter = AcceptanceCounter()
        for job in self.answers:
            if job.error is not None:
                raise job.error
            counter.merge(job.counter)
        if streamer is not None:
            streamer.end()
        return counter

    def sequences(self) -> Tensor:
        """The padded prompts and their answers, padded to the longest."""
        new = [job.sequence.tokens[job.sequence.num_prompt :] for job in self.answers]
        longest = max(map(len, new))
        pad = self._config.pad_token_id
        if pad is None:
            pad = self._ends[0] if self._ends else 0
        rows = [tokens + [int(pad)] * (longest - len(tokens)) for tokens in new]
        prompts = self._ids.repeat_interleave(self._config.num_return_sequences, dim=0)
        return torch.cat([prompts, torch.tensor(rows, dtype=prompts.dtype, device=prompts.device)], dim=1)

    def _num_new(self, has_length: bool) -> int:
        config, width = self._config, self._ids.shape[1]
        if config.max_new_tokens is not None:
            return int(config.max_new_tokens)
        if has_length:
            return int(config.max_length) - width
        return min(int(config.max_length), self._model.info.max_model_len - width)

    def _params(self, num_new: int) -> SamplingParams:
        config = self._config
        if num_new < 1:
            raise ParameterError(
                f"max_length={config.max_length} leaves no room for new tokens behind {self._ids.shape[1]} of the "
                "prompt; set max_new_tokens."
            )
        at_least = config.min_new_tokens or (config.min_length or 0) - self._ids.shape[1]
        sampled: dict[str, Any] = {"temperature": 0.0}
        if config.do_sample:
            if not config.temperature or config.temperature < 0:
                raise ParameterError(
                    f"temperature={config.temperature!r} is not allowed with do_sample; give more than 0."
                )
            sampled = {"temperature": float(config.temperature), "top_k": int(config.top_k or 0)}
            sampled |= {
                "top_p": float(1.0 if config.top_p is None else config.top_p),
                "min_p": float(config.min_p or 0),
            }
        return SamplingParams(
            max_tokens=num_new,
            min_tokens=min(max(at_least, 0), num_new),
            stop_token_ids=self._ends,
            repetition_penalty=float(config.repetition_penalty or 1.0),
            **sampled,
        )

    def _check(self, prompt: list[int], num_new: int) -> None:
        info = self._model.info
        if len(prompt) + num_new > info.max_model_len:
            raise ParameterError(
                f"max_new_tokens={num_new} behind a prompt of {len(prompt)} tokens goes beyond the model's "
                f"{info.max_model_len} positions; give less."
            )
        wrong = next((token for token in prompt if not 0 <= token < info.vocab_size), None)
        if wrong is not None:
            raise ParameterError(f"input_ids holds id {wrong}; ids are 0 to {info.vocab_size - 1}.")

    def _answer(self, number: int, prompt: list[int], params: SamplingParams, seed: int) -> Answer:
        return Answer(
            id=str(number),
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=params,
            seed=seed,
            cache=self._model.new_cache(),
            end_ids=frozenset(self._ends),
            watcher=self._watcher_of(),
        )


def _stop_watcher(stops: Any, tokenizer: Any) -> Any:
    """A function that makes a watcher for stop strings, or None where there are none."""
    if not stops:
        return lambda: None
    if tokenizer is None:
        raise ParameterError("stop_strings needs the tokenizer; give it to wrap or to generate.")
    strings = (stops,) if isinstance(stops, str) else tuple(stops)
    return lambda: _StopWatcher(strings, tokenizer)


class _StopWatcher:
    """Sees stop strings in the text of an answer (`types.TextWatcher`)."""

    def __init__(self, stops: tuple[str, ...], tokenizer: Any) -> None:
        self._stops = stops
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    def push(self, token_id: int) -> str | None:
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return next((stop for stop in self._stops if stop in text), None)
