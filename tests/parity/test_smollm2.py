"""A real model: SmolLM2 from its GGUF file, by us and by transformers."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from sakiyomi.checkpoints.gguf import read_gguf
from sakiyomi.text.tokenizer import Tokenizer
from sakiyomi.types import Span

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT = (
    "The sky looks blue because the molecules of the air scatter short waves more than long ones.\n\n"
    "def scatter(wavelength: float) -> float:\n    return 1 / wavelength**4\n\nQ: And why is the sunset red?\nA:"
)


@pytest.fixture(scope="module")
def checkpoint(model_path):
    return read_gguf(model_path)


@pytest.fixture(scope="module")
def ids(checkpoint):
    return Tokenizer.load(checkpoint.tokenizer).encode(PROMPT)


@pytest.fixture(scope="module")
def expected(model_path, ids):
    pytest.importorskip("accelerate", reason="transformers reads GGUF files through accelerate")
    torch.set_num_threads(1)
    read = transformers.AutoModelForCausalLM.from_pretrained
    model = read(model_path.parent, gguf_file=model_path.name, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([ids])).logits[0].numpy()


def all_logits(model, ids):
    span = Span(model.new_cache(), ids, range(-1, len(ids) - 1), range(len(ids)))
    output = model.forward([span])[0]
    return np.stack([output.row(i) for i in range(len(ids))])


def test_torch_equals_transformers(checkpoint, ids, expected):
    from sakiyomi.models.torch import TorchModel

    ours = all_logits(TorchModel.load(checkpoint), ids)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("sakiyomi._native") is None, reason="the native kernels are not built")
def test_native_equals_transformers(checkpoint, ids, expected):
    from sakiyomi.models.native import NativeModel

    ours = all_logits(NativeModel.load(checkpoint, dtype="float32"), ids)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("sakiyomi._native") is None, reason="the native kernels are not built")
def test_native_in_float32_is_within_a_ten_thousandth_of_torch(checkpoint, ids):
    """Logits reach 37: this is a rounding or two of float32."""
    from sakiyomi.models.native import NativeModel
    from sakiyomi.models.torch import TorchModel

    torch.set_num_threads(1)
    ours = all_logits(NativeModel.load(checkpoint, dtype="float32", keep_packed=False), ids)
    expected = all_logits(TorchModel.load(checkpoint), ids)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("sakiyomi._native") is None, reason="the native kernels are not built")
def test_native_in_8_bits_is_close_in_law(checkpoint, ids, expected):
    """Rounding the activations to 8 bits in groups of 32 costs a few thousandths of a nat."""
    from sakiyomi.models.native import NativeModel

    ours = all_logits(NativeModel.load(checkpoint, dtype="int8"), ids)
    log_p, log_q = (torch.log_softmax(torch.tensor(logits), -1) for logits in (expected, ours))
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    assert 0 < divergence < 0.02
