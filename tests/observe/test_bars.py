"""A progress bar that is being drawn stays whole, whatever we say below it: twenty lines in a recorded terminal."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from torch.utils.data import DataLoader

from ckpt_engine import Checkpointer
from ckpt_engine.observe.events import announce, clear_bars
from tests.support.screen import recording, rows_of

MESSAGES = 20
BAR = re.compile(r"it/s|s/it|[|━╸]|\d+/20")
Steps = Callable[[Iterable[Any]], Iterable[Any]]


def say(number: int, trainer: str) -> None:
    """A line of a run: news, a warning or an error, by the engine's logger and that of the adapter in turn."""
    log = logging.getLogger(("ckpt_engine", trainer)[number % 2])
    text = f"step {number:,}: a line of the engine"
    (lambda: announce(log, text), lambda: log.warning(text), lambda: log.error(text))[number % 3]()


def loop(around: Steps, root: Path) -> None:
    """A plain loop under a bar."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(torch.ones(2 * MESSAGES, 4), batch_size=2)  # type: ignore[arg-type]
    with Checkpointer(root, writer="thread", every_n_steps=5) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for x in around(loader):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            say(run.global_step, "ckpt_engine.loop")


def with_tqdm(root: Path) -> None:
    import tqdm

    loop(lambda loader: tqdm.tqdm(loader, mininterval=0), root)


def with_two_tqdm(root: Path) -> None:
    from tqdm.auto import tqdm

    def both(loader: Iterable[Any]) -> Iterator[Any]:
        for _ in tqdm(range(1), mininterval=0, desc="epochs"):
            yield from tqdm(loader, mininterval=0, leave=False)

    loop(both, root)


def with_accelerate(root: Path) -> None:
    from accelerate.utils import tqdm

    loop(lambda loader: tqdm(loader, mininterval=0), root)


def with_rich(root: Path) -> None:
    from rich.progress import track

    loop(lambda loader: track(loader, total=MESSAGES, refresh_per_second=1000), root)


def with_transformers(root: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from accelerate_ckpt import TransformersCallback

    class Says(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            say(state.global_step, "ckpt_engine.transformers")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).sum()}

    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "per_device_train_batch_size": 2}
    shown = {"num_train_epochs": 1, "disable_tqdm": False}  # by default the log level decides, which other tests set
    arguments = TrainingArguments(f"{root}-out", **shown, **options)  # type: ignore[arg-type]
    data = [{"x": torch.ones(2)} for _ in range(2 * MESSAGES)]
    callbacks = [TransformersCallback(root, writer="thread", every_n_steps=5, resume="auto"), Says()]
    Trainer(Model(), arguments, train_dataset=data, callbacks=callbacks).train()  # type: ignore[arg-type]


def with_lightning(bar: str) -> Callable[[Path], None]:
    def train(root: Path) -> None:
        import lightning.pytorch as pl
        from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
        from lightning.pytorch.demos.boring_classes import BoringModel

        from lightning_ckpt import AdaptiveCheckpoint

        class Says(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                say(trainer.global_step, "lightning_ckpt")

        shown = TQDMProgressBar(1) if bar == "tqdm" else RichProgressBar(1)
        ours = AdaptiveCheckpoint(root, writer="thread", every_n_steps=5)
        loader = DataLoader(torch.ones(2 * MESSAGES, 32), batch_size=2)  # type: ignore[arg-type]
        quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
        pl.Trainer(max_epochs=1, callbacks=[shown, ours, Says()], **quiet).fit(BoringModel(), loader)  # type: ignore[arg-type]

    return train


BARS: dict[str, Callable[[Path], None]] = {
    "tqdm": with_tqdm,
    "two of tqdm": with_two_tqdm,
    "accelerate": with_accelerate,
    "rich": with_rich,
    "transformers": with_transformers,
    "lightning and tqdm": with_lightning("tqdm"),
    "lightning and rich": with_lightning("rich"),
}


@pytest.mark.cells(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("bar", "configured"),
    [
        *((bar, False) for bar in BARS),
        *((bar, True) for bar in BARS if "rich" not in bar),  # any handler but that of rich writes past its bar
    ],
)
def test_a_live_bar_is_never_broken(
    bar: str, configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of twenty lines stands alone in a row, and none has a rest of the bar, which is drawn again below."""
    with monkeypatch.context() as patch, recording(monkeypatch) as seen:
        patch.setattr(logging.root, "handlers", [])
        if configured:
            logging.basicConfig(level=logging.WARNING, format="%(message)s")
        BARS[bar](tmp_path / "run")
    rows = rows_of(seen.text)
    news = [number for number in range(1, MESSAGES + 1) if number % 3 or not configured]
    wanted = [f"step {number:,}: a line of the engine" for number in news]
    assert [row for row in rows if "a line of the engine" in row] == wanted, "\n".join(rows)
    assert any(BAR.search(row) for row in seen.text.split("\r")), seen.text
    first, last = rows.index(wanted[0]), rows.index(wanted[-1])
    assert [row for row in rows[first:last] if BAR.search(row)] == [], "\n".join(rows)
    assert any(BAR.search(row) for row in rows[last:]) or "lightning and rich" in bar, "\n".join(rows)


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        ("one\ntwo\r\n", ["one", "two"]),
        ("12345\rab", ["ab345"]),
        ("a bar\r     \rline\n", ["line"]),
        ("one\ntwo\x1b[A\r\x1b[2Kup", ["up", "two"]),
        ("x" * 85, ["x" * 80, "x" * 5]),
        ("\x1b[31mred\x1b[0m\x1b[?25l", ["red"]),
    ],
)
def test_the_screen_shows_what_a_terminal_would(written: str, rows: list[str]) -> None:
    """Returns, cursors, erased lines, colours, and lines that wrap."""
    assert rows_of(written) == rows


class _Kept(tqdm.std.tqdm):  # type: ignore[type-arg]
    """A bar that another thread makes at this moment."""

    def __init__(self) -> None: ...


def test_a_line_leaves_alone_what_is_not_drawn_on_the_terminal() -> None:
    """A bar that is not made yet, and one that a program draws into a file."""
    file = io.StringIO()
    with tqdm.std.tqdm(total=3, file=file):
        half, before = _Kept(), file.getvalue()
        try:
            assert clear_bars()
        finally:
            half.disable = True  # nothing is to be closed
        assert file.getvalue() == before
