"""Where an answer goes: towards the client."""

from typing import Protocol


class Sink(Protocol):
    """Takes one answer: `start` once, pieces, `finish`."""

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        ...

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body."""
        ...

    def push(self, piece: bytes) -> bool:
        """Send a piece of the body now, without waiting: false where that can't be, and nothing was sent."""
        ...

    async def finish(self) -> None:
        """End the body."""
        ...
