"""The public names, pinned: adding or removing one is a decision and not an accident."""

from __future__ import annotations

from importlib.metadata import version

import pytest

import sakiyomi

PUBLIC = [
    "LLM",
    "ChatSession",
    "CompletionOutput",
    "Draft",
    "RequestOutput",
    "SakiyomiError",
    "SamplingParams",
    "StreamPiece",
    "__version__",
]


def test_public_names() -> None:
    assert sorted(sakiyomi.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(sakiyomi, name) is not None


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="Sequence"):
        _ = sakiyomi.Sequence


def test_one_version() -> None:
    try:
        installed = version("sakiyomi")
    except ModuleNotFoundError:
        pytest.skip("sakiyomi runs from its sources, not installed")
    assert sakiyomi.__version__ == installed
