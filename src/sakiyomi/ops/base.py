"""Ops: the array operations that every network is written over.

Rows are packed: the tokens of all sequences of a call stand under one another, without padding.
Letters: R packed rows, H hidden width, Q query heads, G key/value heads, D head width, N outputs, K inputs,
L layers, C cache slots, B sequences in the call.

An implementation (ops/native.py, ops/torch.py) fills in the primitives; whatever is longer (`decoder_stack`,
`decoder_pass`, the drafts of trained heads) has a composed form here that an implementation may replace by a fused one
with the same result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sakiyomi.tree import Draft
from sakiyomi.types import THE_BEST, Array, Quantized

Matrix: TypeAlias = "npt.NDArray[Any] | Quantized"
Weight: TypeAlias = Any  # what `Ops.weight` made of a matrix


# ---------------------------------------------------------------------------------------------- masks


@dataclass(frozen=True)
class Causal:
    """Each sequence of the packed rows (`bounds`, B+1 row offsets) attends to itself and what came before."""

    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """A row attends to its sequence's past, to its ancestors in the tree, and to itself.

    Attributes:
        parents: R integers, indices into the tree of the row's sequence, -1 = the cached past. Parents come first. A
            tree begins with the pending rows of the cache (`KVSlots.pending`), then come the call's own.
        bounds: B+1 row offsets of the segments.
    """

    parents: npt.NDArray[np.int32] | Sequence[int]
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Blocks:
    """Several documents in the packed rows: a row attends to earlier rows with its own id.

    Attributes:
        doc_ids: int32 [R].
    """

    doc_ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Dense:
    """Any pattern: allowed[r, c] says whether row r attends to row c (no past)."""

    allowed: npt.NDArray[np.bool_]


Mask: TypeAlias = Causal | Tree | Blocks | Dense


# ---------------------------------------------------------------------------------------------- caches


@dataclass(frozen=True, slots=True)
class KVSlots:
    """One sequence's cache as the ops see it.

    Attributes:
        keys, values: as `Ops.new_kv` made them, with room for the rows of the call behind `length` and `pending`.
        length: committed slots; slot i holds position i.
        pending: the parents (-1: the committed past) of rows behind `length` that earlier calls stored, and that the
            rows of this call may descend from.
    """

    keys: Array
    values: Array
    length: int
    pending: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The slot of the call's first row."""
        return self.length + len(self.pending)


@dataclass(frozen=True, slots=True)
class Past:
    """The caches of a call's sequences, seen at one layer."""

    slots: Sequence[KVSlots]
    layer: int = 0

    def at(self, layer: int) -> Past:
        return self if layer == self.layer else replace(self, layer=layer)


# ---------------------------------------------------------------------------------------------- decoder stacks


class LanguageHead(NamedTuple):
    """What makes logits of states: a norm's weight [H], its eps, and a matrix [V, H]."""

    norm: Array
    eps: float
    weight: Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSpec:
    """Shape of a stack of pre-norm decoder layers (Llama, Mistral, Qwen2, Qwen3).

    Attributes:
        inv_freq: float32 [D / 2], rotary frequencies after scaling.
        rope_scale: factor on cos and sin (yarn's attention factor; 1 elsewhere).
        windows: for each layer the number of positions it sees (itself included), or None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    inv_freq: npt.NDArray[np.float32]
    rope_scale: float = 1.0
    windows: tuple[int | None, ...] = ()

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one decoder layer, made by `Ops.weight` (matrices) and `Ops.array` (vectors).

    qkv stacks q, k and v along the output: [(Q + 2G) * D, H]; gate_up stacks gate and up: [2I, H].
    """

    input_norm: Array
    qkv: Weight
    qkv_bias: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    output: Weight
    output_bias: Array | None = None
    post_norm: Array
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """Weights of one step of a recurrent MLP speculator (nets/mlp.py); gate_up stacks gate and up: [2I, H].

    Attributes:
        fuse, fuse_token: of the states in front of a token, [H, n * H], and of its embedding, [H, H].
        tokens: what the step adds for a token of its own, [M, H], or None; its last row is 0.
        token_rows: int32 [V], for each id the row of `tokens`; M - 1 for those without one.
    """

    tokens: Weight | None = None
    token_rows: npt.NDArray[np.int32] | None = None
    fuse: Weight
    fuse_token: Weight
    bias: Array
    inner_norm: Array
    gate_up: Weight
    down: Weight
    norm: Array
    ones: Array
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyRules:
    """How drafts of the most probable tokens grow (sampling/growth.py).

    Attributes:
        ids: int64 [K], the ascending ids that logits are of.
        sharpness: factor on the logits from which confidences are taken.
        width: children of a node, and nodes that go on at each depth.
        lowest: the logarithm of the confidence below which nothing is drafted.
    """

    ids: npt.NDArray[np.int64]
    sharpness: float
    width: int
    lowest: float


