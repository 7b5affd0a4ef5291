"""Programs of others with us in them: `python -m tests.real.third_party --list`, `--only NAME`, `--sources FOLDER`.

Nothing of theirs is here: sources come from a folder of clones named `owner+name`, else from GitHub, at a commit that
this file names. A program gets the lines that our pages ask for and is killed with SIGKILL at random instants until it
has come to its end. Its last snapshot that a run which nothing interrupts has too must be the same, bit for bit; that
run must print what the unchanged program prints, and so must the killed one. A suite is run with us in every Trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_engine.cli.compare import MEASURED, Comparison
from ckpt_engine.cli.root import open_run
from ckpt_engine.restore.choose import assemble

REPOSITORY = Path(__file__).parents[2]
LIFE_SECONDS = 900.0
_CORPORA = "data/wikitext-2"
_OUR_OWN = (*MEASURED, "ckpt_engine/audit/locals")


@dataclass(frozen=True, slots=True)
class Program:
    """A program of others.

    Args:
        repository, commit: on GitHub.
        folder: of the program in it.
        file: that is run.
        changes: lines, and what our pages ask for in their place; ROOT is the run's folder.
        end: the last lines.
        arguments: of the program, so that it is small.
        prepare: makes its data, called in its folder.
        spoken: what of its output counts: times do not.
    """

    repository: str
    commit: str
    folder: str
    file: str
    changes: Sequence[tuple[str, str]]
    end: str
    arguments: Sequence[str]
    prepare: Callable[[Path], None]
    spoken: str


@dataclass(frozen=True, slots=True)
class Suite:
    """A test suite of others, run by `ckpt verify-resume --pytest`.

    Args:
        folder: where it is run; `paths` are in it.
        options: of pytest.
    """

    repository: str
    commit: str
    folder: str
    paths: Sequence[str]
    options: Sequence[str]


# ---- data, and the lines that our pages ask for


def characters(folder: Path) -> None:
    """nanoGPT's data: its own source text."""
    place = folder / "data" / "own"
    place.mkdir(parents=True)
    text = (folder / "model.py").read_bytes()
    for name, part in (("train", text[:12_000]), ("val", text[12_000:15_000])):
        (place / f"{name}.bin").write_bytes(b"".join(bytes((byte, 0)) for byte in part))
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def words(folder: Path) -> None:
    """A language model's data: its own source text, as its corpus has 10 MB."""
    place = folder / "data" / "wikitext-2"
    place.mkdir(parents=True)
    lines = (folder / "main.py").read_text().splitlines()
    for name, part in (("train", lines), ("valid", lines[:60]), ("test", lines[60:120])):
        (place / f"{name}.txt").write_text("\n".join(part) + "\n")


def waves(folder: Path) -> None:
    """Sine waves, shorter than those of the program's own generator."""
    shifts = np.random.default_rng(2).integers(-80, 80, 10).reshape(10, 1)
    torch.save(np.sin((np.arange(60) + shifts) / 20.0), folder / "traindata.pt")
    # It is older than the default weights_only=True.
    edit(
        folder / "train.py",
        [("    data = torch.load('traindata.pt')", "    data = torch.load('traindata.pt', weights_only=False)")],
    )


NANOGPT = (
    (
        "running_mfu = -1.0",
        """running_mfu = -1.0
from ckpt_engine import Carry, Checkpointer
ckpt = Checkpointer(ROOT, every_n_steps=1, keep={"last": 1000})
carry = Carry(X=X, Y=Y, best_val_loss=best_val_loss)
run = ckpt.track(model=raw_model, optimizer=optimizer, scaler=scaler, carry=carry)
iter_num, X, Y, best_val_loss = run.global_step, carry.X, carry.Y, carry.best_val_loss""",
    ),
    (
        "    local_iter_num += 1",
        """    local_iter_num += 1
    carry.X, carry.Y, carry.best_val_loss = X, Y, best_val_loss
    run.step()""",
    ),
)

WORDS = (
    (
        "best_val_loss = None",
        """best_val_loss = None
from ckpt_engine import Carry, Checkpointer
ckpt = Checkpointer(ROOT, every_n_steps=1, keep={"last": 1000})
carry = Carry(batch=0, hidden=None, total_loss=0.0, epoch=1, lr=lr, best_val_loss=None)
run = ckpt.track(model=model, optimizer=optimizer, carry=carry)
lr, best_val_loss = carry.lr, carry.best_val_loss""",
    ),
    (
        "        hidden = model.init_hidden(args.batch_size)",
        """        hidden = model.init_hidden(args.batch_size)
    if carry.batch:
        hidden, total_loss = carry.hidden, carry.total_loss""",
    ),
    (
        "    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):",
        """    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        if batch < carry.batch:
            continue""",
    ),
    (
        "        if args.dry_run:",
        """        carry.batch, carry.hidden, carry.total_loss = batch + 1, repackage_hidden(hidden), total_loss
        run.step()
        if args.dry_run:""",
    ),
    ("    for epoch in range(1, args.epochs+1):", "    for epoch in range(carry.epoch, args.epochs+1):"),
    ("        train()", "        train()\n        carry.batch = 0"),
    (
        "            lr /= 4.0",
        """            lr /= 4.0
        carry.epoch, carry.lr, carry.best_val_loss = epoch + 1, lr, best_val_loss""",
    ),
)

