"""Heads that guess several tokens in one pass: P-EAGLE's placeholder rows, and Medusa."""

from __future__ import annotations

import itertools
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
from sakiyomi.checkpoints.drafter import write_drafter
from sakiyomi.decode import prefill, step
from sakiyomi.drafters.medusa import lay_out_tree
from sakiyomi.nets.binding import describe_target
from sakiyomi.tree import Draft
from sakiyomi.types import DrafterFile, Sequence
from sakiyomi.verify.match import MatchVerifier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from heads import eagle3_parts, medusa_parts, write_head

PROMPT = list(b"The river was wide, and the boat was small.")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, write_llama: Callable[..., Path]) -> LoadedModel:
    return load_model(write_llama(tmp_path_factory.mktemp("target")), ModelOptions(dtype="float32", threads=1))


def new_sequence(target: LoadedModel, tokens: list[int], **params: Any) -> Sequence:
    return Sequence("s", list(tokens), len(tokens), SamplingParams(**params), 7, target.model.new_cache())


def advance(target: LoadedModel, drafter: Any, sequence: Sequence, count: int, budget: int = 4) -> None:
    for _ in range(count):
        step(target.model, drafter, MatchVerifier(MatchVerifier.Config()), [sequence], [budget])


def test_one_place_is_a_step_of_eagle3(tmp_path: Path, target: LoadedModel) -> None:
    config, tensors = eagle3_parts(mask_token_id=5)
    parallel = make_drafter(f"peagle:path={write_head(tmp_path / 'p', config, tensors)}", target, ModelOptions())
    del tensors["mask_hidden"], config["mask_token_id"]
    chain = make_drafter(f"eagle3:path={write_head(tmp_path / 'e', config, tensors)}", target, ModelOptions())
    sequences = [new_sequence(target, PROMPT, temperature=0.0, max_tokens=60) for _ in range(2)]
    drafts = []
    for drafter, sequence in zip((parallel, chain), sequences, strict=True):
        prefill(target.model, drafter, sequence)
        advance(target, drafter, sequence, 5, budget=1)
        drafts.append(drafter.propose([sequence], [1])[0])
    assert len(drafts[0]) == 1
    assert drafts[0].tokens == drafts[1].tokens
    assert sequences[0].tokens == sequences[1].tokens


def test_placeholders_leave_no_trace(tmp_path: Path, target: LoadedModel) -> None:
    drafter: Any = make_drafter(
        f"peagle:path={write_head(tmp_path, *eagle3_parts(mask_token_id=5))}", target, ModelOptions()
    )
    sequence = new_sequence(target, PROMPT, temperature=1.0, max_tokens=60, ignore_eos=True)
    prefill(target.model, drafter, sequence, chunk=7)
    advance(target, drafter, sequence, 12)
    first = drafter.propose([sequence], [4])[0]
    assert drafter.propose([sequence], [4])[0] == first
    fresh = new_sequence(target, sequence.tokens, temperature=1.0, max_tokens=60, ignore_eos=True)
    prefill(target.model, drafter, fresh)
    assert drafter.propose([fresh], [4])[0] == first
    length = len(sequence.tokens) - 1
    held, wanted = sequence.memo.cache.slots(), fresh.memo.cache.slots()
    assert held.length == wanted.length == length
    np.testing.assert_array_equal(held.keys[:, :, :length], wanted.keys[:, :, :length])


def test_medusa_heads_guess_what_plain_numpy_guesses(tmp_path: Path, target: LoadedModel) -> None:
    config, tensors = medusa_parts()
    folder = write_head(tmp_path, config, tensors, name="medusa_lm_head.safetensors")
    drafter: Any = make_drafter(f"medusa:path={folder}", target, ModelOptions())
    sequence = new_sequence(target, PROMPT, temperature=0.0, max_tokens=60)
    prefill(target.model, drafter, sequence)
    lent = target.model.lend()
    assert lent is not None
    for _ in range(6):
        state = np.asarray(sequence.memo.state, np.float64)[0]
        x = state / np.sqrt((state * state).mean() + lent.eps) * np.asarray(lent.norm, np.float64)
        guesses = [int((tensors[f"{i}.1.weight"] @ residual(x, tensors, i)).argmax()) for i in range(3)]
        assert list(drafter.propose([sequence], [3])[0].tokens) == guesses
        advance(target, drafter, sequence, 1)


def residual(x: npt.NDArray[Any], tensors: dict[str, Any], head: int) -> npt.NDArray[Any]:
    y = tensors[f"{head}.0.linear.weight"] @ x + tensors[f"{head}.0.linear.bias"]
    return np.asarray(x + y / (1 + np.exp(-y)))


def medusa_file(path: Path, target: LoadedModel, num_layers: int, has_own_heads: bool) -> Path:
    """Heads of several blocks, some without biases, over some of the ids."""
    rng, info, lent = np.random.default_rng(6), target.model.info, target.model.lend()
    assert lent is not None
    names = [f"heads.{head}.{layer}" for head in range(3) for layer in range(num_layers)]
    tensors = {f"{name}.weight": rng.normal(0, 0.2, (64, 64)).astype(np.float32) for name in names}
    tensors |= {f"{name}.bias": rng.normal(0, 0.2, 64).astype(np.float32) for name in names[::2]}
    if has_own_heads:
        tensors |= {f"lm_heads.{head}.weight": rng.normal(0, 0.2, (90, 64)).astype(np.float32) for head in range(3)}
    config = {"num_heads": 3, "num_layers": num_layers, "hidden_size": 64}
    ids = np.sort(rng.choice(257, 90, replace=False)).astype(np.int32)
    described = describe_target(info, lent)
    write_drafter(
        path, DrafterFile(kind="medusa", config=config, taps=(), target=described, tensors=tensors, vocabulary=ids)
    )
    return path


