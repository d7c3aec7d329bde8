"""A scripted LLM behind the real command line; run as a program it is `sakiyomi` with that model."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from sakiyomi.errors import ContextLengthError, ParameterError, UnknownNameError

ANSWER = ["The", " sky", " is", " blue", "", "\U0001f600", "\n", "Done."]
DRAFTED = {2, 3, 6}
# Every control character but line end and tab, some of them in drafted tokens.
CONTROLS = "".join(chr(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t")
STEERING = ["<", CONTROLS, CONTROLS, "\x1b[2J\x9b2J", "\t>"]


class FakeLLM:
    """Says the same to everything, word by word, and remembers what it was asked."""

    def __init__(self, *, chat_template: bool = True, delay: float = 0.0) -> None:
        self.chat_template = object() if chat_template else None
        self.info = SimpleNamespace(name="fake")
        self.delay = delay
        self.asked: list[tuple[Any, Any]] = []
        self.wishes: list[tuple[Any, Any]] = []
        self.closed = 0

    def render(self, messages: list[dict[str, str]]) -> str | list[int]:
        if messages[-1]["content"] == "steer":
            return "steer"
        return [len(message["content"]) for message in messages]

    def stream(
        self, prompt: str | list[int], params: Any, *, prediction: Any = None, speculation: Any = True
    ) -> Iterator[Any]:
        self.asked.append((prompt, params))
        self.wishes.append((prediction, speculation))
        if prompt == "too long" or prompt == [8]:
            raise ContextLengthError("the prompt has 9999 tokens and the context 2048;\nshorten it.")
        if prompt == "steer":
            return self._pieces(prompt, params, STEERING)
        if prompt == "bug":
            raise RuntimeError("a wire came\nloose")
        return self._pieces(prompt, params, ANSWER)

    def _pieces(self, prompt: str | list[int], params: Any, answer: list[str]) -> Iterator[Any]:
        words = answer[: params.max_tokens]
        try:
            for index, text in enumerate(words):
                time.sleep(self.delay if answer is ANSWER else 0)
                is_last = index == len(words) - 1
                yield SimpleNamespace(
                    token_id=100 + index,
                    text=text,
                    source="draft" if index in DRAFTED else "target",
                    index=index,
                    output=self._output(prompt, params, words) if is_last else None,
                )
        finally:
            self.closed += 1

    def _output(self, prompt: str | list[int], params: Any, words: list[str]) -> Any:
        completion = SimpleNamespace(
            index=0,
            text="".join(words),
            token_ids=[100 + index for index in range(len(words))],
            finish_reason="length" if len(words) < len(ANSWER) else "stop",
            stop_reason=None,
        )
        speculation = SimpleNamespace(
            drafter="ngram",
            verifier="match",
            is_lossless="tokens",
            verifier_options={},
            num_steps=5,
            num_draft_tokens=6,
            num_accepted_tokens=3,
            num_lossy_tokens=0,
            mean_acceptance_length=1.6,
            acceptance_per_position=[0.4, 0.2],
            tried_per_position=[0.5, 1.0],
        )
        timing = SimpleNamespace(load_s=0.5, prefill_s=0.25, decode_s=0.125, draft_s=0.0625, tokens_per_s=64.0)
        return SimpleNamespace(
            prompt_token_ids=prompt if isinstance(prompt, list) else [1, 2, 3],
            outputs=[completion],
            speculation=speculation,
            timing=timing,
            seed=1234 if params.seed is None else params.seed,
        )

    def session(self, system: str | None = None) -> FakeSession:
        return FakeSession(self, system)


class FakeSession:
    def __init__(self, llm: FakeLLM, system: str | None) -> None:
        self.llm = llm
        self.turns = [system] if system else []

    def reset(self) -> None:
        self.turns = []

    def stream(self, text: str, params: Any, **wishes: Any) -> Iterator[Any]:
        self.turns.append(text)
        return self.llm.stream("steer" if text == "steer" else [len(turn) for turn in self.turns], params, **wishes)


def load_fake(options: Any, llm: FakeLLM) -> FakeLLM:
    if options.drafter.startswith("nonsense"):
        raise UnknownNameError("unknown drafter 'nonsense'; known: model, ngram, none.")
    if options.device != "cpu":
        raise ParameterError("device='tpu' is not allowed; give cpu or cuda.")
    return llm


if __name__ == "__main__":
    from sakiyomi.cli import loading, main

    slow = FakeLLM(delay=0.25)
    loading.load_llm = lambda options: load_fake(options, slow)  # type: ignore[assignment]
    loading.share_plainly = lambda llm: llm
    sys.argv[0] = "sakiyomi"
    main()
