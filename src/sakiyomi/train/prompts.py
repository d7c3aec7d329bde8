"""Which prompts the target shall write: unseeded ones, ones that an opener starts, and tasks on its earlier answers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.errors import ParameterError

PLAIN = "plain"
OWN = "own"
MAX_PASSAGES = 4


@dataclass(frozen=True, kw_only=True)
class Task:
    """A user's turn to be written.

    Attributes:
        group: what kind of prompt it is.
        head: how the turn begins.
        tail: how it ends, or None where the target writes on to the end of the turn. With a tail the target writes to
            the end of the line only; a task with `is_complete` needs nothing more written.
        turns: further user's turns that are given.
    """

    group: str
    head: str = ""
    tail: str | None = None
    is_complete: bool = False
    turns: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Openers:
    group: str
    weight: float
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Template:
    group: str
    weight: float
    sources: tuple[str, ...]
    tokens: tuple[int, int]
    texts: tuple[str, ...]


@dataclass
class PassagePool:
    """Earlier answers to make tasks of, by group."""

    answers: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def add(self, group: str, text: str, num_tokens: int) -> None:
        if num_tokens >= 16 and text.strip():
            self.answers.setdefault(group, []).append((text.strip(), num_tokens))

    def draw(self, rng: np.random.Generator, sources: Sequence[str], num_tokens: int) -> list[str]:
        """Passages of about `num_tokens` tokens together, whole sentences as far as possible; none from no answers."""
        known = [self.answers[group] for group in sources if group in self.answers]
        passages: list[str] = []
        while known and num_tokens > 0 and len(passages) < MAX_PASSAGES:
            group = known[int(rng.integers(len(known)))]
            text, length = group[int(rng.integers(len(group)))]
            cut = _cut(text, num_tokens / length)
            passages.append(cut)
            num_tokens -= max(int(length * len(cut) / len(text)), 16)
        return passages


def _cut(text: str, share: float) -> str:
    """The first part of a text, to the end of a sentence where there is one."""
    if share >= 1:
        return text
    end = max(int(len(text) * share), 1)
    sentence = max(text.rfind(mark, 0, end) for mark in (". ", "! ", "? ", ".\n", "\n"))
    return (text[: sentence + 1] if sentence > end // 3 else text[:end]).strip()


class PromptBook:
    """Draws tasks.

    Args:
        path: a TOML file like `train/prompts.toml`; None takes that one.
        shares: of the unseeded prompts, of those with an opener, and of those on earlier answers.
    """

    def __init__(self, path: Path | None = None, shares: tuple[float, float, float] = (0.45, 0.35, 0.2)) -> None:
        content = _read(path)
        self.shares = shares
        self.openers = [_build(Openers, entry, "openers") for entry in content.get("openers", ())]
        self.templates = [_build(Template, entry, "templates") for entry in content.get("templates", ())]
        if not self.openers or not self.templates:
            raise ParameterError(f"{path or 'prompts.toml'} has no [[openers]] or no [[templates]]; give both.")

    @property
    def groups(self) -> list[str]:
        return sorted({PLAIN, OWN, *(one.group for one in [*self.openers, *self.templates])})

    def draw(self, rng: np.random.Generator, pool: PassagePool) -> Task:
        """One task."""
        kind = rng.choice(3, p=np.array(self.shares) / sum(self.shares))
        if kind == 2:
            template = _pick(rng, self.templates)
            low, high = template.tokens
            passages = pool.draw(rng, template.sources, int(low * (high / low) ** rng.random()))
            if passages:
                return _fill(template.group, template.texts[int(rng.integers(len(template.texts)))], passages)
        if kind == 0:
            return Task(group=PLAIN)
        openers = _pick(rng, self.openers)
        return Task(group=openers.group, head=openers.texts[int(rng.integers(len(openers.texts)))])


def _pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    weights = np.array([one.weight for one in choices])
    return choices[int(rng.choice(len(choices), p=weights / weights.sum()))]


def _fill(group: str, text: str, passages: Sequence[str]) -> Task:
    numbered = "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1))
    text = text.replace("{passages}", numbered).replace("{passage}", "\n\n".join(passages))
    head, mark, tail = text.partition("{question}")
    return Task(group=group, head=head.rstrip(" "), tail=tail if mark else None, is_complete=not mark)


def _read(path: Path | None) -> Mapping[str, Any]:
    try:
        text = (files("sakiyomi.train") / "prompts.toml" if path is None else path).read_text(encoding="utf-8")
        return tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ParameterError(f"the prompts in {path} cannot be read ({error}); give a TOML file.") from error


def _build(kind: Any, entry: Mapping[str, Any], table: str) -> Any:
    try:
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()})
    except TypeError as error:
        raise ParameterError(f"[[{table}]] {entry.get('group')!r} does not have the right keys ({error}).") from error
