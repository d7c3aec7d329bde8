"""Options from texts: what a text can express is read, what it cannot is refused, and sizes have bounds."""

from __future__ import annotations

import dataclasses
import logging
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from sakiyomi.assemble import check_drafter, make_verifier
from sakiyomi.drafters.planted import PlantedDrafter
from sakiyomi.errors import ParameterError
from sakiyomi.plugins import find_class, list_names, make_config
from sakiyomi.tree import Draft


@dataclass(frozen=True, kw_only=True)
class Config:
    whole: int = 1
    part: float = 0.5
    name: str = "a"
    is_on: bool = False
    kind: Literal["x", "y"] = "x"
    place: Path | None = None
    either: int | str = 0
    anything: Any = None
    function: Callable[[int], int] | None = None
    plain_function: Callable[..., Any] = print
    numbers: Sequence[int] = ()
    table: dict[str, int] | None = None
    draft: Draft | None = None


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("whole", "7", 7),
        ("part", "7", 7.0),
        ("name", "7", "7"),
        ("is_on", "True", True),
        ("kind", "y", "y"),
        ("place", "a/b", Path("a/b")),
        ("place", "none", None),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("anything", "7", "7"),
        ("function", "none", None),
        ("draft", "none", None),
    ],
)
def test_texts_are_read(key: str, text: str, value: Any) -> None:
    found = getattr(make_config("owner", Config, {key: text}), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, "foo") for key in ("function", "plain_function", "numbers", "table", "draft")),
        *((key, "foo") for key in ("whole", "part", "is_on", "kind")),
        *((key, 7) for key in ("name", "function", "plain_function")),
        ("whole", 0.5),
        ("plain_function", "none"),
    ],
)
def test_what_is_of_a_wrong_kind_is_refused_with_its_name(key: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=rf"^owner: {key}={value!r} is not allowed"):
        make_config("owner", Config, {key: value})


def every_option(package: str, group: str, kind: str) -> list[tuple[str, str, Any]]:
    """(name, option, type) of all options of all plug-ins."""
    found = []
    for name in list_names(package, group):
        config = find_class(package, group, kind, name).Config
        hints = typing.get_type_hints(config)
        found += [(name, field.name, hints[field.name]) for field in dataclasses.fields(config)]
    return found


DRAFTER_OPTIONS = every_option("sakiyomi.drafters", "sakiyomi.drafters", "drafter")
SIZES = [(name, key) for name, key, hint in DRAFTER_OPTIONS if hint is int]
NO_TEXTS = [
    (name, key)
    for name, key, hint in DRAFTER_OPTIONS
    if typing.get_origin(hint) is not None and str not in typing.get_args(hint)
]


def write_spec(name: str, key: str, value: str) -> str:
    """A drafter's spec with one option, and those that it must have."""
    needed = {"model": ",model=x", "combined": ",parts=ngram"}
    return f"{name}:{key}={value}{needed.get(name, '')}"


@pytest.mark.parametrize(("name", "key"), SIZES)
@pytest.mark.parametrize("value", ["-1", "0", "300000000"])
def test_every_size_of_a_drafter_has_bounds(name: str, key: str, value: str) -> None:
    with pytest.raises(ParameterError, match=rf"{key}={value}") as caught:
        check_drafter(write_spec(name, key, value))
    assert "\n" not in str(caught.value)


def test_the_bounds_are_known() -> None:
    assert ("ngram", "max_ngram") in SIZES
    for spec in ("ngram:max_ngram=64", "suffix:width=1024", "model:model=x,max_nodes=1024"):
        check_drafter(spec)
    for spec in ("ngram:max_ngram=65", "suffix:width=1025", "suffix:doubt=inf", "suffix:store_mb=nan"):
        with pytest.raises(ParameterError, match="give"):
            check_drafter(spec)


@pytest.mark.parametrize(("name", "key"), NO_TEXTS)
def test_no_text_passes_for_what_is_no_text(name: str, key: str) -> None:
    with pytest.raises(ParameterError, match=f"{key}='foo'"):
        check_drafter(write_spec(name, key, "foo"))


def test_verifiers_options_are_read_alike() -> None:
    for spec in ("typical:lossy=foo", "relaxed:lossy=true,top_n=foo", "lenient:lossy=true,lenience=foo"):
        with pytest.raises(ParameterError, match="='foo' is not allowed"):
            make_verifier(spec)


def test_planted_without_a_script_says_that_it_drafts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        PlantedDrafter(PlantedDrafter.Config(script=lambda sequence, budget: Draft.empty()))
        assert caplog.messages == []
        PlantedDrafter()
    assert "drafts nothing" in caplog.text
