"""A pass of an EAGLE head: the fused form has the bits of the composed one, and rows do not depend on their company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sakiyomi.cache import KVCache
from sakiyomi.ops.base import Causal, HeadEnds, LayerWeights, Ops, Past, StackSpec, Tree
from sakiyomi.ops.native import NativeOps

pytest.importorskip("sakiyomi._native")
HIDDEN, INNER, VOCAB, NUM_IDS = 64, 96, 50, 40
SPEC = StackSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    eps=1e-5,
    inv_freq=(1000.0 ** -np.linspace(0, 1, 8)).astype(np.float32),
    rope_scale=1.0,
)


def make_parts(ops: Ops, norm_before_residual: bool) -> tuple[HeadEnds, list[LayerWeights]]:
    rng = np.random.default_rng(3)

    def matrix(*shape: int) -> Any:
        return ops.weight(rng.normal(0, 0.2, shape).astype(np.float32))

    def vector() -> Any:
        return ops.array(rng.normal(1, 0.2, HIDDEN).astype(np.float32))

    layers = [
        LayerWeights(
            input_norm=vector(),
            qkv=matrix(128, HIDDEN * (2 if index == 0 else 1)),
            output=matrix(HIDDEN, 64),
            post_norm=vector(),
            gate_up=matrix(2 * INNER, HIDDEN),
            down=matrix(HIDDEN, INNER),
        )
        for index in range(2)
    ]
    ends = HeadEnds(
        embedding=matrix(VOCAB, HIDDEN),
        embed_norm=layers[0].input_norm,
        feature_norm=vector(),
        norm_before_residual=norm_before_residual,
        final_norm=vector(),
        head=matrix(NUM_IDS, HIDDEN),
    )
    return ends, layers


@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_fused_is_composed_and_rows_keep_to_themselves(dtype: Any, norm_before_residual: bool) -> None:
    rng = np.random.default_rng(4)
    features = rng.normal(0, 1, (21, HIDDEN)).astype(np.float32)
    ids = rng.integers(0, VOCAB, 21).astype(np.int32)
    results = []
    for threads in (1, 2):
        ops = NativeOps(dtype=dtype, threads=threads)
        ends, layers = make_parts(ops, norm_before_residual)
        for run in (ops.head_pass, lambda *given, ops=ops: Ops.head_pass(ops, *given)):
            for chunks in ((21,), (5, 16), (1,) * 21):
                cache, rows, start = KVCache(ops, 2, 2, 16, max_length=64), [], 0
                for size in chunks:
                    end = start + size
                    cache.reserve(size)
                    past, positions = Past([cache.slots()]), np.arange(start, end, dtype=np.int32)
                    mask = Causal((0, size))
                    out = run(features[start:end], ids[start:end], ends, layers, SPEC, positions, past, mask, True)
                    rows.append(np.concatenate(out, axis=1))
                    cache.keep(range(size))
                    start = end
                results.append(np.concatenate(rows))
    assert results[0].shape == (21, 2 * HIDDEN + NUM_IDS)
    for other in results[1:]:
        assert other.tobytes() == results[0].tobytes()


def test_trees_without_logits() -> None:
    ops = NativeOps(dtype="int8", threads=1)
    ends, layers = make_parts(ops, False)
    features = np.random.default_rng(5).normal(0, 1, (4, HIDDEN)).astype(np.float32)
    ids, positions = np.arange(4, dtype=np.int32), np.array([0, 1, 1, 2], np.int32)
    tree = Tree(np.array([-1, 0, 0, 2], np.int32), (0, 4))
    outs = []
    for run in (ops.head_pass, lambda *given: Ops.head_pass(ops, *given)):
        cache = KVCache(ops, 2, 2, 16, max_length=64)
        cache.reserve(4)
        normed, states, logits = run(features, ids, ends, layers, SPEC, positions, Past([cache.slots()]), tree, False)
        assert logits is None
        outs.append(normed.tobytes() + states.tobytes())
    assert outs[0] == outs[1]
    with pytest.raises(ValueError, match="out of range"):
        ops.head_pass(features, ids + VOCAB, ends, layers, SPEC, positions, Past([cache.slots()]), tree, False)
