"""EAGLE heads: what a row reads and predicts, the cache that is made from the target's features, and the same text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sakiyomi import LLM, SamplingParams
from sakiyomi.assemble import LoadedModel, ModelOptions, load_model, make_drafter
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.none import NoneDrafter
from sakiyomi.errors import SakiyomiError
from sakiyomi.tree import Draft
from sakiyomi.types import Sequence, Span
from sakiyomi.verify.match import MatchVerifier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from heads import eagle1_parts, eagle3_parts, write_head

VARIANTS: dict[str, dict[str, Any]] = {
    "3": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "norm before fc": {"norm_before_fc": True, "norm_before_residual": True},
}
PROMPT = list(b"The river was wide, and the boat was small.")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, write_llama: Callable[..., Path]) -> LoadedModel:
    folder = write_llama(tmp_path_factory.mktemp("target"))
    return load_model(folder, ModelOptions(dtype="float32", threads=1))


def rms(x: npt.NDArray[Any], weight: npt.NDArray[Any], eps: float = 1e-5) -> npt.NDArray[Any]:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)


class Reference:
    """The head in plain numpy, one row after the other, in double precision."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Any], embedding: npt.NDArray[Any]) -> None:
        self.config = config
        self.t = {n.replace("midlayer.", ""): np.asarray(t, np.float64) for n, t in tensors.items()}
        self.embedding = embedding.astype(np.float64)
        self.ids = np.arange(len(tensors["d2t"])) + tensors["d2t"]
        self.keys: list[npt.NDArray[Any]] = []
        self.values: list[npt.NDArray[Any]] = []

    def fuse(self, taps: npt.NDArray[Any]) -> npt.NDArray[Any]:
        taps = taps.astype(np.float64)
        if self.config.get("fc_norm"):
            parts = np.split(taps, 3)
            taps = np.concatenate([rms(part, self.t[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        if self.config.get("norm_before_fc"):
            taps = rms(taps, self.t["input_norm.weight"])
        return np.asarray(self.t["fc.weight"] @ taps)

    def row(self, token: int, feature: npt.NDArray[Any], position: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Logits over the drafted ids, and the state to feed back."""
        t, num_heads, num_kv, dim = self.t, 4, 2, 16
        normed = rms(feature, t["hidden_norm.weight"])
        x = np.concatenate([rms(self.embedding[token], t["input_layernorm.weight"]), normed])
        q = self._rotate((t["self_attn.q_proj.weight"] @ x).reshape(num_heads, dim), position)
        self.keys.append(self._rotate((t["self_attn.k_proj.weight"] @ x).reshape(num_kv, dim), position))
        self.values.append((t["self_attn.v_proj.weight"] @ x).reshape(num_kv, dim))
        attended = []
        for head in range(num_heads):
            group = head // (num_heads // num_kv)
            scores = np.array([key[group] @ q[head] for key in self.keys]) * dim**-0.5
            weights = np.exp(scores - scores.max())
            attended.append(np.stack([v[group] for v in self.values]).T @ (weights / weights.sum()))
        residual = normed if self.config.get("norm_before_residual") else feature
        a = residual + t["self_attn.o_proj.weight"] @ np.concatenate(attended)
        inner = rms(a, t["post_attention_layernorm.weight"])
        gate = t["mlp.gate_proj.weight"] @ inner
        a = a + t["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (t["mlp.up_proj.weight"] @ inner))
        y = rms(a, t["norm.weight"])
        return t["lm_head.weight"] @ y, (y if self.config.get("norm_output") else a)

    def forget(self, length: int) -> None:
        del self.keys[length:], self.values[length:]

    def _rotate(self, x: npt.NDArray[Any], position: int) -> npt.NDArray[Any]:
        half = x.shape[-1] // 2
        angle = position * 10000.0 ** (-np.arange(half) / half)
        left, right = x[:, :half], x[:, half:]
        return np.concatenate(
            [left * np.cos(angle) - right * np.sin(angle), right * np.cos(angle) + left * np.sin(angle)], -1
        )


def new_sequence(target: LoadedModel, tokens: list[int], **params: Any) -> Sequence:
    return Sequence("s", list(tokens), len(tokens), SamplingParams(**params), 7, target.model.new_cache())


def all_taps(target: LoadedModel, tokens: list[int]) -> npt.NDArray[np.float32]:
    span = Span(target.model.new_cache(), tokens, range(-1, len(tokens) - 1), taps=(0, 1, 2))
    return np.asarray(target.model.forward([span])[0].taps)


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_chains_are_those_of_the_reference_row_by_row(
    tmp_path: Path, target: LoadedModel, flags: dict[str, Any]
) -> None:
    config, tensors = eagle3_parts(**flags)
    folder = write_head(tmp_path, config, tensors)
    drafter = make_drafter(f"eagle3:path={folder},num_speculative_tokens=4", target, ModelOptions())
    model, sequence = target.model, new_sequence(target, PROMPT, temperature=0.0, max_tokens=40)
    lent = model.lend()
    assert lent is not None
    embedding = np.asarray(lent.ops.embed(lent.embedding, np.arange(257, dtype=np.int32)))
    reference = Reference(config, tensors, embedding)
    prefill(model, drafter, sequence, chunk=7)
    num_compared = 0
    for _ in range(6):
        draft = drafter.propose([sequence], [4])[0]
        length = len(sequence.tokens) - 1
        taps = all_taps(target, sequence.tokens[:-1])
        for row in range(len(reference.keys), length):
            logits, state = reference.row(sequence.tokens[row + 1], reference.fuse(taps[row]), row)
        for depth, token in enumerate(draft.tokens):
            order = np.sort(logits)
            if order[-1] - order[-2] > 1e-3:
                assert token == reference.ids[logits.argmax()]
                num_compared += 1
            logits, state = reference.row(token, state, length + depth)
        reference.forget(length)
        step(model, drafter, MatchVerifier(MatchVerifier.Config()), [sequence], [4])
    assert num_compared > 15


@pytest.mark.parametrize("kind", ["3", "3.1", "1"])
@pytest.mark.parametrize("shape", ["num_speculative_tokens=3", "num_speculative_tokens=3,width=3,max_nodes=9"])
def test_text_is_that_of_plain_decoding(tmp_path: Path, target: LoadedModel, kind: str, shape: str) -> None:
    parts = eagle1_parts() if kind == "1" else eagle3_parts(**VARIANTS[kind])
    folder = write_head(tmp_path, *parts)
    params = [
        SamplingParams(temperature=t, max_tokens=24, seed=s, ignore_eos=True) for s, t in enumerate((0, 1, 0.7, 1))
    ]
    prompts = [{"prompt_token_ids": PROMPT[: 9 + 8 * i]} for i in range(4)]

    def run(drafter: str, verifier: str = "match") -> list[Any]:
        llm = LLM.from_loaded(target, drafter=drafter, verifier=verifier)
        return llm.generate(prompts, params, use_tqdm=False)

    plain = run("none")
    drafted = run(f"eagle3:path={folder},{shape}")
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.speculation.num_draft_tokens for o in drafted) > 100
    for verifier in ("rejection",) if "width" not in shape else ("tree",):
        assert all(len(o.outputs[0].token_ids) == 24 for o in run(f"eagle3:path={folder},{shape}", verifier))


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("int8", 3)])
def test_greedy_chains_in_one_call_are_those_grown_step_by_step(
    tmp_path: Path, write_llama: Callable[..., Path], dtype: Any, threads: int, flags: dict[str, Any]
) -> None:
    """Confidences, what is fed back and the caches' rows to the last bit, for a batch of different lengths."""
    target = load_model(write_llama(tmp_path / "target"), ModelOptions(dtype=dtype, threads=threads))
    folder = write_head(tmp_path, *eagle3_parts(**flags))
    model, sizes = target.model, set()
    for depth, min_confidence in ((1, 0.0), (3, 0.0), (5, 0.03)):
        spec = f"eagle3:path={folder},num_speculative_tokens={depth},min_confidence={min_confidence}"
        drafter: Any = make_drafter(spec, target, ModelOptions())
        many = [new_sequence(target, PROMPT[: 5 + 5 * i], temperature=0.0, max_tokens=90) for i in range(4)]
        for sequence in many:
            prefill(model, drafter, sequence, chunk=7)
        for budgets in ([9, 9, 9, 9], [3, 0, 2, 9], [1, 1, 9, 9], [9, 9, 9, 9]):
            for i, sequence in enumerate(many):
                sequence.end_ids = frozenset(range(i, 257, 9))
            rooms = [drafter._find_room(s, budget) for s, budget in zip(many, budgets, strict=True)]
            before = [sequence.memo.fork() for sequence in many]
            at_once = drafter._draft_at_once(many, rooms)
            assert None not in at_once
            after = [sequence.memo for sequence in many]
            for sequence, room, memo, held, draft in zip(many, rooms, before, after, at_once, strict=True):
                if min(room.max_depth, room.max_nodes) <= 0:
                    assert draft == Draft.empty()
                    continue
                sequence.memo = memo
                assert [draft] == drafter._draft_by_levels([sequence], [room])
                sizes.add(len(draft))
                for one, other in zip(held.last, memo.last, strict=True):
                    np.testing.assert_array_equal(one, other)
                length = memo.cache.length
                assert held.cache.length == length == len(sequence.tokens) - 1
                assert not held.waiting
                assert drafter.propose([replace(sequence, memo=held)], [9]) == drafter.propose([sequence], [9])
            for sequence, held in zip(many, after, strict=True):
                sequence.memo = held
            for sequence in many:
                sequence.end_ids = frozenset()
                step(model, drafter, MatchVerifier(MatchVerifier.Config()), [sequence], [2])
    assert len(sizes) > 2


def test_damaged_features_are_reported(tmp_path: Path, target: LoadedModel) -> None:
    drafter: Any = make_drafter(f"eagle3:path={write_head(tmp_path, *eagle3_parts())}", target, ModelOptions())
    sequence = new_sequence(target, PROMPT, temperature=0.0, max_tokens=40)
    prefill(target.model, drafter, sequence)
    sequence.memo.waiting[-1] = sequence.memo.waiting[-1] * np.float32(np.nan)
    with pytest.raises(SakiyomiError, match="hold nan"):
        drafter.propose([sequence], [3])


def test_the_cache_holds_rows_of_the_targets_features_alone(tmp_path: Path, target: LoadedModel) -> None:
    folder = write_head(tmp_path, *eagle3_parts())
    spec = f"eagle3:path={folder},num_speculative_tokens=3,width=2"
    drafter: Any = make_drafter(spec, target, ModelOptions())
    sequence = new_sequence(target, PROMPT, temperature=1.0, max_tokens=60, ignore_eos=True)
    prefill(target.model, drafter, sequence)
    for _ in range(20):
        step(target.model, drafter, MatchVerifier(MatchVerifier.Config()), [sequence], [6])
    drafter.propose([sequence], [6])
    fresh = new_sequence(target, sequence.tokens, temperature=1.0, max_tokens=60)
    prefill(target.model, drafter, fresh, chunk=512)
    drafter.propose([fresh], [6])
    length = len(sequence.tokens) - 1
    held, wanted = sequence.memo.cache.slots(), fresh.memo.cache.slots()
    assert held.length == wanted.length == length
    np.testing.assert_array_equal(held.keys[:, :, :length], wanted.keys[:, :, :length])
    np.testing.assert_array_equal(held.values[:, :, :length], wanted.values[:, :, :length])


def test_a_second_turn_drafts_what_a_fresh_start_drafts(tmp_path: Path, target: LoadedModel) -> None:
    folder = write_head(tmp_path, *eagle3_parts())
    drafter: Any = make_drafter(f"eagle3:path={folder}", target, ModelOptions())
    sequence = new_sequence(target, PROMPT, temperature=0.0, max_tokens=60)
    prefill(target.model, drafter, sequence)
    for _ in range(4):
        step(target.model, drafter, MatchVerifier(MatchVerifier.Config()), [sequence], [3])
    common = len(PROMPT) + 2
    tokens = [*sequence.tokens[:common], *b" And then"]
    sequence.cache.truncate(common - 1)
    sequence.tokens = tokens
    drafter.rewind(sequence, common)
    prefill(target.model, drafter, sequence)
    fresh = new_sequence(target, tokens, temperature=0.0, max_tokens=60)
    prefill(target.model, drafter, fresh)
    draft = drafter.propose([sequence], [3])[0]
    assert len(draft) == 3
    assert draft == drafter.propose([fresh], [3])[0]


def test_attached_late_it_drafts_nothing(tmp_path: Path, target: LoadedModel) -> None:
    folder = write_head(tmp_path, *eagle3_parts())
    drafter = make_drafter(f"eagle3:path={folder}", target, ModelOptions())
    sequence = new_sequence(target, PROMPT, temperature=0.0, max_tokens=60)
    prefill(target.model, NoneDrafter(NoneDrafter.Config(), None), sequence)  # type: ignore[arg-type]
    for _ in range(3):
        assert step(target.model, drafter, MatchVerifier(MatchVerifier.Config()), [sequence], [3])[0].num_draft == 0
