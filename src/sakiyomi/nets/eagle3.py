"""EAGLE heads, written once over `ops`: EAGLE-3 with the options of 3.1, and EAGLE-1/2 as a special form.

A head is a small decoder of its own. Row t reads the embedding of token t + 1 and a feature of position t - from the
target's hidden states where the target has been there, its own state where it drafts -, stands at position t and
predicts token t + 2 (Li et al., "EAGLE", 2024; "EAGLE-3", 2025; Eldenk et al., "Attention Drift", 2026, for the
post-norm feedback and the norms in front of `fc` of 3.1).

Letters: R rows, H width of the head, Ht width of the target, A taps, I inner width, V ids, K drafted ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError
from sakiyomi.nets.decoder import rope_frequencies
from sakiyomi.ops.base import (
    Causal,
    DraftRoom,
    FuseWeights,
    GreedyRules,
    HeadEnds,
    LayerWeights,
    Mask,
    Ops,
    Past,
    Placeholder,
    StackSpec,
)
from sakiyomi.tree import Draft
from sakiyomi.types import Array, DrafterFile, Lent, Tensor

Kind = Literal["eagle1", "eagle3", "peagle"]
ATTENTION = ("q_proj", "k_proj", "v_proj")
DEFAULT_MAX_POSITIONS = 2048


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Shape of a head; the names are those of a drafter file's configuration.

    Attributes:
        num_taps: A, hidden states of the target that a feature is made of.
        rope: rotary parameters as in a transformers config.json.
        fc_norm: each tap has a norm of its own (3.1).
        norm_before_fc: one norm over all taps side by side.
        norm_before_residual: the residual stream begins with the normed feature.
        norm_output: the state fed back is the normed one (3.1).
        mask_token_id: of P-EAGLE, the token of its placeholder rows.
    """

    kind: Kind
    hidden_size: int
    target_hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_taps: int
    vocab_size: int
    eps: float
    rope: Mapping[str, Any]
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None

    @classmethod
    def read(cls, stored: DrafterFile) -> EagleConfig:
        """From a drafter file.

        Raises:
            CheckpointError: a number is missing, or an activation other than silu.
        """
        if stored.config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise CheckpointError(f"the head's activation {stored.config['hidden_act']!r} is not supported; silu is.")
        known = {name: stored.config[name] for name in cls.__dataclass_fields__ if name in stored.config}
        try:
            return cls(**{**known, "kind": stored.kind})
        except TypeError as error:
            raise CheckpointError(f"the drafter's configuration is incomplete: {error}.") from error

    @property
    def is_first(self) -> bool:
        """EAGLE-1/2: one feature, mixed with the embedding in front of an ordinary layer, no norm at the end."""
        return self.kind == "eagle1"

    @cached_property
    def spec(self) -> StackSpec:
        """The same shape as the ops take it."""
        inv_freq, scale = rope_frequencies({"rope_parameters": dict(self.rope)}, self.head_dim, DEFAULT_MAX_POSITIONS)
        return StackSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
            inv_freq=inv_freq,
            rope_scale=scale,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors by name, those lent by the target and optional biases left out."""
        hidden, inner = self.hidden_size, self.inner_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        fused = 2 * hidden if self.is_first else self.num_taps * self.target_hidden_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fused)}
        if self.fc_norm:
            shapes |= {f"fc_norm.{index}.weight": (self.target_hidden_size,) for index in range(self.num_taps)}
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (fused,)
        if self.kind == "peagle":
            shapes["mask_hidden"] = (1, 1, fused)
        for index in range(self.num_layers):
            is_wide = index == 0 and not self.is_first
            prefix = f"layers.{index}."
            if is_wide:
                shapes[f"{prefix}hidden_norm.weight"] = (hidden,)
            if is_wide or index:
                shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
            width = 2 * hidden if is_wide else hidden
            shapes |= {
                f"{prefix}self_attn.{name}.weight": (size, width)
                for name, size in zip(ATTENTION, (q_size, kv_size, kv_size), strict=True)
            }
            shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, q_size)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
            shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        if not self.is_first:
            shapes["norm.weight"] = (hidden,)
        return shapes


class EagleHead:
    """The net with weights in the form that `ops` wants.

    Args:
        weights: the tensors of `EagleConfig.shapes`, matrices made by `Ops.weight` and vectors by `Ops.array`, with the
            layers as `LayerWeights` under "layers".
        embedding: [V, H], its own or the target's.
        final_norm: weight and eps of the target's final norm, which EAGLE-1 reads through.
    """

    def __init__(
        self,
        ops: Ops,
        config: EagleConfig,
        weights: Mapping[str, Any],
        embedding: Any,
        final_norm: tuple[Array, float] | None = None,
    ) -> None:
        self.ops = ops
        self.config = config
        self.weights = weights
        self.layers: tuple[LayerWeights, ...] = tuple(weights["layers"])
        self.embedding = embedding
        self._final_norm = final_norm
        self._kept_ends: HeadEnds | None = None

    @classmethod
    def load(cls, config: EagleConfig, tensors: Mapping[str, Tensor], lent: Lent) -> EagleHead:
        """The net of tensors as they are stored, with what its target lends where it has nothing of its own.

        Raises:
            CheckpointError: a tensor that is missing or has another shape.
        """
        for name, shape in config.shapes().items():
            tensor = tensors.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
                raise CheckpointError(f"the head's tensor {name} is {found}; it must be {list(shape)}.")
        own = tensors.get("embed_tokens.weight")
        ops: Ops = lent.ops
        embedding = lent.embedding if own is None else ops.weight(own)
        return cls(ops, config, prepare(ops, config, tensors), embedding, (lent.norm, lent.eps))

    def fuse(self, taps: Array) -> Array:
        """Features [R, H] of the target's hidden states side by side [R, A * Ht]; those of EAGLE-1 are the state."""
        ops, config = self.ops, self.config
        if config.is_first:
            assert self._final_norm is not None, "EAGLE-1 reads the state behind the target's final norm"
            return ops.rms_norm(taps, *self._final_norm)
        return ops.fuse(taps, self._fuse)

    @cached_property
    def _fuse(self) -> FuseWeights:
        config, weights = self.config, self.weights
        norms = tuple(weights[f"fc_norm.{i}.weight"] for i in range(config.num_taps)) if config.fc_norm else ()
        if config.norm_before_fc and not config.fc_norm:
            norms = (weights["input_norm.weight"],)
        return FuseWeights(norms=norms, matrix=weights["fc.weight"], eps=config.eps)

    def placeholders(self, num_rows: int) -> Array:
        """Features [num_rows, H] of P-EAGLE's rows whose inputs are not known yet."""
        fused = self._placeholder
        return fused.repeat(num_rows, 0) if isinstance(fused, np.ndarray) else fused.expand(num_rows, -1)

    @cached_property
    def _placeholder(self) -> Array:
        return self.fuse(self.weights["mask_hidden"].reshape(1, -1))

    def forward(
        self,
        token_ids: npt.NDArray[np.int32],
        features: Array,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
    ) -> tuple[Array, Array]:
        """Run R packed rows.

        Args:
            token_ids, positions: int32 [R]; a row's token is the one behind its position.
            features: [R, H], from `fuse` or fed back.

        Returns:
            What the language-model head reads [R, H], and the states to feed back [R, H].
        """
        read, states, _ = self._run(token_ids, features, positions, past, mask, None)
        return read, states

    def forward_to_logits(
        self,
        token_ids: npt.NDArray[np.int32],
        features: Array,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
        head: Any,
    ) -> tuple[Array, Array, Array]:
        """`forward`, and the logits [R, K] over a language-model head [K, H]."""
        read, states, logits = self._run(token_ids, features, positions, past, mask, head)
        return read, states, self.ops.linear(read, head) if logits is None else logits

    def _run(
        self,
        token_ids: npt.NDArray[np.int32],
        features: Array,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
        head: Any,
    ) -> tuple[Array, Array, Array | None]:
        ops, config = self.ops, self.config
        if config.is_first:
            both = ops.concat([ops.embed(self.embedding, token_ids), features])
            fused = ops.linear(both, self.weights["fc.weight"], self.weights["fc.bias"])
            x, _ = ops.decoder_stack(fused, self.layers, config.spec, positions, past, mask, read=fused)
            return x, x, None
        with_logits = head is not None
        normed, states, logits = ops.head_pass(
            features, token_ids, self._ends(head), self.layers, config.spec, positions, past, mask, with_logits
        )
        return normed, normed if config.norm_output else states, logits

    def draft(
        self,
        token_ids: npt.NDArray[np.int32],
        taps: Array,
        past: Past,
        mask: Causal,
        head: Any,
        rules: GreedyRules,
        rooms: Sequence[DraftRoom],
    ) -> tuple[list[Draft | None], Array, Array] | None:
        """`fuse` and a pass of rows behind the caches, and drafts of the likeliest tokens (`Ops.head_drafts`)."""
        config = self.config
        if config.is_first:
            return None
        ends, layers, spec, normed = self._ends(head), self.layers, config.spec, config.norm_output
        fuse, ahead = self._fuse, self._ahead
        return self.ops.head_drafts(taps, fuse, token_ids, ends, layers, spec, past, mask, normed, rules, rooms, ahead)

    @cached_property
    def _ahead(self) -> Placeholder | None:
        if self.config.kind != "peagle":
            return None
        return Placeholder(feature=self._placeholder, token_id=self.config.mask_token_id or 0)

    def _ends(self, head: Any) -> HeadEnds:
        """What stands around the layers; kept, since every pass of a chain asks for the same."""
        head = self.embedding if head is None else head  # never read where no logits are wanted
        if self._kept_ends is None or self._kept_ends.head is not head:
            self._kept_ends = HeadEnds(
                embedding=self.embedding,
                embed_norm=self.layers[0].input_norm,
                feature_norm=self.weights["layers.0.hidden_norm.weight"],
                norm_before_residual=self.config.norm_before_residual,
                final_norm=self.weights["norm.weight"],
                head=head,
            )
        return self._kept_ends