@pytest.mark.parametrize(("dtype", "threads"), [("float32", 1), ("int8", 3)])
@pytest.mark.parametrize("family", ["peagle", "peagle 3.1", "medusa", "medusa of 2 blocks", "medusa that shares"])
def test_greedy_drafts_in_one_call_are_those_grown_by_levels(
    tmp_path: Path, write_llama: Callable[..., Path], family: str, dtype: Any, threads: int
) -> None:
    """Confidences, and what peagle keeps, to the last bit, for a batch of different lengths."""
    target = load_model(write_llama(tmp_path / "target"), ModelOptions(dtype=dtype, threads=threads))
    if family.startswith("peagle"):
        flags = {"fc_norm": True, "norm_output": True} if "3.1" in family else {"norm_before_residual": True}
        path = write_head(tmp_path / "head", *eagle3_parts(mask_token_id=5, **flags))
    elif family == "medusa":
        path = write_head(tmp_path / "head", *medusa_parts(vllm=True))
    else:
        path = medusa_file(tmp_path / "head", target, 2 if "blocks" in family else 1, "shares" not in family)
    sizes = set()
    for width, depth, nodes in ((1, 1, 8), (1, 3, 8), (2, 3, 5), (3, 2, 20), (3, 3, 9), (300, 2, 7)):
        for min_confidence in (0.0, 0.03):
            options = f"num_speculative_tokens={depth},width={width},max_nodes={nodes},min_confidence={min_confidence}"
            drafter: Any = make_drafter(f"{family.split()[0]}:path={path},{options}", target, ModelOptions())
            sharpen(drafter, 1.5)
            many = [new_sequence(target, PROMPT[: 5 + 6 * i], temperature=0.0, max_tokens=60) for i in range(3)]
            for sequence in many:
                prefill(target.model, drafter, sequence, chunk=7)
            for budgets in ([9, 9, 9], [2, 0, 3]):
                for i, sequence in enumerate(many):
                    sequence.end_ids = frozenset(range(i, 257, 7))
                rooms = [drafter._find_room(s, budget) for s, budget in zip(many, budgets, strict=True)]
                before = [replace(sequence, memo=drafter.fork(sequence)) for sequence in many]
                at_once = drafter._draft_at_once(many, rooms)
                for sequence, other, room, draft in zip(many, before, rooms, at_once, strict=True):
                    if min(room.max_depth, room.max_nodes) <= 0:
                        assert draft == Draft.empty()
                        continue
                    assert [draft] == drafter._draft_by_levels([other], [room])
                    sizes.add(len(draft))
                    if family.startswith("peagle"):
                        check_same_memos(sequence.memo, other.memo)
                    assert drafter.propose([sequence], [9]) == drafter.propose([other], [9])
                for sequence in many:
                    sequence.end_ids = frozenset()
                advance_all(target, drafter, many)
    assert len(sizes) > 4


def sharpen(drafter: Any, sharpness: float) -> None:
    drafter.rules = replace(drafter.rules, sharpness=sharpness)
    if hasattr(drafter, "parts"):
        drafter.parts = replace(drafter.parts, sharpness=sharpness)
    else:
        drafter.sharpness = sharpness


def check_same_memos(one: Any, other: Any) -> None:
    assert one.cache.length == other.cache.length
    assert not one.waiting
    assert not other.waiting
    for some, others in zip(one.last, other.last, strict=True):
        np.testing.assert_array_equal(some, others)


def advance_all(target: LoadedModel, drafter: Any, many: list[Sequence]) -> None:
    step(target.model, drafter, MatchVerifier(MatchVerifier.Config()), many, [4] * len(many))


SHAPES = ("width=1", "width=3,max_nodes=9", "tree=static,max_nodes=9")


@pytest.mark.parametrize(
    ("name", "shape"), [("peagle", SHAPES[0]), ("peagle", SHAPES[1]), *(("medusa", shape) for shape in SHAPES)]
)
def test_text_is_that_of_plain_decoding(tmp_path: Path, target: LoadedModel, name: str, shape: str) -> None:
    parts = eagle3_parts(mask_token_id=5) if name == "peagle" else medusa_parts(vllm=True)
    folder = write_head(tmp_path, *parts)
    params = [
        SamplingParams(temperature=t, max_tokens=24, seed=s, ignore_eos=True) for s, t in enumerate((0, 1, 0.7, 1))
    ]
    prompts = [{"prompt_token_ids": PROMPT[: 9 + 8 * i]} for i in range(4)]

    def run(drafter: str, verifier: str = "match") -> list[Any]:
        return LLM.from_loaded(target, drafter=drafter, verifier=verifier).generate(prompts, params, use_tqdm=False)

    plain, drafted = run("none"), run(f"{name}:path={folder},{shape}")
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.speculation.num_draft_tokens for o in drafted) > 100
    sampled = run(f"{name}:path={folder},{shape}", "rejection" if shape == "width=1" else "tree")
    assert all(len(o.outputs[0].token_ids) == 24 for o in sampled)


def test_static_trees_are_the_best_of_their_size() -> None:
    rates = [[0.5, 0.2, 0.1], [0.4, 0.25, 0.05], [0.3, 0.1, 0.1]]
    paths = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]

    def worth(path: tuple[int, ...]) -> float:
        return float(np.prod([rates[depth][rank] for depth, rank in enumerate(path)]))

    for size in (1, 4, 9, 20):
        laid = lay_out_tree(rates, size)
        assert all(path[:-1] in laid or len(path) == 1 for path in laid)
        best = sorted((worth(path) for path in paths), reverse=True)[:size]
        assert sum(map(worth, laid)) == pytest.approx(sum(best))
