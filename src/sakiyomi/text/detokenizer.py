"""Detokenizer: ids to text one at a time, whole characters only."""

from __future__ import annotations

import codecs

from sakiyomi.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one answer as it grows.

    The pieces of `push` and the rest from `flush`, joined, are exactly `Tokenizer.decode` of all ids. A character whose
    bytes are spread over several tokens appears once, with the token that completes it. Each token costs the length of
    its own bytes.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._drops_space = tokenizer.strips_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is now complete, often empty."""
        if self._skips_special and self._tokenizer.is_special(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data and self._drops_space:
            self._drops_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The end of the answer: a last incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)
