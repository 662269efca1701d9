"""What the processes of one gateway tell each other at once: which engine made which response.

Only that engine can go on from it, and the client's next request may come to any of them. Notes are messages on socket
pairs that the parent process holds, so they last over a worker's lives; one that finds no room is lost, and the
response is then known to the process that saw it, as it is with several gateways.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from gateway.response_homes import ResponseHomes

NOTE_BYTES_MAX = 4096

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Siblings:
    """Where one process hears the others, and where it tells each of them; non-blocking, of whole messages."""

    inbox: socket.socket
    outboxes: tuple[socket.socket, ...]

    @classmethod
    def of(cls, inbox: socket.socket, outboxes: Sequence[socket.socket]) -> "Siblings":
        """With all of them made non-blocking."""
        for each in (inbox, *outboxes):
            each.setblocking(False)
        return cls(inbox, tuple(outboxes))


class SiblingNotes:
    """Tells what `homes` learns, and lets it hear what the others tell."""

    def __init__(self, homes: ResponseHomes, siblings: Siblings) -> None:
        self._homes, self._siblings = homes, siblings
        self.lost = 0
        """Notes that found no room."""
        homes.on_change = self._tell

    async def run(self) -> None:
        """Hear the others until cancelled."""
        loop = asyncio.get_running_loop()
        while note := await loop.sock_recv(self._siblings.inbox, NOTE_BYTES_MAX):
            try:
                response_id, engine = orjson.loads(note)
            except ValueError:  # a worker of another release, in the middle of an upgrade
                logger.warning("a note of another worker can't be read")
                continue
            self._homes.hear(response_id, engine)

    def _tell(self, response_id: str, engine: str | None) -> None:
        note = orjson.dumps([response_id, engine])
        for outbox in self._siblings.outboxes:
            try:
                outbox.send(note)
            except OSError:  # no room, or too long
                self.lost += 1
