"""`sakiyomi generate`: one prompt, one answer."""

from __future__ import annotations

import codecs
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.options import (
    Debug,
    EngineOptions,
    MaxTokens,
    Misuse,
    SamplingOptions,
    Speculation,
    System,
    expand_options,
    parse_speculation,
)
from sakiyomi.cli.show import print_stream, print_summary
from sakiyomi.errors import ContextLengthError, ParameterError

if TYPE_CHECKING:
    from sakiyomi.results import RequestOutput


@expand_options
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - or nothing reads it from standard input.", show_default=False)
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    max_tokens: MaxTokens = None,
    system: System = None,
    prediction: Annotated[
        Path | None, typer.Option("--prediction", help="A file with what the answer is expected to be close to.")
    ] = None,
    speculation: Speculation = "on",
    raw: Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt.

    The model's chat template is applied where it has one. In a terminal, tokens that the drafter guessed are in colour.
    """
    if raw and system is not None:
        raise Misuse("--system needs the chat template that --raw leaves out; drop one of them.")
    params = sampling.to_params(max_tokens=max_tokens)
    wishes: dict[str, Any] = {"speculation": parse_speculation(speculation), "prediction": _read_prediction(prediction)}
    text = _read_prompt(prompt, file)
    llm = loading.load_llm(engine)
    stream = llm.stream(text if raw else loading.render_prompt(llm, text, system), params, **wishes)
    if as_json:
        output = next(piece.output for piece in stream if piece.output is not None)
        print(_dump_json(to_json(output)))
        return
    output = print_stream(stream)
    print(flush=True)
    print_summary(output, temperature=params.temperature)


def to_json(output: RequestOutput) -> dict[str, Any]:
    """What `--json` prints. The keys are frozen: new ones may be added, none may go."""
    completion, stats, timing = output.outputs[0], output.speculation, output.timing
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": output.seed,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(completion.token_ids),
        },
        "speculation": {
            "drafter": stats.drafter,
            "verifier": stats.verifier,
            "is_lossless": stats.is_lossless,
            "verifier_options": stats.verifier_options,
            "num_steps": stats.num_steps,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_lossy_tokens": stats.num_lossy_tokens,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "acceptance_per_position": list(stats.acceptance_per_position),
            "tried_per_position": list(stats.tried_per_position),
        },
        "timing": {
            "load_s": timing.load_s,
            "prefill_s": timing.prefill_s,
            "decode_s": timing.decode_s,
            "draft_s": timing.draft_s,
            "tokens_per_s": timing.tokens_per_s,
        },
    }


def _dump_json(content: dict[str, Any]) -> str:
    """One line of JSON that loses nothing in stdout's encoding and cannot steer a terminal."""
    text = json.dumps(content, ensure_ascii=not _is_utf8(sys.stdout.encoding))
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _is_utf8(encoding: str | None) -> bool:
    try:
        return codecs.lookup(encoding or "").name == "utf-8"
    except LookupError:
        return False


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the one place that was named."""
    if prompt is not None and file is not None:
        raise Misuse("give the prompt as an argument or with --file, not both.")
    if prompt is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise Misuse("there is no prompt: give one as an argument, with --file, or through a pipe.")
    if prompt is not None and prompt != "-":
        text = prompt
    else:
        # Like $(...) in a shell, one line's end at the end is not part of the prompt.
        text = _read_text("prompt", file).removesuffix("\n").removesuffix("\r")
    return check_prompt(text)


def check_prompt(text: str) -> str:
    """`text` itself, if it can be answered.

    Raises:
        ParameterError: bytes of the command line that are no text.
        ContextLengthError: an empty prompt.
    """
    if not _is_unicode(text):
        raise ParameterError("the prompt is not valid UTF-8; mend it, or check the terminal's encoding.")
    if not text.strip():
        raise ContextLengthError("the prompt is empty; give a text of at least one character.")
    return text


def _read_prediction(file: Path | None) -> str | None:
    return None if file is None else _read_text("prediction", file)


def _read_text(what: str, file: Path | None) -> str:
    name = "standard input" if file is None else str(file)
    if file is None and sys.stdin is None:
        raise ParameterError(f"standard input is closed; give the {what} in another way.")
    try:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
        return data.decode("utf-8").removeprefix("\ufeff")  # the mark that some editors put in front
    except OSError as error:
        raise ParameterError(f"cannot read the {what} from {name} ({error.strerror}); check the path.") from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{name} is not valid UTF-8 (byte {error.start}); give a text in UTF-8.") from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
