"""The decoder of Llama, SmolLM2, Mistral, Qwen2 and Qwen3, written once over `ops`.

Letters: R packed rows, H hidden width, V vocabulary, T taps, I width of the feed-forward layer, D head width.
"""

from __future__ import annotations

import copy
import itertools
import math
import reprlib
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError, ParameterError, UnsupportedModelError
from sakiyomi.ops.base import (
    BurstRules,
    BurstStep,
    KVSlots,
    LanguageHead,
    LayerWeights,
    Mask,
    Ops,
    Past,
    RowChoice,
    StackSpec,
)
from sakiyomi.types import Array, Tensor

# What transformers assumes where a config.json says nothing.
_WINDOWED = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _WINDOWED,
    "qwen3": _WINDOWED | {"head_dim": 128},
}
# Far above every model, and low enough that a wrong number does not exhaust the memory before it is noticed.
MAX_INTEGER, MAX_LAYERS, MAX_HEAD_DIM = 2**31 - 1, 10_000, 65_536
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder, read from the keys of a transformers config.json.

    Attributes:
        max_positions: positions the model was made for, rope scaling included.
        qkv_bias, output_bias: whether the attention projections have biases.
        qk_norm: whether q and k are normed per head (Qwen3).
        inv_freq, rope_scale, windows: as in `ops.base.StackSpec`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    inv_freq: npt.NDArray[np.float32]
    rope_scale: float
    windows: tuple[int | None, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a configuration; missing keys take transformers' defaults.

        One key is not transformers': `rope_freq_factors`, D / 2 numbers that divide the rotary frequencies, as GGUF
        files carry them instead of the parameters of the llama3 rope type.

        Raises:
            UnsupportedModelError: an architecture, activation, rope scaling or bias that is not supported.
            CheckpointError: a missing key, or a value that cannot be.
        """
        try:
            with np.errstate(all="ignore"):  # what comes out is checked
                return cls._read(config)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            told = " ".join(str(error).split())
            raise CheckpointError(
                f"the model's configuration cannot be read ({told}); fetch the model again."
            ) from error

    @classmethod
    def _read(cls, config: Mapping[str, Any]) -> DecoderConfig:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in DEFAULTS:
            raise UnsupportedModelError(
                f"model_type {model_type!r} is not supported; supported are {', '.join(DEFAULTS)}."
            )
        config = DEFAULTS[model_type] | dict(config)
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; only 'silu' is.")
        if config.get("mlp_bias"):
            raise UnsupportedModelError("mlp_bias=true is not supported; only feed-forward layers without biases are.")
        hidden_size = _integer(config, "hidden_size")
        num_layers = _integer(config, "num_hidden_layers", highest=MAX_LAYERS)
        num_heads = _integer(config, "num_attention_heads")
        num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
        head_dim = _integer(config, "head_dim", hidden_size // num_heads, highest=MAX_HEAD_DIM)
        if num_heads % num_kv_heads or head_dim % 2:
            raise CheckpointError(
                f"{num_heads} query heads over {num_kv_heads} key/value heads of width {head_dim} do not fit: "
                "the query heads must be a multiple of the others and the width even."
            )
        max_positions = _integer(config, "max_position_embeddings")
        rope = _rope_parameters(config, max_positions)
        inv_freq, rope_scale = _rope_frequencies(rope, head_dim, config.get("rope_freq_factors"))
        if not np.isfinite(inv_freq).all():
            raise CheckpointError(f"the rope parameters {reprlib.repr(rope)} give no finite frequencies.")
        if rope["rope_type"] == "yarn":
            max_positions = max(max_positions, int(rope["factor"] * rope["original_max_position_embeddings"]))
        has_bias = bool(config.get("attention_bias", False)) and model_type in ("llama", "qwen3")
        return cls(
            model_type=model_type,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            eps=_number(config, "rms_norm_eps", 1e-6, where="configuration"),
            max_positions=max_positions,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=has_bias or model_type == "qwen2",
            output_bias=has_bias,
            qk_norm=model_type == "qwen3",
            inv_freq=inv_freq,
            rope_scale=rope_scale,
            windows=_windows(config, model_type, num_layers),
        )

    def stack_spec(self) -> StackSpec:
        """The same shape as the ops take it."""
        return StackSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
            inv_freq=self.inv_freq,
            rope_scale=self.rope_scale,
            windows=self.windows if any(self.windows) else (),
        )


class Decoder:
    """A decoder with its weights in the form that `ops` wants.

    Attributes:
        numbers: which layers of the model `layers` are: all, or those that `shallow` left.

    Args:
        tensors: transformers' tensor names to arrays.
        vocab_size: ids that have logits; rows of embedding and head behind them are padding and are cut off.
            None takes all.

    Raises:
        CheckpointError: missing tensors, or one whose shape is not the configuration's.
        ParameterError: a `vocab_size` larger than the model's.
    """

    def __init__(
        self, ops: Ops, config: DecoderConfig, tensors: Mapping[str, Tensor], vocab_size: int | None = None
    ) -> None:
        if vocab_size is not None and not 1 <= vocab_size <= config.vocab_size:
            raise ParameterError(f"vocab_size={vocab_size} is not allowed; the model has {config.vocab_size} ids.")
        self.ops = ops
        self.config = config
        self.vocab_size = vocab_size or config.vocab_size
        self.spec = config.stack_spec()
        loader = _Loader(ops, config, tensors)
        self.layers = [loader.layer(index) for index in range(config.num_layers)]
        self.numbers = tuple(range(config.num_layers))
        self._num_layers = config.num_layers
        self._stretch_rows: Counter[tuple[int, int]] = Counter()
        self._found_stretches: dict[tuple[int, int], list[tuple[int, tuple[LayerWeights, ...], StackSpec]]] = {}
        self.norm = loader.vector("model.norm.weight")
        self.embedding = loader.rows("model.embed_tokens.weight", self.vocab_size)
        self.head = self.embedding if config.tied else loader.rows("lm_head.weight", self.vocab_size)
        ops.prepare_head(f"head[:{self.vocab_size}] screen", self.head, self.norm)

    def forward(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        past: Past | None,
        mask: Mask,
        logit_rows: Sequence[int] = (),
        taps: Sequence[int] = (),
        choices: Sequence[RowChoice] = (),
    ) -> tuple[Array | None, Array | None, npt.NDArray[np.int64] | None]:
        """Run the decoder, which must not skip layers, over R packed rows.

        Args:
            token_ids, positions: R integers.
            past: the sequences' caches with room for the rows, or None.
            mask: which rows see which.
            logit_rows: rows that the head shall run over (`logits`, `best_ids`), ascending.
            taps: layer numbers t, ascending: the hidden state after t layers (0: the embedding).
            choices: how these rows choose ids, where that is wanted at once (`Ops.chosen_ids`).

        Returns:
            The states behind the last layer [len(logit_rows), H], taps [R, T * H], and chosen ids [len(logit_rows)],
            each None when not asked for.
        """
        ((start, layers, spec),) = self._stretches(0, self.config.num_layers)
        self._stretch_rows[start, len(layers)] += len(token_ids)
        here = None if past is None else past.at(start)
        head = LanguageHead(self.norm, self.config.eps, self.head) if choices else None
        return self.ops.decoder_pass(
            token_ids, self.embedding, layers, spec, positions, here, mask, logit_rows, taps, head, choices
        )

    def burst(
        self,
        last: int,
        slots: KVSlots,
        capacity: int,
        taps: Sequence[int],
        first_taps: Array | None,
        rules: BurstRules,
    ) -> tuple[list[BurstStep], Array]:
        """Several steps of the decoder, which must not skip layers (`Ops.run_burst`)."""
        ((start, layers, spec),) = self._stretches(0, self.config.num_layers)
        head = LanguageHead(self.norm, self.config.eps, self.head)
        steps, kept = self.ops.run_burst(
            last, self.embedding, layers, spec, slots, capacity, taps, first_taps, head, rules
        )
        self._stretch_rows[start, len(layers)] += sum(1 + step.num_draft for step in steps)
        return steps, kept

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Array:
        """What goes into the first layer: ids [R] -> [R, H]."""
        return self.ops.embed(self.embedding, token_ids)

    def run(
        self,
        x: Array,
        first: int,
        end: int,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
        taps: Sequence[int] = (),
    ) -> tuple[Array, list[Array]]:
        """Run those of the layers `first` to `end` - 1 that the decoder has over x [R, H].

        Args:
            taps: layer numbers t from `first` to `end`, ascending: the hidden state after the first t layers.

        Returns:
            The state after the last of them [R, H], and one [R, H] per tap.
        """
        kept: dict[int, Array] = {}
        for start, layers, spec in self._stretches(first, end):
            self._stretch_rows[start, len(layers)] += len(x)
            here = None if past is None else past.at(start)
            if not taps:
                x, _ = self.ops.decoder_stack(x, layers, spec, positions, here, mask)
                continue
            inside = [tap for tap in taps if start <= tap <= start + len(layers)]
            kept |= {tap: x for tap in taps if tap < start and tap not in kept}
            x, tapped = self.ops.decoder_stack(x, layers, spec, positions, here, mask, [tap - start for tap in inside])
            kept |= dict(zip(inside, tapped, strict=True))
        return x, [kept.get(tap, x) for tap in taps]

    def logits(self, x: Array) -> Array:
        """Logits [R, V] of states [R, H] behind the last layer."""
        return self.ops.normed_logits(x, self.norm, self.config.eps, self.head)

    def best_ids(self, x: Array) -> npt.NDArray[np.int64]:
        """The ids [R] of their largest logits (`Ops.best_ids`)."""
        return self.ops.best_ids(x, self.norm, self.config.eps, self.head)

    def shallow(self, num_layers: int, skip: Collection[int] = ()) -> Decoder:
        """The first layers without those in `skip`, with the final norm and the head, sharing all weights."""
        if not 1 <= num_layers <= self.config.num_layers:
            raise ParameterError(f"num_layers={num_layers} is not allowed; give 1 to {self.config.num_layers}.")
        wrong = [layer for layer in skip if not 0 <= layer < num_layers]
        if wrong:
            raise ParameterError(f"layer {wrong[0]} cannot be skipped; layers are 0 to {num_layers - 1}.")
        numbers = tuple(number for number in self.numbers[:num_layers] if number not in skip)
        if not numbers:
            raise ParameterError(f"all {num_layers} layers are to be skipped; leave one at least.")
        cut = copy.copy(self)
        cut.config = replace(self.config, num_layers=num_layers, windows=self.config.windows[:num_layers])
        cut.spec = cut.config.stack_spec()
        cut.numbers = numbers
        cut.layers = [self.layers[number] for number in numbers]
        cut._found_stretches = {}
        return cut

    @property
    def num_rows(self) -> npt.NDArray[np.int64]:
        """For each layer of the model the rows that it has run over, in this and all shallow forms [L]."""
        counts = np.zeros(self._num_layers, np.int64)
        for (start, length), rows in self._stretch_rows.items():
            counts[start : start + length] += rows
        return counts

    @property
    def num_leading(self) -> int:
        """How many layers the decoder has before the first one that it skips."""
        return next((i for i, number in enumerate(self.numbers) if number != i), len(self.numbers))

    def _stretches(self, first: int, end: int) -> list[tuple[int, tuple[LayerWeights, ...], StackSpec]]:
        """Runs of neighbouring layers from `first` to `end` - 1: number of the first, weights, shape; the same objects
        each time, which the ops may keep what they prepared for."""
        found = self._found_stretches.get((first, end))
        if found is None:
            found = self._found_stretches[first, end] = []
            wanted = [(i, number) for i, number in enumerate(self.numbers) if first <= number < end]
            for _, group in itertools.groupby(wanted, key=lambda pair: pair[1] - pair[0]):
                pairs = list(group)
                start, stop = pairs[0][1], pairs[-1][1] + 1
                layers = tuple(self.layers[i] for i, _ in pairs)
                windows = self.spec.windows[start:stop] if self.spec.windows else ()
                found.append((start, layers, replace(self.spec, windows=windows)))
        return found


# ---------------------------------------------------------------------------------------------- weights


class _Loader:
    """Takes tensors by name, checks their shapes and hands them to the ops."""

    def __init__(self, ops: Ops, config: DecoderConfig, tensors: Mapping[str, Tensor]) -> None:
        self.ops = ops
        self.config = config
        self.tensors = tensors
        self.shapes = _tensor_shapes(config)
        missing = [name for name in self.shapes if name not in tensors]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise CheckpointError(
                f"the checkpoint lacks {', '.join(missing[:3])}{more}; it is incomplete or not a {config.model_type} "
                "model, fetch it again."
            )

    def tensor(self, name: str) -> Tensor:
        tensor, expected = self.tensors[name], self.shapes[name]
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                f"tensor {name} has shape {list(tensor.shape)}, but config.json asks for {list(expected)}; "
                "the files do not belong together."
            )
        return tensor

    def vector(self, name: str) -> Array:
        tensor = self.tensor(name)
        assert isinstance(tensor, np.ndarray), "vectors are never quantised"
        return self.ops.array(tensor)

    def stacked(self, prefix: str, parts: Sequence[str]) -> Any:
        return self.ops.named_weight(
            prefix + "+".join(parts), lambda: [self.tensor(f"{prefix}{part}.weight") for part in parts]
        )

    def rows(self, name: str, count: int) -> Any:
        def load() -> Tensor:
            tensor = self.tensor(name)
            if count == tensor.shape[0]:
                return tensor
            return tensor[:count] if isinstance(tensor, np.ndarray) else tensor.rows(slice(count))

        return self.ops.named_weight(f"{name}[:{count}]", load)

    def layer(self, index: int) -> LayerWeights:
        config, prefix = self.config, f"model.layers.{index}."
        attention = f"{prefix}self_attn."
        qkv_bias = None
        if config.qkv_bias:
            biases = [self.tensor(f"{attention}{part}_proj.bias") for part in "qkv"]
            qkv_bias = self.ops.array(np.concatenate([np.asarray(bias) for bias in biases]))
        return LayerWeights(
            input_norm=self.vector(f"{prefix}input_layernorm.weight"),
            qkv=self.stacked(attention, ["q_proj", "k_proj", "v_proj"]),
            qkv_bias=qkv_bias,
            q_norm=self.vector(f"{attention}q_norm.weight") if config.qk_norm else None,
            k_norm=self.vector(f"{attention}k_norm.weight") if config.qk_norm else None,
            output=self.stacked(attention, ["o_proj"]),
            output_bias=self.vector(f"{attention}o_proj.bias") if config.output_bias else None,
            post_norm=self.vector(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.stacked(f"{prefix}mlp.", ["gate_proj", "up_proj"]),
            down=self.stacked(f"{prefix}mlp.", ["down_proj"]),
        )


def _tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {
            "self_attn.q_proj.bias": (q_size,),
            "self_attn.k_proj.bias": (kv_size,),
            "self_attn.v_proj.bias": (kv_size,),
        }
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


# ---------------------------------------------------------------------------------------------- configuration


def _integer(config: Mapping[str, Any], key: str, default: int | None = None, *, highest: int = MAX_INTEGER) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or not 1 <= value <= highest:
        raise CheckpointError(
            f"{key} is {reprlib.repr(value)} in the model's configuration; it must be a positive integer"
            + (f" up to {highest}." if type(value) is int and value > highest else ".")
        )
    return value


def _number(
    values: Mapping[str, Any], key: str, default: float | None = None, *, where: str = "rope parameters"
) -> float:
    value = values.get(key)
    if value is None and (key not in values or where == "rope parameters"):
        value = default
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:  # type: ignore[operator]
        raise CheckpointError(f"{key} is {reprlib.repr(value)} in the model's {where}; it must be a positive number.")
    return float(value)  # type: ignore[arg-type]


def _windows(config: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """For each layer its sliding window, or None: all layers of Mistral, chosen layers of Qwen."""
    is_windowed = model_type == "mistral" or (model_type != "llama" and config.get("use_sliding_window", False))
    if not is_windowed or config["sliding_window"] is None:
        return (None,) * num_layers
    window = _integer(config, "sliding_window")
    if model_type == "mistral":
        return (window,) * num_layers
    first = min(config["max_window_layers"] or 0, num_layers)
    kinds = config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * num_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) < num_layers:
        raise CheckpointError(
            f"layer_types {sorted(set(kinds))} for {len(kinds)} of {num_layers} layers is not supported; "
            "give full_attention or sliding_attention for each layer."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:num_layers])


def rope_frequencies(
    config: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[npt.NDArray[np.float32], float]:
    """Inverse frequencies [D / 2] and the factor on cos and sin that a transformers configuration asks for.

    Raises:
        CheckpointError: a rope type or parameter that is not supported.
    """
    return _rope_frequencies(_rope_parameters(config, max_positions), head_dim, config.get("rope_freq_factors"))


def _rope_parameters(config: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """Rope parameters in one form: transformers 5 writes `rope_parameters`, earlier ones two keys."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    rope["rope_type"] = kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}.")
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor={partial!r} is not supported; only 1.0 is.")
    default_theta = config.get("rope_theta")
    rope["rope_theta"] = _number(rope, "rope_theta", 10000.0 if default_theta is None else default_theta)
    if kind != "default":
        rope["factor"] = _number(rope, "factor")
    rope["original_max_position_embeddings"] = _number(rope, "original_max_position_embeddings", max_positions)
    return rope


