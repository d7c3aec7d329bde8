"""What all tests share: where the real model and the prompts are, and how hard hypothesis tries."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import TokenizerData

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for the modules that several tests share

# No deadline: the first example of a test often compiles or loads something.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def model_path() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file; skips where it was not fetched."""
    named = os.environ.get("SAKIYOMI_TEST_MODEL")
    if named:
        assert Path(named).is_file(), f"SAKIYOMI_TEST_MODEL names {named!r}, which is no file"
        return Path(named)
    from sakiyomi.hub import find_cached

    cached = find_cached("smollm2")
    if cached is None:
        pytest.skip("the real model is not here: run `sakiyomi pull smollm2` or set SAKIYOMI_TEST_MODEL")
    return cached


@pytest.fixture(scope="session")
def spec_bench_path() -> Path:
    """The questions of Spec-Bench; skips where they are not."""
    named = os.environ.get("SAKIYOMI_SPEC_BENCH")
    path = Path(named) if named else ROOT.parent / "shared" / "data" / "spec_bench" / "question.jsonl"
    if not path.is_file():
        pytest.skip("Spec-Bench's questions are not here: set SAKIYOMI_SPEC_BENCH to its question.jsonl")
    return path


@pytest.fixture(scope="session")
def byte_tokenizer_json() -> str:
    """A tokenizer.json: ids 0 to 255 are bytes in the order of the byte-level alphabet, 256 is <end>."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return str(backend.to_str())


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_json: str) -> Tokenizer:
    """The tokenizer of `byte_tokenizer_json`."""
    return Tokenizer.load(TokenizerData(json=byte_tokenizer_json))


@pytest.fixture(scope="session")
def write_llama(byte_tokenizer_json: str) -> Callable[..., Path]:
    """A function that writes a tiny random Llama in the layout of transformers."""

    def write(folder: Path, *, vocab_size: int = 257, seed: int = 0, tokenizer: str = byte_tokenizer_json) -> Path:
        from safetensors.numpy import save_file

        rng = np.random.default_rng(seed)
        width, inner = 64, 96
        shapes = {"model.embed_tokens": (vocab_size, width), "lm_head": (vocab_size, width)}
        for layer in range(2):
            name = f"model.layers.{layer}"
            shapes |= {f"{name}.self_attn.{part}_proj": (width, width) for part in "qo"}
            shapes |= {f"{name}.self_attn.{part}_proj": (width // 2, width) for part in "kv"}
            shapes |= {f"{name}.mlp.{part}_proj": (inner, width) for part in ("gate", "up")}
            shapes |= {f"{name}.mlp.down_proj": (width, inner)}
        tensors = {f"{n}.weight": rng.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}
        norms = [f"model.layers.{i}.{n}_layernorm" for i in range(2) for n in ("input", "post_attention")]
        tensors |= {f"{name}.weight": np.ones(width, np.float32) for name in [*norms, "model.norm"]}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": vocab_size,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": 256,
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def trained_toy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny target that has learnt a toy grammar (`trained_toy.Toy`)."""
    torch = pytest.importorskip("torch")
    from trained_toy import make_toy

    torch.set_num_threads(1)
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def toy_mlp(trained_toy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An mlp drafter fitted to 20 answers of the trained toy, until it knows them."""
    from sakiyomi.train.mlp import fit_mlp
    from trained_toy import FAST_FIT, KINDS, write_documents

    model = trained_toy.load()
    shards = write_documents(model, trained_toy.prompts[:20], 60, 1.0)
    return fit_mlp({**FAST_FIT, **KINDS["mlp"]}, shards, model, tmp_path_factory.mktemp("mlp"))
