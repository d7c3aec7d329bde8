"""TextStream: the text of a growing answer, its stop strings, and what of it may already be shown."""

from __future__ import annotations

from collections import deque

from sakiyomi.text.detokenizer import Detokenizer


class TextStream:
    """Watches one answer for stop strings (a `types.TextWatcher`).

    The first match to end in the text wins; of several that end together, the one that starts first. The text is cut
    there. Streamed pieces (`take`, then `finish`) joined are `text`: whatever may still grow into a stop string, and
    bytes of an unfinished character, are held back. Every character is looked at once, whatever the number of stop
    strings.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Start an empty text.

        Args:
            include_stop: keep the stop string in the text.
            min_tokens: the first `min_tokens` tokens complete no stop string, as in vLLM.
        """
        self.stop: str | None = None
        self._detokenizer = detokenizer
        self._includes_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._matcher = _Matcher(stop_strings) if stop_strings else None
        self._pieces: list[str] = []
        self._pending: deque[str] = deque()
        self._num_pending = 0
        self._is_finished = False

    @property
    def text(self) -> str:
        """The whole text so far, what is held back included, cut at the stop string."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def push(self, token_id: int) -> str | None:
        """Take one more token; return the stop string that it completes, or None."""
        assert self.stop is None, "the text has ended at a stop string"
        self._num_tokens += 1
        piece = self._detokenizer.push(token_id)
        if self._matcher is not None and piece:
            found = self._matcher.scan(piece, may_match=self._num_tokens > self._min_tokens)
            if found is not None:
                self.stop, end = found
                self._append(piece[:end])
                if not self._includes_stop:
                    self._drop(len(self.stop))
                return self.stop
        self._append(piece)
        return None

    def take(self) -> str:
        """Text that can be shown and was not taken before."""
        held = 0 if self._matcher is None or self.stop is not None or self._is_finished else self._matcher.num_held
        wanted = self._num_pending - held
        self._num_pending = held if wanted > 0 else self._num_pending
        taken: list[str] = []
        while wanted > 0:
            piece = self._pending.popleft()
            if len(piece) > wanted:
                self._pending.appendleft(piece[wanted:])
                piece = piece[:wanted]
            taken.append(piece)
            wanted -= len(piece)
        return "".join(taken)

    def finish(self) -> str:
        """The answer is over: everything that was not taken before."""
        if self.stop is None and not self._is_finished:
            self._append(self._detokenizer.flush())
        self._is_finished = True
        return self.take()

    def _append(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._pending.append(piece)
            self._num_pending += len(piece)

    def _drop(self, count: int) -> None:
        """Cut the last characters; they were held back, so they are still pending."""
        self._num_pending -= count
        for pieces in (self._pieces, self._pending):
            left = count
            while left:
                piece = pieces.pop()
                if len(piece) > left:
                    pieces.append(piece[:-left])
                left -= min(left, len(piece))


class _Matcher:
    """Aho-Corasick automaton over characters (Aho and Corasick, 1975).

    A state is the longest suffix of the text read so far that is a prefix of some stop string.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]
        self._held = [0]
        self._state = 0
        for string in strings:
            self._insert(string)
        self._link()

    @property
    def num_held(self) -> int:
        """Length of the longest suffix of the text that may still become a stop string."""
        return self._held[self._state]

    def scan(self, piece: str, may_match: bool) -> tuple[str, int] | None:
        """Read on; the first stop string completed inside `piece` and where it ends there, or None."""
        state = self._state
        for at, letter in enumerate(piece):
            while state and letter not in self._next[state]:
                state = self._fail[state]
            state = self._next[state].get(letter, 0)
            match = self._match[state]
            if match is not None and may_match:
                self._state = state
                return match, at + 1
        self._state = state
        return None

    def _insert(self, string: str) -> None:
        state = 0
        for depth, letter in enumerate(string, 1):
            if letter not in self._next[state]:
                self._next[state][letter] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._match.append(None)
                self._held.append(depth)
            state = self._next[state][letter]
        self._match[state] = string

    def _link(self) -> None:
        """Fill in, breadth first: where to go on after a mismatch, the longest match, and what to hold back."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            if self._match[state] is None:
                self._match[state] = self._match[fail]
            if not self._next[state]:  # nothing longer to wait for
                self._held[state] = self._held[fail]
            for letter, child in self._next[state].items():
                queue.append(child)
                while fail and letter not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(letter, 0)
                fail = self._fail[state]
