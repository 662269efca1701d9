"""The chunk door: a Unix socket where engines say who they are, and are lent slots of the arena.

Messages are small and bytes never pass: an engine maps the arena, whose descriptors it gets once, and hears slot
numbers. Only processes of the agent's own user are let in. A malformed message closes its connection and nothing else.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable

from nodeagent.errors import DoorProtocolError, DoorUnavailable, HelloRefused
from nodeagent.processes import ProcessWatch
from nodeagent.session import Session

CONNECTIONS_MAX = 128
BACKLOG = 64
ACCEPT_PAUSE_S = 0.2
SOCKET_PATH_BYTES_MAX = 107

logger = logging.getLogger(__name__)


class Door:
    """Listens at `path` and runs one `Session` a connection, made by `session`."""

    def __init__(self, path: str, processes: ProcessWatch, session: Callable[[socket.socket], Session]) -> None:
        self._path = path
        self._processes = processes
        self._session = session
        self._listener: socket.socket | None = None
        self._inode: int | None = None
        self._connections = 0

    def open(self) -> None:
        """Bind the socket, readable by this user alone. A dead agent's socket file is replaced.

        Raises `DoorUnavailable`: a live agent listens there, something else lies there, or the path can't be used.
        """
        if len(os.fsencode(self._path)) > SOCKET_PATH_BYTES_MAX:
            raise DoorUnavailable(f"the door's path is longer than {SOCKET_PATH_BYTES_MAX} bytes: {self._path}")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _clear_stale(self._path)
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            self._inode = os.stat(self._path).st_ino
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            hint = "; create its folder, or name another place with door" if error.errno == errno.ENOENT else ""
            raise DoorUnavailable(f"the door can't be opened at {self._path}: {error.strerror}{hint}") from error
        except DoorUnavailable:
            listener.close()
            raise
        self._listener = listener

    async def serve(self) -> None:
        """Let engines in until cancelled; then close every connection."""
        assert self._listener is not None, "a door is opened first"
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    logger.warning("the door can't accept a connection: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                if self._connections >= CONNECTIONS_MAX:
                    logger.warning("the door has %d connections already; one more is closed", CONNECTIONS_MAX)
                    connection.close()
                    continue
                self._connections += 1
                group.create_task(self._attend(connection))

    def close(self) -> None:
        """Close the socket and remove its file, if it is still ours."""
        if self._listener is None:
            return
        self._listener.close()
        self._listener = None
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    async def _attend(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setblocking(False)
                await self._session(connection).run()
        except DoorProtocolError as error:
            logger.warning("a connection at the door is closed: %s", error)
        except HelloRefused as error:
            logger.warning("an engine is refused: %s", error)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.info("a connection at the door has ended: %s", error)
        except Exception:  # the edge of the loop: one connection's fault stays its own
            logger.exception("a connection at the door met a fault and is closed")
        finally:
            self._connections -= 1


def _clear_stale(path: str) -> None:
    """Remove the socket file of an agent that is gone. Raises `DoorUnavailable` where it must not go."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise DoorUnavailable(f"the door can't be opened: {path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError as error:
            if error.errno != errno.ECONNREFUSED:
                raise DoorUnavailable(f"the door can't be opened: {path} is in use ({error})") from error
        else:
            raise DoorUnavailable(f"the door can't be opened: an agent listens at {path} already")
    os.unlink(path)
