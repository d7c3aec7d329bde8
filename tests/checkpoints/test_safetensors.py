"""Folders as transformers writes them, whole and damaged."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from sakiyomi.checkpoints.safetensors import read_safetensors
from sakiyomi.errors import CheckpointError

CONFIG = {"model_type": "llama", "eos_token_id": 2}
VALUES = np.array([[0.0, 1.0, -2.5], [3.140625, 65504.0, 1e-3]], np.float32)
NUMPY_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I32": np.int32}


def encode(dtype, values):
    if dtype == "BF16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(NUMPY_TYPES[dtype]).tobytes()


def write_weights(path, tensors, *, cut=0, changes=None):
    """A safetensors file of {name: (dtype, values)}, written from the format's description."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, values) in tensors.items():
        encoded = encode(dtype, values)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(encoded)],
        } | (changes or {})
        data += encoded
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + data
    path.write_bytes(content[: len(content) - cut])


def write_json(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_json(folder / "config.json", CONFIG)
    write_weights(folder / "model.safetensors", {"a": ("F32", VALUES), "b": ("BF16", VALUES[0])})
    return folder


def shard(folder):
    """The folder's weights in two shards."""
    (folder / "model.safetensors").unlink()
    write_weights(folder / "model-1.safetensors", {"a": ("F32", VALUES)})
    write_weights(folder / "model-2.safetensors", {"b": ("F16", VALUES[0]), "c": ("I32", VALUES[0])})
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})
    return names


def refused(folder, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_floats_are_read_in_float32_or_wider(folder, dtype):
    write_weights(folder / "model.safetensors", {"x": (dtype, VALUES), "scalar": (dtype, VALUES[0, 1])})
    tensors = read_safetensors(folder).tensors
    exact = {"F64": VALUES.astype(np.float64), "F32": VALUES, "F16": VALUES.astype(np.float16)}
    expected = exact.get(dtype, (VALUES.view(np.uint32) >> 16 << 16).view(np.float32))
    assert tensors["x"].dtype == (np.float64 if dtype == "F64" else np.float32)
    np.testing.assert_array_equal(tensors["x"], expected)
    assert tensors["scalar"].shape == ()
    assert tensors["scalar"] == 1.0


def test_torch_writes_what_we_read(folder):
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    written = {str(dtype): torch.randn(7, 5).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    written["integers"] = torch.arange(6).reshape(2, 3)
    save_file(written, folder / "model.safetensors")
    tensors = read_safetensors(folder).tensors
    assert set(tensors) == set(written)
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensors[name], tensor.float().numpy())


def test_shards_are_joined(folder):
    shard(folder)
    checkpoint = read_safetensors(folder)
    assert (len(checkpoint.tensors), checkpoint.name) == (3, "tiny")
    np.testing.assert_array_equal(checkpoint.tensors["a"], VALUES)
    np.testing.assert_array_equal(checkpoint.tensors["c"], [0, 1, -2])
    assert "d" not in checkpoint.tensors
    with pytest.raises(KeyError):
        checkpoint.tensors["d"]


def test_tensors_are_read_when_asked_for(folder):
    tensors = read_safetensors(folder).tensors
    write_weights(folder / "model.safetensors", {"a": ("F32", VALUES + 1), "b": ("BF16", VALUES[0])})
    np.testing.assert_array_equal(tensors["a"], VALUES + 1)
    write_weights(folder / "model.safetensors", {"a": ("F32", VALUES)}, cut=8)
    with pytest.raises(CheckpointError, match="shorter"):
        tensors["a"]


def test_a_missing_shard_is_named(folder):
    shard(folder)
    (folder / "model-2.safetensors").unlink()
    refused(folder, r"shard .*model-2\.safetensors is missing")


def test_a_tensor_that_no_shard_holds_is_named(folder):
    names = shard(folder)
    write_json(folder / "model.safetensors.index.json", {"weight_map": names | {"d": "model-1.safetensors"}})
    refused(folder, "lists tensor d")


@pytest.mark.parametrize("cut", [1, 12, 30])
def test_truncated_data_is_refused(folder, cut):
    write_weights(folder / "model.safetensors", {"a": ("F32", VALUES), "b": ("F32", VALUES)}, cut=cut)
    refused(folder, "truncated")


@pytest.mark.parametrize("size", [0, 5, 8, 40])
def test_a_truncated_header_is_refused(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(folder, "truncated or not a safetensors file")


def test_a_broken_header_is_refused(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{]}[" + bytes(20))
    refused(folder, "broken header")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"[12]" + bytes(20))
    refused(folder, "broken header")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [4, 4]}, r"shape \[4, 4\], which is 64 bytes of F32, but the file gives it 24"),
        ({"shape": [-2, -3]}, "shape"),
        ({"data_offsets": [-24, 0]}, "shape"),
        ({"data_offsets": [0]}, "wrongly"),
        ({"dtype": "F8_E4M3"}, "type F8_E4M3; supported are"),
        ({"shape": None}, "wrongly"),
    ],
)
def test_a_mis_shaped_tensor_is_refused(folder, changes, message):
    write_weights(folder / "model.safetensors", {"a": ("F32", VALUES)}, changes=changes)
    refused(folder, f"tensor a.*{message}|{message}")


