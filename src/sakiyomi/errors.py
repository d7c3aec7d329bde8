"""Every error that sakiyomi raises on purpose.

    SakiyomiError                     one line: what was received, what is allowed, what to do
    ├── ParameterError (ValueError)   a parameter outside its range, an unknown option
    ├── UnknownNameError (ValueError) an unknown model, drafter, verifier or option name
    ├── ContextLengthError (ValueError) a prompt that does not fit the context
    ├── CheckpointError               a file that is missing, truncated, mis-shaped or of an unsupported kind
    │   └── UnsupportedModelError     a sound model of a kind that this backend does not know
    ├── VocabularyError (ValueError)  target and drafter have no tokens in common, or no tokenizer to compare
    ├── DownloadError                 a model that could not be fetched or stored
    └── MissingExtraError (ImportError) an optional part that is not installed, or native kernels that were not built

A user's mistake raises one of these; an `assert` marks our own.
"""

from __future__ import annotations


class SakiyomiError(Exception):
    """Base of all errors raised on purpose; its text is one line meant for a person."""


class ParameterError(SakiyomiError, ValueError):
    """A parameter outside its allowed range, or an option that does not exist."""


class UnknownNameError(SakiyomiError, ValueError):
    """A name that no model, drafter or verifier carries; the text lists the known ones."""


class ContextLengthError(SakiyomiError, ValueError):
    """A prompt that is empty or longer than the model's context."""


class CheckpointError(SakiyomiError):
    """A model file that is missing, damaged, mis-shaped or of an unsupported kind."""


class UnsupportedModelError(CheckpointError):
    """A sound model of a kind that a backend does not know; another backend may."""


class VocabularyError(SakiyomiError, ValueError):
    """Two models whose tokens cannot be brought together."""


class DownloadError(SakiyomiError):
    """A model that could not be fetched, or a cache folder that cannot be written."""


class MissingExtraError(SakiyomiError, ImportError):
    """An optional dependency, or the native extension, that is not installed."""


def advise_extra(extra: str) -> str:
    """How to install an extra, for whoever has the package and for whoever has a clone."""
    return f'pip install "sakiyomi[{extra}]", or in a clone of the repository pip install ".[{extra}]"'
