"""NativeModel: a row's logits and taps are the same bits whatever is computed beside it."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from sakiyomi.errors import ParameterError
from sakiyomi.types import Checkpoint, Span

if importlib.util.find_spec("sakiyomi._native") is None:
    pytest.skip("the native kernels are not built", allow_module_level=True)
from sakiyomi.models.native import NativeModel

CONFIG = {
    "model_type": "qwen3", "vocab_size": 99, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
}  # fmt: skip


def make_checkpoint():
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (99, 96), "lm_head.weight": (99, 96), "model.norm.weight": (96,)}
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (96,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}.weight": (32,) for name in ("q_norm", "k_norm")}
        shapes |= {f"{prefix}self_attn.{name}.weight": (64, 96) for name in ("k_proj", "v_proj")}
        shapes |= {f"{prefix}self_attn.q_proj.weight": (192, 96), f"{prefix}self_attn.o_proj.weight": (96, 192)}
        shapes |= {f"{prefix}mlp.{name}.weight": (160, 96) for name in ("gate_proj", "up_proj")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (96, 160)
    tensors = {name: rng.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}
    return Checkpoint(name="tiny", config=CONFIG, tensors=tensors, tokenizer=None, end_token_ids=())


@pytest.fixture(scope="module", params=["int8", "float32"])
def models(request):
    """The same model with one thread and with two."""
    checkpoint = make_checkpoint()
    return [NativeModel.load(checkpoint, dtype=request.param, threads=threads) for threads in (1, 2)]


def plain(model, ids):
    """Logits and taps of every position, one token at a time."""
    cache, logits, taps = model.new_cache(), [], []
    for token in ids:
        output = model.forward([Span(cache, [token], [-1], (0,), (0, 2, 3))])[0]
        cache.keep([0])
        logits.append(output.row(0))
        taps.append(output.taps[0])
    return np.stack(logits), np.stack(taps)


def test_any_chunking_gives_the_same_bits(models):
    ids = np.random.default_rng(1).integers(0, 99, 70).tolist()
    logits, taps = plain(models[0], ids)
    for model in models:
        for sizes in ([70], [33, 37], [1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 1], [64, 6]):
            cache, start = model.new_cache(), 0
            for size in sizes:
                span = Span(cache, ids[start : start + size], range(-1, size - 1), range(size), (0, 2, 3))
                output = model.forward([span])[0]
                cache.keep(range(size))
                for row in range(size):
                    np.testing.assert_array_equal(output.row(row), logits[start + row])
                np.testing.assert_array_equal(output.taps, taps[start : start + size])
                start += size


def test_trees_of_several_sequences_give_the_bits_of_plain_decoding(models):
    rng = np.random.default_rng(2)
    for model in models:
        prompts = [rng.integers(0, 99, size).tolist() for size in (30, 1, 63)]
        caches = [model.new_cache() for _ in prompts]
        for _ in range(3):
            spans = []
            for prompt, cache in zip(prompts, caches, strict=True):
                tail = prompt[cache.length :]
                size = int(rng.integers(1, 12))
                parents = [
                    *range(-1, len(tail) - 1),
                    *(int(rng.integers(len(tail) - 1, len(tail) + i)) for i in range(size)),
                ]
                tokens = tail + rng.integers(0, 99, size).tolist()
                spans.append(Span(cache, tokens, parents, range(len(tail) - 1, len(tokens))))
            outputs = model.forward(spans)
            for prompt, span, output in zip(prompts, spans, outputs, strict=True):
                first = span.logit_rows[0]
                for row in span.logit_rows:
                    path, node = [], row
                    while node >= 0:
                        path.insert(0, node)
                        node = span.parents[node]
                    ids = prompt[: span.cache.length] + [span.tokens[node] for node in path]
                    np.testing.assert_array_equal(output.row(row - first), plain(models[0], ids)[0][-1])
                span.cache.keep(path)
                prompt[:] = [*ids, int(rng.integers(0, 99))]


def test_bad_options_are_refused():
    for options in ({"dtype": "float16"}, {"threads": 0}, {"max_model_len": 513}):
        with pytest.raises(ParameterError):
            NativeModel.load(make_checkpoint(), **options)
