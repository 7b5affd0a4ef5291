"""Commands and webhooks of the option `on`: what they are given, and that training never notices them."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_engine.checkpointer import Checkpointer
from ckpt_engine.config import load_config
from ckpt_engine.copy.job import RankConfig, WriterConfig
from ckpt_engine.errors import ConfigError
from ckpt_engine.observe.events import SnapshotCommitted, SnapshotFailed, TierDegraded
from ckpt_engine.writer import channel, hooks
from ckpt_engine.writer.hooks import Hooks
from tests.support import interpreters

PATIENCE_SECONDS = 60.0
SEEN = "{ env | grep ^CKPT_ | sort; pwd; } >> seen.txt"
"""What a command was given, and where it runs."""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where training is started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*steps: int, metrics: dict[str, float] | None = None, root: str = "run", **options: Any) -> None:
    """A run that saves these steps."""
    with Checkpointer(Path(root), **options) as ckpt:
        for step in steps:
            ckpt.save({"weights": torch.full((3,), float(step))}, step=step, metrics=metrics)
            assert ckpt.wait(PATIENCE_SECONDS)


def lines(name: str = "seen.txt") -> list[str]:
    path = Path(name)
    return path.read_text().splitlines() if path.exists() else []


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


# ---- what they are given


@pytest.mark.parametrize("writer", ["process", "thread"])
@pytest.mark.parametrize("hook", [SEEN, ["sh", "-c", SEEN]], ids=["line for a shell", "program"])
def test_a_command_gets_what_is_known_in_its_environment(hook: str | list[str], writer: str, tmp_path: Path) -> None:
    """It runs in the folder where training was started."""
    train(7, metrics={"loss": 0.5, "odd": float("nan")}, writer=writer, on={"durable": hook})
    (snapshot,) = [one.id for one in Checkpointer(Path("run")).snapshots()]
    found = lines()
    message = f"CKPT_MESSAGE=step 7: snapshot {snapshot} durable on {tmp_path}/run after "
    assert [one for one in found if one.startswith(message)]
    assert [one for one in found if not one.startswith(("CKPT_MESSAGE", "CKPT_REHEARSAL"))] == [
        "CKPT_CODE=",
        "CKPT_EVENT=durable",
        'CKPT_METRICS={"loss": 0.5, "odd": null}',
        f"CKPT_RUN={tmp_path}/run",
        f"CKPT_SNAPSHOT={tmp_path}/run#{snapshot}",
        "CKPT_STEP=7",
        str(tmp_path),
    ]


@pytest.mark.long
def test_every_durable_snapshot_is_taken_in_order_and_the_end_last(tmp_path: Path) -> None:
    """Also where a command takes longer than the interval: the run waits for them at its end."""
    note = 'sleep 0.1; echo "$CKPT_EVENT $CKPT_STEP" >> seen.txt'
    train(1, 2, 3, on={"durable": note, "stop": "sleep 1; " + note})
    assert lines() == ["durable 1", "durable 2", "durable 3", "stop 3"]


def test_a_command_is_not_shielded_from_signals() -> None:
    """It would not end at a SIGTERM, nor would the workers of its loaders."""
    train(1, on={"durable": ["sh", "-c", "grep -E 'Sig(Blk|Ign)' /proc/self/status > seen.txt"]})
    blocked, ignored = (int(one.split()[1], 16) for one in lines())
    assert blocked == 0
    assert not ignored & (1 << (signal.SIGTERM - 1))


class Service:
    """A real server that keeps what it is sent, and answers with `status` after `delay` is set."""

    def __init__(self, status: int = 200, answers: bool = True) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        self.release = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.got.append((self.headers["Content-Type"], body))
                if not answers:
                    service.release.wait(PATIENCE_SECONDS)
                    return
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/hidden-token"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(**how: Any) -> Service:
        made.append(Service(**how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_webhook_gets_the_same_as_json(serve: Callable[..., Service], tmp_path: Path) -> None:
    """`text` is the message, which chat services show."""
    service = serve()
    train(7, metrics={"loss": 0.5}, on={"durable": service.url, "stop": service.url})
    (kind, durable), (_, stop) = service.got
    assert kind == "application/json"
    assert (durable["event"], durable["step"], durable["metrics"]) == ("durable", 7, {"loss": 0.5})
    assert durable["run"] == f"{tmp_path}/run"
    assert durable["text"] == durable["message"]
    assert (stop["event"], stop["message"], stop["code"]) == ("stop", "training has ended", "")
    assert stop["snapshot"] == durable["snapshot"]


# ---- their failures


def test_hooks_that_fail_are_one_warning_each(serve: Callable[..., Service], caplog: pytest.LogCaptureFixture) -> None:
    """With the code and the reason, and neither the address nor what else opens something."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/hidden-token"
        cases: dict[str, tuple[Any, str]] = {
            "status": ("echo said >&2; exit 3", "it ended with status 3: said"),
            "silent": (["false"], "it ended with status 1"),
            "missing": (["no-such-program"], "[Errno 2] No such file or directory: 'no-such-program'"),
            "dead": (dead, "<urlopen error [Errno 111] Connection refused>"),
            "refuses": (serve(status=403).url, "HTTP Error 403: Forbidden"),
            "moved": (serve(status=301).url, "HTTP Error 301: Moved Permanently"),
        }
        for name, (hook, why) in cases.items():
            caplog.clear()
            train(1, 2, on={"durable": hook}, root=name)
            assert warned(caplog) == [f"[CKPT604] on.durable failed, training continues: {why}"], name
    assert "hidden-token" not in caplog.text


