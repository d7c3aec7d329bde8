"""A toy target that has learnt a toy grammar, and what it says: enough to train drafters on in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCAB, WIDTH, INNER, LAYERS, HEADS = 96, 64, 96, 2, 2
END, NUM_PHRASES = VOCAB - 1, 18
TAPS = (1, LAYERS)
FAST_FIT = {
    "passes": 30,
    "rows_per_step": 250,
    "learning_rate": 4e-3,
    "dropout": 0.0,
    "vocabulary": VOCAB,
    "num_frequent": VOCAB,
    "num_random": 0,
    "num_frequent_late": VOCAB,
    "evaluations": 3,
    "held_out": 0.05,
    "patience": 0,
}
KINDS: dict[str, dict[str, object]] = {
    "mlp": {"inner_size": 96},
    "eagle3": {"inner_size": 96, "head_dim": 32, "unroll": [[0.0, 3]], "num_layers": 2, "passes": 25},
    "peagle": {"inner_size": 96, "head_dim": 32, "unroll": [[0.0, 3]], "num_layers": 2, "passes": 25},
    "medusa": {"num_heads": 3, "num_layers": 2, "unroll": [[0.0, 3]], "passes": 60, "learning_rate": 2e-2},
}
"""What the families of trained heads need to know some texts of the toy by heart, beside `FAST_FIT`."""


def load_fit(kind: str):  # type: ignore[no-untyped-def]
    """The function that fits drafters of a kind, as the package's recipe names it."""
    from sakiyomi.train.recipe import read_recipe

    return read_recipe(kind).load_fit()


@dataclass(frozen=True)
class Toy:
    """A trained target.

    Attributes:
        folder: in transformers' layout.
        prompts: beginnings of texts in the grammar.
    """

    folder: Path
    prompts: list[list[int]]

    def load(self, backend: str = "native", dtype: str = "float32"):  # type: ignore[no-untyped-def]
        """The target on a backend."""
        from sakiyomi.checkpoints.safetensors import read_safetensors

        checkpoint = read_safetensors(self.folder)
        if backend == "torch":
            from sakiyomi.models.torch import TorchModel

            return TorchModel.load(checkpoint, dtype=dtype)
        from sakiyomi.models.native import NativeModel

        return NativeModel.load(checkpoint, dtype=dtype, threads=1, keep_packed=False)


def speak(rng: np.random.Generator, length: int) -> list[int]:
    """A text of the grammar: phrases of five own words each; which phrase follows depends on the last two."""
    tokens: list[int] = []
    before, phrase = (int(value) for value in rng.integers(NUM_PHRASES, size=2))
    while len(tokens) < length:
        tokens += range(5 * phrase, 5 * phrase + 5)
        before, phrase = phrase, (3 * phrase + before + int(rng.choice(2, p=[0.8, 0.2]))) % NUM_PHRASES
    return tokens[:length]


def make_toy(folder: Path) -> Toy:
    """Train a target into a folder; some four seconds."""
    rng = np.random.default_rng(5)
    _train(folder, lambda: speak(rng, 64))
    return Toy(folder, [speak(np.random.default_rng(100 + i), 12) for i in range(40)])


def _train(folder: Path, text: Callable[[], list[int]], num_steps: int = 200) -> None:
    import torch
    from safetensors.numpy import save_file

    from sakiyomi.nets.decoder import Decoder, DecoderConfig
    from sakiyomi.ops.base import Causal
    from sakiyomi.ops.torch import TorchOps

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": END,
    }
    rng = np.random.default_rng(1)
    shapes = {"model.embed_tokens": (VOCAB, WIDTH)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj": (WIDTH, WIDTH) for part in "qo"}
        shapes |= {f"{name}.self_attn.{part}_proj": (WIDTH // HEADS, WIDTH) for part in "kv"}
        shapes |= {f"{name}.mlp.{part}_proj": (INNER, WIDTH) for part in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj": (WIDTH, INNER)}
    tensors = {f"{n}.weight": rng.normal(0, s[1] ** -0.5, s).astype(np.float32) for n, s in shapes.items()}
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(LAYERS) for n in ("input", "post_attention")]
    tensors |= {f"{name}.weight": np.ones(WIDTH, np.float32) for name in [*norms, "model.norm"]}

    kept: dict[int, torch.Tensor] = {}

    class Trained(TorchOps):
        """Ops whose weights have gradients and stay the same tensors."""

        def array(self, values):  # type: ignore[no-untyped-def]
            if id(values) not in kept:
                kept[id(values)] = super().array(values).requires_grad_()
            return kept[id(values)]

    ops, spec = Trained(), DecoderConfig.from_dict(config)
    Decoder(ops, spec, tensors)
    optimizer = torch.optim.AdamW(kept.values(), lr=1e-2, weight_decay=0.01)
    positions, mask_bounds = np.tile(np.arange(64), 4).astype(np.int32), tuple(range(0, 257, 64))
    for step in range(num_steps):
        batch = np.array([text() for _ in range(4)], np.int32)
        # Built anew in each step: it stacks some weights, and stacks are copies.
        decoder = Decoder(ops, spec, tensors)
        states, *_ = decoder.forward(batch.reshape(-1), positions, None, Causal(mask_bounds), logit_rows=range(256))
        logits = decoder.logits(states)
        goals = torch.from_numpy(batch[:, 1:].reshape(-1).astype(np.int64))
        loss = torch.nn.functional.cross_entropy(logits.reshape(4, 64, -1)[:, :-1].reshape(len(goals), -1), goals)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / num_steps) + 1e-4
        optimizer.step()
    save_file(
        {name: kept[id(values)].detach().numpy() for name, values in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config))


def write_documents(model, prompts: list[list[int]], num_tokens: int, temperature: float = 0.0):  # type: ignore[no-untyped-def]
    """What a target says to some prompts, with its taps."""
    from sakiyomi.decode import prefill, step
    from sakiyomi.drafters.none import NoneDrafter
    from sakiyomi.params import SamplingParams
    from sakiyomi.train.shards import Document, MemoryShards
    from sakiyomi.types import Sequence, Span
    from sakiyomi.verify.match import MatchVerifier

    documents = []
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens)
    sequences = [Sequence(str(i), list(p), len(p), params, i, model.new_cache()) for i, p in enumerate(prompts)]
    for sequence in sequences:
        prefill(model, NoneDrafter(), sequence)
    while any(sequence.finish_reason is None for sequence in sequences):
        running = [sequence for sequence in sequences if sequence.finish_reason is None]
        step(model, NoneDrafter(), MatchVerifier(), running, [0] * len(running))
    for sequence in sequences:
        tokens = sequence.tokens
        span = Span(model.new_cache(), tokens, range(-1, len(tokens) - 1), range(len(tokens)), TAPS)
        output = model.forward([span])[0]
        documents.append(
            Document(
                tokens=np.array(tokens, np.int32),
                taps=np.asarray(output.taps, np.float32).astype(np.float16),
                argmax=np.array(output.argmax(), np.int32),
                loss_mask=np.arange(len(tokens)) >= sequence.num_prompt,
                group="toy",
            )
        )
    return MemoryShards(documents, TAPS, WIDTH)
