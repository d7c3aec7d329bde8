"""What the layouts of trained heads share: names brought to one form, shapes that decide, faults that are named.

The tensors decide and the configuration is checked against them, because published files often contradict themselves.
Letters: H width of the drafter, Ht of the target, V ids of the target, K drafted ids, A taps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.checkpoints.files import FLAG, INTEGER, NUMBER, OBJECT, TEXT, Kind, is_integer, is_list_of
from sakiyomi.errors import CheckpointError
from sakiyomi.types import DrafterFile, Tensor

LAYERS = Kind("a list of layer numbers", is_list_of(is_integer))
EAGLE_KINDS = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), INTEGER),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size"), INTEGER),
    **dict.fromkeys(("target_hidden_size", "max_position_embeddings", "num_aux_hidden_states"), INTEGER),
    **dict.fromkeys(("mask_token_id", "ptd_token_id", "pard_token"), INTEGER),
    **dict.fromkeys(("rms_norm_eps", "rope_theta"), NUMBER),
    **dict.fromkeys(("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "bias"), FLAG),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "eagle_config", "dflash_config"), OBJECT),
    **dict.fromkeys(("hidden_act", "model_type"), TEXT),
    "eagle_aux_hidden_state_layer_ids": LAYERS,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
DEFAULT_ROPE_THETA = 10000.0
"""Of files without the key: the official trainer never inherits the target's."""


def eagle_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names: no `model.` in front, `layers.0` for `midlayer`, `d2t` for its other name."""
    renamed: dict[str, Tensor] = {}
    for name in tensors:
        own = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        own = {"draft_id_to_target_id": "d2t"}.get(own, own)
        if own in renamed:
            raise CheckpointError(f"{path} holds tensor {own} twice, under two names; export the drafter again.")
        renamed[own] = tensors[name]
    return renamed


def read_eagle_layout(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, taps: tuple[int, ...] | None, kind: str
) -> DrafterFile:
    """An EAGLE-1, EAGLE-3 or P-EAGLE head, checked and in our form.

    Args:
        config: flat keys as in a native config.json.
        tensors: as `eagle_tensors` names them.
        taps: the target's layers by our count, or None where the file does not tell; EAGLE-1 reads the final state.
        kind: "eagle1", "eagle3" or "peagle".

    Raises:
        CheckpointError: a tensor that is missing, unknown, of another shape than the rest, or not finite, and a
            configuration that contradicts the tensors.
    """
    check = Checker(path, tensors)
    shape = _eagle_shape(path, config, check, kind)
    vocabulary = read_vocabulary(path, tensors.get("d2t"), tensors.get("t2d"), shape["vocab_size"])
    expected = _eagle_shapes(shape, tensors, kind)
    if "lm_head.weight" in tensors:
        rows = shape["vocab_size"] if vocabulary is None else len(vocabulary)
        check.agree("draft_vocab_size", config.get("draft_vocab_size"), rows, "d2t")
        expected["lm_head.weight"] = (rows, shape["hidden_size"])
    kept = check.take(expected, also_known=("d2t", "t2d"))
    return DrafterFile(
        kind=kind,
        config={**shape, "max_positions": config.get("max_position_embeddings")},
        taps=taps or (),
        target={"vocab_size": shape["vocab_size"], "hidden_size": shape["target_hidden_size"]},
        tensors=kept,
        vocabulary=vocabulary,
    )


def read_vocabulary(
    path: Path, d2t: Tensor | None, t2d: Tensor | None, vocab_size: int
) -> npt.NDArray[np.int32] | None:
    """The ascending ids that a head drafts. `d2t` holds offsets: draft id i is target id i + d2t[i].

    Raises:
        CheckpointError: ids outside the vocabulary, twice, or not ascending (a list of ids in place of offsets is told
            apart), and a `t2d` that marks other ids.
    """
    if d2t is None:
        return None
    offsets = np.asarray(d2t)
    ids = np.arange(len(offsets), dtype=np.int64) + offsets
    if ids.min() < 0 or ids.max() >= vocab_size or (np.diff(ids) <= 0).any():
        is_ids = offsets.min() >= 0 and offsets.max() < vocab_size and (np.diff(offsets) > 0).all()
        found = "target ids where offsets belong" if is_ids else f"ids from {ids.min()} to {ids.max()}, not ascending"
        raise CheckpointError(
            f"{path}: d2t gives {found}; draft id i must stand for target id i + d2t[i], ascending and below "
            f"{vocab_size}. Export the drafter again."
        )
    if t2d is not None and not np.array_equal(np.flatnonzero(np.asarray(t2d)), ids):
        raise CheckpointError(f"{path}: t2d marks other ids than d2t names; export the drafter again.")
    vocabulary: npt.NDArray[np.int32] = ids.astype(np.int32)
    return vocabulary


def input_layers(ids: Sequence[int], *, is_output_of: bool) -> tuple[int, ...]:
    """Layer numbers by our count (t: the state after t layers) from "output of layer" or "input of layer" numbers."""
    return tuple(index + is_output_of for index in ids)


def offsets_of(vocabulary: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The `d2t` of ascending ids."""
    return vocabulary.astype(np.int64) - np.arange(len(vocabulary))


