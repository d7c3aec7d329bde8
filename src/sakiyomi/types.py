"""The data that passes between the layers, and the protocols of what can be plugged in.

Shapes: M rows of a span, R packed rows of a call, V vocabulary, D width of the taps, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from sakiyomi.noise import NoiseKey
from sakiyomi.params import SamplingParams
from sakiyomi.tree import Computed, Draft, Probes

Array: TypeAlias = Any  # an array of the backend at hand: numpy.ndarray or torch.Tensor
Lossless: TypeAlias = Literal["tokens", "distribution", "no"]
DrawMode: TypeAlias = Literal["argmax", "coupled", "independent"]
"""How a drafter with laws of its own finds tokens: the most probable, with the target's noise, or sampled by itself."""
DraftShape: TypeAlias = Literal["trees", "chains", "none"]
FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
GROUP_SIZE = 32


# ---------------------------------------------------------------------------------------------- checkpoints


@dataclass(frozen=True)
class Quantized:
    """An [N, K] matrix in unsigned 8-bit values with one scale and one min per group of 32 along K.

    The weight is `scale * value + min`. Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are held without loss.

    Attributes:
        values: uint8 [N, K], K a multiple of 32.
        scales, mins: float16 [N, K / 32].
    """

    values: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float16]
    mins: npt.NDArray[np.float16]

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The float32 [N, K] matrix."""
        rows, width = self.shape
        grouped = self.values.reshape(rows, -1, GROUP_SIZE).astype(np.float32)
        grouped *= self.scales.astype(np.float32)[:, :, None]
        grouped += self.mins.astype(np.float32)[:, :, None]
        return grouped.reshape(rows, width)

    def rows(self, index: Any) -> Quantized:
        """Chosen output rows (a slice or an index array), in that order."""
        return Quantized(self.values[index], self.scales[index], self.mins[index])

    def columns(self, first: int, last: int) -> Quantized:
        """The inputs [first, last), which are bounds of groups."""
        groups = slice(first // GROUP_SIZE, last // GROUP_SIZE)
        values = np.ascontiguousarray(self.values[:, first:last])
        return Quantized(
            values, np.ascontiguousarray(self.scales[:, groups]), np.ascontiguousarray(self.mins[:, groups])
        )

    @staticmethod
    def concatenate(parts: Seq[Quantized]) -> Quantized:
        """Matrices over the same input stacked along the output."""
        return Quantized(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.scales for part in parts]),
            np.concatenate([part.mins for part in parts]),
        )


Tensor: TypeAlias = "npt.NDArray[Any] | Quantized"


@dataclass(frozen=True, kw_only=True)
class TokenizerData:
    """What text/tokenizer.py needs, as plain data: the text of a tokenizer.json, or the fields of a GGUF file.

    Attributes:
        json: the content of tokenizer.json, or None.
        gguf: the `tokenizer.ggml.*` fields without that prefix ("model", "pre", "tokens", "merges", ...), or None.
        config: the content of tokenizer_config.json (may be empty).
        chat_template: the Jinja template, or None.
    """

    json: str | None = None
    gguf: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model read from disk, in one form whatever the file format.

    Attributes:
        name: short name for messages.
        config: the model's configuration with the keys of a transformers config.json (`model_type`, `hidden_size`,
            `num_hidden_layers`, `rope_scaling`, ...), also when it came from a GGUF file.
        tensors: transformers' tensor names ("model.layers.0.self_attn.q_proj.weight") to arrays, read when asked
            for; q/k rows are in transformers' order (rotary halves), GGUF files are permuted back.
        tokenizer: the tokenizer's data, or None where the folder has none.
        end_token_ids: every id at which the files say that generation ends.
        files: the files that hold the tensors; empty where there are none.
    """

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: TokenizerData | None
    end_token_ids: tuple[int, ...]
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DrafterFile:
    """A trained drafter as it is stored, in one form whatever the file format.

    Attributes:
        kind: the drafter that reads it ("mlp", "eagle3", "peagle", "medusa").
        config: numbers of its net.
        taps: the target's layers whose hidden states it reads (0: the embedding, L: before the final norm).
        target: what `nets.binding.describe_target` said of the model that it was trained for.
        tensors: the net's names to arrays.
        vocabulary: int32, the ascending ids that it drafts, or None for all.
        recipe, measured: how it was trained, and what it reached then.
    """

    kind: str
    config: Mapping[str, Any]
    taps: tuple[int, ...]
    target: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    vocabulary: npt.NDArray[np.int32] | None = None
    recipe: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None


