"""A recurrent MLP speculator, written once over `ops`.

It reads a few hidden states of the target at the last verified position (the taps) and the embedding of the token that
follows, and predicts the token behind that one; further tokens come from its own state fed back. No attention and no
cache: a relative of the speculators of Wertheimer et al. (2024), with the frozen embedding and head of the target.

    start:    x = [norm(tap) of each tap, norm(embed(token))]
    advance:  x = [norm(state), norm(embed(token))]
    both:     fused = W x + b + own(token),  state = fused + down(silu_mul(gate_up(norm(fused))))
              logits = head(norm(state))

Letters: R rows, H hidden width, T taps, I inner width, K ids of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import CheckpointError
from sakiyomi.ops.base import DraftRows, GreedyRules, Hide, MlpWeights, Ops
from sakiyomi.types import GROUP_SIZE, Array, Quantized, Tensor

Ids = npt.NDArray[np.int32]
MATRICES = ("start.weight", "advance.weight", "gate_up.weight", "down.weight", "start.tokens", "advance.tokens")
TOKEN_IDS = "tokens.ids"
HEAD = "head.weight"
"""Rows of a head of its own, [K, H], where a drafter file has one."""


@dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """Shape of a speculator.

    Attributes:
        num_taps: T, hidden states of the target that it reads.
        num_tokens: M, ids that have a vector of their own in each matrix's sum; 0 for none.
        eps: of its norms.
    """

    hidden_size: int
    inner_size: int
    num_taps: int
    num_tokens: int = 0
    eps: float

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors by name. Matrices are [outputs, inputs]; gate and up are stacked."""
        hidden, inner = self.hidden_size, self.inner_size
        tokens = {f"{name}.tokens": (self.num_tokens, hidden) for name in ("start", "advance") if self.num_tokens}
        return tokens | {
            "start.weight": (hidden, (self.num_taps + 1) * hidden),
            "start.bias": (hidden,),
            "advance.weight": (hidden, 2 * hidden),
            "advance.bias": (hidden,),
            "inner_norm.weight": (hidden,),
            "gate_up.weight": (2 * inner, hidden),
            "down.weight": (hidden, inner),
            "norm.weight": (hidden,),
        }


def find_token_rows(token_ids: npt.NDArray[Any], vocab_size: int) -> Ids:
    """For each id the row of its own vector, int32 [V]; the row behind the last for those without one."""
    rows = np.full(vocab_size, len(token_ids), np.int32)
    rows[token_ids] = np.arange(len(token_ids))
    return rows


def split_fuse(matrix: Any, hidden_size: int) -> tuple[Any, Any]:
    """The columns of a step's large matrix that read states, and those that read a token's embedding.

    Args:
        matrix: [H, (n + 1) * H], an array, a `Quantized` or a tensor of torch.
    """
    if not isinstance(matrix, Quantized):
        return matrix[:, :-hidden_size], matrix[:, -hidden_size:]
    if hidden_size % GROUP_SIZE:
        return split_fuse(matrix.dequantize(), hidden_size)
    first = matrix.shape[1] - hidden_size
    return matrix.columns(0, first), matrix.columns(first, matrix.shape[1])


class MlpSpeculator:
    """The net with weights in the form that `ops` wants.

    Args:
        weights: the tensors of `MlpConfig.shapes` with their large matrices split (`split_fuse`), matrices made by
            `Ops.weight` and vectors by `Ops.array`.
        embedding: the target's, [V, H].
        token_rows: `find_token_rows` of the ids that have vectors of their own; those have M + 1 rows here, the last 0.
        hide: put on the inputs of the large matrices ("start", "advance", "down") while the net is trained.
    """

    def __init__(
        self,
        ops: Ops,
        config: MlpConfig,
        weights: Mapping[str, Any],
        embedding: Any,
        token_rows: Ids | None = None,
        hide: Hide | None = None,
    ) -> None:
        self.ops = ops
        self.config = config
        self.embedding = embedding
        self._hide = hide
        ones = ops.array(np.ones(config.hidden_size, np.float32))
        start, advance = (
            MlpWeights(
                tokens=weights.get(f"{name}.tokens"),
                token_rows=token_rows if config.num_tokens else None,
                fuse=weights[f"{name}.weight"],
                fuse_token=weights[f"{name}.token_weight"],
                bias=weights[f"{name}.bias"],
                inner_norm=weights["inner_norm.weight"],
                gate_up=weights["gate_up.weight"],
                down=weights["down.weight"],
                norm=weights["norm.weight"],
                ones=ones,
                eps=config.eps,
            )
            for name in ("start", "advance")
        )
        self._weights = {"start": start, "advance": advance}
        self._steps = start, advance

    @classmethod
    def load(
        cls, ops: Ops, config: MlpConfig, tensors: Mapping[str, Tensor], embedding: Any, vocab_size: int
    ) -> MlpSpeculator:
        """The net of tensors as they are stored; `tokens.ids` names the ids of vectors of their own.

        Raises:
            CheckpointError: a tensor that is missing or has another shape.
        """
        weights: dict[str, Any] = {}
        for name, shape in config.shapes().items():
            tensor = tensors.get(name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
                raise CheckpointError(f"the drafter's tensor {name} is {found}; it must be {list(shape)}.")
            if name.endswith(".tokens"):
                weights[name] = ops.weight([tensor, np.zeros((1, config.hidden_size), np.float32)])
            elif name in ("start.weight", "advance.weight"):
                left, token = split_fuse(tensor, config.hidden_size)
                weights |= {name: ops.weight(left), name.replace(".weight", ".token_weight"): ops.weight(token)}
            else:
                weights[name] = ops.weight(tensor) if name in MATRICES else ops.array(np.asarray(tensor, np.float32))
        rows = find_token_rows(np.asarray(tensors[TOKEN_IDS]), vocab_size) if config.num_tokens else None
        return cls(ops, config, weights, embedding, rows)

    def start(self, taps: Array, token_ids: Ids) -> Array:
        """The states [R, H] that predict what follows `token_ids` [R].

        Args:
            taps: the target's hidden states [R, T * H] at the positions in front of the tokens.
        """
        return self._state("start", taps, token_ids)

    def advance(self, states: Array, token_ids: Ids) -> Array:
        """The states one token further, given the states that were to predict `token_ids` [R]."""
        return self._state("advance", states, token_ids)

    def features(self, states: Array) -> Array:
        """What the head reads [R, H]."""
        return self.ops.rms_norm(states, self._weights["start"].norm, self.config.eps)

    def start_logits(self, taps: Array, token_ids: Ids, head: Any) -> tuple[Array, Array]:
        """`start`, and the logits [R, K] over a head [K, H]."""
        return self.ops.mlp_step(taps, token_ids, self.embedding, self._weights["start"], head)

    def advance_logits(self, states: Array, token_ids: Ids, head: Any) -> tuple[Array, Array]:
        """`advance`, and the logits [R, K] over a head [K, H]."""
        return self.ops.mlp_step(states, token_ids, self.embedding, self._weights["advance"], head)

    def drafts(self, head: Any, rules: GreedyRules) -> DraftRows:
        """What drafts the most probable tokens behind some, given the taps [R, T * H] in front (`Ops.mlp_drafts`)."""
        return self.ops.mlp_drafts(self.embedding, self._steps, head, rules)

    def _state(self, name: str, left: Array, token_ids: Ids) -> Array:
        hide = self._hide
        named = None if hide is None else (lambda matrix, x: hide(name if matrix == "fuse" else matrix, x))
        return self.ops.mlp_state(left, token_ids, self.embedding, self._weights[name], named)