# ---------------------------------------------------------------------------------------------- shapes


def _eagle_shape(path: Path, config: Mapping[str, Any], check: Checker, kind: str) -> dict[str, Any]:
    """The numbers of the net, from the tensors' shapes; what the configuration also tells must agree."""
    hidden, fused = check.shape("fc.weight", 2)
    q_size, q_width = check.shape("layers.0.self_attn.q_proj.weight", 2)
    kv_size, _ = check.shape("layers.0.self_attn.k_proj.weight", 2)
    inner, _ = check.shape("layers.0.mlp.gate_proj.weight", 2)
    check.agree("hidden_size", config.get("hidden_size"), hidden, "fc.weight")
    check.agree("intermediate_size", config.get("intermediate_size"), inner, "layers.0.mlp.gate_proj.weight")
    num_heads = check.need(config, "num_attention_heads")
    head_dim = config.get("head_dim") or q_size // num_heads
    if num_heads * head_dim != q_size or kv_size % head_dim:
        raise CheckpointError(
            f"{path}: {num_heads} heads of {head_dim} do not fit projections of {q_size} and {kv_size} rows; "
            "config.json and weights do not belong together."
        )
    check.agree("num_key_value_heads", config.get("num_key_value_heads"), kv_size // head_dim, "k_proj")
    target_hidden = hidden if kind == "eagle1" else config.get("target_hidden_size") or hidden
    num_taps = 1 if kind == "eagle1" else fused // target_hidden
    if fused != (2 * hidden if kind == "eagle1" else num_taps * target_hidden) or num_taps < 1:
        want = f"2 x {hidden}" if kind == "eagle1" else f"a multiple of the target's width {target_hidden}"
        raise CheckpointError(f"{path}: fc.weight reads {fused} values, which is not {want}; is it of another kind?")
    if q_width != (hidden if kind == "eagle1" else 2 * hidden):
        raise CheckpointError(
            f"{path}: layers.0.self_attn.q_proj reads {q_width} values; a head of kind {kind} reads "
            f"{'the fused state' if kind == 'eagle1' else 'embedding and state, 2 x ' + str(hidden)}."
        )
    if kind != "eagle1":
        check.agree("num_aux_hidden_states", config.get("num_aux_hidden_states"), num_taps, "fc.weight")
    return {
        "hidden_size": hidden,
        "target_hidden_size": target_hidden,
        "inner_size": inner,
        "num_layers": check.count_layers(config.get("num_hidden_layers")),
        "num_heads": num_heads,
        "num_kv_heads": kv_size // head_dim,
        "head_dim": head_dim,
        "num_taps": num_taps,
        "vocab_size": check.need(config, "vocab_size"),
        "eps": float(config.get("rms_norm_eps") or 1e-6),
        "rope": _rope(config),
        "hidden_act": config.get("hidden_act") or "silu",
        **{flag: _flag(path, check, config, flag, kind) for flag in FLAGS},
        **({"mask_token_id": check.need(config, "mask_token_id")} if kind == "peagle" else {}),
    }


FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
_FLAG_TENSORS = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}


def _flag(path: Path, check: Checker, config: Mapping[str, Any], flag: str, kind: str) -> bool:
    """A flag, which must agree with the tensors that it brings."""
    told = bool(config.get(flag) or False)
    tensor = _FLAG_TENSORS.get(flag)
    if tensor is not None and told != (tensor in check.tensors):
        raise CheckpointError(
            f"{path}: {flag} is {told} in config.json but the weights {'lack' if told else 'hold'} {tensor}; "
            "they do not belong together."
        )
    if told and kind == "eagle1":
        raise CheckpointError(f"{path}: {flag} is set, but EAGLE-1 heads have none; is it of another kind?")
    return told


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    rope.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_ROPE_THETA)
    return rope


