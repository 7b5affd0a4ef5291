"""The flight recorder: a row for each optimizer step, and the proof that a resumed run repeats those of an earlier one.

No step waits for it. The rows are in memory that the writer process shares, so that they outlive a trainer that is
killed; see docs/exactness.md.
"""

from __future__ import annotations

import os
import platform
import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ckpt_engine.copy.host_memory import shared_memory
from ckpt_engine.observe.run_times import hook_time
from ckpt_engine.probe.batch import digest_of
from ckpt_engine.probe.raw_memory import numpy_stream, torch_stream
from ckpt_engine.probe.repeated_steps import RepeatedSteps, steps_behind
from ckpt_engine.probe.replay_proof import ReplayProof
from ckpt_engine.probe.sample import Samplers
from ckpt_engine.ranks.world import Ranks
from ckpt_engine.store import names
from ckpt_engine.store.rows import ROW_BYTES, ROWS, ProcessRows, Ring

NOTE = "replay"
"""The note of a snapshot that says how many steps were recorded."""
_SINCE = "since"
"""Its entry that says when a process has gone another way than those before it: what they did counts no more."""
_OTHER_STREAMS_EACH = 16
"""Python's stream takes longer to read than torch's."""
VERSION = 4
"""What a row has: rows of another version cannot be compared."""


class FlightRecorder:
    """Of one run of one process, on its training thread.

    Args:
        optimizers: of the run now, by name.
        modules: names for its parameters.
        ranks: this process is one of them; None: it is alone.
        stops: a difference raises.

    Attributes:
        rank: of this process.
        name, about, fd: what `WriterClient.attach_rows` takes.
        proof: of the resume of this process.
    """

    def __init__(
        self,
        optimizers: Callable[[], Mapping[str, torch.optim.Optimizer]],
        modules: Callable[[], Mapping[str, torch.nn.Module]],
        ranks: Ranks | None,
        *,
        stops: bool,
    ) -> None:
        self.proof = ReplayProof(ranks, stops=stops)
        self.rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self.name = names.rows_name(time.time_ns() // 1_000_000, os.urandom(4).hex(), self.rank)
        self.about: dict[str, Any] = {
            "version": VERSION,
            "world": size,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "machine": platform.machine(),
        }
        self.fd, memory = shared_memory("ckpt-rows", ROWS * ROW_BYTES)
        self._ring = Ring(memory)
        self._samplers = Samplers(optimizers, modules)
        self._number = self._calls = self._step = self._skips = self._batch = 0
        self._rates: tuple[list[float], int] = ([], 0)
        """The last ones, and their digest."""
        self._noted = 0, 0, time.time()
        """Steps of optimizers and the digest of batches at the last boundary, and since when the rows count."""
        self._handle: RemovableHandle | None = register_optimizer_step_post_hook(self._stepped)

    def leave_fork(self) -> None:
        """See `Leaver`: a fork shares the memory of the rows, and puts none there."""
        self._handle = None

    def close(self) -> None:
        """Record no more. What was compared is the outcome. Idempotent."""
        if self._handle is None:
            return
        self._handle.remove()
        self._handle = None
        self._samplers.clear()
        os.close(self.fd)
        self.proof.end()

    @property
    def note(self) -> dict[str, float]:
        """For the snapshot of the last boundary."""
        calls, batch, since = self._noted
        return {"calls": calls, "batch": batch, "world": self.about["world"], _SINCE: since}

    # ---- what a run says

    def took(self, batch: Any) -> None:
        """The loop got a batch."""
        if self._skips:
            self._skips -= 1
            return
        self._batch = digest_of(batch, self._batch)

    def boundary(self, step: int) -> None:
        """Step `step` is complete. Where the run has no optimizer of torch, that makes a row."""
        if self._calls == self._noted[0] and step != self._step and not self._samplers.optimizers():
            self._stepped(self._samplers.by_hand())
        self._step = step
        self._noted = self._calls, self._batch, self._noted[2]
        if self.proof.resumed is not None:
            self.proof.join(last=False)

    def expect(
        self, saved: Mapping[str, Any] | None, step: int, earlier: Sequence[ProcessRows], *, other_way: str = ""
    ) -> None:
        """The run continues from a snapshot.

        Args:
            saved: its `note`; None: it has none.
            step: its step.
            earlier: what earlier processes have recorded, oldest first.
            other_way: why this process is to go another way than they did, and is not compared.
        """
        self._step = step
        self.proof.expect(step, self._comparison_with(saved, earlier, other_way))

    def _comparison_with(
        self, saved: Mapping[str, Any] | None, earlier: Sequence[ProcessRows], other_way: str
    ) -> RepeatedSteps | str:
        """With what earlier processes have recorded; a text: why there is none."""
        if saved is None:
            return other_way or "the snapshot has no record of its steps"
        self._calls, self._batch = int(saved["calls"]), int(saved["batch"])
        if saved["world"] != self.about["world"]:
            other_way = f"another number of processes: the snapshot is of {saved['world']}, now {self.about['world']}"
        since = time.time() if other_way else float(saved.get(_SINCE, 0.0))
        self._noted = self._calls, self._batch, since
        if other_way:
            return other_way
        earlier = [replace(one, rows=tuple(row for row in one.rows if row.time >= since)) for one in earlier]
        earlier = [life for life in earlier if life.about.get("version") == VERSION]
        if expected := steps_behind(earlier, self._calls):
            return RepeatedSteps(expected, earlier[-1].about, self.about, self._samplers.names)
        return "no step was repeated" if earlier else "no earlier process has left a record"

    def begin(self, ahead: int) -> None:
        """The resumed loop asks for its first batch.

        Args:
            ahead: so many of the batches that come were counted before the snapshot.
        """
        self._batch, self._skips = self._noted[1], ahead

    # ---- a step

    @hook_time.counted
    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        sampler = self._samplers.get(id(optimizer)) or self._samplers.follow(optimizer)
        if sampler is None or self._handle is None:
            return
        self._calls += 1
        self._number += 1
        rates = [rate if type(rate := group.get("lr")) is float else _number(rate) for group in optimizer.param_groups]
        if rates != self._rates[0]:
            self._rates = rates, xxhash.xxh3_64_intdigest(array("d", rates))
        words = sampler.look(self._calls)  # which may make another plan
        row = (
            self._number,
            self._calls,
            self._step + 1,
            sampler.checksum,
            sampler.plan,
            self._batch,
            xxhash.xxh3_64_intdigest(torch_stream()),
            0 if self._calls % _OTHER_STREAMS_EACH else _other_streams(),
            self._rates[1],
            time.time(),
            words,
        )
        self._batch = 0
        self.proof.compare(row)
        self._ring.put(row)


def _number(rate: Any) -> float:
    """A learning rate; 0.0 where reading it would wait for a device."""
    if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
        return 0.0
    return float(rate or 0.0)


def _other_streams() -> int:
    numpy = numpy_stream() or repr(np.random.get_state()).encode()
    return xxhash.xxh3_64_intdigest(numpy, hash(random.getstate()[1]) % 2**64)
