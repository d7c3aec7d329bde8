"""none: plain decoding, that is drafting nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sakiyomi.tree import Draft
from sakiyomi.types import Drafter, DrafterContext, Sequence


class NoneDrafter(Drafter):
    """Drafts nothing."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """`none` has no options."""

    def __init__(self, config: Config | None = None, context: DrafterContext | None = None) -> None:
        self.config = config or self.Config()

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [Draft.empty() for _ in sequences]

    def sources(self) -> Seq[Drafter]:
        return []