WAVES = (
    (
        "    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)",
        """    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)
    from ckpt_engine import Checkpointer
    ckpt = Checkpointer(ROOT, every_n_steps=1, keep={"last": 1000})
    run = ckpt.track(seq=seq, optimizer=optimizer)""",
    ),
    ("    for i in range(opt.steps):", "    for i in range(run.global_step, opt.steps):"),
    ("        plt.close()", "        plt.close()\n        run.step()"),
)

_EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
_SMALL_GPT = (
    *("--dataset=own", "--device=cpu", "--compile=False", "--dtype=float32", "--eval_interval=7", "--eval_iters=2"),
    *("--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=32", "--batch_size=4", "--dropout=0.1"),
    *("--gradient_accumulation_steps=2", "--max_iters=120", "--warmup_iters=5", "--lr_decay_iters=120"),
)
_LIGHTNING = ("Lightning-AI/pytorch-lightning", "be98784a1a03581b7051a355ae1084fd352d7cea", "tests")
_ALONE = ("-p", "no:cacheprovider", "-o", "addopts=", "--timeout", "100", "-k", "not ddp and not spawn")
PROGRAMS: Mapping[str, Program | Suite] = {
    "nanogpt": Program(
        *("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", ""),
        *("train.py", NANOGPT, "ckpt.close()", _SMALL_GPT, characters, r"(?:iter|step) \d+: .*?loss [\d.]+"),
    ),
    "word_language_model": Program(
        *(*_EXAMPLES, "word_language_model", "main.py", WORDS, "ckpt.close()"),
        (
            "--emsize=16",
            "--nhid=16",
            "--epochs=2",
            "--batch_size=4",
            "--log-interval=5",
            "--use-optimizer",
            "--lr=0.01",
        ),
        *(words, r"(?:test |valid )?loss +[\d.]+"),
    ),
    "time_sequence_prediction": Program(
        *(*_EXAMPLES, "time_sequence_prediction", "train.py", WAVES, "    ckpt.close()", ("--steps=12",), waves),
        r"(?:test )?loss: [\d.e-]+",
    ),
    "lightning-restore": Suite(*_LIGHTNING, ("tests_pytorch/models/test_restore.py",), _ALONE),
    "lightning-loops": Suite(*_LIGHTNING, ("tests_pytorch/loops",), _ALONE),
    "lightning-checkpointing": Suite(*_LIGHTNING, ("tests_pytorch/checkpointing",), _ALONE),
    "lightning-connectors": Suite(*_LIGHTNING, ("tests_pytorch/trainer/connectors",), _ALONE),
}


# ---- sources


def edit(path: Path, changes: Sequence[tuple[str, str]]) -> None:
    """Replace lines, each of which is there once."""
    text = path.read_text() + "\n"
    for old, new in changes:
        if text.count(f"\n{old}\n") != 1:
            raise SystemExit(
                f"{path} is not the program we know: {text.count(f'{chr(10)}{old}{chr(10)}')} times {old!r}"
            )
        text = text.replace(f"\n{old}\n", f"\n{new}\n")
    path.write_text(text)


def unpack(one: Program | Suite, sources: Path | None, target: Path) -> None:
    """The files of one folder at the commit."""
    tree = f"{one.commit}:{one.folder}" if one.folder else one.commit
    where = None
    for found in (sources / one.repository.replace("/", "+"),) if sources is not None else ():
        where = next((path for path in (found / "repo", found) if path.is_dir()), None)
    with tempfile.TemporaryDirectory() as scratch:
        if where is None:
            url = f"https://github.com/{one.repository}"
            clone = ["git", "clone", "-q", "--filter=blob:none", "--no-checkout", url, scratch]
            if subprocess.run(clone, timeout=LIFE_SECONDS, check=False).returncode:
                raise SystemExit(f"{url} cannot be cloned: without a network give --sources FOLDER with a clone in it")
        done = subprocess.run(
            ["git", "-C", str(where or scratch), "archive", "--format=tar", tree, "--", ".", f":(exclude){_CORPORA}"],
            capture_output=True,
            timeout=LIFE_SECONDS,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{one.repository} has no {tree}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(target, filter="data")


# ---- programs


class Lives:
    """Lives of one program, in a folder of its own for each variant."""

    def __init__(self, program: Program, source: Path) -> None:
        self.program, self.source = program, source

    def make(self, name: str) -> Path:
        """A copy with our lines; "unchanged" is without."""
        folder = self.source.with_name(name)
        shutil.copytree(self.source, folder)
        if name != "unchanged":
            root = repr(str(folder / "run"))
            edit(folder / self.program.file, [(old, new.replace("ROOT", root)) for old, new in self.program.changes])
            with (folder / self.program.file).open("a") as file:
                file.write(f"\n{self.program.end}\n")
        return folder

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        with (folder / "output").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", self.program.file, *self.program.arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, folder: Path) -> list[str]:
        """One life to its end; what it said."""
        code = self.start(folder).wait(LIFE_SECONDS)
        if code:
            raise SystemExit(f"{folder}: exit code {code}: {(folder / 'output').read_text()[-600:]}")
        return self.said(folder)

    def said(self, folder: Path) -> list[str]:
        return re.findall(self.program.spoken, (folder / "output").read_text())

    def kill_often(self, folder: Path, kills: int, seconds: float, draw: random.Random) -> int:
        """Lives that are killed so often, or until one comes to its end; then one more. How many were killed.

        Args:
            seconds: that training takes without an interruption.
        """
        for number in range(kills):
            process, before = self.start(folder), snapshots(folder)
            deadline = time.monotonic() + LIFE_SECONDS
            while process.poll() is None and snapshots(folder) <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            with suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0, 1.6 * seconds / kills))  # a random instant
            if process.poll() is not None:
                if process.returncode:
                    raise SystemExit(f"{folder}: life {number}: {(folder / 'output').read_text()[-600:]}")
                return number
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.run(folder)
        return kills


