"""The pictures: both loss curves on top of each other, and the killed run's way through time."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from demo.record import Step, Validation
from demo.runs import Life, Run

INK, REFERENCE, RUN, SAVED, KILLED = "#222222", "#9aa0a6", "#1668b0", "#2f8f4e", "#c8312b"
FONTS = ["DejaVu Sans", "sans-serif"]
LIVES = ("#1668b0", "#e07b00", "#7b3fa0", "#00808a", "#a0522d")


def draw(folder: Path, reference: Run, killed: Run, *, identical: bool) -> None:
    """Writes `demo.png` with both pictures, and `demo.svg` with the loss curves, for a page.

    Args:
        identical: the result of the comparison; goes into the title.
    """
    figure, (losses, times) = plt.subplots(2, 1, figsize=(11, 9), height_ratios=(3, 2), layout="constrained", dpi=130)
    _losses(losses, reference, killed)
    _times(times, reference, killed)
    _finish(folder / "demo.png", figure, killed, identical=identical)
    # Text stays text, so that the file is small, and two files of the same run are equal.
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "demo", "font.family": FONTS}):
        figure, losses = plt.subplots(figsize=(8, 4.2), layout="constrained")
        _losses(losses, reference, killed)
        _finish(folder / "demo.svg", figure, killed, identical=identical)


def _finish(path: Path, figure: Figure, killed: Run, *, identical: bool) -> None:
    verdict = "bitwise identical" if identical else "NOT identical"
    kills = sum(life.kill is not None for life in killed.lives)
    figure.suptitle(
        f"Killed {kills} times with kill -9, resumed with ckpt_path='auto': {verdict}",
        fontsize=13,
        color=INK if identical else KILLED,
    )
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.margins(x=0.01)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _losses(axes: Axes, reference: Run, killed: Run) -> None:
    truth = [entry for entry in reference.entries if isinstance(entry, Step)]
    axes.plot(
        [step.step for step in truth],
        [step.loss_value for step in truth],
        color=REFERENCE,
        linewidth=6,
        alpha=0.45,
        solid_capstyle="round",
        label="never interrupted (no callback)",
    )
    for number, (life, steps) in enumerate(_lives(killed)):
        name = "killed run, 1st process" if number == 0 else f"after restart {number}, from step {life.resumed_step}"
        axes.plot(
            [step.step for step in steps],
            [step.loss_value for step in steps],
            color=LIVES[number % len(LIVES)],
            linewidth=1.2 + 1.1 * (len(killed.lives) - 1 - number),
            label=name,
        )
    validations = {entry.step: entry for entry in killed.entries if isinstance(entry, Validation)}
    axes.plot(
        list(validations),
        [entry.loss_value for entry in validations.values()],
        "D",
        color=INK,
        markersize=4.5,
        label="validation loss",
    )
    for life, after in itertools.pairwise(killed.lives):
        if life.kill is not None:
            lost = life.kill.step - after.resumed_step
            axes.axvline(life.kill.step, color=KILLED, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.axvspan(after.resumed_step, life.kill.step, color=KILLED, alpha=0.07, linewidth=0)
            axes.annotate(
                f"kill -9 of {life.kill.victims}\n{lost} step{'s' * (lost != 1)} lost",
                (life.kill.step, 0.60),
                (-5, 0),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="right",
                color=KILLED,
                fontsize=9,
            )
    low, high = axes.get_ylim()
    floor = low - 0.04 * (high - low)
    axes.plot(
        [durable.step for durable in killed.durable],
        [floor] * len(killed.durable),
        "|",
        color=SAVED,
        markersize=12,
        markeredgewidth=1.8,
        label="durable snapshot",
    )
    axes.set_ylim(low - 0.08 * (high - low), high)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("training loss (nats per byte)")
    axes.legend(framealpha=1, edgecolor="none", fontsize=9, loc="upper right", ncols=2)


def _times(axes: Axes, reference: Run, killed: Run) -> None:
    began = killed.lives[0].spawned
    first = reference.lives[0].spawned
    truth = [entry for entry in reference.entries if isinstance(entry, Step)]
    axes.plot(
        [step.time - first for step in truth],
        [step.step for step in truth],
        color=REFERENCE,
        linewidth=4,
        alpha=0.45,
        label="never interrupted",
    )
    for number, (life, steps) in enumerate(_lives(killed)):
        color = LIVES[number % len(LIVES)]
        axes.plot([step.time - began for step in steps], [step.step for step in steps], color=color, linewidth=1.6)
        # From the start of the process to its first batch: imports, the loaders, reading the snapshot.
        axes.plot(
            [life.spawned - began, life.first_batch - began],
            [life.resumed_step] * 2,
            color=color,
            linewidth=1.2,
            linestyle=(0, (1, 2)),
            label="starting: imports, loaders, restore" if number == 0 else None,
        )
        if number and (kill := killed.lives[number - 1].kill) is not None:
            axes.plot([kill.time - began] * 2, [kill.step, life.resumed_step], color=KILLED, linewidth=1.2)
        if life.kill is not None:
            axes.plot(life.kill.time - began, life.kill.step, "x", color=KILLED, markersize=10, markeredgewidth=2.5)
    axes.plot(
        [durable.time - began for durable in killed.durable],
        [durable.step for durable in killed.durable],
        "|",
        color=SAVED,
        markersize=10,
        markeredgewidth=1.8,
        label="durable snapshot",
    )
    axes.plot([], [], "x", color=KILLED, markersize=8, markeredgewidth=2.5, label="kill -9")
    axes.set_xlabel("seconds since the first start")
    axes.set_ylabel("optimizer step")
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _lives(run: Run) -> list[tuple[Life, list[Step]]]:
    return [(life, run.steps(life.pid)) for life in run.lives]
