"""Runs on tiers with parity, and what is lost there."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from ckpt_engine import Checkpointer
from ckpt_engine.store import names
from ckpt_engine.store.names import ParityName
from ckpt_engine.store.repository import Repository
from ckpt_engine.store.storage import open_storage
from ckpt_engine.store.storage.base import Storage

WAIT_SECONDS = 60.0
PARTS = {"data": 8, "parity": 2}


def state(step: int, elements: int = 300_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    frozen = {f"frozen{number}": torch.randn(60_000, generator=generator) for number in range(6)}
    return {"model": {**frozen, "w": torch.full((elements,), float(step))}, "step": step}


def train(tiers: list[Any], steps: int = 3, elements: int = 300_000, **options: Any) -> None:
    for step in range(1, steps + 1):
        given = {"keep": {"last": 9}, "writer": "thread", "wait_at_end": WAIT_SECONDS, **options}
        with Checkpointer({"tiers": tiers, **given}) as ckpt:
            if step > 1:
                ckpt.load()
            assert ckpt.save(state(step, elements), step=step).wait(WAIT_SECONDS)


class ParityPlace:
    """A place with parity, and the bytes of its objects before they were hurt."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.storage: Storage = open_storage(url, options or {})
        self.was = self.objects()

    def objects(self) -> dict[str, bytes]:
        """Manifests and their copies, data files and their parity."""
        kept = (names.MANIFESTS, names.DATA)
        listed = [item for prefix in kept for item in self.storage.list(prefix)]
        return {item.name: self.storage.get(item.name, 0, item.nbytes) for item in listed}

    @property
    def ids(self) -> list[str]:
        return [parsed.id for parsed in Repository(self.storage).ids()]

    @property
    def parities(self) -> dict[str, ParityName]:
        """By the name of its data file."""
        return {one.file: one for name in self.was if (one := names.parity_of(name)) is not None}

    @property
    def newest_file(self) -> str:
        """The data file that the newest snapshot has written."""
        return max(self.parities)

    def replace(self, name: str, data: bytes) -> None:
        self.storage.put(name, [memoryview(data)], exclusive=False)

    def hurt(self, file: str, parts: int, rng: random.Random) -> None:
        """Lose or flip so many parts of a data file and its parity."""
        parity = self.parities[file]
        data, made = bytearray(self.was[file]), bytearray(self.was[str(parity)])
        for part in rng.sample(range(parity.data + parity.parity), parts):
            blocks = ranges_of(parity, part)
            image = data if part < parity.data else made
            first, last = blocks[0][0], blocks[-1][1]
            match rng.choice(["flip", "zero", "flip everywhere"]):
                case "flip":
                    image[rng.randrange(first, blocks[0][1])] ^= 1 << rng.randrange(8)
                case "zero":
                    for start, stop in blocks:
                        image[start:stop] = bytes(stop - start)
                case _:
                    for start, stop in blocks:
                        image[rng.randrange(start, stop)] ^= 0xFF
            assert first < last
        self.replace(file, bytes(data))
        self.replace(str(parity), bytes(made))


def ranges_of(parity: ParityName, part: int) -> list[tuple[int, int]]:
    """The bytes of a part: one range of the data file, or its blocks in the parity object."""
    from ckpt_engine.copy.file_parity import BLOCK_BYTES, DIGEST_BYTES

    range_bytes = -(-parity.nbytes // parity.data)
    if part < parity.data:
        return [(part * range_bytes, min(parity.nbytes, (part + 1) * range_bytes))]
    found, at, row_bytes = [], 0, (parity.data + parity.parity + 1) * DIGEST_BYTES
    for start in range(0, range_bytes, BLOCK_BYTES):
        part_bytes = row_bytes + min(BLOCK_BYTES, range_bytes - start)
        begin = at + (part - parity.data) * part_bytes
        found.append((begin, begin + part_bytes))
        at += parity.parity * part_bytes
    return found
