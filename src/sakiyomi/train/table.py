"""The fit of `table`: counting the n-grams of the target's own text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.checkpoints.drafter import write_drafter
from sakiyomi.errors import ParameterError
from sakiyomi.lookup.table import TableCounter
from sakiyomi.plugins import make_config
from sakiyomi.train.estimate import Announce, Report, announce_nothing, say_nothing
from sakiyomi.train.shards import Shards
from sakiyomi.types import DrafterFile, Model

DRAFTER_FILE = "drafter.safetensors"
MAX_ORDER = 8


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """The recipe of a table.

    Args:
        order: tokens of the longest n-gram, the predicted one included.
        max_mb: size of the table.
        min_count: n-grams of three tokens and more that were seen less often are left out.
        loss_on: count what follows "all" tokens, or "answers" alone.
    """

    order: int = 4
    max_mb: float = 4.0
    min_count: int = 2
    loss_on: str = "answers"

    def __post_init__(self) -> None:
        if not 1 <= self.order <= MAX_ORDER:
            raise ParameterError(f"fit: order={self.order} is not allowed; give 1 to {MAX_ORDER}.")
        if not 0 < self.max_mb <= 1000:
            raise ParameterError(f"fit: max_mb={self.max_mb} is not allowed; give a number up to 1000.")
        if self.loss_on not in ("all", "answers"):
            raise ParameterError(f"fit: loss_on={self.loss_on!r} is not allowed; give all or answers.")


def fit_table(
    recipe: Mapping[str, Any],
    shards: Shards,
    target: Model,
    folder: Path,
    report: Report = say_nothing,
    announce: Announce = announce_nothing,
) -> Path:
    """Count a table and write its drafter file, which takes seconds: `announce` is told nothing.

    Where the target's choices were captured they are counted; else what its text says.

    Raises:
        ParameterError: a wrong recipe.
    """
    config: TableConfig = make_config("fit", TableConfig, recipe)
    info = target.info
    counter = TableCounter(config.order, info.vocab_size)
    for number, document in enumerate(shards.documents()):
        report("counting", number, len(shards))
        is_answer = np.append(document.loss_mask[1:], False)
        counts = np.ones(len(document), np.bool_) if config.loss_on == "all" else is_answer
        counter.add(document.tokens, document.argmax, counts)
    report("choosing what to keep", len(shards), len(shards))
    table = counter.build(int(config.max_mb * 1e6), config.min_count)
    path = folder / DRAFTER_FILE
    folder.mkdir(parents=True, exist_ok=True)
    write_drafter(
        path,
        DrafterFile(
            kind="table",
            config={"order": config.order},
            taps=(),
            target={"name": info.name, "vocab_size": info.vocab_size},
            tensors=table.to_tensors(),
            recipe=dict(recipe),
        ),
    )
    return path
