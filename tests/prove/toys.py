"""Toys to be certified: a target, a drafting model that is nearly right, and a model that rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from sakiyomi.assemble import LoadedModel
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.models.toy import ToyModel, random_law
from sakiyomi.prove.certificate import MakeDrafter, Plan
from sakiyomi.types import DrafterContext, Model, Span, Verifier

VOCAB_SIZE = 12
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
PLAN = Plan(num_tokens=12, num_draws=1000, num_contexts=2)


def make_target() -> LoadedModel:
    return load(ToyModel(random_law(VOCAB_SIZE, 0, scale=1.5), VOCAB_SIZE))


def load(model: Model) -> LoadedModel:
    return LoadedModel(model=model, tokenizer=None, chat_template=None, path=Path("no such file"))


def drafting(target: LoadedModel, verifier: Verifier, width: int = 1) -> MakeDrafter:
    """What builds a drafter for a verifier."""
    small = ToyModel(random_law(VOCAB_SIZE, 5, scale=1.0), VOCAB_SIZE)

    def build(wrap: Callable[[Model], Model]) -> ModelDrafter:
        context = DrafterContext(wrap(target.model), lambda name: wrap(small), verifier.draw)
        return ModelDrafter(ModelDrafter.Config(model="small", width=width), context)

    return build


class RoundingModel(ToyModel):
    """A toy whose logits carry noise that depends on the shape of the pass, as on a backend of other kernels.

    Args:
        size: of the noise.
        fault: added to the first logit of every row below a sibling, a mask that leaks.
    """

    def __init__(self, size: float, fault: float = 0.0) -> None:
        super().__init__(random_law(VOCAB_SIZE, 0, scale=1.5), VOCAB_SIZE)
        self.info = replace(self.info, is_bit_exact=False)
        self.size = size
        self.fault = fault

    def forward(self, spans):  # type: ignore[no-untyped-def]
        outputs = super().forward(spans)
        num_rows = sum(len(span.tokens) for span in spans)
        for span, output in zip(spans, outputs, strict=True):
            for i, row in enumerate(span.logit_rows):
                noise = np.random.default_rng((num_rows, row, span.cache.length)).uniform(-1, 1, VOCAB_SIZE)
                output._rows[i] = (output._rows[i] + self.size * noise).astype(np.float32)
                output._rows[i][0] += self.fault * has_sibling(span, row)
        return outputs


def has_sibling(span: Span, row: int) -> bool:
    return list(span.parents).count(span.parents[row]) > 1