def snapshots(folder: Path) -> set[str]:
    """The manifests of a run."""
    return {path.name for path in (folder / "run" / "snapshots").glob("[!.]*.json")}


def differences(one: Path, other: Path) -> list[str]:
    """Of the last step that both runs have a snapshot of, bit for bit.

    What is measured does not count, nor a random stream that nothing seeds: it differs in the first snapshots already.
    """
    runs = [open_run(str(folder / "run")).holders for folder in (one, other)]
    both = {parsed.step for parsed in runs[0]} & {parsed.step for parsed in runs[1]}

    def of_step(step: int) -> dict[str, str]:
        candidates = []
        for holders in runs:
            last = max((parsed for parsed in holders if parsed.step == step), key=lambda parsed: parsed.seq)
            candidates.append(assemble(last.id, holders[last]))
        return {row.path: str(row) for row in Comparison(*candidates) if not row.path.startswith(_OUR_OWN)}

    unseeded = {path for path in of_step(min(both)) if "/rng/" in path}
    return [f"step {max(both)}: {row}" for path, row in of_step(max(both)).items() if path not in unseeded]


def verify(name: str, program: Program, source: Path, kills: int) -> dict[str, Any]:
    """The verdict on one program."""
    program.prepare(source)
    lives = Lives(program, source)
    unchanged = lives.run(lives.make("unchanged"))
    whole = lives.make("whole")
    first = lives.run(whole)
    times = sorted(path.stat().st_mtime for path in (whole / "run" / "data").glob("[!.]*"))
    began = min(path.stat().st_mtime for path in (whole / "run").rglob("*"))
    killed = lives.make("killed")
    count = lives.kill_often(killed, kills, times[-1] - began, random.Random(name))
    found = differences(whole, killed)
    report = killed / "run" / "resume-report.json"
    declared = [row["name"] for row in json.loads(report.read_text())["not_restored"]] if report.exists() else []
    same = not found and set(lives.said(killed)) == set(first)
    return {
        "verdict": "bitwise" if same else "declared" if declared else "silent",
        "kills": count,
        "unchanged by us": unchanged == first,
        "lines": len(first),
        "differences": found[:5],
        "declared": declared,
    }


def verify_suite(suite: Suite, source: Path) -> dict[str, Any]:
    """New failures of one suite."""
    command = [sys.executable, "-m", "ckpt_engine.cli.main", "verify-resume", "--timeout", "3000", "--pytest", "--json"]
    done = subprocess.run(
        [*command, "--", *suite.options, *suite.paths],
        cwd=source,
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{REPOSITORY}"},
        stdout=subprocess.PIPE,
        timeout=10_000,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{suite.repository}: exit code {done.returncode}")
    report = json.loads(done.stdout)
    return {
        "verdict": "new failures" if report["new_failures"] else "no new failure",
        **{key: report[key] for key in ("new_failures", "unsteady", "passed", "skipped")},
        "failed_before": len(report["failed_before"]),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a program is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="*", choices=sorted(PROGRAMS))
    parser.add_argument("--sources", type=Path, help="folder with clones named owner+name")
    parser.add_argument("--folder", type=Path, help="where to work; kept")
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name}: {one.repository} at {one.commit[:12]}" for name, one in PROGRAMS.items()))
        return 0
    place = options.folder or Path(tempfile.mkdtemp(prefix="ckpt-third-party-"))
    results = {}
    for name in options.only or PROGRAMS:
        one, source = PROGRAMS[name], place / name / "source"
        shutil.rmtree(place / name, ignore_errors=True)
        source.mkdir(parents=True)
        unpack(one, options.sources, source)
        results[name] = (
            verify(name, one, source, options.kills) if isinstance(one, Program) else verify_suite(one, source)
        )
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    good = ("bitwise", "declared", "no new failure")
    return 0 if all(one["verdict"] in good and one.get("unchanged by us", True) for one in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
