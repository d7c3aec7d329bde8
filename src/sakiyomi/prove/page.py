"""The certificate for people: tables for the terminal, and one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from html import escape
from math import inf, log, log10

from sakiyomi.prove.certificate import Certificate
from sakiyomi.prove.identity import IdentityResult
from sakiyomi.prove.law import ALPHA, POWER, Context, LawResult, PrefixResult
from sakiyomi.prove.sequential import e_to_text

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 300, 56, 36, 12
COLOURS = ("#0a6", "#c22", "#b60", "#729")
MAX_CONTROL_DIFFERENCES = 2
MAX_POWER_OF_TEN = 6.0  # where a curve leaves the picture


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        details: columns that a terminal has no room for.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    details: tuple[int, ...] = ()

    def without_details(self) -> Table:
        kept = [column for column in range(len(self.head)) if column not in self.details]
        return Table(
            self.title,
            tuple(self.head[column] for column in kept),
            tuple(tuple(row[column] for column in kept) for row in self.rows),
        )


def tables(certificate: Certificate, *, is_short: bool = False) -> Iterator[Table]:
    """The evidence; in short without what controls did wrong."""
    if certificate.identity or certificate.identity_controls:
        yield _identity_table(certificate)
    differences = [
        (result, one)
        for result in (*certificate.identity, *certificate.identity_controls)
        for one in result.differences[: MAX_CONTROL_DIFFERENCES if result.error else None]
        if not (is_short and result.error)
    ]
    if differences:
        yield Table(
            "Differences",
            (
                "way",
                "temperature",
                "prompt",
                "position",
                "plain",
                "got",
                "top-2 gap",
                "row moved by",
                "limit",
                "finding",
            ),
            tuple(
                (
                    _name(result),
                    f"{result.temperature:g}",
                    *(str(value) for value in (one.prompt, one.position, one.plain_token, one.token)),
                    *(f"{value:.3g}" for value in (one.gap, one.change, one.limit)),
                    one.finding,
                )
                for result, one in differences
            ),
        )
    if certificate.noise:
        yield Table(
            "Numeric noise: how far a row moves when the same text is computed plainly in other shapes (logits)",
            ("setting", "shape", "largest change"),
            tuple((name, *shape) for name, noise in certificate.noise.items() for shape in _shapes(noise.shapes)),
        )
    if certificate.law is not None:
        yield _law_table((certificate.law, *certificate.law_controls))
        yield _prefix_table(certificate, certificate.law)


def summarize(certificate: Certificate) -> list[str]:
    """The verdict in a few lines."""
    lines = [f"Claim: {certificate.claim}.", f"{certificate.outcome.capitalize()}: {certificate.reason}."]
    law = certificate.law
    if law is not None:
        lines.append(
            f"A correct verifier is refuted with probability {ALPHA:g} at most, whenever one looks (e-value of "
            f"{1 / ALPHA:g}); this run reached {e_to_text(law.log_e)} in {law.num_draws} draws."
        )
        if law.first_error is not None:
            lines.append(f"The verifier emitted {law.first_error}.")
        lines += _describe_power(law)
    lines += _describe_controls(certificate)
    for noise in list(certificate.noise.values())[:1]:
        lines.append(f"Rounding is what moves a row by at most {noise.limit:.3g} (measured {noise.measured:.3g}).")
    return lines


def _describe_controls(certificate: Certificate) -> Iterator[str]:
    seen = [(one.error or "", one.finding == "fault") for one in certificate.identity_controls]
    seen += [(f"{one.name}: {one.error}", one.is_rejected) for one in certificate.law_controls]
    for error, is_seen in seen:
        yield (
            f"Control {error}: "
            + ("rejected, as it must be." if is_seen else "not rejected; with this drafter it errs too little to show.")
        )


def _describe_power(law: LawResult) -> Iterator[str]:
    if law.least_deviation is not None:
        yield (
            f"With probability {POWER:g} it would have noticed a law of the first token that is off by "
            f"{law.least_deviation:.1%} at any one context (total variation over the cells below)."
        )
    if law.least_tilt is not None:
        yield (
            f"With probability {POWER:g} it would have noticed tokens that the drafter over-rates coming too often by "
            f"{law.least_tilt:.1%} everywhere."
        )


def provenance_rows(certificate: Certificate) -> list[tuple[str, str]]:
    """What was run."""
    hidden = ("prompt_token_ids",)
    values = certificate.provenance.items()
    return [(key.replace("_", " "), _text(value)) for key, value in values if key not in hidden and value is not None]


def _text(value: object) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _name(result: IdentityResult) -> str:
    return result.way if result.error is None else f"control {result.error.partition(':')[0]}"


def _shapes(shapes: Seq[tuple[str, float]]) -> list[tuple[str, str]]:
    return [(name, f"{change:.3g}") for name, change in shapes]


def _identity_table(certificate: Certificate) -> Table:
    return Table(
        "Tokens and rows of logits against plain decoding",
        ("way", "T", "budget", "batch", "same texts", "same rows", "accepted", "per step", "finding"),
        tuple(
            (
                _name(result),
                f"{result.temperature:g}",
                "own" if result.budget is True else "0" if result.budget is False else str(result.budget),
                str(result.batch),
                f"{result.num_same_texts} of {result.num_prompts}",
                f"{result.num_same_rows} of {result.num_rows}",
                f"{result.num_accepted_tokens} of {result.num_draft_tokens}",
                f"{result.mean_acceptance_length:.2f}",
                result.finding if result.error is None else _control_finding(result.finding == "fault"),
            )
            for result in (*certificate.identity, *certificate.identity_controls)
        ),
        details=(7,),
    )


def _law_table(results: Seq[LawResult]) -> Table:
    return Table(
        "Draws against the target's own laws",
        ("verifier", "draws", "accepted", "largest e-value", "limit", "finding"),
        tuple(
            (
                result.name if result.error is None else f"control {result.name}",
                str(result.num_draws),
                f"{result.num_accepted_tokens} of {result.num_draft_tokens}",
                e_to_text(result.log_e),
                f"{1 / ALPHA:g}",
                ("failed" if result.is_rejected else "passed")
                if result.error is None
                else _control_finding(result.is_rejected),
            )
            for result in results
        ),
    )


def _control_finding(is_seen: bool) -> str:
    return "rejected" if is_seen else "not rejected"


def _prefix_table(certificate: Certificate, law: LawResult) -> Table:
    def row(result: PrefixResult) -> tuple[str, ...]:
        total = max(sum(result.counts), 1)
        return (
            f"{result.context}: {_describe_context(certificate.contexts[result.context])}",
            " ".join(map(str, result.prefix)) or "(start)",
            str(sum(result.counts)),
            " ".join(f"{p:.3f}" for p in result.probs),
            " ".join(f"{count / total:.3f}" for count in result.counts),
            e_to_text(result.log_e),
            "" if result.least_deviation is None else f"{result.least_deviation:.1%}",
        )

    return Table(
        "The verifier's draws behind each beginning of an answer, and the least deviation that they would show",
        ("context", "behind", "draws", "expected", "drawn", "e-value", "least TV"),
        tuple(row(result) for result in law.prefixes),
        details=(3, 4),
    )


# ---------------------------------------------------------------------------------------------- HTML

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222;
       background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.05rem; margin-top: 2rem }
.badge { color: #fff; padding: .1em .6em; border-radius: .3em; text-transform: uppercase }
.proven { background: #087443 } .refuted { background: #b3261e } .void { background: #8a5a00 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { text-align: left; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
td.word { overflow-wrap: anywhere } svg { max-width: 100%; height: auto }
"""


