"""A connection to the writer of another rank, which may move."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_engine.writer.peer_service import PeerConnection, connect


@dataclass(slots=True)
class PeerLink:
    """A connection to a rank's writer, which is made when it is needed. One thread; others may move it or hang up."""

    secret: str
    address: tuple[str, int]
    _line: PeerConnection | None = None
    _line_to: tuple[str, int] | None = None

    def line(self) -> PeerConnection:
        """The connection to where the writer is now; raises as `connect`."""
        address, line = self.address, self._line
        if line is None or self._line_to != address:
            self.hang_up()
            line = self._line = connect(*address, self.secret)
            self._line_to = address
        return line

    def hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()
