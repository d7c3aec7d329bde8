"""Tying a trained drafter to its target: what is lent to it, and how a wrong target is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from sakiyomi.errors import CheckpointError
from sakiyomi.types import DrafterFile, Lent, ModelInfo

NUM_PROBES = 64
TOLERANCE = 0.1
"""Of the probe, relative: weights rounded to 8 or 4 bits move it by less than 0.02, other models by 1 and more."""

SHAPE = ("vocab_size", "hidden_size", "num_layers")


def describe_target(info: ModelInfo, lent: Lent) -> dict[str, Any]:
    """What a drafter file remembers of its target.

    The `probe` is a fixed random projection of the embeddings of a few ids: it tells models of one shape apart, and
    is the same for all precisions of a model up to their rounding.
    """
    ids = np.linspace(0, info.vocab_size - 1, min(NUM_PROBES, info.vocab_size)).astype(np.int32)
    rows = lent.ops.to_numpy(lent.ops.embed(lent.embedding, ids)).astype(np.float64)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], info.hidden_size)
    probe = [float(f"{value:.6g}") for value in (rows * signs).sum(1)]
    return {"name": info.name, **{key: getattr(info, key) for key in SHAPE}, "probe": probe}


def resolve_taps(stored: DrafterFile, num_layers: int) -> tuple[int, ...]:
    """The layers whose hidden states a drafter reads, by our count; files of other projects may leave them out.

    Raises:
        CheckpointError: layers that the target does not have, or another number of them than the net reads.
    """
    default = (2, num_layers // 2, num_layers - 3) if stored.kind in ("eagle3", "peagle") else (num_layers,)
    taps = stored.taps or default
    wanted = stored.config.get("num_taps", len(taps))
    if len(taps) != wanted or sorted(set(taps)) != list(taps) or not 0 <= taps[0] <= taps[-1] <= num_layers:
        raise CheckpointError(
            f"the drafter reads the layers {list(taps)} and its net takes {wanted}; a target of {num_layers} layers "
            f"needs that many ascending numbers from 0 to {num_layers}."
        )
    return taps


def cut_padding(stored: DrafterFile, vocab_size: int) -> DrafterFile:
    """A head without the ids from `vocab_size` on: heads of other projects count the target's padding in."""
    names = [name for name in stored.tensors if name == "lm_head.weight" or name.startswith("lm_heads.")]
    num_rows = {len(np.asarray(stored.tensors[name])) for name in names}
    kept: Any
    if stored.vocabulary is None:
        kept = np.arange(vocab_size) if any(count > vocab_size for count in num_rows) else None
    else:
        kept = None if int(stored.vocabulary.max(initial=-1)) < vocab_size else stored.vocabulary < vocab_size
    if kept is None:
        return stored
    return replace(
        stored,
        vocabulary=None if stored.vocabulary is None else stored.vocabulary[kept],
        tensors={**stored.tensors, **{name: np.asarray(stored.tensors[name])[kept] for name in names}},
    )


def find_mismatch(told: Mapping[str, Any], info: ModelInfo, lent: Lent) -> str | None:
    """Why a drafter for the target `told` does not fit this one, or None."""
    is_foreign = "probe" not in told
    for key in sorted(set(SHAPE) & set(told)) if is_foreign else SHAPE:
        if is_foreign and key == "vocab_size" and told[key] == info.padded_vocab_size:
            continue
        if told.get(key) != getattr(info, key):
            return f"its {key} is {getattr(info, key)} and the drafter's target had {told.get(key)}"
    if is_foreign:
        return None  # files of other projects tell no more
    probe, own = np.array(told.get("probe", [])), np.array(describe_target(info, lent)["probe"])
    if probe.shape != own.shape or np.linalg.norm(own - probe) > TOLERANCE * np.linalg.norm(probe):
        return "its shape fits, but its embeddings are those of another model"
    return None
