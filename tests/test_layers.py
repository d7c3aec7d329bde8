"""The layers of the package: a file imports only from smaller layers and from its own folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "sakiyomi"

LAYERS = (
    ("errors", "params", "noise", "tree", "types", "results", "plugins", "cores", "parts"),
    ("ops",),
    ("sampling", "text", "checkpoints", "lookup", "plan", "hub", "tuned"),
    ("nets", "cache", "verify"),
    ("models",),
    ("decode",),
    ("drafters",),
    ("engine",),
    ("assemble", "requests", "session", "llm", "hf"),
    ("measure",),
    ("train", "bench", "prove", "doctor", "serve", "tune"),
    ("cli",),
    ("", "__main__"),  # the package's own __init__: the public surface
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}

# In these folders the files are alternatives to each other; what they share lies in a smaller layer.
ALTERNATIVES = {
    "drafters": frozenset[str](),
    "verify": frozenset[str](),
    "checkpoints": frozenset({"files", "layout"}),
    "ops": frozenset({"base"}),  # what the implementations may import
}
# The only places that may import torch or transformers; everything else runs without them.
NEEDS_TORCH = (
    *("ops.torch", "ops.torch_noise", "models.torch", "models.hf", "hf", "train"),
    *("bench.peers", "checkpoints.pickled"),
)
NEEDS_NATIVE = ("ops.native", "sampling.choose", "lookup.automaton")


def find_violations(sources: dict[str, str]) -> list[str]:
    """Breaches in `sources`: path below the package ("ops/native.py") to its text."""
    modules = {_module_name(path) for path in sources} | {"_native"}
    violations = []
    for path, text in sorted(sources.items()):
        for line, target in _imports(path, text, modules):
            breach = _breach(_module_name(path), target)
            if breach:
                violations.append(f"{path}:{line}: {breach}")
    return violations


def _module_name(path: str) -> str:
    """Dotted name below the package; "" is the package itself."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: str, text: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, full dotted name of a module) for each import, wherever in the file it stands."""
    package = ["sakiyomi", *path.split("/")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield node.lineno, full if full.removeprefix("sakiyomi.") in modules else source


def _breach(importer: str, target: str) -> str | None:
    if target.split(".")[0] in ("torch", "transformers"):
        return _place_breach(importer, target, NEEDS_TORCH)
    if target.split(".")[0] != "sakiyomi":
        return None
    if target == "sakiyomi._native":
        return _place_breach(importer, target, NEEDS_NATIVE)
    imported = target.removeprefix("sakiyomi").removeprefix(".")
    own, other = importer.split(".")[0], imported.split(".")[0]
    for name in (own, other):
        if name not in LAYER_OF:
            return f"{name!r} is in no layer; add it to design and test"
    if LAYER_OF[other] > LAYER_OF[own]:
        return f"layer {LAYER_OF[own]} imports {target} of layer {LAYER_OF[other]}"
    if LAYER_OF[other] < LAYER_OF[own]:
        return None
    if own == other:
        return _sibling_breach(importer, imported)
    if (SOURCE / own).is_dir() or (SOURCE / other).is_dir():
        return f"{own} and {other} are of one layer and do not import each other"
    return None  # both lie in the package's own folder


def _place_breach(importer: str, target: str, places: tuple[str, ...]) -> str | None:
    allowed = any(importer == place or importer.startswith(f"{place}.") for place in places)
    return None if allowed else f"imports {target}; only {', '.join(places)} may"


def _sibling_breach(importer: str, imported: str) -> str | None:
    folder, *mine = importer.split(".")
    theirs = imported.split(".")[1:]
    if folder not in ALTERNATIVES or not mine:  # a folder's __init__ may gather its files
        return None
    if theirs and (theirs[0] == mine[0] or theirs[0] in ALTERNATIVES[folder]):
        return None
    return f"files of {folder} do not import each other ({imported})"


def _read_package() -> dict[str, str]:
    return {str(path.relative_to(SOURCE).as_posix()): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}


def test_package_keeps_to_its_layers() -> None:
    sources = _read_package()
    assert len(sources) > 10
    assert not find_violations(sources)


LOWER = {"errors.py": "", "types.py": "", "hub.py": "", "ops/base.py": "", "nets/decoder.py": "", "decode.py": ""}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("types.py", "from sakiyomi.decode import step"),
        ("types.py", "import sakiyomi.nets.decoder"),
        ("types.py", "from sakiyomi import decode"),
        ("types.py", "from sakiyomi import LLM"),
        ("types.py", "from . import decode"),
        ("types.py", "from .nets import decoder"),
        ("ops/native.py", "from ..decode import step"),
        ("types.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sakiyomi.decode import step"),
        ("types.py", "def late():\n    from sakiyomi.decode import step"),
        ("cache.py", "from sakiyomi.nets import decoder"),
        ("nets/decoder.py", "from sakiyomi.cache import Rows"),
        ("text/chat.py", "from sakiyomi.sampling.choose import choose"),
        ("text/chat.py", "from sakiyomi.hub import resolve"),
        ("ops/torch.py", "from sakiyomi.ops.native import NativeOps"),
        ("ops/torch.py", "from .native import NativeOps"),
        ("ops/base.py", "from sakiyomi.ops.native import NativeOps"),
        ("drafters/ngram.py", "from sakiyomi.drafters.model import ModelDrafter"),
        ("drafters/ngram.py", "from sakiyomi.drafters import model"),
        ("verify/match.py", "from sakiyomi.verify import block"),
        ("checkpoints/gguf.py", "from sakiyomi.checkpoints.safetensors import read"),
        ("drafters/ngram.py", "import torch"),
        ("nets/decoder.py", "import torch.nn.functional as F"),
        ("decode.py", "from transformers import AutoModel"),
        ("nets/decoder.py", "from sakiyomi import _native"),
        ("nets/decoder.py", "from sakiyomi._native import stack"),
        ("strange.py", "from sakiyomi import errors"),
    ],
)
def test_a_breach_is_found(path: str, text: str) -> None:
    others = {"drafters/model.py": "", "verify/block.py": "", "ops/native.py": ""}
    found = find_violations(LOWER | others | {path: text})
    assert len(found) == 1, found
    assert found[0].startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("types.py", "from sakiyomi.errors import SakiyomiError\nimport numpy"),
        ("decode.py", "from sakiyomi import errors\nfrom .nets.decoder import Decoder"),
        ("ops/torch.py", "import torch\nfrom sakiyomi.ops.base import Ops"),
        ("ops/native/stack.py", "from sakiyomi.ops.native.plan import Plan\nfrom sakiyomi import _native"),
        ("nets/eagle3.py", "from sakiyomi.nets.decoder import Decoder"),
        ("checkpoints/__init__.py", "from sakiyomi.checkpoints.gguf import read"),
        ("llm.py", "from sakiyomi.assemble import make_model"),
        ("__init__.py", "from sakiyomi.llm import LLM"),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    others = {"ops/native/plan.py": "", "checkpoints/gguf.py": "", "llm.py": "", "assemble.py": ""}
    assert not find_violations(LOWER | others | {path: text})
