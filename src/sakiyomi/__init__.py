"""sakiyomi (先読み, "reading ahead"): speculative decoding as a product.

from sakiyomi import LLM, SamplingParams
llm = LLM("smollm2")
print(llm.generate("The sky is", SamplingParams(max_tokens=32))[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sakiyomi.errors import SakiyomiError
    from sakiyomi.llm import LLM
    from sakiyomi.params import SamplingParams
    from sakiyomi.results import CompletionOutput, RequestOutput, StreamPiece
    from sakiyomi.session import ChatSession
    from sakiyomi.tree import Draft

__version__ = "0.1.0"

_HOMES = {
    "LLM": "sakiyomi.llm",
    "ChatSession": "sakiyomi.session",
    "CompletionOutput": "sakiyomi.results",
    "Draft": "sakiyomi.tree",
    "RequestOutput": "sakiyomi.results",
    "SakiyomiError": "sakiyomi.errors",
    "SamplingParams": "sakiyomi.params",
    "StreamPiece": "sakiyomi.results",
}

__all__ = [
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


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that the command line starts fast."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sakiyomi' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
