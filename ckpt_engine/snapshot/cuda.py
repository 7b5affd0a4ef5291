"""What copying from and to GPUs needs of CUDA: streams, events, asynchronous copies, page-locked host memory.

Everything that talks to CUDA while a snapshot is copied goes through `Runtime`, so that tests can put streams in its
place whose work is done late and in any order that CUDA allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all GPUs, not only the current one
_SUCCESS = 0


class Runtime(Protocol):
    """Devices whose work is queued in streams. A stream or event is whatever the runtime returned."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's bytes are on one of these devices."""
        ...

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor is that the runtime owns."""
        ...

    def current(self, device: torch.device) -> Any:
        """The stream that the calling thread queues work in."""
        ...

    def side(self, device: torch.device) -> Any:
        """A new stream."""
        ...

    def mark(self, stream: Any) -> Any:
        """An event that happens when all work queued in `stream` so far is done."""
        ...

    def hold(self, stream: Any, event: Any) -> None:
        """Work queued in `stream` from now on waits for `event`; the caller does not."""
        ...

    def wait(self, event: Any) -> None:
        """Return when `event` has happened. Lets go of the GIL and of the core."""
        ...

    def copy(self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Queue copies in `stream`; either side of a pair may be host memory, which should be page-locked."""
        ...

    def empty(self, stream: Any, device: torch.device, nbytes: int) -> torch.Tensor:
        """Bytes on a device, to be used in `stream` only."""
        ...

    def register(self, device: torch.device, address: int, nbytes: int) -> str | None:
        """Page-lock host memory, by the driver of a device; what is wrong, or None. Lets go of the GIL."""
        ...

    def unregister(self, device: torch.device, address: int) -> str | None:
        """Give page-locked memory back to the system's paging; what is wrong, or None."""
        ...


class Cuda:
    """The `Runtime` of torch's CUDA devices.

    A thread that has not chosen a device would make a context on the first one, which takes hundreds of megabytes of a
    GPU that training may not use: so whatever other threads call chooses one.
    """

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def device(self, tensor: torch.Tensor) -> torch.device:
        return tensor.device

    def current(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def side(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # Blocking: a host thread that waits for it sleeps, instead of taking a core from training.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def hold(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def wait(self, event: torch.cuda.Event) -> None:
        with torch.cuda.device(event.device):
            event.synchronize()

    def copy(self, stream: torch.cuda.Stream, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            if targets[0].is_cuda and sources[0].is_cuda:
                torch._foreach_copy_(list(targets), list(sources))
                return
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def empty(self, stream: torch.cuda.Stream, device: torch.device, nbytes: int) -> torch.Tensor:
        # It is used again by later snapshots, of which some may be taken in inference mode and some not.
        with torch.inference_mode(False), torch.cuda.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def register(self, device: torch.device, address: int, nbytes: int) -> str | None:
        with torch.cuda.device(device):
            return self._problem(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, device: torch.device, address: int) -> str | None:
        with torch.cuda.device(device):
            return self._problem(_cudart().cudaHostUnregister(address))

    def _problem(self, code: Any) -> str | None:
        return None if int(code) == _SUCCESS else str(_cudart().cudaGetErrorString(code))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


CUDA = Cuda()