def test_what_opens_a_store_is_not_shown(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a command prints it."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "opens-the-store")
    train(1, on={"durable": "echo bad key $AWS_SECRET_ACCESS_KEY; exit 1"}, writer="thread")
    assert warned(caplog) == ["[CKPT604] on.durable failed, training continues: it ended with status 1: bad key ***"]


@pytest.mark.parametrize("kind", ["command", "webhook"])
def test_a_hook_that_hangs_is_left_after_its_timeout(
    kind: str, serve: Callable[..., Service], caplog: pytest.LogCaptureFixture
) -> None:
    """With everything that it has started; the next one gets its own chance."""
    hang = "sleep 600 & echo $! > child.txt; wait" if kind == "command" else serve(answers=False).url
    train(1, on={"durable": hang, "timeout": "0.3 s"})
    (said,) = warned(caplog)
    assert said.endswith("it was stopped after 300 ms" if kind == "command" else "timed out")
    if kind == "command":
        (child,) = lines("child.txt")
        until(lambda: not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text())


def test_training_does_not_wait_for_a_hook(serve: Callable[..., Service]) -> None:
    """Snapshots become durable, and the next ones are taken, while a hook hangs."""
    service = serve(answers=False)
    with Checkpointer(Path("run"), wait_at_end=0, on={"durable": service.url}) as ckpt:
        for step in range(1, 6):
            handle = ckpt.save({"weights": torch.ones(3)}, step=step)
            assert handle.wait(PATIENCE_SECONDS)
        assert len(service.got) == 1


# ---- the end of a run


def test_the_end_waits_no_longer_than_the_options_allow_and_nothing_is_lost() -> None:
    """With `wait_at_end: 0` the writer process continues alone."""
    train(1, 2, wait_at_end=0, on={"durable": "while ! test -e go; do sleep 0.02; done; echo $CKPT_STEP >> seen.txt"})
    assert lines() == []
    Path("go").touch()
    until(lambda: lines() == ["1", "2"])


def test_a_long_wait_is_announced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One line says for what, how long at most, and what happens then."""
    monkeypatch.setattr("ckpt_engine.observe.events.TELL_SECONDS", 0.1)
    with caplog.at_level(logging.INFO):
        train(1, writer="thread", on={"durable": "sleep 0.5"})
    said = [one.getMessage() for one in caplog.records if "waiting for on" in one.getMessage()]
    assert said == [
        "waiting for on.durable to end, up to 10 min (wait_at_end) or until Ctrl-C; what is missing then: "
        "the writer thread continues it"
    ]


class Failure(Exception):
    """Of a script."""


def test_an_exception_is_a_failure() -> None:
    """Its kind is named, and its text is not: that may be anything."""
    with pytest.raises(Failure), Checkpointer(Path("run"), on={"failure": SEEN, "stop": SEEN}) as ckpt:
        assert ckpt.save({"weights": torch.ones(3)}, step=4).wait(PATIENCE_SECONDS)
        raise Failure("hidden")
    assert "CKPT_MESSAGE=training has failed: Failure" in lines()
    assert {"CKPT_EVENT=failure", "CKPT_STEP=4"} <= set(lines())
    assert len([one for one in lines() if one.startswith("CKPT_EVENT")]) == 1


KILLED = """
import os, signal, sys
import torch
from ckpt_engine.checkpointer import Checkpointer

if __name__ == "__main__":
    ckpt = Checkpointer("run", on={"failure": sys.argv[1], "stop": sys.argv[1]})
    ckpt.save({"weights": torch.ones(3)}, step=4)
    ckpt.wait(60)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_that_is_killed_is_a_failure(tmp_path: Path) -> None:
    """Its writer process outlives it, and knows."""
    (tmp_path / "train.py").write_text(KILLED)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "train.py"), SEEN]
    ended = interpreters.run(command, cwd=tmp_path, check=False, timeout=PATIENCE_SECONDS)
    assert ended.returncode == -signal.SIGKILL
    until(lambda: str(tmp_path) in lines())
    assert "CKPT_MESSAGE=the training process was killed, or has crashed" in lines()
    assert {"CKPT_EVENT=failure", "CKPT_STEP=4"} <= set(lines())


