"""Recipes: one TOML file says how a drafter is made, from the text to what is measured."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from sakiyomi.errors import ParameterError
from sakiyomi.plugins import make_config, suggest
from sakiyomi.train.capture import CaptureConfig
from sakiyomi.train.data import DataConfig
from sakiyomi.train.export import ExportConfig
from sakiyomi.train.measure import MeasureConfig

SECTIONS = ("data", "capture", "fit", "measure", "export")
KEYS = ("drafter", "fit_with", *SECTIONS)
Fit = Callable[..., Path]
"""`fit(recipe, shards, target, folder, report, announce) -> Path`: from the section [fit], the documents and the
target's model to a drafter file in the folder, telling what it will take before it begins. It may be killed and called
again."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a drafter is made.

    Attributes:
        drafter: its name, as `--drafter` takes it.
        fit_with: the function that fits it, "module:name" (see `Fit`).
        fit: what that function reads.
    """

    drafter: str
    fit_with: str
    data: DataConfig = field(default_factory=DataConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    fit: Mapping[str, Any] = field(default_factory=dict)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_fit(self) -> Fit:
        """The function that fits the drafter.

        Raises:
            ParameterError: there is none of that name.
        """
        module, _, name = self.fit_with.partition(":")
        try:
            found: Fit = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            if isinstance(error, ImportError) and getattr(error, "name", None) == "torch":
                raise
            raise ParameterError(
                f"fit_with={self.fit_with!r} names no function ({error}); write module:function."
            ) from error
        return found


def list_recipes() -> list[str]:
    """The drafters that a recipe comes with the package for."""
    folder = files("sakiyomi.train") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_recipe(drafter: str, path: Path | None = None, settings: Sequence[str] = ()) -> Recipe:
    """The package's recipe of a drafter, with what a file of the user's and single settings change in it.

    Args:
        path: a TOML file with the same keys; it need not hold all of them.
        settings: "section.key=value" each, the value as TOML writes it or a plain word.

    Raises:
        ParameterError: an unknown drafter, key or value.
    """
    known = list_recipes()
    content: dict[str, Any] = {"drafter": drafter}
    if drafter in known:
        content |= _parse((files("sakiyomi.train") / "recipes" / f"{drafter}.toml").read_text("utf-8"), drafter)
    elif path is None:
        raise ParameterError(
            f"there is no recipe for a drafter {drafter!r}{suggest(drafter, known)}; known are {', '.join(known)}; for "
            "one of your own give --config."
        )
    if path is not None:
        _overlay(content, _read_file(path))
    for setting in settings:
        _overlay(content, _read_setting(setting))
    return _build(content)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"the recipe {path} cannot be read ({error}); check the path.") from error


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(f"the recipe {name} is no valid TOML ({error}).") from error


def _read_setting(setting: str) -> dict[str, Any]:
    name, equals, value = setting.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot or section not in SECTIONS:
        raise ParameterError(f"--set {setting} is not allowed; write section.key=value, section {_or(SECTIONS)}.")
    try:
        return {section: {key: tomllib.loads(f"value = {value}")["value"]}}
    except tomllib.TOMLDecodeError:
        return {section: {key: value.strip()}}


def _overlay(content: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if key not in KEYS:
            raise ParameterError(f"a recipe has no key {key!r}{suggest(key, list(KEYS))}; known are {', '.join(KEYS)}.")
        if key not in SECTIONS:
            content[key] = value
        elif isinstance(value, Mapping):
            content[key] = {**content.get(key, {}), **value}
        else:
            raise ParameterError(f"{key}={value!r} is not allowed in a recipe; write a section [{key}].")


def _build(content: Mapping[str, Any]) -> Recipe:
    sections = {name: _tuples(content.get(name, {})) for name in SECTIONS}
    if not isinstance(content.get("fit_with"), str):
        raise ParameterError('a recipe needs fit_with = "module:function"; see the recipes in sakiyomi/train/recipes.')
    return Recipe(
        drafter=str(content["drafter"]),
        fit_with=content["fit_with"],
        data=make_config("data", DataConfig, sections["data"]),
        capture=make_config("capture", CaptureConfig, sections["capture"]),
        fit=sections["fit"],
        measure=make_config("measure", MeasureConfig, sections["measure"]),
        export=make_config("export", ExportConfig, sections["export"]),
    )


def _tuples(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in section.items()}


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
