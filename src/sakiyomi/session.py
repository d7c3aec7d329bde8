"""ChatSession: a conversation of several turns over one cache."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from sakiyomi.decode import rewind
from sakiyomi.errors import ParameterError
from sakiyomi.params import SamplingParams
from sakiyomi.requests import Conversation, Prediction, Request, Speculation
from sakiyomi.results import StreamPiece
from sakiyomi.types import Sequence

if TYPE_CHECKING:
    from sakiyomi.llm import LLM


class ChatSession:
    """A conversation. Each turn computes only what the turns before have not; the answers equal a fresh start's.

    Attributes:
        messages: the conversation so far; a turn enters it when its answer is over or closed.
    """

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self._llm = llm
        self._system = system
        self.messages: list[dict[str, str]] = []
        self._previous: Sequence | None = None
        self._turn: Generator[StreamPiece, None, None] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        self._end_turn()
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._previous = None

    def stream(
        self,
        text: str,
        sampling_params: SamplingParams | None = None,
        *,
        prediction: Prediction | None = None,
        speculation: Speculation = True,
    ) -> Iterator[StreamPiece]:
        """Say `text` and stream the answer; an answer still under way is closed first.

        An answer that is closed early stays in the conversation as far as its pieces were taken. One that fails leaves
        the conversation as it was. The other arguments are those of `LLM.generate`.
        """
        self._end_turn()
        messages = [*self.messages, {"role": "user", "content": text}]
        params = sampling_params or SamplingParams(temperature=0, max_tokens=None)
        if params.n != 1:
            raise ParameterError(f"a chat has one answer, but n={params.n}; leave n at 1.")
        request = self._llm.requests.build(Conversation(messages), params, prediction, speculation)
        self._turn = self._stream(messages, request)
        return self._turn

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.close()

    def _stream(self, messages: list[dict[str, str]], request: Request) -> Generator[StreamPiece, None, None]:
        (job,) = request.jobs
        job.keeps_cache = True
        self._resume(job.sequence)
        heard: list[str] = []
        try:
            for piece in self._llm.run_stream(request):
                heard.append(piece.text)
                yield piece
        finally:
            if job.error is None:
                self.messages = [*messages, {"role": "assistant", "content": "".join(heard)}]
                self._previous = job.sequence

    def _resume(self, sequence: Sequence) -> None:
        """Take over cache and drafter state from the last turn, up to where the tokens differ."""
        previous, self._previous = self._previous, None
        if previous is None:
            return
        pairs = zip(previous.tokens[: previous.cache.length], sequence.tokens[:-1], strict=False)
        length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        # A drafter's row at a position may depend on the token behind it, so the last common one is fed again.
        previous.cache.truncate(max(length - 1, 0) if self._llm.drafter.taps else length)
        sequence.cache, sequence.memo = previous.cache, previous.memo
        rewind(self._llm.drafter, sequence, length)