def test_missing_and_broken_files_are_refused(folder, tmp_path):
    refused(tmp_path / "nowhere", r"config\.json is missing")
    for content, message in (("{", "not valid JSON"), ("[1]", "not a JSON object")):
        write_json(folder / "config.json", content)
        refused(folder, rf"config\.json.*{message}")
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    refused(folder, "UTF-8")
    write_json(folder / "config.json", CONFIG)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"holds pytorch_model\.bin; fetch the model in safetensors format")
    write_json(folder / "model.safetensors.index.json", {"weights": {}})
    refused(folder, "no weight_map")


def test_quantised_folders_are_refused(folder):
    write_json(folder / "config.json", CONFIG | {"quantization_config": {"quant_method": "gptq"}})
    refused(folder, "'gptq', which is not supported")


def test_the_tokenizer_and_its_template(folder):
    assert read_safetensors(folder).tokenizer is None
    write_json(folder / "tokenizer.json", {"model": {"vocab": {"</s>": 5}}, "added_tokens": []})
    write_json(folder / "special_tokens_map.json", {"eos_token": "</s>", "bos_token": "<s>"})
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    write_json(folder / "tokenizer_config.json", {"bos_token": "<t>", "chat_template": templates})
    tokenizer = read_safetensors(folder).tokenizer
    assert json.loads(tokenizer.json)["model"]["vocab"] == {"</s>": 5}
    assert (tokenizer.config["eos_token"], tokenizer.config["bos_token"]) == ("</s>", "<t>")
    assert tokenizer.chat_template == "yes"
    (folder / "chat_template.jinja").write_text("from the file")
    assert read_safetensors(folder).tokenizer.chat_template == "from the file"


def test_end_ids_of_all_files_are_merged(folder):
    assert read_safetensors(folder).end_token_ids == (2,)
    write_json(folder / "generation_config.json", {"eos_token_id": [7, 2]})
    write_json(
        folder / "tokenizer.json",
        {"model": {"vocab": {"</s>": 5}}, "added_tokens": [{"content": "<|im_end|>", "id": 9}]},
    )
    assert read_safetensors(folder).end_token_ids == (7, 2)
    for token, found in (("</s>", 5), ("<|im_end|>", 9), ({"content": "<|im_end|>"}, 9)):
        write_json(folder / "tokenizer_config.json", {"eos_token": token})
        assert read_safetensors(folder).end_token_ids == (7, 2, found)
    write_json(folder / "tokenizer_config.json", {"eos_token": "unknown"})
    write_json(folder / "config.json", {"model_type": "llama", "eos_token_id": None})
    assert read_safetensors(folder).end_token_ids == (7, 2)
