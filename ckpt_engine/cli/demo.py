"""`ckpt demo`: a training that is killed twice and resumed, as one loss curve in the terminal."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import click

from ckpt_engine.cli.output import bar, print_table, print_text
from ckpt_engine.errors import CkptError
from ckpt_engine.observe.resume_report import replay_of

KILLS = (70, 150, 0)
"""The step at which each process is killed; 0: it trains to the end."""
_EPOCHS, _BATCHES, _BATCH, _EVERY = 8, 32, 16, 20
_SECONDS = 300.0
StepLosses = Mapping[int, float]


@click.command("demo", short_help="Kill a small training twice, and see that it resumes.")
def demo() -> None:
    """Train a small network in another process, kill it twice with `kill -9`, and resume it.

    Shows one loss curve and which process trained where, and whether the steps that were repeated gave the same batches
    and weights. Nothing stays on the disk. Ends with exit code 1 if a step was different.
    """
    print_text("A small network trains in another process, which is killed twice with kill -9.", "")
    lives, proofs = list[StepLosses](), list[str]()
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as folder:
        for number, kill_at in enumerate(KILLS, 1):
            life = _life(Path(folder), kill_at, sum(map(len, lives)))
            lives.append(life)
            print_text(f"process {number}: steps {min(life)} to {max(life)}, {'killed' if kill_at else 'ended'}")
            if number > 1 and (proof := replay_of(f"{folder}/run")) is not None:
                proofs.append(proof.result)
                print_text(f"  {proof.text()}")
    print_text("")
    print_table(("steps", "process", "loss", ""), list(_rows(lives)), numbers=("loss",))
    is_exact = proofs == ["exact"] * (len(KILLS) - 1)
    verdict = "proved exact" if is_exact else "NOT proved exact"
    print_text("", f"One loss curve of three processes: {verdict}.", fg="green" if is_exact else "red")
    sys.exit(not is_exact)


def _life(folder: Path, kill_at: int, known: int) -> StepLosses:
    """What a process has trained; `known`: how many steps those before it have.

    Raises:
        CkptError: it ended otherwise than it should.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ckpt_engine.checkpointer"])  # torch is imported once
    process = context.Process(target=_train, args=(folder, kill_at))
    process.start()
    process.join(_SECONDS)
    if process.exitcode != (-signal.SIGKILL if kill_at else 0):
        process.kill()
        raise CkptError(f"the training of the demo ended with {process.exitcode}", hint="the lines above say why")
    rows = [line.split() for line in (folder / "losses.txt").read_text().splitlines()[known:]]
    return {int(step): float(loss) for step, loss in rows}


def _train(folder: Path, kill_at: int) -> None:
    """A plain loop of PyTorch to its end, or up to a step; it writes `step loss` of each step."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from ckpt_engine.checkpointer import Checkpointer

    logging.basicConfig(filename=folder / "log.txt")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    x = torch.linspace(-3.0, 3.0, _BATCH * _BATCHES)[:, None]
    loader = DataLoader(TensorDataset(x, torch.sin(2.0 * x)), _BATCH, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Dropout(0.02), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    with Checkpointer(folder / "run", every_n_steps=_EVERY) as ckpt, (folder / "losses.txt").open("a") as losses:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for _ in range(run.epoch, _EPOCHS):
            for inputs, targets in loader:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.write(f"{run.global_step} {loss.item()!r}\n")
                if run.global_step == kill_at:
                    losses.flush()
                    ckpt.wait(60.0)  # so that it resumes from the same step on each machine
                    os.kill(os.getpid(), signal.SIGKILL)


def _rows(lives: Sequence[StepLosses]) -> Iterator[tuple[str, str, str, str]]:
    """Of each few steps which processes trained them, and the mean loss with a bar."""
    losses = {step: loss for life in lives for step, loss in life.items()}
    most = fmean(losses[step] for step in range(1, 1 + _BATCH))
    for first in range(1, max(losses), _BATCH):
        steps = range(first, first + _BATCH)
        trained = (str(number) for number, life in enumerate(lives, 1) if not life.keys().isdisjoint(steps))
        mean = fmean(losses[step] for step in steps)
        yield f"{first} to {steps[-1]}", " and ".join(trained), f"{mean:.3f}", bar(mean / most, 40)
