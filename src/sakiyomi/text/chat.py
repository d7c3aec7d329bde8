"""ChatTemplate: messages to a prompt by the model's own Jinja template, which is untrusted code from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from sakiyomi.errors import CheckpointError, ParameterError
from sakiyomi.types import TokenizerData

if TYPE_CHECKING:
    from jinja2 import Environment


class ChatTemplate:
    """A chat template in the dialect of transformers' `apply_chat_template`.

    It runs in Jinja's immutable sandbox and sees plain copies of the messages only.
    """

    def __init__(self, data: TokenizerData) -> None:
        """Compile the template of a checkpoint.

        Raises:
            CheckpointError: there is none, or it is no valid Jinja.
        """
        from jinja2 import TemplateSyntaxError

        if data.chat_template is None:
            raise CheckpointError("the model has no chat template; use raw prompts.")
        try:
            self._template = _make_environment().from_string(data.chat_template)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"the model's chat template is not valid (line {error.lineno}: {error.message}); use raw prompts."
            ) from None
        except (SyntaxError, ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
            # What Jinja makes of it is too large or too deep for Python.
            raise CheckpointError(
                f"the model's chat template cannot be compiled ({_one_line(error)}); use raw prompts."
            ) from None
        self._tokens = {f"{role}_token": _find_token(data, role) for role in ("bos", "eos")}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt for `messages`; encode it with `add_special_tokens=False`, it holds the special tokens already.

        Args:
            messages: dicts with "role" and "content", oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: JSON schemas of functions, for templates that know tools.

        Raises:
            ParameterError: the messages are malformed, or the template refuses them.
            CheckpointError: the template itself fails or tries what the sandbox forbids.
        """
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError

        plain = [_check_message(message) for message in messages]
        try:
            return self._template.render(
                messages=plain,
                tools=None if tools is None else _copy_plain(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except _RefusalError as error:
            raise ParameterError(f"the chat template refuses these messages: {_one_line(error)}") from None
        except (SecurityError, OverflowError, MemoryError, RecursionError) as error:
            raise CheckpointError(
                f"the model's chat template does what is forbidden ({_one_line(error)}); use raw prompts."
            ) from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise CheckpointError(
                f"the model's chat template fails on these messages ({_one_line(error)}); "
                "change the messages or use raw prompts."
            ) from None


class _RefusalError(Exception):
    """What `raise_exception` in a template raises."""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _find_token(data: TokenizerData, role: str) -> str:
    """The text of the BOS or EOS token, empty where there is none."""
    if data.gguf is not None:
        token_id, tokens = data.gguf.get(f"{role}_token_id"), data.gguf["tokens"]
        return str(tokens[token_id]) if isinstance(token_id, int) and token_id < len(tokens) else ""
    token = data.config.get(f"{role}_token")
    return str((token.get("content") if isinstance(token, Mapping) else token) or "")


# ---------------------------------------------------------------------------------------------- messages


def _check_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ParameterError(f"a chat message is {message!r}; each one is a dict with 'role' and 'content'.")
    # Keys without a value are left out: templates test for presence.
    return {key: _copy_plain(value) for key, value in message.items() if value is not None}


def _copy_plain(value: Any) -> Any:
    """A copy of JSON data, so that a template meets no object with methods of ours."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _copy_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise ParameterError(f"a chat message holds a {type(value).__name__}; only JSON values are allowed.")


# ---------------------------------------------------------------------------------------------- the environment


def _make_environment() -> Environment:
    """Jinja as chat templates expect it: trimmed blocks, loop controls, `generation` blocks, a few functions."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class GenerationBlock(Extension):
        """`{% generation %}` marks the assistant's words for training; here it is transparent."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def make_namespace(*args: Any, **fields: Any) -> Namespace:
        return PlainNamespace(*args, **fields)

    class PlainNamespace(Namespace):
        """A namespace without names that Python or Jinja would call by themselves."""

        def __init__(self, *args: Any, **fields: Any) -> None:
            for name in dict(*args, **fields):
                _refuse_private(name)
            super().__init__(*args, **fields)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"namespace field {name!r}")

    def make_dict(*args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _dump_json
    environment.globals.pop("lipsum", None)
    environment.globals |= {
        "dict": make_dict,
        "namespace": make_namespace,
        "raise_exception": _raise_refusal,
        "strftime_now": _format_now,
    }
    return environment


def _raise_refusal(message: str) -> NoReturn:
    raise _RefusalError(message)


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _dump_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
