"""Finding drafters and verifiers by name, and reading their options.

A built-in is a module of its package and is called like its file; a third party joins by an entry point of the group
`sakiyomi.drafters` or `sakiyomi.verifiers` that names the class. Either has a nested keyword-only dataclass `Config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import types
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from sakiyomi.errors import ParameterError, UnknownNameError

MAX_DRAFT_TOKENS = 1024
"""Nodes of a draft that a built-in drafter may be asked for: far beyond what ever pays, near enough to stay quick."""


def list_names(package: str, group: str) -> list[str]:
    """Names of all plug-ins: the modules of `package` and the entry points of `group`."""
    modules = (module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))
    return sorted({*modules, *(entry.name for entry in entry_points(group=group))})


def find_class(package: str, group: str, kind: str, name: str) -> Any:
    """The class that is called `name`.

    Raises:
        UnknownNameError: listing the known names.
    """
    known = list_names(package, group)
    if name not in known:
        raise UnknownNameError(f"unknown {kind} {name!r}{suggest(name, known)}; known are {', '.join(known)}.")
    for entry in entry_points(group=group):
        if entry.name == name:
            return entry.load()
    module = importlib.import_module(f"{package}.{name}")
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "Config")
    )


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """Read `name:key=value,key=value`.

    Raises:
        ParameterError: for a part that is not key=value.
    """
    name, _, rest = text.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ParameterError(f"cannot read the option {part!r} in {text!r}; write name:key=value,key=value.")
        options[key.strip()] = value.strip()
    return name.strip(), options


def make_config(owner: str, config: type, options: Mapping[str, Any]) -> Any:
    """Build a Config from options, whose values may be texts.

    Args:
        owner: whose options these are, for messages.

    Raises:
        ParameterError: for an unknown option (the known ones are listed), a missing one, or a value of a wrong type.
    """
    hints = typing.get_type_hints(config, vars(importlib.import_module(config.__module__)))
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}
    for key in options:
        if key not in fields:
            known = ", ".join(fields) or "none"
            raise ParameterError(f"{owner} has no option {key!r}{suggest(key, list(fields))}; its options: {known}.")
    for key, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if not has_default and key not in options:
            raise ParameterError(f"{owner} needs the option {key!r}; write {owner}:{key}=...")
    return config(**{key: _convert(f"{owner}: {key}", hints[key], value) for key, value in options.items()})


def check_bounds(name: str, value: int, lowest: int, highest: int) -> None:
    """Refuse an option of a Config outside its range.

    Raises:
        ParameterError: naming the option, its value and what is allowed.
    """
    if not lowest <= value <= highest:
        raise ParameterError(f"{name}={value} is not allowed; give {lowest} to {highest}.")


def check_growth(config: Any) -> None:
    """Refuse what a Config says wrongly of the drafts to grow; options that it lacks or leaves None pass.

    Raises:
        ParameterError: for num_speculative_tokens, width, max_nodes, min_confidence or draw.
    """
    for name in ("num_speculative_tokens", "width", "max_nodes"):
        value = getattr(config, name, None)
        if value is not None:
            check_bounds(name, value, 1, MAX_DRAFT_TOKENS)
    if not 0 <= getattr(config, "min_confidence", 0) < 1:
        raise ParameterError(f"min_confidence={config.min_confidence}; give a number from 0 to below 1.")
    if config.draw not in ("auto", "coupled", "independent", "argmax"):
        raise ParameterError(f"draw={config.draw!r} is not allowed; give auto, coupled, independent or argmax.")


def _convert(what: str, hint: Any, value: Any) -> Any:
    """`value` as the type `hint`; texts are read, everything else is checked."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(what, get_args(hint), value)
    if origin is Literal:
        if value not in get_args(hint):
            raise ParameterError(f"{what}={value!r} is not allowed; give one of {', '.join(map(str, get_args(hint)))}.")
        return value
    if hint is bool and isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise ParameterError(f"{what}={value!r} is not allowed; give true or false.")
        return value.lower() == "true"
    if hint in (int, float) and isinstance(value, str):
        try:
            return hint(value)
        except ValueError:
            raise ParameterError(f"{what}={value!r} is not allowed; give a number.") from None
    if hint in (int, float, str, bool) and not _is_a(value, hint):
        raise ParameterError(f"{what}={value!r} is not allowed; give a value of type {hint.__name__}.")
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(value, str) and hint not in (str, Any, object):
        raise ParameterError(f"{what}={value!r} is not allowed: no text can express it; give it from Python.")
    if (hint is Callable or origin is Callable) and not callable(value):
        raise ParameterError(f"{what}={value!r} is not allowed; give a function.")
    return value


def _convert_union(what: str, hints: tuple[Any, ...], value: Any) -> Any:
    """`value` as the first of several types that takes it; "none" is None where that is one of them."""
    if type(None) in hints and (value is None or value == "none"):
        return None
    refusal = None
    for hint in hints:
        if hint is type(None):
            continue
        try:
            return _convert(what, hint, value)
        except ParameterError as error:
            refusal = refusal or error
    assert refusal is not None, "a union has members"
    raise refusal


def _is_a(value: Any, hint: type) -> bool:
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def suggest(name: str, known: list[str]) -> str:
    """A hint at the known name that is closest, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
