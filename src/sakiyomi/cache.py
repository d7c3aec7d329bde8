"""The key/value cache of one sequence: grow, keep an accepted tree path, truncate, fork."""

from __future__ import annotations

from collections.abc import Sequence

from sakiyomi.errors import ParameterError
from sakiyomi.ops.base import KVSlots, Ops
from sakiyomi.tree import Computed
from sakiyomi.types import Array

FIRST_CAPACITY = 64


class KVCache:
    """Keys and values of one sequence, in arrays of `ops`; slot i holds position i.

    A forward pass asks for room by `reserve(M)` and writes its M rows behind `length`; they stay pending until `keep`
    commits the ones that shall stay, or the next `reserve`, `truncate` or `keep` drops them.

    Args:
        num_layers, num_kv_heads, head_dim: L, G and D.
        max_length: positions of the model's context, beyond which no spare room is made; None knows no such end.
    """

    def __init__(
        self, ops: Ops, num_layers: int, num_kv_heads: int, head_dim: int, *, max_length: int | None = None
    ) -> None:
        self._ops = ops
        self._max_length = max_length
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._length = 0
        self._num_pending = 0
        self._computed: Computed | None = None
        self._allocate(0)

    @property
    def length(self) -> int:
        """Committed positions."""
        return self._length

    @property
    def num_pending(self) -> int:
        """Rows of the last forward pass that are neither kept nor dropped yet."""
        return self._num_pending

    @property
    def capacity(self) -> int:
        """Slots held, spare ones included."""
        return self._capacity

    @property
    def num_bytes(self) -> int:
        """Bytes held, spare room included."""
        return int(self._keys.nbytes) + int(self._values.nbytes)

    def fits(self, num_layers: int, num_kv_heads: int, head_dim: int) -> bool:
        """Whether a model of this shape can write here (one with fewer layers can)."""
        return self._shape[0] >= num_layers and self._shape[1:] == (num_kv_heads, head_dim)

    def note(self, computed: Computed) -> None:
        """Remember what first layers have made of the pending rows."""
        self._computed = computed

    def find(self, computed: Computed | None) -> Computed | None:
        """`computed` itself if the rows that it tells of are still pending here, else None."""
        return computed if computed is self._computed else None

    def reserve(self, num_rows: int, num_kept: int = 0) -> None:
        """Make room for the rows of a forward pass behind `length`.

        Args:
            num_kept: how many pending rows of an earlier pass are the first ones of this; the others are dropped.
        """
        if num_rows < 0:
            raise ParameterError(f"cannot reserve {num_rows} rows; give 0 or more.")
        self._make_room(self._length + num_rows, self._length + num_kept)
        self._num_pending = num_rows
        self._computed = None

    def expect(self, length: int) -> None:
        """Make room for `length` positions at once, as far as the context goes: growing later copies what is there.

        Committed and pending rows stay.
        """
        needed = length if self._max_length is None else min(length, self._max_length)
        self._make_room(needed, self._length + self._num_pending)

    def slots(self, pending: tuple[int, ...] = ()) -> KVSlots:
        """The arrays as the ops take them, with the parents of pending rows that a pass goes on from."""
        return KVSlots(self._keys, self._values, self._length, pending)

    def keep(self, path: Sequence[int]) -> None:
        """Commit rows of the last forward pass and drop its other rows.

        Args:
            path: indices into the rows of that pass, ascending; they land behind `length` in this order.

        Raises:
            ParameterError: a row that the pass did not have, or indices that do not ascend; nothing is changed.
        """
        previous = -1
        for row in path:
            if not 0 <= row < self._num_pending:
                raise ParameterError(f"row {row} is not in the last forward pass, which had {self._num_pending} rows.")
            if row <= previous:
                raise ParameterError(f"rows to keep must ascend; got {row} after {previous}.")
            previous = row
        in_place = 0
        while in_place < len(path) and path[in_place] == in_place:
            in_place += 1
        if in_place < len(path):
            source = [self._length + row for row in path[in_place:]]
            target = range(self._length + in_place, self._length + len(path))
            self._ops.move_slots((self._keys, self._values), self._shape[2], source, target)
        self._length += len(path)
        self._num_pending = 0
        self._computed = None

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on, and pending rows.

        Raises:
            ParameterError: a length below 0 or above the present one.
        """
        if not 0 <= length <= self._length:
            raise ParameterError(f"cannot truncate a cache of {self._length} positions to {length}.")
        self._length = length
        self._num_pending = 0
        self._computed = None

    def fork(self) -> KVCache:
        """An independent copy of the committed positions."""
        copy = KVCache(self._ops, *self._shape, max_length=self._max_length)
        copy.expect(self._capacity)
        copy.reserve(self._length)
        copy._take_slots((self._keys, self._values), self._length)
        copy.keep(range(self._length))
        return copy

    def _make_room(self, needed: int, num_used: int) -> None:
        if needed <= self._capacity:
            return
        generous = max(2 * self._capacity, FIRST_CAPACITY)
        largest = generous if self._max_length is None else min(generous, self._max_length)
        self._grow(max(needed, largest), num_used)

    def _allocate(self, capacity: int) -> None:
        self._keys, self._values = self._ops.new_kv(*self._shape, capacity)
        self._capacity = capacity

    def _grow(self, capacity: int, num_used: int) -> None:
        kv = self._keys, self._values
        self._allocate(capacity)
        self._take_slots(kv, num_used)

    def _take_slots(self, kv: tuple[Array, Array], length: int) -> None:
        self._ops.copy_slots(kv, (self._keys, self._values), length)
