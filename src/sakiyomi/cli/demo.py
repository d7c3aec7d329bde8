"""`sakiyomi demo`: one prompt answered twice, plainly and with speculation, and the two compared."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Annotated

import typer

from sakiyomi.cli import loading
from sakiyomi.cli.generate import check_prompt
from sakiyomi.cli.options import Debug, EngineOptions, expand_options
from sakiyomi.cli.show import disarm, print_note, print_stream
from sakiyomi.errors import SakiyomiError
from sakiyomi.params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from sakiyomi.llm import LLM
    from sakiyomi.results import RequestOutput

PROMPT = """\
Copy this text word for word:

The lighthouse of Kozushima stands on the western cliff, thirty-two metres above the sea. It was lit for the first time
in the spring of 1911, and its lamp has not gone out since. Visitors climb one hundred and four steps to reach the
gallery, from where the whole island can be seen on a clear day. A ticket costs three dollars for adults and one dollar
for children, and the keeper sells both at the gate."""


@expand_options
def demo(
    engine: EngineOptions,
    prompt: Annotated[str, typer.Argument(help="The prompt of both answers.", show_default=False)] = PROMPT,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")] = 160,
    debug: Debug = False,
) -> None:
    """Answer one prompt twice, plainly and with speculation, and show that the tokens are the same."""
    from rich.console import Console

    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    prompt = check_prompt(prompt)
    speculative = loading.load_llm(engine)
    plain = loading.share_plainly(speculative)
    console = Console(highlight=False, soft_wrap=True)
    console.rule("the prompt")
    console.print(disarm(prompt), markup=False)
    outputs = []
    for title, llm in (("plain decoding", plain), (f"speculation: {engine.drafter}", speculative)):
        _warm_up(llm)
        console.rule(title)
        outputs.append(print_stream(llm.stream(loading.render_prompt(llm, prompt), params)))
        print(flush=True)
    _compare(console, *outputs)
    if prompt == PROMPT:
        print_note('Copying suits drafters that look texts up; try `sakiyomi demo "a prompt of yours"`.')


def _warm_up(llm: LLM) -> None:
    """A few tokens first, so that the times are of decoding and not of reading the file."""
    list(llm.stream(loading.render_prompt(llm, "Say hello."), SamplingParams(temperature=0, max_tokens=4)))


def _compare(console: Console, plain: RequestOutput, speculative: RequestOutput) -> None:
    from rich.table import Table

    table = Table("", "plain", "speculative")
    columns = (plain, speculative)
    table.add_row("tokens", *(str(len(output.outputs[0].token_ids)) for output in columns))
    table.add_row("forward passes", *(str(output.speculation.num_steps) for output in columns))
    table.add_row("tokens per pass", *(f"{output.speculation.mean_acceptance_length:.2f}" for output in columns))
    table.add_row("seconds", *(f"{output.timing.decode_s:.2f}" for output in columns))
    table.add_row("tokens/s", *(f"{output.timing.tokens_per_s:.1f}" for output in columns))
    console.print(table)
    first, second = (output.outputs[0].token_ids for output in columns)
    if first != second:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
        raise SakiyomiError(f"the two answers differ from token {same} on, which must not be; please report it.")
    console.print(
        f"The same {len(first)} token ids, {plain.timing.decode_s / speculative.timing.decode_s:.2f} times as fast."
    )
