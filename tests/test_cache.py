"""KVCache against a plain list of positions, on numpy and torch arrays, and on the blocks of the native kernels."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_cache import unpack
from sakiyomi.cache import KVCache
from sakiyomi.errors import ParameterError
from sakiyomi.ops.base import Ops, Past

LAYERS, HEADS, WIDTH = 2, 3, 4


def ops_with(new_kv):
    """What a cache needs of its ops, with slots that are moved as ops do where they know no better."""
    return SimpleNamespace(
        new_kv=new_kv,
        copy_slots=lambda *arguments: Ops.copy_slots(None, *arguments),
        move_slots=lambda *arguments: Ops.move_slots(None, *arguments),
    )


def numpy_ops():
    def new_kv(num_layers, num_kv_heads, head_dim, capacity):
        shape = (num_layers, num_kv_heads, capacity, head_dim)
        return np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)

    return ops_with(new_kv)


def torch_ops():
    torch = pytest.importorskip("torch")

    def new_kv(num_layers, num_kv_heads, head_dim, capacity):
        shape = (num_layers, num_kv_heads, capacity, head_dim)
        return torch.full(shape, torch.nan), torch.full(shape, torch.nan)

    return ops_with(new_kv)


def native_ops():
    pytest.importorskip("sakiyomi._native")
    from sakiyomi.ops.native import NativeOps

    class Spoiled(NativeOps):
        def new_kv(self, *shape_and_capacity):
            keys, values = super().new_kv(*shape_and_capacity)
            keys[:] = values[:] = 255  # scales that are no numbers
            return keys, values

    return Spoiled(threads=1)


BACKENDS = {"numpy": numpy_ops, "torch": torch_ops, "native": native_ops}


def new_cache(backend="numpy"):
    return KVCache(BACKENDS[backend](), LAYERS, HEADS, WIDTH)


def write(cache, tags):
    """What a forward pass does: room first, then rows behind the length. Every number of a row tells its tag."""
    cache.reserve(len(tags))
    slots = cache.slots()
    if slots.keys.dtype == np.uint8:
        offsets = np.arange(LAYERS)[:, None] * 10 + np.arange(HEADS)
        for layer in range(LAYERS):
            rows = (np.array(tags)[:, None] * 100 + offsets[layer])[..., None] * np.ones(WIDTH)
            cache._ops.store(Past([slots], layer), rows.astype(np.float32), -rows.astype(np.float32), (0, len(tags)))
        return
    assert slots.keys.shape[2] >= slots.length + len(tags)
    for index, tag in enumerate(tags):
        for layer in range(LAYERS):
            for head in range(HEADS):
                slots.keys[layer, head, slots.length + index] = tag * 100 + layer * 10 + head
                slots.values[layer, head, slots.length + index] = -(tag * 100 + layer * 10 + head)


def read(cache):
    """The tags of the committed positions; fails when a row is not whole."""
    slots = cache.slots()
    assert slots.length == cache.length
    kv = slots.keys, slots.values
    if slots.keys.dtype == np.uint8:
        kv = (np.rint(array) for array in unpack(*kv, WIDTH))
    keys, values = (np.asarray(array)[:, :, : cache.length] for array in kv)
    tags = (keys[0, 0, :, 0] / 100).astype(int)
    offsets = np.arange(LAYERS)[:, None] * 10 + np.arange(HEADS)
    expected = np.broadcast_to((tags * 100 + offsets[:, :, None])[..., None], keys.shape)
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, -expected)
    return tags.tolist()


OPERATIONS = st.one_of(
    st.tuples(st.just("forward"), st.integers(1, 40), st.randoms(use_true_random=False)),
    st.tuples(st.just("truncate"), st.floats(0, 1), st.none()),
    st.tuples(st.just("fork"), st.none(), st.none()),
    st.tuples(st.just("expect"), st.integers(0, 200), st.none()),
    st.tuples(st.just("abandon"), st.integers(0, 90), st.none()),
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(operations=st.lists(OPERATIONS, max_size=12))
def test_cache_equals_a_list(backend, operations):
    cache, model = new_cache(backend), []
    left_behind = []
    next_tag = 1
    for kind, value, random in operations:
        if kind == "forward":
            tags = list(range(next_tag, next_tag + value))
            next_tag += value
            write(cache, tags)
            assert cache.num_pending == value
            path = sorted(random.sample(range(value), random.randint(0, value)))
            cache.keep(path)
            model += [tags[row] for row in path]
        elif kind == "expect":
            write(cache, [next_tag])
            cache.expect(value)
            assert cache.capacity >= value
            cache.keep([0])  # rows of a pass outlive the growth
            model.append(next_tag)
            next_tag += 1
        elif kind == "abandon":
            write(cache, [next_tag] * value)
        elif kind == "truncate":
            length = int(value * len(model))
            cache.truncate(length)
            del model[length:]
        else:
            left_behind.append((cache, list(model)))
            cache = cache.fork()
        assert cache.length == len(model) <= cache.capacity
        assert read(cache) == model
    for old, expected in left_behind:
        assert read(old) == expected


def test_what_is_expected_is_made_room_for_as_far_as_the_context_goes():
    cache = KVCache(numpy_ops(), LAYERS, HEADS, WIDTH, max_length=300)
    cache.expect(200)
    assert cache.capacity == 200
    cache.expect(10)
    assert cache.capacity == 200
    cache.expect(4000)
    assert cache.capacity == 300
    write(cache, [1, 2])
    cache.keep([0, 1])
    assert cache.fork().capacity == 300  # a fork goes on as far


@pytest.mark.parametrize("backend", BACKENDS)
def test_growth_doubles_and_keeps_positions(backend):
    cache = new_cache(backend)
    assert cache.num_bytes == 0
    write(cache, list(range(1, 61)))
    cache.keep(range(60))
    first = cache.capacity
    write(cache, [61] * 10)
    assert cache.capacity == 2 * first
    row_bytes = 2 * WIDTH * 4 if backend != "native" else (2304 // 2 + (16 + 4) * 32) // 32
    assert cache.num_bytes == LAYERS * HEADS * row_bytes * cache.capacity
    cache.keep([9])
    assert read(cache) == list(range(1, 62))


def test_a_fork_does_not_see_pending_rows():
    cache = new_cache()
    write(cache, [1, 2, 3])
    fork = cache.fork()
    assert (fork.length, fork.num_pending) == (0, 0)
    with pytest.raises(ParameterError):
        fork.keep([0])
    cache.keep([0, 2])
    assert read(cache) == [1, 3]


def test_leading_rows_are_kept_without_a_copy():
    copied = []

    class Watched(np.ndarray):
        def __setitem__(self, index, value):
            copied.append(index)
            super().__setitem__(index, value)

    def new_kv(*shape_and_capacity):
        keys, values = numpy_ops().new_kv(*shape_and_capacity)
        return keys.view(Watched), values.view(Watched)

    cache = KVCache(ops_with(new_kv), LAYERS, HEADS, WIDTH)
    write(cache, [1, 2, 3, 4, 5])
    copied.clear()
    cache.keep([0, 1, 2])
    assert copied == []
    cache.reserve(5)
    copied.clear()
    cache.keep([0, 1, 3])
    assert [index[2] for index in copied] == [[5], [5]]


@pytest.mark.parametrize("path", [[3], [-1], [0, 0], [1, 0], [0, 1, 2, 3]])
def test_keep_refuses_bad_rows_and_changes_nothing(path):
    cache = new_cache()
    write(cache, [1, 2])
    cache.keep([0])
    write(cache, [3, 4, 5])
    with pytest.raises(ParameterError):
        cache.keep(path)
    assert (cache.length, cache.num_pending) == (1, 3)
    cache.keep([0, 2])
    assert read(cache) == [1, 3, 5]


def test_rows_can_be_kept_only_once():
    cache = new_cache()
    write(cache, [1, 2])
    cache.keep([0])
    with pytest.raises(ParameterError, match="0 rows"):
        cache.keep([0])


@pytest.mark.parametrize("length", [-1, 3])
def test_truncate_refuses_a_length_outside(length):
    cache = new_cache()
    write(cache, [1, 2])
    cache.keep([0, 1])
    with pytest.raises(ParameterError, match="2 positions"):
        cache.truncate(length)


def test_truncate_drops_pending_rows():
    cache = new_cache()
    write(cache, [1, 2])
    cache.truncate(0)
    with pytest.raises(ParameterError):
        cache.keep([0])


def test_reserve_refuses_a_negative_number():
    with pytest.raises(ParameterError):
        new_cache().reserve(-1)
