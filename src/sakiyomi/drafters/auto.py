"""auto: what suits the target, under a budget.

Its parts are lookup drafters, which need nothing, and a trained drafter where there is one for this target. The engine
asks them one by one, as far as that pays, and checks what is worth its time (engine/budget.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from sakiyomi.parts import PartsDrafter
from sakiyomi.tree import Draft
from sakiyomi.types import DrafterContext, Sequence


class AutoDrafter(PartsDrafter):
    """Never slower than plain decoding, whatever the text."""

    wants_budget = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Options of `auto`.

        Args:
            parts: drafters joined by "+", each `name` or `name:key=value,...`, cheap ones first; the last of the
                options. None takes those that suit the target.
        """

        parts: str | None = None

    def __init__(self, config: Config, context: DrafterContext) -> None:
        assert context.make_drafters is not None, "auto is built by assemble"
        self.config = config
        super().__init__(context.make_drafters(config.parts or context.fitting_parts), context.target.info.hidden_size)

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Without a budget: the first part that drafts anything."""
        drafts = [Draft.empty() for _ in sequences]
        for number in range(len(self.parts)):
            empty = [index for index, draft in enumerate(drafts) if not len(draft) and budgets[index] > 0]
            if not empty:
                break
            answers = self.ask(number, [sequences[index] for index in empty], [budgets[index] for index in empty])
            for index, draft in zip(empty, answers, strict=True):
                drafts[index] = draft
        return drafts
