"""A picture of a benchmark: for each group of prompts the speed-up of every drafter, with its bounds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from sakiyomi.bench.run import PLAIN, Result, Row
from sakiyomi.errors import MissingExtraError, ParameterError, advise_extra

INCHES_PER_GROUP, HEIGHT, DPI = 1.6, 4.2, 150


def require_matplotlib() -> Any:
    """matplotlib.

    Raises:
        MissingExtraError: naming the extra that brings it.
    """
    try:
        import matplotlib
        import matplotlib.backends.backend_agg
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtraError(
            f"a chart needs matplotlib, which is not installed; run {advise_extra('bench')}."
        ) from error
    return matplotlib


def draw_chart(result: Result, path: Path) -> None:
    """Write the chart as a PNG file.

    Raises:
        MissingExtraError: without matplotlib.
        ParameterError: a file that cannot be written.
    """
    matplotlib = require_matplotlib()
    bars = group_bars(result.rows)
    groups = list(dict.fromkeys(row.group for row in result.rows))
    figure = matplotlib.figure.Figure(
        figsize=(max(6.0, INCHES_PER_GROUP * len(groups) + 1), HEIGHT), layout="constrained"
    )
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / max(len(bars), 1)
    for number, (name, rows) in enumerate(bars.items()):
        spreads = [row.speedup for row in rows]
        axes.bar(
            [groups.index(row.group) + (number - (len(bars) - 1) / 2) * width for row in rows],
            [spread.value for spread in spreads],
            width * 0.92,
            yerr=[[s.value - s.low for s in spreads], [s.high - s.value for s in spreads]],
            error_kw={"linewidth": 0.8},
            capsize=2,
            label=name,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("speed over plain decoding")
    axes.set_title(str(result.provenance.get("model", "")), loc="left", fontsize="medium")
    axes.grid(axis="y", linewidth=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=min(len(bars), 3) or 1, frameon=False, fontsize="small")
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise ParameterError(f"cannot write {path} ({error.strerror}); check the path.") from error


def group_bars(rows: Seq[Row]) -> dict[str, list[Row]]:
    """The rows of each bar's colour: all but plain decoding, named by what differs between them."""
    shown = [row for row in rows if not (row.drafter == PLAIN and row.engine == "sakiyomi")]
    several_rules = len({row.verifier for row in shown if row.engine == "sakiyomi"}) > 1
    several_temperatures = len({row.temperature for row in shown}) > 1
    bars: dict[str, list[Row]] = {}
    for row in shown:
        name = row.drafter if row.engine == "sakiyomi" else f"{row.engine}: {row.drafter}"
        name += f", {row.verifier}" if several_rules else ""
        name += f", t={row.temperature:g}" if several_temperatures else ""
        bars.setdefault(name, []).append(row)
    return bars