def _eagle_shapes(shape: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, target = shape["hidden_size"], shape["inner_size"], shape["target_hidden_size"]
    q_size, kv_size = shape["num_heads"] * shape["head_dim"], shape["num_kv_heads"] * shape["head_dim"]
    fused = 2 * hidden if kind == "eagle1" else shape["num_taps"] * target
    expected: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, fused)}
    for index in range(shape["num_layers"]):
        is_wide = index == 0 and kind != "eagle1"
        layer = f"layers.{index}."
        for name, size in zip(PROJECTIONS, (q_size, kv_size, kv_size, hidden), strict=True):
            width = q_size if name == "o_proj" else 2 * hidden if is_wide else hidden
            expected[f"{layer}self_attn.{name}.weight"] = (size, width)
            if name != "o_proj" and f"{layer}self_attn.{name}.bias" in tensors:
                expected[f"{layer}self_attn.{name}.bias"] = (size,)
        expected[f"{layer}post_attention_layernorm.weight"] = (hidden,)
        expected |= {f"{layer}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        expected[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        if kind != "eagle1" or index:
            expected[f"{layer}input_layernorm.weight"] = (hidden,)
        if is_wide:
            expected[f"{layer}hidden_norm.weight"] = (hidden,)
    if kind == "eagle1":
        expected |= {"fc.bias": (hidden,)} if "fc.bias" in tensors else {}
    else:
        expected["norm.weight"] = (hidden,)
        if shape["fc_norm"]:
            expected |= {f"fc_norm.{index}.weight": (target,) for index in range(shape["num_taps"])}
        if shape["norm_before_fc"]:
            expected["input_norm.weight"] = (fused,)
    if kind == "peagle":
        expected["mask_hidden"] = (1, 1, fused)
    if "embed_tokens.weight" in tensors:
        expected["embed_tokens.weight"] = (shape["vocab_size"], hidden)
    return expected


class Checker:
    """Looks at the tensors of one file and names what is wrong."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self.tensors = tensors

    def shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} lacks tensor {name}; it is incomplete or of another kind.")
        shape = tuple(self.tensors[name].shape)
        if len(shape) != num_dims:
            raise CheckpointError(f"{self.path}: tensor {name} has shape {list(shape)}; {num_dims} dimensions belong.")
        return shape

    def need(self, config: Mapping[str, Any], key: str) -> int:
        value = config.get(key)
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{self.path}: config.json gives {key} as {value!r}; it must be a whole number.")
        return value

    def agree(self, key: str, told: int | None, found: int, tensor: str) -> None:
        if told is not None and told != found:
            raise CheckpointError(
                f"{self.path}: {key} is {told} in config.json but {found} by the shape of {tensor}; "
                "they do not belong together."
            )

    def count_layers(self, told: int | None) -> int:
        numbers = {int(name.split(".")[1]) for name in self.tensors if name.startswith("layers.")}
        if numbers != set(range(len(numbers))):
            raise CheckpointError(f"{self.path} holds layers {sorted(numbers)}; they must count from 0 without a gap.")
        self.agree("num_hidden_layers", told, len(numbers), "layers.*")
        return len(numbers)

    def take(self, expected: Mapping[str, tuple[int, ...]], *, also_known: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """The expected tensors, read; no other may lie in the file."""
        unknown = sorted(set(self.tensors) - set(expected) - set(also_known))
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise CheckpointError(
                f"{self.path} holds {', '.join(unknown[:3])}{more}, which no head of this kind has; "
                "it would be ignored silently. Is it of another kind?"
            )
        taken: dict[str, Tensor] = {}
        for name, shape in expected.items():
            found = self.shape(name, len(shape))
            if found != shape:
                raise CheckpointError(f"{self.path}: tensor {name} has shape {list(found)}; {list(shape)} belongs.")
            values = np.asarray(self.tensors[name], np.float32)
            if not np.isfinite(values).all():
                raise CheckpointError(f"{self.path}: tensor {name} holds values that are no finite numbers.")
            taken[name] = values
        return taken