def prepare(
    ops: Ops,
    config: EagleConfig,
    tensors: Mapping[str, Any],
    make: Callable[[list[Any]], Any] | None = None,
) -> dict[str, Any]:
    """Weights as `EagleHead` takes them.

    Args:
        make: puts matrices under one another and prepares them; None takes `Ops.weight`, training has its own.
    """

    def matrix(parts: list[Any]) -> Any:
        return make(parts) if make else ops.weight(parts if len(parts) > 1 else parts[0])

    def vector(value: Any) -> Any:
        return value if make else ops.array(np.asarray(value, np.float32))

    shapes = config.shapes()
    weights: dict[str, Any] = {"fc.weight": matrix([tensors["fc.weight"]])}
    weights["fc.bias"] = vector(tensors["fc.bias"]) if "fc.bias" in tensors else None
    for name in shapes:
        if not name.startswith("layers.") and name != "fc.weight":
            weights[name] = vector(tensors[name])
    if "layers.0.hidden_norm.weight" in shapes:
        weights["layers.0.hidden_norm.weight"] = vector(tensors["layers.0.hidden_norm.weight"])
    weights["layers"] = [_layer(f"layers.{index}.", tensors, matrix, vector) for index in range(config.num_layers)]
    return weights


def _layer(
    prefix: str, tensors: Mapping[str, Any], matrix: Callable[[list[Any]], Any], vector: Callable[[Any], Any]
) -> LayerWeights:
    def named(name: str) -> Any:
        return vector(tensors[prefix + name]) if prefix + name in tensors else None

    biases = [tensors.get(f"{prefix}self_attn.{name}.bias") for name in ATTENTION]
    return LayerWeights(
        input_norm=named("input_layernorm.weight"),
        qkv=matrix([tensors[f"{prefix}self_attn.{name}.weight"] for name in ATTENTION]),
        qkv_bias=None if biases[0] is None else vector(np.concatenate([np.asarray(bias) for bias in biases])),
        output=matrix([tensors[f"{prefix}self_attn.o_proj.weight"]]),
        post_norm=named("post_attention_layernorm.weight"),
        gate_up=matrix([tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]),
        down=matrix([tensors[f"{prefix}mlp.down_proj.weight"]]),
    )
