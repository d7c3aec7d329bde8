"""The options that several commands share, each declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from sakiyomi.hub import DEFAULT_MODEL
from sakiyomi.params import SamplingParams

Result = TypeVar("Result")


class Misuse(typer.BadParameter):
    """A command line whose parts do not go together; ends like typer's own complaints."""

    def format_message(self) -> str:
        return self.message


def _option(*names: str, help: str, panel: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


ENGINE, SAMPLING = "Engine", "Choice of tokens"

MaxTokens = Annotated[
    int | None, _option("--max-tokens", "-n", help="New tokens at most; by default the context alone is the limit.")
]
System = Annotated[str | None, _option("--system", "-s", help="The system message, for the chat template.")]
Speculation = Annotated[
    str, _option("--speculation", help="on, off, or how many tokens to draft at most; the answer stays the same.")
]
Debug = Annotated[bool, _option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How the model is loaded."""

    model: Annotated[
        str, _option("--model", "-m", help="smollm2, a folder, a .gguf file or a hub id.", panel=ENGINE)
    ] = DEFAULT_MODEL
    dtype: Annotated[str | None, _option("--dtype", help="Number format of the weights.", panel=ENGINE)] = None
    device: Annotated[str, _option("--device", help="Where to compute: cpu, cuda, ...", panel=ENGINE)] = "cpu"
    backend: Annotated[
        str, _option("--backend", help="native (our kernels), torch, hf (transformers), or auto.", panel=ENGINE)
    ] = "auto"
    threads: Annotated[int | None, _option("--threads", help="Threads; by default one per core.", panel=ENGINE)] = None
    max_model_len: Annotated[
        int | None, _option("--max-model-len", help="Positions of the context; by default the model's.", panel=ENGINE)
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(LoadOptions):
    """How the model is loaded and run."""

    drafter: Annotated[
        str,
        _option("--drafter", "-d", help="Who guesses: NAME or NAME:key=value,key=value; none is plain.", panel=ENGINE),
    ] = "auto"
    verifier: Annotated[
        str, _option("--verifier", help="The rule that accepts guesses: NAME or NAME:key=value.", panel=ENGINE)
    ] = "match"
    budget: Annotated[
        str,
        _option("--budget", help="How much is drafted: adaptive, fixed, or auto (adaptive for auto).", panel=ENGINE),
    ] = "auto"


def parse_speculation(text: str) -> bool | int:
    """`--speculation`: on, off, or how many tokens to draft at most."""
    if text in ("on", "off"):
        return text == "on"
    if not text.isdecimal():
        raise Misuse(f"--speculation {text} is not allowed; give on, off or a number of tokens.")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How each token is chosen."""

    temperature: Annotated[
        float, _option("--temperature", "-t", help="0 takes the most probable token.", panel=SAMPLING)
    ] = 0.0
    top_p: Annotated[float, _option("--top-p", help="Keep this share of the probability.", panel=SAMPLING)] = 1.0
    top_k: Annotated[int, _option("--top-k", help="Keep the k most probable tokens; 0: all.", panel=SAMPLING)] = 0
    min_p: Annotated[
        float, _option("--min-p", help="Drop tokens below this fraction of the most probable.", panel=SAMPLING)
    ] = 0.0
    seed: Annotated[int | None, _option("--seed", help="Seed of the noise; drawn if absent.", panel=SAMPLING)] = None
    stop: Annotated[list[str] | None, _option("--stop", help="Text that ends the answer; repeat.", panel=SAMPLING)] = (
        None
    )
    presence_penalty: Annotated[float, _option("--presence-penalty", help="-2 to 2.", panel=SAMPLING)] = 0.0
    frequency_penalty: Annotated[float, _option("--frequency-penalty", help="-2 to 2.", panel=SAMPLING)] = 0.0
    repetition_penalty: Annotated[
        float, _option("--repetition-penalty", help="Above 0; 1 is none.", panel=SAMPLING)
    ] = 1.0
    min_tokens: Annotated[
        int, _option("--min-tokens", help="No end of the answer before this many tokens.", panel=SAMPLING)
    ] = 0
    ignore_eos: Annotated[bool, _option("--ignore-eos", help="Go on after the model's end.", panel=SAMPLING)] = False

    def to_params(self, **more: Any) -> SamplingParams:
        """The parameters of the request; `more` are those that only one command has."""
        return SamplingParams(**{field.name: getattr(self, field.name) for field in fields(self)}, **more)


def expand_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Let a command take dataclasses of options: typer sees their fields, the command gets the dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += _fields_as_parameters(hints[name])
        else:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    def expanded(**values: Any) -> Result:
        built = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**values, **built)

    expanded.__name__, expanded.__doc__ = command.__name__, command.__doc__
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _fields_as_parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]