class DraftRoom(NamedTuple):
    """What a single draft may hold: its depth and its nodes at most, and the ids behind which nothing is drafted."""

    max_depth: int
    max_nodes: int
    end_ids: frozenset[int]


class SourceRules(NamedTuple):
    """What a burst knows of one source of drafts; see engine/budget.py for how it is used.

    Attributes:
        drafts: an object of the ops' own that drafts (`types.BurstSource`), or None: the burst ends before it is asked.
        max_depth, max_nodes: of a draft.
        survivals, seconds: of a source whose drafts have a price: how probably the text goes on with the first 1, 2,
            ... tokens of a draft, and what a draft of as many nodes costs. Empty for one that is always asked.
        num_rested, rest: steps since it was asked, and behind how many it is tried although it does not pay.
        offsets, slopes: for each kind of nodes how one is believed: offset + slope * confidence, given its parent.
        is_coupled: whether it takes the noise with which tokens are chosen, where these take some.
    """

    drafts: Any
    max_depth: int
    max_nodes: int
    survivals: Sequence[float]
    seconds: Sequence[float]
    num_rested: int
    rest: int
    offsets: Sequence[float]
    slopes: Sequence[float]
    is_coupled: bool


class NoisyChoice(NamedTuple):
    """How tokens are chosen at a temperature above 0 (sampling/choose.py): the seed of the noise, and the filters."""

    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class RowChoice(NamedTuple):
    """A `BareChoice` at the position of the token that is chosen; 0, like the seed, where that has no influence."""

    seed: int
    temperature: float
    position: int


THE_BEST_ROW = RowChoice(*THE_BEST, 0)


class BurstRules(NamedTuple):
    """What the steps of a burst go by (`Ops.run_burst`).

    Attributes:
        sources: asked in this order.
        seconds: of a pass over 0, 1, 2, ... rows, which also bounds the rows.
        rate: tokens that a second is worth.
        least: a node that is right less often is not worth thinking about.
        edges: of the confidences that are told apart.
        end_ids: the ids that end the text.
        num_left: tokens that may come at most.
        max_steps, max_seconds: the burst is over behind so many steps, or the first one that ends so late.
        choice: None: the most probable tokens.
        num_unchecked: steps since nodes were checked last; where that is `pause` or more, the most probable node is
            checked even if it does not seem to pay.
    """

    sources: tuple[SourceRules, ...]
    seconds: Sequence[float]
    rate: float
    least: float
    edges: Sequence[float]
    end_ids: Sequence[int]
    num_left: int
    max_steps: int
    max_seconds: float
    choice: NoisyChoice | None
    num_unchecked: int
    pause: int


class BurstDraft(NamedTuple):
    """A draft that a step of a burst was offered.

    Attributes:
        source: number of the source in the rules.
        num_asked: nodes that it was asked for.
        is_trial: whether it was asked although it did not seem to pay.
        seconds: what it took.
        gains: for each node the probability that the text passes through it; kinds: of the nodes, as in `SourceRules`.
    """

    source: int
    num_asked: int
    is_trial: bool
    seconds: float
    draft: Draft
    gains: list[float]
    kinds: list[int]


