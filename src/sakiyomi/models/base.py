"""What the models over `nets.decoder` share: one forward pass over the spans of several sequences."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Self
from weakref import WeakSet

from sakiyomi.cache import KVCache
from sakiyomi.errors import ParameterError
from sakiyomi.models.packing import AskedRows, find_choices, make_room, own_caches, pack_spans, split_result
from sakiyomi.models.stages import run_in_stages
from sakiyomi.nets.decoder import Decoder, DecoderConfig
from sakiyomi.ops.base import BurstRules, BurstStep, Ops
from sakiyomi.types import Array, Checkpoint, Lent, ModelInfo, Output, Span


class DecoderModel:
    """A `types.Model` over a decoder. Several threads may use one model; their passes run one after the other."""

    def __init__(self, decoder: Decoder, info: ModelInfo) -> None:
        self.decoder = decoder
        self.info = info
        self._pass = Turnstile()
        self._is_cut = False

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(self.decoder.ops, *self._cache_shape, max_length=self.info.max_model_len)

    def forward(self, spans: Sequence[Span]) -> list[Output]:
        """Run all spans in one pass; rows land in the caches behind their length, uncommitted.

        Raises:
            ParameterError: a span that cannot be run (see `packing.pack_spans`).
            ContextLengthError: a row behind the model's context.
        """
        if not spans:
            return []
        with self._pass.lock:
            packed = pack_spans(spans, self.info)
            caches = own_caches(spans, *self._cache_shape)
            try:
                if self._is_cut or any(span.computed is not None for span in spans):
                    return list(run_in_stages(self.decoder, spans, packed, caches, notes=self._is_cut))
                choices = find_choices(spans, packed) if self.decoder.ops.has_best_ids else []
                states, taps, chosen = self.decoder.forward(
                    packed.token_ids,
                    packed.positions,
                    make_room(caches, spans),
                    packed.mask,
                    packed.logit_rows,
                    packed.taps,
                    choices,
                )
                rows = None if states is None else AskedRows.of_states(self.decoder, states, choices, chosen)
            except BaseException:
                # Rows of a pass that broke off (an interrupt, no memory) must never be committed.
                for span in spans:
                    span.cache.keep(())
                raise
        return list(split_result(self.decoder.ops, spans, packed, rows, taps))

    @property
    def has_bursts(self) -> bool:
        """Whether `burst` makes steps."""
        return self.decoder.ops.has_bursts and not self._is_cut

    def burst(
        self, cache: KVCache, last: int, taps: Sequence[int], first_taps: Array | None, rules: BurstRules
    ) -> tuple[list[BurstStep], Array]:
        """Several steps of one sequence in one call (see `Ops.run_burst`), whose rows the cache commits."""
        with self._pass.lock:
            steps, kept = self.decoder.burst(last, cache.slots(), cache.capacity, taps, first_taps, rules)
            cache.reserve(len(kept))
            cache.keep(range(len(kept)))
        return steps, kept

    def shallow(self, num_layers: int, skip: Collection[int] = ()) -> Self:
        """The same model cut after its first layers, with final norm and head, sharing weights.

        It can also run over caches of the whole model, whose layers it fills.

        Args:
            skip: numbers of layers, from 0, that are left out.
        """
        cut = copy.copy(self)
        cut.decoder = self.decoder.shallow(num_layers, skip)
        cut.info = replace(self.info, num_layers=num_layers)
        cut._is_cut = True
        return cut

    def lend(self) -> Lent:
        """Embedding, head and final norm, for the nets of drafters."""
        decoder = self.decoder
        return Lent(decoder.ops, decoder.embedding, decoder.head, decoder.norm, decoder.config.eps)

    @property
    def _cache_shape(self) -> tuple[int, int, int]:
        config = self.decoder.config
        return config.num_layers, config.num_kv_heads, config.head_dim


class Turnstile:
    """A lock that a forked child finds open: the thread that held it does not exist there."""

    _all: WeakSet[Turnstile] = WeakSet()

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._all.add(self)

    @classmethod
    def reopen_all(cls) -> None:
        for turnstile in cls._all:
            turnstile.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Turnstile.reopen_all)


def load_decoder(
    ops: Ops, checkpoint: Checkpoint, *, dtype: str, max_model_len: int | None, vocab_size: int | None
) -> tuple[Decoder, ModelInfo]:
    """The decoder of a checkpoint and what the layers above need to know of it.

    Raises:
        CheckpointError: an unsupported or incomplete checkpoint.
        ParameterError: a context longer than the model's.
    """
    config = DecoderConfig.from_dict(checkpoint.config)
    if max_model_len is not None and not 2 <= max_model_len <= config.max_positions:
        raise ParameterError(
            f"max_model_len={max_model_len} is not allowed; {checkpoint.name} has a context of 2 to "
            f"{config.max_positions} positions."
        )
    if vocab_size is not None:
        vocab_size = min(vocab_size, config.vocab_size)  # a tokenizer may know more ids than the model
    decoder = Decoder(ops, config, checkpoint.tensors, vocab_size)
    info = ModelInfo(
        name=checkpoint.name,
        architecture=config.model_type,
        vocab_size=decoder.vocab_size,
        max_model_len=max_model_len or config.max_positions,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        end_token_ids=tuple(checkpoint.end_token_ids),
        is_bit_exact=ops.is_bit_exact,
        dtype=dtype,
        padded_vocab_size=config.vocab_size,
    )
    return decoder, info
