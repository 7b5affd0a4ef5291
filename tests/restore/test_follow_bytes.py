"""A follower of a tier with differences reads the new difference only, and is right whatever it misses."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.counted import CountedReads
from ckpt_engine import Checkpointer, follow
from ckpt_engine.restore import follower as following
from tests.restore.test_follow import (  # noqa: F401
    EVERY,
    WAIT_SECONDS,
    far,
    heard,
    polls,
    same,
    save,
    state,
    upload,
)
from tests.servers.fixtures import bucket, moto, proxy, wire  # noqa: F401
from tests.servers.wire import Wire
from tests.support import interpreters

LEAST_RATIO = 45
"""The bar: bytes of all weights, by those that are read for one step."""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[CountedReads]:
    """The storages of followers that are made."""
    made: list[CountedReads] = []
    real = following.storage_of

    def counted(tier: Any) -> CountedReads:
        made.append(CountedReads(real(tier)))
        return made[-1]

    monkeypatch.setattr(following, "storage_of", counted)
    return made


def training(width: int = 128) -> Iterator[dict[str, torch.Tensor]]:
    """The weights in bfloat16 after each step on scikit-learn's digits, once a network knows them a little."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = (torch.from_numpy(one) for one in datasets.load_digits(return_X_y=True))
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.ReLU(), nn.Linear(width, width))]
    network = nn.Sequential(nn.Linear(64, width), *hidden, nn.ReLU(), nn.Linear(width, 10))
    chance = torch.Generator().manual_seed(1)

    def steps(lr: float) -> Iterator[dict[str, torch.Tensor]]:
        optimizer = torch.optim.AdamW(network.parameters(), lr=lr)
        while True:
            batch = torch.randint(len(images), (64,), generator=chance)
            loss = nn.functional.cross_entropy(network(images[batch].float() / 16), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield {name: one.detach().bfloat16() for name, one in network.named_parameters()}

    for _, _ in zip(range(30), steps(3e-4), strict=False):
        pass
    small = steps(3e-6)
    for _, _ in zip(range(20), small, strict=False):
        pass
    yield from small


@pytest.mark.long
def test_a_step_of_bfloat16_weights_is_read_in_a_fortieth_of_their_bytes(
    tmp_path: Path, reads: list[CountedReads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest included, for each difference of a chain; the snapshot that begins a chain is read whole.

    Each one is there after one poll, bit for bit.
    """
    has: dict[str, torch.Tensor] = {}
    read = []
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": "delta"}]) as ckpt:
        run = follow(tmp_path, "model", EVERY)
        for step, model in zip(range(1, 8), training(1024), strict=False):
            ckpt.save({"model": model}, step=step).wait(WAIT_SECONDS)
            before = reads[0].nbytes if reads else 0
            with monkeypatch.context() as patch:
                polls(patch, 1)
                found, changed = next(run)
            has |= changed
            assert found == step and same(has, model)
            read.append(reads[0].nbytes - before)
    whole = sum(one.nbytes for one in has.values())
    ratios = [whole / nbytes for nbytes in read]
    assert [ratio >= LEAST_RATIO for ratio in ratios] == [False, True, True, True, True, False, True], ratios


def test_a_difference_is_read_without_what_it_was_made_against(tmp_path: Path, reads: list[CountedReads]) -> None:
    """Who starts late reads the chain, and from then on no more than the early one."""
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": "delta"}]) as ckpt:
        early = follow(tmp_path, "model", EVERY)
        for step, model in zip(range(1, 5), training(), strict=False):
            if step == 4:
                late = follow(tmp_path, "model", EVERY)
                next(late)
            ckpt.save({"model": model}, step=step).wait(WAIT_SECONDS)
            if step < 4:
                next(early)
        before = [one.nbytes for one in reads]
        has = [next(run) for run in (early, late)]
        taken = [one.nbytes - had for one, had in zip(reads, before, strict=True)]
    assert taken[0] == taken[1] and [step for step, _ in has] == [4, 4]
    assert same(has[0][1], has[1][1])


def test_what_is_kept_is_of_its_own(tmp_path: Path) -> None:
    """A user may change the tensors that are given: the next difference is not made against those."""
    has: dict[str, torch.Tensor] = {}
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": "delta"}]) as ckpt:
        run = follow(tmp_path, "model", EVERY)
        for step, model in zip(range(1, 4), training(), strict=False):
            ckpt.save({"model": model}, step=step).wait(WAIT_SECONDS)
            found, changed = next(run)
            has |= {name: one.clone() for name, one in changed.items()}
            assert found == step and same(has, model)
            for one in changed.values():
                one.zero_()


@pytest.mark.long
@pytest.mark.parametrize("keep", [1, 3])
def test_snapshots_that_were_missed_and_bases_that_were_pruned(tmp_path: Path, keep: int) -> None:
    """Whatever is left of the chains, the next look gives the newest snapshot, whole, and no mixture."""
    tier = {"url": str(tmp_path), "codec": "delta", "keep": {"last": keep}}
    model, has = training(), {}
    with Checkpointer(tiers=[tier]) as ckpt:
        run, step = follow(tmp_path, "model", EVERY), 0
        for missed in (0, 1, 3, 0, 6, 2, 0):
            for _ in range(missed + 1):
                step += 1
                newest = next(model)
                ckpt.save({"model": newest}, step=step).wait(WAIT_SECONDS)
            found, changed = next(run)
            has |= changed
            assert found == step and same(has, newest)


def test_a_damaged_copy_of_the_base_costs_one_snapshot(tmp_path: Path, heard: list[str]) -> None:  # noqa: F811
    """Memory that has changed is found by the digest of what is made with it; the next snapshot is read whole."""
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": "delta"}]) as ckpt:
        places = [following.Repository(following.storage_of(tier)) for tier in following.load_config(tmp_path).tiers]
        follower = following._Follower(places, "model", 0.01, float("inf"))
        run = follower.changes()
        models = training()
        ckpt.save({"model": next(models)}, step=1).wait(WAIT_SECONDS)
        has = next(run)[1]
        for data in follower._bases.values():
            data[0] ^= 1
        ckpt.save({"model": next(models)}, step=2).wait(WAIT_SECONDS)
        assert follower._look() is None and "[CKPT401]" in heard[0]
        newest = next(models)
        ckpt.save({"model": newest}, step=3).wait(WAIT_SECONDS)
        step, changed = next(run)
        assert step == 3 and same(has | changed, newest)


def test_a_store_that_dies_and_returns(
    far: dict[str, Any],  # noqa: F811
    wire: Wire,  # noqa: F811
    tmp_path: Path,
    heard: list[str],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first look after its return gives the newest of the snapshots that have come, made with what it kept."""
    models = training()
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": "delta"}]) as ckpt:
        ckpt.save({"model": next(models)}, step=1).wait(WAIT_SECONDS)
        upload(tmp_path, far)
        run = follow(far, "model", EVERY)
        has = next(run)[1]
        wire.cut()
        for step in (2, 3):
            newest = next(models)
            ckpt.save({"model": newest}, step=step).wait(WAIT_SECONDS)

        def mend(number: int) -> None:
            if number == 3:
                wire.mend()
                upload(tmp_path, far)

        seen = polls(monkeypatch, 5, mend)
        step, changed = next(run)
    assert (step, len(seen)) == (3, 3) and same(has | changed, newest)
    assert len(heard) == 1 and "[CKPT300]" in heard[0]


@pytest.mark.long
def test_followers_that_are_killed_again_and_again(tmp_path: Path) -> None:
    """Real processes and `kill -9` at random: each new one catches up, and no one ever has a mixture."""
    command = [sys.executable, "-m", "tests.restore.follow_victim", str(tmp_path)]
    chance, lines = random.Random(5), list[str]()
    process: interpreters.Popen | None = None
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": "delta", "keep": {"last": 2}}]) as ckpt:
        for step in range(1, 31):
            save(ckpt, step)
            if process is None:
                process = interpreters.Popen(command, stdout=subprocess.PIPE, text=True)
                assert process.stdout is not None
                lines.append(process.stdout.readline().strip())
            elif chance.random() < 0.2:
                with process:
                    process.kill()
                    lines += process.communicate(timeout=WAIT_SECONDS)[0].split()
                process = None
    last = interpreters.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True)
    if process is not None:
        with process:
            lines += process.communicate(timeout=WAIT_SECONDS)[0].split()
    assert all(line.isdecimal() for line in lines) and len(lines) >= 3
    assert last.stdout.split() == ["30"]


@pytest.mark.long
def test_what_is_kept_of_a_tensor_is_not_kept_alive_by_another_one(tmp_path: Path, heard: list[str]) -> None:  # noqa: F811
    """A small tensor may have the bytes that a large one had once; the rest of the large one is let go."""
    places = [following.Repository(following.storage_of(tier)) for tier in following.load_config(tmp_path).tiers]
    follower, small = following._Follower(places, None, 0.01, float("inf")), dict[str, torch.Tensor]()
    run = follower.changes()
    with Checkpointer(tiers=[{"url": str(tmp_path), "codec": "delta"}]) as ckpt:
        for step in range(1, 5):
            large = torch.randn(10 << 20, generator=torch.Generator().manual_seed(step)).bfloat16()
            small[f"best{step}"] = large[: 8 << 20].clone()
            ckpt.save({"large": large, **small}, step=step).wait(WAIT_SECONDS)
            assert next(run)[0] == step and heard == []
            owners = {id(one.obj): memoryview(one.obj).nbytes for one in follower._bases.values()}
            assert sum(owners.values()) == sum(one.nbytes for one in follower._bases.values())