def render(certificate: Certificate) -> str:
    """One HTML page with all the evidence; it loads nothing."""
    outcome = certificate.outcome
    parts = [
        f'<h1>Certificate of losslessness <span class="badge {outcome}">{outcome}</span></h1>',
        *(f"<p>{escape(line)}</p>" for line in summarize(certificate)),
    ]
    if certificate.law is not None:
        parts += ["<h2>The test over the draws</h2>", _plot((certificate.law, *certificate.law_controls))]
    parts += [_table(table) for table in tables(certificate)]
    rows = tuple((name, value) for name, value in provenance_rows(certificate))
    parts += [_table(Table("What was run", ("", ""), rows))]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>sakiyomi certificate: {outcome}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _describe_context(context: Context) -> str:
    return f"{context.name}, {len(context.tokens)} tokens"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    body = "\n".join(
        "<tr>" + "".join(f'<td class="word">{escape(cell)}</td>' for cell in row) + "</tr>" for row in table.rows
    )
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _plot(results: Seq[LawResult]) -> str:
    """log10 of the e-value over draws, on a logarithmic axis since controls end early."""
    num_draws = max(result.num_draws for result in results)
    low, high = -2.0, MAX_POWER_OF_TEN

    def x(draws: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * log(max(draws, 1)) / max(log(num_draws), 1e-9)

    def y(log_e: float) -> float:
        value = high if log_e == inf else min(max(log_e / log(10), low), high)
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="e-value over draws" font-size="12">']
    for power in range(int(low), int(high) + 1, 2):
        parts.append(_line(x(1), y(power * log(10)), WIDTH - 10, "#ddd"))
        parts.append(f'<text x="{LEFT - 8}" y="{y(power * log(10)) + 4:.1f}" text-anchor="end">1e{power}</text>')
    for power in range(int(log10(num_draws)) + 1):
        parts.append(f'<text x="{x(10**power):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{10**power}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 3}" text-anchor="middle">draws</text>')
    parts.append(_line(x(1), y(log(1 / ALPHA)), WIDTH - 10, "#222", ' stroke-dasharray="5 4"'))
    label = f"rejected from {1 / ALPHA:g} on"
    parts.append(f'<text x="{WIDTH - 12}" y="{y(log(1 / ALPHA)) - 5:.1f}" text-anchor="end">{label}</text>')
    for number, result in enumerate(results):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(draws):.1f},{y(log_e):.1f}" for draws, log_e in ((1, 0.0), *result.curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        label = result.name if result.error is None else f"control {result.name}"
        parts.append(f'<text x="{LEFT + 12}" y="{TOP + 16 + 16 * number}" fill="{colour}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"])


def _line(x: float, y: float, end: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="{colour}"{more}/>'
