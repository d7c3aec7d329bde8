"""transformers beside us: its plain decoding, its prompt lookup, and its assisted generation, on the same model."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakiyomi.assemble import LoadedModel
from sakiyomi.bench.run import Arm
from sakiyomi.errors import MissingExtraError, ParameterError, advise_extra
from sakiyomi.measure import Trial, Way
from sakiyomi.params import SamplingParams

PEERS = ("transformers",)
NUM_LOOKUP_TOKENS = 10
"""What its documentation shows for prompt lookup."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """Ids of an answer, and the forward passes of the large model that it took."""

    token_ids: list[int]
    num_passes: int


class TransformersPeer:
    """The model in float32 on torch, with the threads that torch takes.

    Args:
        assistant: path of a smaller model with the same tokenizer, or None.

    Raises:
        MissingExtraError: without torch or transformers.
    """

    def __init__(self, loaded: LoadedModel, assistant: Path | None = None, threads: int | None = None) -> None:
        os.environ.setdefault("TQDM_DISABLE", "1")  # stderr is for our own bar
        try:
            import torch
            import transformers
        except ImportError as error:
            raise MissingExtraError(
                f"--peer transformers needs torch and transformers ({error.name} is not installed); run "
                f"{advise_extra('torch')} and pip install transformers."
            ) from error
        library: Any = transformers
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
        self._torch = torch
        self._end_ids = list(loaded.model.info.end_token_ids)
        self._model = _load(library, torch, loaded.path)
        self._assistant = None if assistant is None else _load(library, torch, assistant)
        self._num_passes = 0
        self._model.register_forward_hook(self._count)

    def arms(self, params: SamplingParams) -> list[Arm]:
        """Its ways to answer with these parameters."""
        ways: dict[str, Mapping[str, Any]] = {
            "none": {},
            "prompt lookup": {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS},
        }
        if self._assistant is not None:
            ways["assistant"] = {"assistant_model": self._assistant}
        return [
            Arm(name, "own", "tokens" if params.is_greedy else "distribution", self._way(params, more), "transformers")
            for name, more in ways.items()
        ]

    def _count(self, *_: Any) -> None:
        self._num_passes += 1

    def _way(self, params: SamplingParams, more: Mapping[str, Any]) -> Way[Seq[int]]:
        options: dict[str, Any] = {
            "max_new_tokens": params.max_tokens,
            "eos_token_id": self._end_ids,
            "pad_token_id": self._end_ids[0] if self._end_ids else 0,
            "do_sample": not params.is_greedy,
            **({} if params.is_greedy else {"temperature": params.temperature, "top_k": 0, "top_p": 1.0}),
            **more,
        }

        def answer(prompt: Seq[int]) -> Trial:
            torch, clock = self._torch, _Clock()
            ids = torch.tensor([list(prompt)])
            torch.manual_seed(params.seed or 0)
            self._num_passes = 0
            with torch.inference_mode():
                out = self._model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
            answered = out[0, len(prompt) :].tolist()
            # The first tokens come out of the pass over the prompt, whose time does not count here either.
            return Trial(
                time.perf_counter() - clock.first_at,
                max(len(answered) - clock.num_first, 1),
                PeerAnswer(answered, self._num_passes),
            )

        return answer


class _Clock:
    """A streamer that notes when the first new tokens came, and how many there were."""

    def __init__(self) -> None:
        self.first_at = 0.0
        self.num_first = 0
        self._num_puts = 0

    def put(self, tokens: Any) -> None:
        self._num_puts += 1
        if self._num_puts == 2:  # the first is the prompt
            self.first_at = time.perf_counter()
            self.num_first = tokens.numel()

    def end(self) -> None:
        return None


def _load(transformers: Any, torch: Any, path: Path) -> Any:
    where = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(os.fspath(folder), dtype=torch.float32, **where)
    except Exception as error:
        raise ParameterError(f"transformers cannot load {path}: {error}") from error
    return model.eval()