# ---------------------------------------------------------------------------------------------- sequences


@dataclass(frozen=True, slots=True)
class History:
    """What the choice of one token depends on beside its logits.

    The position of the token to choose is `len(tokens) + len(path)`.

    Attributes:
        tokens: committed ids, prompt included.
        num_prompt: how many of them are the prompt.
        params: the request's sampling parameters.
        seed: the key of the noise.
        end_ids: the ids that end the answer (for `min_tokens`).
        path: drafted ids between the committed ones and the token to choose.
    """

    tokens: Seq[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    end_ids: frozenset[int] = frozenset()
    path: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        return len(self.tokens) + len(self.path)


class TextWatcher(Protocol):
    """Turns committed tokens into text and sees stop strings (text/stops.py)."""

    def push(self, token_id: int) -> str | None:
        """Take one more token; return the stop string that it completes, or None."""
        ...


@dataclass(eq=False)
class Sequence:
    """One answer in the making. Between steps `cache.length == len(tokens) - 1`.

    Attributes:
        memo: private state of the drafter, whatever it likes.
        end_ids: the ids that end the answer, resolved from model, `stop_token_ids` and `ignore_eos`.
        prediction: a text to draft from (ids), or None.
        speculation: False drafts nothing for this request, an int caps its drafts, True leaves it to the engine.
        num_steps: steps made so far (`decode.step` counts them).
    """

    id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    cache: Cache
    end_ids: frozenset[int] = frozenset()
    watcher: TextWatcher | None = None
    memo: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prediction: Seq[int] | None = None
    speculation: bool | int = True
    num_steps: int = 0

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    def history(self, path: tuple[int, ...] = ()) -> History:
        """The history of the token that follows the committed ones and `path`."""
        return History(self.tokens, self.num_prompt, self.params, self.seed, self.end_ids, path)

    def noise_key(self, node: int, purpose: int) -> NoiseKey:
        """The key of what is drawn at `node` (-1: the root) in the step to come."""
        # A later turn of a chat begins behind at least one token per step of this one, so with the prompt's length
        # in the sum no key returns although each turn counts its steps from 0.
        return NoiseKey(self.seed, self.num_prompt + self.num_steps, node, purpose)


# ---------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the layers above need to know of a model.

    Attributes:
        vocab_size: V, the ids that logits cover (padding of the head left out).
        padded_vocab_size: rows of embedding and head as the model's files tell it, padding included; None: V.
        max_model_len: positions of the context.
        hidden_size: width of one tap.
        is_bit_exact: whether a row's logits are the same bits whatever is computed beside it.
        draft_shape: what one pass checks at little cost. Where it is "chains", drafts are cut to `Draft.best_chain`;
            where it is "none", every token costs as much as a step, so none are drafted.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    hidden_size: int
    end_token_ids: tuple[int, ...] = ()
    is_bit_exact: bool = False
    dtype: str = "float32"
    draft_shape: DraftShape = "trees"
    padded_vocab_size: int | None = None


@runtime_checkable
class Cache(Protocol):
    """Keys and values of one sequence.

    A forward pass writes its rows behind `length` and leaves `length` alone; `keep` commits the rows that shall stay.
    """

    @property
    def length(self) -> int:
        """Committed positions."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes held, spare room included."""
        ...

    def expect(self, length: int) -> None:
        """A hint: about so many positions will be needed, so that room for them can be made at once."""

    def keep(self, path: Seq[int]) -> None:
        """Commit rows of the last forward pass (indices into its span, ascending) and drop its other rows."""
        ...

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on."""
        ...

    def fork(self) -> Cache:
        """An independent copy of the committed positions."""
        ...


class BareChoice(NamedTuple):
    """How tokens are chosen where no parameter changes logits and no filter leaves an id out.

    Attributes:
        seed: of the noise.
        temperature: 0: the most probable token, whatever the seed.
    """

    seed: int
    temperature: float


THE_BEST = BareChoice(0, 0.0)


@dataclass(frozen=True, slots=True)
class Span:
    """What a forward pass takes for one sequence: a prompt chunk, a plain step and a tree check are the same call.

    Attributes:
        tokens: M ids; the committed but uncached ones (at least one), then draft nodes.
        parents: M indices into the span, -1 the cached prefix. A row's position is `cache.length` + its depth - 1
            (rows with parent -1 have depth 1).
        logit_rows: the rows whose logits are wanted, ascending.
        taps: layer numbers t whose hidden state (after t layers; 0 = embedding, L = before the final norm) is wanted.
        computed: an offer to go on from what the first layers have computed of the first rows. A model takes it up as
            far as the rows are the same and its cache still holds their keys and values; results do not depend on it.
        choice: how the tokens of `logit_rows` will be chosen, where most likely nothing else of them is asked for, so
            that a model may choose at once; results do not depend on it.
    """

    cache: Cache
    tokens: Seq[int]
    parents: Seq[int]
    logit_rows: Seq[int] = ()
    taps: tuple[int, ...] = ()
    computed: Computed | None = None
    choice: BareChoice | None = None


class Output(Protocol):
    """Result of a forward pass for one span; `i` counts `logit_rows`, not rows."""

    taps: Array | None
    """[M, len(span.taps) * hidden_size], or None when no taps were asked for."""

    def row(self, i: int) -> npt.NDArray[np.float32]:
        """Logits [V] of the i-th asked row."""
        ...

    def argmax(self) -> list[int]:
        """The lowest id with the largest logit, for each asked row."""
        ...

    def choose(self, i: int, history: History) -> int:
        """The token that plain decoding chooses from the i-th asked row."""
        ...


@dataclass(frozen=True, slots=True)
class Lent:
    """What a target lends to the nets of its drafters.

    Attributes:
        ops: the operations (`ops.base.Ops`) that its weights are prepared for.
        embedding, head: weights [V, H].
        norm: the final norm's weight [H].
        eps: of its norms.
    """

    ops: Any
    embedding: Any
    head: Any
    norm: Array
    eps: float


class Model(Protocol):
    """Something that verifies: target models, and drafters' own models too."""

    info: ModelInfo

    def new_cache(self) -> Cache:
        """An empty cache for one sequence."""
        ...

    def forward(self, spans: Seq[Span]) -> list[Output]:
        """Run all spans in one pass; rows land in the caches behind their length, uncommitted."""
        ...

    def shallow(self, num_layers: int, skip: Collection[int] = ()) -> Model:
        """The same model cut after its first layers, and without those in `skip`, sharing weights.

        Where it can run over the caches of the whole model, so that what it computes need not be computed again, its
        outputs have an attribute `computed`, for the next span over that cache.
        """
        ...

    def lend(self) -> Lent | None:
        """What drafters may share of its weights; None where it has none to share."""
        return None


# ---------------------------------------------------------------------------------------------- speculation


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier decides.

    Attributes:
        path: the accepted nodes, root to leaf.
        tokens: the tokens to emit: the accepted ones and the final one.
        lossy: indices in `path` of nodes that only a lossy rule accepts.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    lossy: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built beside: `Drafter(config, context)`.

    Attributes:
        target: the model that verifies.
        load_model: loads a second model by name.
        draw: how the verifier wants tokens to be found; for drafters that can choose.
        make_drafters: builds the drafters that a text joins by "+", for the same target.
        open_drafter: reads the trained drafter of one of some kinds from a path, or (None) the one that comes with the
            package, and checks that it was made for the target.
        fitting_parts: the drafters that suit the target, joined by "+".
        translate: how the ids of that model become the target's (a `text.vocabulary.Translation`), or None where both
            have one tokenizer.
        tuned: what `sakiyomi tune` chose for the target, by the drafter's name.
    """

    target: Model
    load_model: Callable[[str], Model]
    draw: DrawMode = "coupled"
    make_drafters: Callable[[str], list[Drafter]] | None = None
    open_drafter: Callable[[tuple[str, ...], str | None], DrafterFile] | None = None
    fitting_parts: str = "suffix"
    translate: Callable[[str], Any] = lambda name: None
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class BurstSource(NamedTuple):
    """What drafts for one sequence within a burst (`Ops.run_burst`), where no Python runs.

    Attributes:
        drafts: an object of the ops' own that does it.
        max_depth, max_nodes: of a draft.
        taps: the taps [1, D] of the last position fed, or None where none are read.
        is_coupled: whether it takes the noise with which tokens are chosen, where these take some.
    """

    drafts: Any
    max_depth: int
    max_nodes: int
    taps: Array | None = None
    is_coupled: bool = False


class Drafter(Protocol):
    """Guesses. Only `propose` is required of an implementation; derive from this class to inherit the rest.

    What it keeps for a sequence lives in `sequence.memo`, so that one drafter serves several threads.
    """

    taps: tuple[int, ...] = ()
    needs_all_taps: bool = False
    reads_prediction: bool = False
    """Whether it drafts from `Sequence.prediction`."""
    wants_budget: bool = False
    """Whether the engine shall decide at each step how much to draft and to check, unless the user decides."""

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """One draft per sequence, of at most `budget` nodes each."""
        ...

    def observe(self, sequence: Sequence, start: int, tokens: Seq[int], taps: Array | None) -> None:
        """A committed run of positions from `start`, with their taps [len(tokens), D]; in order, without gaps."""
        return None

    def observe_probes(self, sequence: Sequence, probes: Probes, tokens: Seq[int]) -> None:
        """The most probable tokens behind the asked ones of the probes that the last draft came with."""
        return None

    def rewind(self, sequence: Sequence, length: int) -> None:
        """The sequence's tokens from `length` on were replaced (a new chat turn); forget at least those."""
        self.forget(sequence)

    def fork(self, sequence: Sequence) -> Any:
        """A memo for another sequence with the same committed tokens; None where that one must be observed anew."""
        return None

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over; drop what was kept for it."""
        sequence.memo = None

    def sources(self) -> Seq[Drafter]:
        """The drafters that a budget may ask apart, the cheap ones first; none if it never drafts.

        Of these `propose` and `burst_source` are used.
        """
        return [self]

    def burst_source(self, sequence: Sequence) -> BurstSource | None:
        """What drafts the same for a sequence without Python, from all that was observed; None where nothing does.

        It is asked only where no parameter changes logits, now or later.
        """
        return None


class Verifier(Protocol):
    """Decides which drafted tokens stay.

    A verifier with `is_lossless = "no"` has a field `lossy: bool = False` in its Config, the user's consent.
    """

    is_lossless: Lossless
    draw: DrawMode = "coupled"
    """How drafters that can choose shall find their tokens."""
    follows_choices: bool = False
    """Whether it takes just the tokens that plain decoding chooses, so that whoever knows these need not ask it."""

    def verify(self, draft: Draft, output: Output, sequence: Sequence) -> Verdict:
        """Judge `draft`; `output` has the root's row first, then one row per node."""
        ...
