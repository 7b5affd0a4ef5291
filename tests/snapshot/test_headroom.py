"""Whether the host has room for the arena: what the kernel tells, and what is made of it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine import Checkpointer
from ckpt_engine.copy import memory_limits
from ckpt_engine.copy.memory_limits import RESERVE, Fit, MemoryLimit, look, plan_arena
from ckpt_engine.writer.launch import ProcessWriter, ThreadWriter

GB = 10**9


class Host:
    """The kernel's files, as a machine with 64 GiB available has them."""

    def __init__(self, folder: Path) -> None:
        self.meminfo, self.membership, self.cgroups = folder / "meminfo", folder / "cgroup", folder / "fs"
        self.meminfo.write_text("MemTotal:       99999999 kB\nMemFree: 1 kB\nMemAvailable:   67108864 kB\n")
        self.membership.write_text("0::/\n")
        self.cgroups.mkdir()

    def group_v2(self, path: str, limit: int | str, usage: int, cache: int = 0) -> None:
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"anon 1\nfile 9\ninactive_file {cache}\nactive_file 0\nshmem 7\n")

    def group_v1(self, path: str, limit: int, usage: int, cache: int = 0) -> None:
        folder = self.cgroups / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file 0\ntotal_active_file {cache}\n")

    def look(self) -> MemoryLimit | None:
        return look(self.meminfo, self.membership, self.cgroups)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_machine_without_limits_has_what_it_says(host: Host) -> None:
    """A limit of `max` counts as none."""
    host.group_v2("", "max", 5 * GB)
    assert host.look() == MemoryLimit(64 << 30, "MemAvailable of this machine")


def test_the_limit_of_the_own_group_counts_and_its_page_cache_is_free(host: Host) -> None:
    """Version 2: 10 GB, of which 7 are used, of which 3 are cache."""
    host.membership.write_text("0::/job/step\n")
    host.group_v2("job/step", 10 * GB, 7 * GB, 3 * GB)
    found = host.look()
    assert found is not None
    assert (found.nbytes, found.limit.endswith("fs/job/step")) == (6 * GB, True)


def test_the_limit_of_a_group_above_counts_too(host: Host) -> None:
    """A job's step has no limit of its own, the job has."""
    host.membership.write_text("0::/job/step\n")
    host.group_v2("job/step", "max", GB)
    host.group_v2("job", 4 * GB, GB)
    found = host.look()
    assert found is not None
    assert found.nbytes == 3 * GB


def test_version_1_and_hybrid_systems(host: Host) -> None:
    """The memory controller is version 1 although there is a version 2 tree; its no-limit is a huge number."""
    host.membership.write_text("5:cpu,cpuacct:/a\n4:memory:/a/b\n1:name=systemd:/a\n0::/a\n")
    host.group_v1("a/b", 9223372036854771712, 2 * GB)
    host.group_v1("a", 8 * GB, 6 * GB, GB)
    (host.cgroups / "unified/a").mkdir(parents=True)
    found = host.look()
    assert found is not None
    assert found.nbytes == 3 * GB


def test_a_container_that_sees_the_path_on_the_host(host: Host) -> None:
    """A container without a namespace of its own sees its group at the root of the mount."""
    host.membership.write_text("4:memory:/docker/0123\n0::/docker/0123\n")
    host.group_v1("", 2 * GB, GB)
    found = host.look()
    assert found is not None
    assert found.nbytes == GB


def test_usage_above_the_limit_leaves_nothing(host: Host) -> None:
    """A limit that was lowered under a running job."""
    host.group_v2("", GB, 2 * GB)
    found = host.look()
    assert found is not None
    assert found.nbytes == 0


def test_a_system_that_tells_nothing_is_not_guessed_at(tmp_path: Path) -> None:
    """Every arena counts as fitting then."""
    nowhere = tmp_path / "nowhere"
    assert look(nowhere, nowhere, nowhere) is None
    assert plan_arena(10**15, 3, memory=True, room=None) == Fit(3, True)


def test_this_machine_tells() -> None:
    """The default paths are the real ones."""
    found = look()
    assert found is not None
    assert found.nbytes > 0


@pytest.mark.parametrize(
    ("available", "slots", "memory"), [(40, 3, True), (31, 2, True), (21, 1, False), (5, 1, False)]
)
def test_first_fewer_slots_then_no_memory_tier(available: int, slots: int, memory: bool) -> None:
    """Three slots of 10 GB."""
    fit = plan_arena(10 * GB, 3, memory=True, room=MemoryLimit(available * GB, "limit of x"))
    assert (fit.slots, fit.memory) == (slots, memory)
    assert (fit.warning is None) == (slots == 3)


def test_the_warning_says_needed_available_and_what_to_do() -> None:
    """One message has all that a user needs."""
    fit = plan_arena(10 * GB, 3, memory=True, room=MemoryLimit(12 * GB, "limit of control group /x"))
    assert fit.warning == (
        "too little host memory for the arena: 3 slots of 10 GB need 30 GB, 11 GB are available (limit of control "
        "group /x). Snapshots continue with 1 slot and without the memory tier. Give the job more memory, or set "
        "`slots: 1` and remove the memory tier"
    )
    fit = plan_arena(10 * GB, 2, memory=False, room=MemoryLimit(12 * GB, "y"))
    assert fit.warning is not None
    assert "continue with 1 slot. Give" in fit.warning


