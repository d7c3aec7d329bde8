"""What the weights of a drafter tell without being run: zeros, copies, and whether they belong to the target.

Letters: K drafted ids, H width of the drafter, Ht of the target, V ids of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.doctor.findings import Finding
from sakiyomi.types import DrafterFile, Lent, Quantized, Tensor

Floats = npt.NDArray[np.float32]

EAGLE = ("eagle1", "eagle3", "peagle")
NUM_SAMPLES = 64
CHUNK = 8192
ALIKE = 0.5
"""Mean cosine above which rows are those of the target, rounded or trained on; of other models it is near 0."""
SAME = 0.9
"""Cosine of one row and the row that it was copied from."""
RETRAIN = "export it again from the training run, or train it"


def check_zeros(stored: DrafterFile) -> Iterator[Finding]:
    """Tensors that are all zero, or states of the target that `fc` reads with zeros alone."""
    for name, tensor in sorted(stored.tensors.items()):
        values = to_dense(tensor)
        if values.size == 0 or values.any() or name.endswith(".bias"):
            continue
        if "norm" in name or name in ("fc.weight", "lm_head.weight", "head.weight") or name.startswith("lm_heads."):
            yield Finding(
                part=name,
                found=f"{name} is all zero",
                expected="weights; whatever passes through it is lost",
                remedy=f"{RETRAIN} anew: the tensor was never filled in",
            )
        else:
            yield Finding(
                part=name,
                found=f"{name} is all zero",
                expected="weights that training has moved away from their start",
                remedy="check that this checkpoint is a trained one",
                is_fault=False,
            )
    yield from _check_fusion(stored)
    yield from _check_rows(stored)


def _check_fusion(stored: DrafterFile) -> Iterator[Finding]:
    if stored.kind not in ("eagle3", "peagle"):
        return
    fc, num_taps = to_dense(stored.tensors["fc.weight"]), int(stored.config["num_taps"])
    blocks = [bool(block.any()) for block in np.split(fc, num_taps, axis=1)]
    if all(blocks) or not any(blocks):
        return
    layers = stored.taps or tuple(range(num_taps))
    dead = [str(layers[index]) for index, is_alive in enumerate(blocks) if not is_alive]
    yield Finding(
        part="fc.weight",
        found=f"its part for layer {', '.join(dead)} is all zero, so {len(dead)} of {num_taps} states are never read",
        expected="weights for each state of the target",
        remedy=f"{RETRAIN} anew: a loader that put another number of states in fc leaves such a hole",
    )


def _check_rows(stored: DrafterFile) -> Iterator[Finding]:
    if "lm_head.weight" not in stored.tensors:
        return
    head = to_dense(stored.tensors["lm_head.weight"])
    num_dead = int((~head.any(axis=1)).sum())
    if 0 < num_dead < len(head):
        yield Finding(
            part="lm_head.weight",
            found=f"{num_dead} of its {len(head)} rows are all zero",
            expected="a row for each drafted id",
            remedy="check the draft vocabulary with which it was exported",
            is_fault=False,
        )


def check_copies(stored: DrafterFile) -> Iterator[Finding]:
    """Medusa heads that are one and the same."""
    if stored.kind != "medusa":
        return
    blocks = [to_dense(stored.tensors[f"heads.{head}.0.weight"]) for head in range(int(stored.config["num_heads"]))]
    for index, block in enumerate(blocks[1:], 1):
        if block.any() and np.array_equal(block, blocks[0]):
            yield Finding(
                part=f"heads.{index}",
                found=f"head {index} has the weights of head 0",
                expected="a head of its own for each place",
                remedy="check how the heads were exported",
                is_fault=False,
            )


def check_head_present(stored: DrafterFile, vocab_size: int) -> Iterator[Finding]:
    """Whether a published EAGLE-3 or P-EAGLE head has the matrix that it was trained with."""
    if stored.kind not in ("eagle3", "peagle") or "lm_head.weight" in stored.tensors:
        return
    num_ids = vocab_size if stored.vocabulary is None else len(stored.vocabulary)
    is_cut = num_ids < vocab_size
    yield Finding(
        part="lm_head",
        found="lm_head.weight is missing"
        + (f", though only {num_ids} of {vocab_size} ids are drafted" if is_cut else ""),
        expected="the head's own matrix; engines leave one that is missing at its random start",
        remedy="export the drafter with lm_head, or, if it was trained with the target's rows, write them to the file "
        "(`write_speculators` does)",
        is_fault=is_cut,
    )


def check_lent(stored: DrafterFile, lent: Lent, vocab_size: int) -> Iterator[Finding]:
    """Whether embedding and head are those of the target where the file has its own, or lie at other ids.

    A head that was trained from a random start is like the target's at no id, which is no fault; one that has the
    target's rows at other ids than `d2t` tells is.
    """
    rng = np.random.default_rng(0)
    embedding, head = stored.tensors.get("embed_tokens.weight"), stored.tensors.get("lm_head.weight")
    if embedding is not None:
        yield from _check_embedding(stored, to_dense(embedding), lent, vocab_size, rng)
    if head is not None and to_dense(head).any():
        rows = to_dense(head)
        ids = np.arange(len(rows)) if stored.vocabulary is None else stored.vocabulary
        picked = np.flatnonzero(rows.any(axis=1) & (ids < vocab_size))
        picked = rng.choice(picked, min(NUM_SAMPLES, len(picked)), replace=False)
        yield from _check_order(_unit(rows[picked]), ids[picked], lent, vocab_size)


def _check_embedding(
    stored: DrafterFile, own: Floats, lent: Lent, vocab_size: int, rng: np.random.Generator
) -> Iterator[Finding]:
    ids = rng.choice(min(len(own), vocab_size), min(NUM_SAMPLES, len(own), vocab_size), replace=False)
    likeness = float((_unit(own[ids]) * _unit(target_rows(lent, lent.embedding, ids))).sum(1).mean())
    if likeness < ALIKE:
        yield Finding(
            part="embed_tokens",
            found=f"embed_tokens.weight is not the target's (mean cosine of its rows {likeness:.2f})",
            expected="a copy of the target's embedding" + (", trained on" if stored.kind == "peagle" else ""),
            remedy="check that the head was made for this target; where it was, drop embed_tokens and the target's is "
            "taken",
            is_fault=stored.kind != "peagle",
        )


def _check_order(own: Floats, ids: npt.NDArray[Any], lent: Lent, vocab_size: int) -> Iterator[Finding]:
    """Args: own: sampled rows of the head, of length 1; ids: what they stand for."""
    if float((own * _unit(target_rows(lent, lent.head, ids))).sum(1).mean()) >= ALIKE:
        return
    best, likeness = np.zeros(len(own), np.int64), np.full(len(own), -1.0)
    for first in range(0, vocab_size, CHUNK):
        chunk = np.arange(first, min(first + CHUNK, vocab_size))
        cosines = own @ _unit(target_rows(lent, lent.head, chunk)).T
        found = cosines.argmax(1)
        better = cosines[np.arange(len(own)), found] > likeness
        best[better] = chunk[found[better]]
        likeness = np.maximum(likeness, cosines.max(1))
    copied = likeness > SAME
    if copied.mean() < 0.8:
        return
    index = int(np.flatnonzero(copied)[0])
    yield Finding(
        part="d2t",
        found=f"lm_head holds the target's rows, but at other ids than d2t names: what it calls {ids[index]} is the "
        f"row of {best[index]}",
        expected="row i of lm_head is that of target id i + d2t[i]",
        remedy="export lm_head and d2t together",
    )


def target_rows(lent: Lent, weight: Any, ids: npt.NDArray[Any]) -> Floats:
    """Rows [len(ids), Ht] of the target's embedding or head."""
    rows: Floats = np.asarray(lent.ops.to_numpy(lent.ops.embed(weight, ids.astype(np.int32))), np.float32)
    return rows


def to_dense(tensor: Tensor) -> Floats:
    """The values of a stored tensor."""
    return tensor.dequantize() if isinstance(tensor, Quantized) else np.asarray(tensor, np.float32)


def _unit(rows: Floats) -> Floats:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), np.float32)