class BurstStep(NamedTuple):
    """A step of a burst; for the first four fields see `decode.Step`.

    Attributes:
        draft_s, pass_s: seconds of drafting, and of the rest.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    num_draft: int
    num_tried: int
    draft_s: float
    pass_s: float
    drafts: list[BurstDraft]


DraftRows: TypeAlias = Callable[[Array, Sequence[int], Sequence[DraftRoom]], list[Draft | None]]
"""Drafts behind tokens [R], given what a network reads for each of them and the room that it has (`Ops.mlp_drafts`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadEnds:
    """What stands around the layers of an EAGLE head (nets/eagle3.py).

    Attributes:
        embed_norm, feature_norm: of the token's embedding and of the state that is fed, [H] each.
        norm_before_residual: the residual stream begins with the normed state.
        final_norm: behind the last layer, [H].
        head: the language-model head [K, H].
    """

    embedding: Weight
    embed_norm: Array
    feature_norm: Array
    norm_before_residual: bool
    final_norm: Array
    head: Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseWeights:
    """What makes a feature of an EAGLE head from the target's hidden states side by side [R, A * Ht].

    Attributes:
        norms: one for each of as many equal parts; none leaves the states as they are.
        matrix: [H, A * Ht].
        eps: of the norms.
    """

    norms: tuple[Array, ...]
    matrix: Weight
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """The inputs of P-EAGLE's rows whose own are not known yet (nets/eagle3.py).

    Attributes:
        feature: [1, H].
    """

    feature: Array
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaWeights:
    """Medusa heads (nets/medusa.py).

    Attributes:
        blocks: for each layer (matrix, bias or None) of all heads under one another [N * H, H] in the first layer,
            where all heads read the same, and one [H, H] per head behind it.
        heads: the language-model heads [K, H], one for all or one per head.
        norm, eps: of the norm in front.
        ones: [H].
    """

    blocks: Sequence[Sequence[tuple[Weight, Array | None]]]
    heads: Sequence[Weight]
    norm: Array
    eps: float
    ones: Array


Hide = Callable[[str, Array], Array]
"""From the name of a matrix and its inputs to the inputs with some of them hidden (training's dropout)."""


class Ops(ABC):
    """The operations. Arrays are the implementation's own; integer arguments are numpy int32 arrays."""

    name: str
    is_bit_exact: bool = False
    """Whether each row's result is the same bits whatever is computed beside it."""
    has_best_ids: bool = False
    """Whether `best_ids` costs less than `normed_logits`, so that logits are not made before somebody asks for them."""
    has_bursts: bool = False
    """Whether there is a `run_burst`."""

    # ---- arrays and weights

    @abstractmethod
    def array(self, values: npt.NDArray[Any]) -> Array:
        """A vector or table of parameters in the working precision."""

    @abstractmethod
    def weight(self, matrix: Matrix | Sequence[Matrix]) -> Weight:
        """Prepare an [N, K] matrix for `linear` and `embed`; a sequence of matrices is stacked along N."""

    def named_weight(self, name: str, load: Callable[[], Matrix | Sequence[Matrix]]) -> Weight:
        """`weight(load())`; an implementation may keep what it made under `name` and load nothing the next time."""
        return self.weight(load())

    def prepare_head(self, name: str, head: Weight, norm: Array) -> None:
        """Expect rows normed with `norm` [H] to go through `head` [N, H].

        An implementation may make what finds their ids faster, and keep it under `name` as `named_weight` does. No
        result depends on it.
        """
        return

    @abstractmethod
    def to_numpy(self, x: Array) -> npt.NDArray[np.float32]:
        """A float32 numpy array of the same values."""

    @abstractmethod
    def new_kv(self, num_layers: int, num_kv_heads: int, head_dim: int, capacity: int) -> tuple[Array, Array]:
        """Keys and values in the cache's precision; contents undefined.

        They are [L, G, C, D], or what an implementation has in its place: others only hand them on.
        """

    def copy_slots(self, source: tuple[Array, Array], target: tuple[Array, Array], count: int) -> None:
        """Copy the first slots of keys and values to those of others."""
        for old, new in zip(source, target, strict=True):
            new[:, :, :count] = old[:, :, :count]

    def move_slots(self, kv: tuple[Array, Array], head_dim: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy slots of keys and values to others of the same; both ascend, no target is behind its source."""
        for array in kv:
            # Indexing by a list gathers into a new array, so overlapping slots are safe.
            array[:, :, list(target)] = array[:, :, list(source)]

    # ---- operations

    @abstractmethod
    def embed(self, table: Weight, ids: npt.NDArray[np.int32]) -> Array:
        """Rows of an embedding table: ids [R] -> [R, K]."""

    @abstractmethod
    def select_rows(self, weight: Weight, ids: npt.NDArray[np.int32]) -> Weight:
        """The outputs `ids` [K] of a weight [N, H] as a weight [K, H] of the same precision."""

    @abstractmethod
    def linear(self, x: Array, weight: Weight, bias: Array | None = None) -> Array:
        """x [R, K] times the transposed weight [N, K], plus bias [N] -> [R, N]."""

    def logits(self, x: Array, head: Weight) -> Array:
        """`linear` for a language model's head, whose rounding shows in every logit: never coarser than `linear`."""
        return self.linear(x, head)

    def normed_logits(self, x: Array, norm: Array, eps: float, head: Weight) -> Array:
        """`logits` of `rms_norm` of x."""
        return self.logits(self.rms_norm(x, norm, eps), head)

    def best_ids(self, x: Array, norm: Array, eps: float, head: Weight) -> npt.NDArray[np.int64]:
        """`argmax` of `normed_logits` [R]; -1 where only the logits can tell, since there may be a nan among them."""
        logits = self.to_numpy(self.normed_logits(x, norm, eps, head))
        return np.where(logits.max(axis=1) > -np.inf, logits.argmax(axis=1), -1)

    def chosen_ids(
        self, x: Array, norm: Array, eps: float, head: Weight, choices: Sequence[RowChoice]
    ) -> npt.NDArray[np.int64]:
        """What rows of x choose of `normed_logits` [R]; -1 where only the logits can tell."""
        best = self.best_ids(x, norm, eps, head)
        return np.where([choice == THE_BEST_ROW for choice in choices], best, -1)

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019)."""

    @abstractmethod
    def rope(
        self, x: Array, positions: npt.NDArray[np.int32], inv_freq: npt.NDArray[np.float32], scale: float = 1.0
    ) -> Array:
        """Rotate the halves of each head by position: x [R, heads, D] (Su et al., 2021; transformers' half layout).

        The angle is rounded to float32 before its cosine and sine, as in the reference implementations.
        """

    @abstractmethod
    def store(self, past: Past, k: Array, v: Array, bounds: Sequence[int]) -> tuple[Array, Array]:
        """Write the rows' k, v [R, G, D] into the caches behind what is there; return them as the cache holds them."""

    @abstractmethod
    def attend(self, q: Array, k: Array, v: Array, past: Past | None, mask: Mask, window: int | None = None) -> Array:
        """Scaled dot-product attention with grouped queries.

        Args:
            q: [R, Q, D]; query head h reads key/value head h // (Q / G).
            k, v: [R, G, D], the call's own rows; with a past they are what `store` returned.
            past: the caches, or None (training, prompt without cache).
            mask: which rows see which; `Blocks` and `Dense` take no past.
            window: a row sees only positions > its own - window.

        Returns:
            [R, Q * D]. The scale is D ** -0.5.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Array) -> Array:
        """silu(first half) * second half of the last axis: [R, 2I] -> [R, I]."""

    @abstractmethod
    def add(self, x: Array, y: Array) -> Array:
        """x + y."""

    def concat(self, parts: Sequence[Array]) -> Array:
        """Arrays [R, N_i] side by side: [R, sum of N_i]. This form is for numpy arrays."""
        return np.concatenate(parts, axis=-1)

    def stack(self, parts: Sequence[Array]) -> Array:
        """Arrays [R_i, N] under one another: [sum of R_i, N]. This form is for numpy arrays."""
        return np.concatenate(parts, axis=0)

    @abstractmethod
    def argmax(self, x: Array) -> npt.NDArray[np.int64]:
        """The lowest index of the largest value of each row: [R, N] -> [R]."""

    # ---- a step of an MLP speculator, composed

    def mlp_state(
        self, left: Array, token_ids: npt.NDArray[np.int32], embedding: Weight, weights: MlpWeights, hide: Hide | None
    ) -> Array:
        """The states [R, H] behind `token_ids` [R], from the states [R, n * H] in front of them."""
        hide = hide or (lambda name, x: x)
        x = self.concat([left, self.embed(embedding, token_ids)])
        num_rows, width = x.shape
        hidden = len(weights.ones)
        normed = self.rms_norm(x.reshape(-1, hidden), weights.ones, weights.eps).reshape(num_rows, width)
        normed = hide("fuse", normed)
        token = self.linear(normed[:, -hidden:], weights.fuse_token)
        if weights.token_rows is not None:
            token = self.add(self.embed(weights.tokens, weights.token_rows[token_ids]), token)
        fused = self.add(token, self.linear(normed[:, :-hidden], weights.fuse, weights.bias))
        inner = self.silu_mul(self.linear(self.rms_norm(fused, weights.inner_norm, weights.eps), weights.gate_up))
        return self.add(fused, self.linear(hide("down", inner), weights.down))

    def mlp_step(
        self, left: Array, token_ids: npt.NDArray[np.int32], embedding: Weight, weights: MlpWeights, head: Weight
    ) -> tuple[Array, Array]:
        """`mlp_state`, and the logits [R, K] over a head [K, H]."""
        states = self.mlp_state(left, token_ids, embedding, weights, None)
        return states, self.linear(self.rms_norm(states, weights.norm, weights.eps), head)

    def mlp_drafts(
        self, embedding: Weight, steps: tuple[MlpWeights, MlpWeights], head: Weight, rules: GreedyRules
    ) -> DraftRows:
        """What drafts the most probable tokens behind some, each draft in one go.

        Args:
            steps: the weights of the first step and of all further ones.
            head: [K, H].

        Returns:
            A function of the states [R, T * H] in front of the tokens, the tokens [R] and their rooms. For each row it
            gives what `sampling.growth.Growth` would draft, or None where it has to be grown level by level.
        """
        return lambda left, token_ids, rooms: [None] * len(token_ids)

    # ---- a pass of an EAGLE head, composed

    def fuse(self, taps: Array, weights: FuseWeights) -> Array:
        """Features [R, H] of the target's hidden states side by side [R, A * Ht]."""
        norms, eps = weights.norms, weights.eps
        if norms:
            width = taps.shape[1] // len(norms)
            parts = [taps[:, i * width : (i + 1) * width] for i in range(len(norms))]
            taps = self.concat([self.rms_norm(part, norm, eps) for part, norm in zip(parts, norms, strict=True)])
        return self.linear(taps, weights.matrix)

    def head_pass(
        self,
        features: Array,
        token_ids: npt.NDArray[np.int32],
        ends: HeadEnds,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
        with_logits: bool,
    ) -> tuple[Array, Array, Array | None]:
        """Run the layers over features [R, H] with the embeddings of `token_ids` [R] beside them.

        Returns:
            The states behind the last layer, normed [R, H] and not normed [R, H], and the logits [R, K] or None.
        """
        normed = self.rms_norm(features, ends.feature_norm, spec.eps)
        read = self.concat([self.rms_norm(self.embed(ends.embedding, token_ids), ends.embed_norm, spec.eps), normed])
        start = normed if ends.norm_before_residual else features
        states, _ = self.decoder_stack(start, layers, spec, positions, past, mask, read=read)
        normed = self.rms_norm(states, ends.final_norm, spec.eps)
        return normed, states, self.linear(normed, ends.head) if with_logits else None

    def head_drafts(
        self,
        taps: Array,
        fuse: FuseWeights,
        token_ids: npt.NDArray[np.int32],
        ends: HeadEnds,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        past: Past,
        mask: Causal,
        feeds_normed: bool,
        rules: GreedyRules,
        rooms: Sequence[DraftRoom],
        placeholder: Placeholder | None = None,
    ) -> tuple[list[Draft | None], Array, Array] | None:
        """A `head_pass` of rows that stand behind the caches, and drafts of the most probable tokens behind them.

        Args:
            taps: the target's hidden states side by side [R, A * Ht], of which `fuse` makes the features.
            past: caches with room for the rows and for max_depth - 1 more each.
            mask: bounds of B sequences, each with a row at least.
            feeds_normed: what is fed back is the normed state.
            rules: without a placeholder of width 1.
            rooms: B of them.
            placeholder: None grows chains from states fed back; else one pass over as many more rows, all with these
                inputs, tells the candidates of each depth.

        Returns:
            For each sequence its draft, or None where it has to be grown step by step; and of its last row the logits
            [B, K] and the state to feed back [B, H]. None where all have to be grown step by step, and nothing was run.
        """
        return None

    # ---- steps

    def run_burst(
        self,
        last: int,
        embedding: Weight,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        slots: KVSlots,
        capacity: int,
        taps: Sequence[int],
        first_taps: Array | None,
        head: LanguageHead,
        rules: BurstRules,
    ) -> tuple[list[BurstStep], Array]:
        """Several steps of decoding in one call, where `has_bursts`: draft, pass, follow the chosen tokens, commit.

        It ends early before a step that it cannot make (too little room, a source without `drafts`, damaged logits).

        Args:
            last: the last token of a text whose other tokens stand in the cache.
            capacity: slots of the cache that may be written.
            taps: layer numbers, as in `decoder_stack`.
            first_taps: those [1, T * H] of the position in front of `last`, or None.

        Returns:
            The steps, and the taps [N, T * H] of the N positions that they fed: as many as there are new tokens.
        """
        raise NotImplementedError

    # ---- Medusa heads

    def medusa_drafts(
        self, states: Array, weights: MedusaWeights, rules: GreedyRules, rooms: Sequence[DraftRoom]
    ) -> list[Draft | None]:
        """Drafts of the most probable tokens, each grown in one go.

        Args:
            states: the target's last hidden states [R, H], in front of its final norm.
            rooms: R of them, none deeper than there are heads.

        Returns:
            For each row what `sampling.growth.Growth` would draft, or None where it has to be grown level by level.
        """
        return [None] * len(states)

    # ---- a decoder stack, composed

    def decoder_stack(
        self,
        x: Array,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
        taps: Sequence[int] = (),
        read: Array | None = None,
    ) -> tuple[Array, list[Array]]:
        """Run pre-norm decoder layers over x [R, H].

        Args:
            past: the caches, or None; layer i of `layers` uses layer past.layer + i of the caches.
            taps: layer numbers t in 0..len(layers), the hidden state after t layers (0: x itself), ascending.
            read: [R, K of the first layer's qkv], what its attention reads in place of the normed x.

        Returns:
            The hidden state after the last layer [R, H] (not normed), and one [R, H] per tap.
        """
        wanted = set(taps)
        kept = {0: x} if 0 in wanted else {}
        for index, layer in enumerate(layers):
            here = None if past is None else past.at(past.layer + index)
            normed = read if read is not None and index == 0 else self.rms_norm(x, layer.input_norm, spec.eps)
            x = self.add(x, self.self_attention(normed, layer, spec, positions, here, mask, spec.window(index)))
            x = self.add(x, self.feed_forward(x, layer, spec.eps))
            if index + 1 in wanted:
                kept[index + 1] = x
        return x, [kept[tap] for tap in taps]

    def decoder_pass(
        self,
        token_ids: Sequence[int],
        embedding: Weight,
        layers: Sequence[LayerWeights],
        spec: StackSpec,
        positions: Sequence[int],
        past: Past | None,
        mask: Mask,
        rows: Sequence[int],
        taps: Sequence[int] = (),
        head: LanguageHead | None = None,
        choices: Sequence[RowChoice] = (),
    ) -> tuple[Array | None, Array | None, npt.NDArray[np.int64] | None]:
        """A whole decoder over token ids [R]: `embed`, `decoder_stack`, and the choice of rows behind it.

        Args:
            token_ids, positions: R integers.
            rows: the rows whose states are wanted, ascending.
            taps: as in `decoder_stack`.
            head, choices: over what, and how, those rows choose ids, where that is wanted too (`chosen_ids`) and
                `has_best_ids`.

        Returns:
            The states behind the last layer [len(rows), H], the taps side by side [R, T * H], and the chosen ids
            [len(rows)], each None where it was not asked for.
        """
        ids, places = np.asarray(token_ids, np.int32), np.asarray(positions, np.int32)
        x, kept = self.decoder_stack(self.embed(embedding, ids), layers, spec, places, past, mask, taps)
        states = x if len(rows) == len(x) else x[list(rows)] if len(rows) else None
        chosen = None if states is None or head is None else self.chosen_ids(states, *head, choices)
        return states, self.concat(kept) if kept else None, chosen

    def self_attention(
        self,
        normed: Array,
        layer: LayerWeights,
        spec: StackSpec,
        positions: npt.NDArray[np.int32],
        past: Past | None,
        mask: Mask,
        window: int | None = None,
    ) -> Array:
        """What a layer's attention adds to its residual stream, from what it reads [R, K of `layer.qkv`]."""
        num_heads, num_kv, width = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = self.linear(normed, layer.qkv, layer.qkv_bias).reshape(len(positions), num_heads + 2 * num_kv, width)
        q, k, v = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv], qkv[:, num_heads + num_kv :]
        if layer.q_norm is not None:
            q = self.rms_norm(q, layer.q_norm, spec.eps)
        if layer.k_norm is not None:
            k = self.rms_norm(k, layer.k_norm, spec.eps)
        q = self.rope(q, positions, spec.inv_freq, spec.rope_scale)
        k = self.rope(k, positions, spec.inv_freq, spec.rope_scale)
        if past is not None:
            assert isinstance(mask, Causal | Tree), "only Causal and Tree masks go with a cache"
            k, v = self.store(past, k, v, mask.bounds)
        attended = self.attend(q, k, v, past, mask, window)
        return self.linear(attended, layer.output, layer.output_bias)

    def feed_forward(self, x: Array, layer: LayerWeights, eps: float) -> Array:
        """What a layer's inner part adds to its residual stream x [R, H]."""
        normed = self.rms_norm(x, layer.post_norm, eps)
        return self.linear(self.silu_mul(self.linear(normed, layer.gate_up)), layer.down)