def test_a_run_that_is_stopped_says_by_whom() -> None:
    """A schedule that requeues jobs may want to know."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(40, 2), batch_size=2)
    with pytest.raises(SystemExit), Checkpointer(Path("run"), on={"failure": SEEN, "stop": SEEN}) as ckpt:
        run = ckpt.track(model=model, optimizer=optimizer, loader=loader)
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
            if run.global_step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
    assert "CKPT_MESSAGE=training has ended: SIGTERM" in lines()
    assert [one for one in lines() if one.startswith("CKPT_EVENT")] == ["CKPT_EVENT=stop"]


# ---- which events


def committed(step: int) -> SnapshotCommitted:
    return SnapshotCommitted(f"s{step}", step, "/run", 1, 1, 1.0, 1.0, 0.0, 0.0)


def failed(code: str, step: int = 1) -> SnapshotFailed:
    return SnapshotFailed(f"s{step}", step, "/run", code, "full")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([failed("CKPT301"), failed("CKPT301", 2)], ["CKPT301"]),
        ([failed("CKPT301"), failed("CKPT300")], ["CKPT301", "CKPT300"]),
        ([failed("CKPT301"), failed("CKPT300"), failed("CKPT301", 2)], ["CKPT301", "CKPT300"]),
        ([failed("CKPT301"), committed(2), failed("CKPT301", 3)], ["CKPT301", "CKPT301"]),
        ([TierDegraded("s3://b/r", "CKPT300", "away"), committed(1)], ["CKPT300"]),
        ([committed(1), committed(2)], []),
    ],
)
def test_a_failure_is_reported_once_for_each_reason(
    events: list[Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full fails each snapshot, and one call for all of them is enough."""
    called: list[str] = []
    monkeypatch.setattr(hooks, "run", lambda command, about, options: called.append(about["code"]))
    passed: list[Any] = []
    tap = Hooks(WriterConfig("/run", on={"failure": ["x"], "timeout": 1.0, "folder": "/"}), passed.append)
    for event in events:
        tap.emit(channel.event(event))
    assert passed == [channel.event(event) for event in events]
    tap.finish(None)
    assert called == expected


def test_of_several_ranks_the_first_calls() -> None:
    """The others would call once more each."""
    config = WriterConfig("/run", on={"durable": ["x"]}, ranks=RankConfig(1, 2, "session", None, 1.0))
    tap = Hooks(config, lambda body: None)
    tap.emit(channel.event(committed(1)))
    tap.finish("gone")
    assert not [one for one in threading.enumerate() if one.name.startswith("ckpt-on")]


def test_a_writer_that_is_replaced_is_no_end_of_the_run() -> None:
    """Only one who says that training ends, or a trainer that is gone, ends it."""
    ckpt = Checkpointer(Path("run"), on={"stop": SEEN})
    ckpt.save({"weights": torch.ones(3)}, step=1)
    assert ckpt.wait(PATIENCE_SECONDS)
    writer = ckpt.engine._pipeline._writer
    assert writer is not None and writer.close(PATIENCE_SECONDS)
    assert lines() == []
    ckpt.engine._pipeline._lose_writer()
    ckpt.save({"weights": torch.ones(3)}, step=2)
    ckpt.close()
    assert "CKPT_EVENT=stop" in lines()


def test_a_rehearsal_calls_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`ckpt verify-resume` trains in a scratch folder."""
    rehearsal = json.dumps({"folder": str(tmp_path / "scratch"), "every_n_steps": 1, "end": 9})
    monkeypatch.setenv("CKPT_REHEARSAL", rehearsal)
    assert load_config("run", on={"stop": SEEN}).on.stop is None


# ---- the option


def test_it_is_written_in_yaml_as_well() -> None:
    """The key is a text there, as all of our files are YAML 1.2."""
    Path("ckpt.yaml").write_text(
        "tiers: run\non:\n  durable: [python, evaluate.py]\n  stop: ./x.sh\n  timeout: 2 min\n"
    )
    on = load_config("ckpt.yaml").on
    assert (on.durable, on.stop, on.failure, on.timeout) == (("python", "evaluate.py"), "./x.sh", None, 120.0)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("", "must be a text that is not empty"),
        ([], "must be a list of a program and its arguments"),
        (["curl", 3], "must be a list of texts"),
        ({"url": "https://x"}, "must be a list of a program and its arguments"),
        ("https://", "must be a URL that starts with http:// or https:// and names a host"),
        ("https://host/a token", "must be a URL that starts with"),
        ("https://me:token@host/run", "without a user"),
    ],
)
def test_what_can_be_no_hook_is_refused(hook: Any, said: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=r"on\.failure: ") as raised:
        load_config("run", on={"failure": hook})
    assert said in str(raised.value)
    assert "token" not in str(raised.value)


def test_a_hook_is_not_shown_with_the_options() -> None:
    """It may hold a token."""
    config = load_config("run", on={"failure": "https://host/hidden-token", "stop": ["./x", "--token=hidden-token"]})
    assert "hidden-token" not in repr(config)
