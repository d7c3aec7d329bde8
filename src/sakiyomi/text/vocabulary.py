"""Two vocabularies over one text: what a drafting model with another tokenizer says, in the target's tokens.

Two lossless ways (Timor, Mamou, Korat, Berchansky, Jain, Pereg, Wasserblat and Harel, 2025, "Accelerating LLM inference
with lossless speculative decoding algorithms for heterogeneous vocabularies"): the tokens that both have, as laws over
the target's ids; or texts, spelled again in the target's tokens. Either only proposes, so what fails to translate costs
speed and nothing else.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sakiyomi.text.tokenizer import Tokenizer

NONE = -1
OPEN_CHARACTERS = 512
"""How much of a growing text may be spelled anew with each token; what lies before stays as it was spelled."""
LOOK_BACK = 8
"""Tokens in front of a draft that are spelled together with it."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A model's side of a translation.

    Attributes:
        vocab_size: ids that have logits; a tokenizer may know more.
        end_ids: the ids that end a text, the usual one first.
    """

    tokenizer: Tokenizer
    vocab_size: int
    end_ids: tuple[int, ...] = ()

    def list_tokens(self) -> dict[bytes, list[int]]:
        """The ordinary tokens by their bytes."""
        tokens: dict[bytes, list[int]] = {}
        for token_id in range(min(self.vocab_size, self.tokenizer.vocab_size)):
            data = self.tokenizer.token_bytes(token_id)
            if data and not self.is_special(token_id):
                tokens.setdefault(data, []).append(token_id)
        return tokens

    def is_special(self, token_id: int) -> bool:
        return token_id in self.end_ids or self.tokenizer.is_special(token_id)


class Translation:
    """Which ids of a drafting model and of its target mean the same.

    Ordinary tokens are the same by their bytes, special ones by their name or, for the beginning and the end of a text,
    by their role.

    Attributes:
        to_target: for each id of the drafting model the target's id, or -1.
        to_drafting: for each id of the target an id of the drafting model, or -1.
    """

    def __init__(self, drafting: Side, target: Side) -> None:
        self.drafting = drafting
        self.target = target
        self.to_target = np.full(drafting.vocab_size, NONE, np.int64)
        self.to_drafting = np.full(target.vocab_size, NONE, np.int64)
        ours = target.list_tokens()
        for data, theirs in drafting.list_tokens().items():
            if data in ours:
                self._join(theirs, ours[data])
        self._join_special_tokens()
        self._shared = np.flatnonzero(self.to_target != NONE)
        self._goals = self.to_target[self._shared]
        self._has_doubles = len(np.unique(self._goals)) < len(self._goals)

    def _join(self, theirs: Seq[int], ours: Seq[int]) -> None:
        self.to_target[list(theirs)] = ours[0]
        self.to_drafting[list(ours)] = theirs[0]

    def _join_special_tokens(self) -> None:
        names = {
            self.target.tokenizer.token_bytes(token_id): token_id
            for token_id in range(self.target.vocab_size)
            if self.target.is_special(token_id)
        }
        for token_id in range(self.drafting.vocab_size):
            if self.drafting.is_special(token_id):
                same = names.get(self.drafting.tokenizer.token_bytes(token_id))
                if same is not None and token_id not in self.drafting.end_ids:
                    self._join([token_id], [same])
        roles = [(self.drafting.end_ids, self.target.end_ids)]
        bos = self.drafting.tokenizer.bos_id, self.target.tokenizer.bos_id
        if bos[0] is not None and bos[1] is not None:
            roles.append(((bos[0],), (bos[1],)))
        for theirs, ours in roles:
            theirs = tuple(i for i in theirs if i < self.drafting.vocab_size)
            ours = tuple(i for i in ours if i < self.target.vocab_size)
            if theirs and ours:
                self._join(theirs, ours)

    @property
    def num_shared(self) -> int:
        """Ids of the drafting model that the target has too."""
        return len(self._shared)

    @property
    def overlap(self) -> float:
        """The share of the drafting model's ids that the target has too."""
        return self.num_shared / max(self.drafting.vocab_size, 1)

    def restrict(self, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits of the drafting model as logits over the target's ids: -inf where it has no such token.

        Where several of its ids mean one of the target's, their probabilities are added.
        """
        goal = np.full(self.target.vocab_size, -np.inf, np.float32)
        if not self._has_doubles:
            goal[self._goals] = row[self._shared]
        elif self.num_shared:
            shared = row[self._shared].astype(np.float64)
            top = shared.max()
            sums = np.zeros(self.target.vocab_size)
            np.add.at(sums, self._goals, np.exp(shared - top))
            with np.errstate(divide="ignore"):
                goal[:] = np.log(sums) + top
        return goal

    def spell(self, before: Seq[int], drafted: Seq[int]) -> list[int]:
        """The target's tokens for what the drafting model wrote behind the target's tokens `before`.

        It ends where the text ends, and before what the target cannot spell or is no whole character.
        """
        theirs, tokenizer = self.drafting, self.target.tokenizer
        data, end = b"", NONE
        for token_id in drafted:
            if theirs.is_special(token_id):
                end = int(self.to_target[token_id])
                break
            data += theirs.tokenizer.token_bytes(token_id)
        whole = _whole_text(data)
        tokens = self._spell_text(before, whole)
        is_whole = len(whole) == len(data) and _bytes_of(tokenizer, tokens) == data
        return [*tokens, end] if end != NONE and is_whole else tokens

    def _spell_text(self, before: Seq[int], data: bytes) -> list[int]:
        if not data:
            return []
        tokenizer = self.target.tokenizer
        start = len(before)
        while start > max(len(before) - LOOK_BACK, 0) and not self.target.is_special(before[start - 1]):
            start -= 1
        context = _bytes_of(tokenizer, before[start:])
        try:
            text = (context + data).decode()
        except UnicodeDecodeError:  # the window begins inside a character
            context, text = b"", data.decode()
        for spelled, seam in ((text, len(context)), (data.decode(), 0)):
            # Where a token reaches over the seam, the draft is spelled by itself.
            tokens, at = self._encode(spelled, seam)
            for index, token in enumerate(tokens):
                if at == 0:
                    return self._checked(tokens[index:], data)
                at += len(tokenizer.token_bytes(token))
        return []

    def _encode(self, text: str, seam: int) -> tuple[list[int], int]:
        """Tokens of the text, and where the first begins, counted from the seam at that byte of the text."""
        tokenizer = self.target.tokenizer
        if not tokenizer.strips_space:
            return tokenizer.encode(text, add_special_tokens=False), -seam
        # Such a tokenizer puts a space in front.
        is_there = text.startswith(" ")
        return tokenizer.encode(text.removeprefix(" "), add_special_tokens=False), -seam - (not is_there)

    def _checked(self, tokens: Seq[int], data: bytes) -> list[int]:
        """The first tokens, as far as they spell `data` and the target has logits for them."""
        kept: list[int] = []
        for token in tokens:
            own = self.target.tokenizer.token_bytes(token)
            if not own or not data.startswith(own) or token >= self.target.vocab_size or self.target.is_special(token):
                break
            kept.append(token)
            data = data[len(own) :]
        return kept


class Reader:
    """A text that grows in the target's tokens, in the ids of the drafting model.

    Attributes:
        ids: the ids so far; from one `read` to the next the last ones may change.
        is_whole: whether the text ends with a whole character, so that the ids stand for all of it.
    """

    def __init__(self, translation: Translation) -> None:
        self._translation = translation
        tokenizer = translation.drafting.tokenizer
        bos = tokenizer.bos_id
        self._settled = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
        self._open = ""
        self._is_first = True  # whether the open text begins a stretch of text
        self._drops_space = translation.target.tokenizer.strips_space  # the one that the tokenizer put in front
        self._num_read = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.ids: list[int] = list(self._settled)
        self.is_whole = True

    @property
    def num_settled(self) -> int:
        """How many of the ids, from the first on, will not change any more."""
        return len(self._settled)

    def read(self, tokens: Seq[int]) -> list[int]:
        """Take in the tokens that were appended since the last call; all ids so far."""
        target = self._translation.target
        for position in range(self._num_read, len(tokens)):
            token = tokens[position]
            if target.is_special(token):
                self._end_stretch()
                self._add_special(token, is_start=position == 0)
            else:
                data = target.tokenizer.token_bytes(token)
                if self._drops_space:
                    data = data.removeprefix(b" ")
                self._drops_space = False
                self._open += self._utf8.decode(data)
        self._num_read = len(tokens)
        if len(self._open) > OPEN_CHARACTERS:
            self._settle()
        self.ids = [*self._settled, *self._spell(self._open)]
        self.is_whole = not self._utf8.getstate()[0]
        return self.ids

    def _add_special(self, token: int, is_start: bool) -> None:
        translation = self._translation
        own = int(translation.to_drafting[token]) if token < len(translation.to_drafting) else NONE
        if own != NONE:
            if not (is_start and self._settled[-1:] == [own]):
                self._settled.append(own)
            return
        name = translation.target.tokenizer.token_bytes(token).decode("utf-8", "replace")
        self._settled += translation.drafting.tokenizer.encode(name, add_special_tokens=False)

    def _end_stretch(self) -> None:
        self._open += self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._settled += self._spell(self._open)
        self._open, self._is_first = "", True
        self._drops_space = self._translation.target.tokenizer.strips_space

    def _settle(self) -> None:
        """Leave the first part of the open text as it is spelled, up to where a word begins."""
        for at in range(len(self._open) - OPEN_CHARACTERS // 4, 0, -1):
            if self._open[at].isspace() and not self._open[at - 1].isspace():
                self._settled += self._spell(self._open[:at])
                self._open, self._is_first = self._open[at:], False
                return

    def _spell(self, text: str) -> list[int]:
        tokenizer = self._translation.drafting.tokenizer
        if not self._is_first and tokenizer.strips_space:
            text = text.removeprefix(" ")  # the tokenizer puts one there
        return tokenizer.encode(text, add_special_tokens=False) if text else []


def _bytes_of(tokenizer: Tokenizer, tokens: Collection[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in tokens)


def _whole_text(data: bytes) -> bytes:
    """The longest beginning that is whole characters."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start]
    return data