@given(st.integers(1, 10**12), st.integers(1, 8), st.booleans(), st.integers(0, 10**13), st.integers(0, 10**12))
def test_the_plan_has_room_or_is_the_least(nbytes: int, slots: int, memory: bool, room: int, occupied: int) -> None:
    """Never more slots than wanted or than there is room for, never none, and a memory tier only with two."""
    fit = plan_arena(nbytes, slots, memory=memory, room=MemoryLimit(room, "x"), held_bytes=occupied)
    assert 1 <= fit.slots <= slots
    assert fit.slots == 1 or fit.slots * nbytes <= room * (1.0 - RESERVE) + occupied + 1
    assert not fit.memory or memory
    assert fit.slots == slots or not fit.memory or fit.slots >= 2
    assert (fit.warning is None) == (fit == Fit(slots, memory))


MB = 10**6


@pytest.mark.parametrize(
    ("available", "process", "slots"),
    [
        (200, True, 2),
        (120, True, 1),
        (80, False, 1),  # a writer process would leave too little for one snapshot
        (130, True, 1),
        (20, False, 1),
    ],
)
def test_where_a_writer_process_leaves_no_room_a_thread_writes(available: int, process: bool, slots: int) -> None:
    """Snapshots of 60 MB in small control groups: the process counts before it is started, and says so in one line."""
    room = MemoryLimit(available * MB, "limit of control group /x")
    fit = plan_arena(60 * MB, 2, memory=False, room=room, process=True)
    assert (fit.process, fit.slots, fit.memory) == (process, slots, False)
    assert fit.process or "written by a thread of the trainer, with 1 slot. Give" in (fit.warning or "")
    started = plan_arena(60 * MB, 2, memory=False, room=room, process=True, started=True)
    assert started.process == (available * (1 - RESERVE) >= 60)


def test_a_writer_process_is_not_started_into_too_little_memory() -> None:
    """Before any state is known; with the memory tier, which needs a process, that is lost too."""
    room = MemoryLimit(20 * MB, "limit of control group /x")
    fit = plan_arena(0, 3, memory=True, room=room, process=True)
    assert (fit.process, fit.slots, fit.memory) == (False, 3, False)
    assert fit.warning == (
        "too little host memory for a writer process: 19 MB are available (limit of control group /x). Snapshots "
        "continue, written by a thread of the trainer, with 3 slots and without the memory tier. Give the job more "
        "memory, or set `writer: thread` and remove the memory tier"
    )
    assert plan_arena(0, 3, memory=True, room=MemoryLimit(40 * MB, "x"), process=True).process


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("memory", [False, True])
def test_the_defaults_write_with_a_thread_where_a_process_would_be_killed(
    tmp_path: Path, started: bool, memory: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found before the writer is started, or when the first state is seen: then the process is ended again."""
    rooms = [MemoryLimit(100 * MB, "limit of control group /x")] * started + [
        MemoryLimit(10 * MB, "limit of control group /x")
    ] * 9
    with Checkpointer(tiers=["memory", str(tmp_path)] if memory else str(tmp_path)) as ckpt:
        monkeypatch.setattr(memory_limits, "look", lambda: rooms.pop(0))
        ckpt.engine.start()
        assert isinstance(_client(ckpt), ProcessWriter if started else ThreadWriter)
        ckpt.save({"w": torch.ones(12 * MB // 4)}, step=1).wait(60)
        assert not ckpt.engine._pipeline.process and not ckpt.engine.memory
        assert [one.step for one in ckpt.snapshots()] == [1]
    assert sum("too little host memory for a writer process" in line for line in caplog.messages) == 1


def _client(ckpt: Checkpointer) -> object:
    assert ckpt.engine._pipeline._writer is not None
    return ckpt.engine._pipeline._writer.client


def test_a_state_that_has_outgrown_its_memory_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It has snapshots already, training can go on, and each that is missing is said with what to do."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with Checkpointer(tmp_path, every_n_steps=2, at_end=False, writer="thread", on_error="warn") as ckpt:
            run = ckpt.track(model=model, optimizer=optimizer)
            first = 0
            while run.global_step < first + 4:
                if not first and ckpt.wait(30) and ckpt.snapshots():  # a busy machine skips earlier ones
                    first = run.global_step
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
                    model.register_buffer("big", torch.zeros(1 << 19))
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                run.step()
                assert run.global_step < 1000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one.step for one in Checkpointer(tmp_path).snapshots()] == [first]
    due = first + 2 - first % 2  # a snapshot that a busy machine put off does not move those after it
    assert f"no snapshot of step {due}: [CKPT200] cannot reserve 2" in caplog.text
    assert "→ raise the limit of the size of files (`ulimit -f`)" in caplog.text
