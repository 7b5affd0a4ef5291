"""Put the tables of the newest results into the page for readers, between two markers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bars
from benchmarks.record import MeasuredBar, Record
from benchmarks.run import Scale
from benchmarks.table import disturbance, number, spread, target, verdict
from benchmarks.values import Plot

BEGIN = "<!-- results: written by `python -m benchmarks`, do not edit -->"
END = "<!-- end of results -->"


def write_page(page: Path, records: Sequence[Record], names: Sequence[str] = bars.NAMES) -> None:
    """Replace what is between the markers of `page` by the newest measurements of these bars.

    Raises:
        ValueError: the page lacks the markers.
    """
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{page} must have the lines {BEGIN!r} and {END!r} once each")
    head, rest = text.split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{render(records, names)}{END}{rest.partition(END)[2]}")
    for _, bar in newest(records, names):
        for at, plot in enumerate(bar.result.plots):
            draw(plot, page.parent / _figure(bar.result.name, at))


def draw(plot: Plot, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same points."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = plot.title
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for name, points in plot.lines.items():
        axes.plot(*zip(*points, strict=True), label=name, marker="o", markersize=2.5, linewidth=1.2)
    axes.set(title=plot.title, xlabel=plot.x, ylabel=plot.y)
    axes.legend(fontsize="small")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _figure(name: str, at: int) -> str:
    return f"figures/{name}-{at}.svg"


def render(records: Sequence[Record], names: Sequence[str] = bars.NAMES) -> str:
    """The newest measurement of every bar, as Markdown, with the machine of each."""
    found = newest(records, names)
    machines: list[Mapping[str, Any]] = []
    for record, _ in found:
        if record.machine not in machines:
            machines.append(record.machine)
    places = {bar.result.name: _letter(machines.index(record.machine)) for record, bar in found}
    lines = [
        "",
        *(f"- {_machine(number, machine)}" for number, machine in enumerate(machines)),
        "",
        "### Targets",
        "",
        "| bar | target | limit | median | quartiles (samples) | | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for _, bar in found:
        name = bar.result.name
        lines += [
            f"| {name} | {check.what} | {target(check)} | {number(check.measured, check.unit)} "
            f"| {spread(check.series)} | {verdict(check)} | {bar.when[:10]}, {places[name]} |"
            for check in bar.result.checks
        ]
    for _, bar in found:
        lines += ["", *_bar(bar, places[bar.result.name])]
    return "\n".join([*lines, "", ""])


def newest(records: Sequence[Record], names: Sequence[str] = bars.NAMES) -> list[tuple[Record, MeasuredBar]]:
    """The newest measurement of every bar, and the record that has it, in the order of the bars."""
    found: dict[str, tuple[Record, MeasuredBar]] = {}
    for record in records:
        for name, bar in record.bars.items():
            if name not in found or found[name][1].when < bar.when:
                found[name] = record, bar
    return [found[name] for name in names if name in found]


def _letter(number: int) -> str:
    return chr(ord("A") + number)


def _machine(number: int, machine: Mapping[str, Any]) -> str:
    return (
        f"Machine {_letter(number)}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB memory, "
        f"{machine['kernel']}, {machine['file_system']}, transparent huge pages: {machine['huge_pages']}."
    )


def _bar(bar: MeasuredBar, place: str) -> list[str]:
    software = ", ".join(f"{name} {version}" for name, version in bar.versions.items())
    rounds = "" if bar.scale is Scale.FULL else f" Only a {bar.scale.value} run: too few samples for a result."
    lines = [
        f"### {bar.result.title}",
        "",
        f"Measured {bar.when[:10]} on machine {place}; {software}.{rounds}",
        "",
        *(f"- {key}: {value}" for key, value in bar.result.conditions.items()),
    ]
    for grid in bar.result.grids:
        cells = [grid.columns, ("---",) * len(grid.columns), *grid.rows]
        lines += ["", f"**{grid.title}**", "", *(f"| {' | '.join(row)} |" for row in cells)]
    lines += [
        "",
        "| measured | median | quartiles (samples) | note |",
        "|---|---|---|---|",
        *(
            f"| {series.name} | {number(series.median, series.unit)} | {spread(series)} | {series.note} |"
            for series in bar.result.series
        ),
    ]
    for at, plot in enumerate(bar.result.plots):
        lines += ["", f"![{plot.title}]({_figure(bar.result.name, at)})"]
    notes = [*bar.result.notes, *([disturbance(bar)] if bar.disturbed else [])]
    return [*lines, "", *notes] if notes else lines