def _rope_frequencies(
    rope: Mapping[str, Any], head_dim: int, factors: Sequence[float] | None
) -> tuple[npt.NDArray[np.float32], float]:
    """Inverse frequencies [D / 2] and the factor on cos and sin, in the float32 steps of the reference."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power is taken in double precision and rounded once, so that it is the same on every platform.
    wavelengths = np.power(float(rope["rope_theta"]), exponents.astype(np.float64)).astype(np.float32)
    if factors is not None:
        wavelengths *= np.asarray(factors, np.float32)
    inv_freq = np.float32(1.0) / wavelengths
    kind = rope["rope_type"]
    if kind == "linear":
        return inv_freq / np.float32(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3_frequencies(rope, inv_freq), 1.0
    if kind == "yarn":
        return _yarn_frequencies(rope, wavelengths)
    return inv_freq, 1.0


def _llama3_frequencies(rope: Mapping[str, Any], inv_freq: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1, 2024)."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    if low >= high:
        raise CheckpointError(
            f"low_freq_factor {low:g} must be below high_freq_factor {high:g} in the rope parameters."
        )
    turns = original * inv_freq.astype(np.float64) / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    scaled: npt.NDArray[np.float64] = (1 - blend) * inv_freq / factor + blend * inv_freq
    return scaled.astype(np.float32)


def _yarn_frequencies(
    rope: Mapping[str, Any], wavelengths: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], float]:
    """YaRN (Peng et al., 2023): interpolated slow dimensions, kept fast ones, a ramp between, warmer attention."""
    factor, theta, original = rope["factor"], rope["rope_theta"], rope["original_max_position_embeddings"]
    half = len(wavelengths)

    def dimension(turns: float) -> float:
        return half * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = dimension(_number(rope, "beta_fast", 32.0)), dimension(_number(rope, "beta_slow", 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(half) - low) / width, 0.0, 1.0)
    inv_freq = (ramp / (factor * wavelengths) + (1 - ramp) / wavelengths).astype(np.float32)
    return inv_freq, _yarn_scale(rope)


def _yarn_scale(rope: Mapping[str, Any]) -> float:
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")

    def magnitude(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(_number(rope, "mscale")) / magnitude(_number(rope, "mscale_all_dim"))
    return magnitude(1.0)
