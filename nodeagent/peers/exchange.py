"""This host's part in the exchange of chunks between hosts, as it is configured: a server, a fetcher, both or neither.

The agent opens it before it registers (other hosts need the address), starts it when its tiers are there, and stops it
before they go.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from nodeagent.config import PeersConfig
from nodeagent.errors import PeersUnavailable
from nodeagent.hints import PeerHint
from nodeagent.metrics import AgentMetrics
from nodeagent.peers.connection import Dialer
from nodeagent.peers.fetcher import PeerFetcher
from nodeagent.peers.server import PeerServer
from nodeagent.roster import Roster
from nodeagent.tiers.dram import DramTier
from nodeagent.tiers.promotion import LowerTier

BACKLOG = 128

logger = logging.getLogger(__name__)


class PeerExchange:
    """Made from configuration; a context in which the port is bound."""

    def __init__(self, config: PeersConfig, metrics: AgentMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._listener: socket.socket | None = None
        self._server: PeerServer | None = None
        self._fetcher: PeerFetcher | None = None
        self._dialing: ssl.SSLContext | None = None
        self._serving: ssl.SSLContext | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def __enter__(self) -> Self:
        """Bind the port, and read the certificates. Raises `PeersUnavailable`."""
        listen, tls = self._config.listen, self._config.tls
        if tls.ca is not None:
            with _naming(f"ca: {tls.ca}"):
                self._dialing = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None and tls.key is not None:
            with _naming(f"cert and key: {tls.cert} with {tls.key}"):
                self._serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                self._serving.load_cert_chain(tls.cert, tls.key)
        if listen.port is not None:
            family = socket.AF_INET6 if ":" in listen.bind else socket.AF_INET
            try:
                self._listener = socket.create_server((listen.bind, listen.port), family=family, backlog=BACKLOG)
            except OSError as error:
                raise PeersUnavailable(
                    f"peers can't be listened for on {listen.bind} port {listen.port}: {error.strerror}"
                ) from error
            self._listener.setblocking(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()

    @property
    def address(self) -> str | None:
        """`host:port` at which other hosts' agents fetch chunks of this one; `None` where they can't."""
        if self._listener is None:
            return None
        bind, port = self._listener.getsockname()[:2]
        return self._config.listen.address or (f"[{bind}]:{port}" if ":" in bind else f"{bind}:{port}")

    def start(self, group: asyncio.TaskGroup, dram: DramTier, lower: Callable[[], LowerTier], roster: Roster) -> None:
        """Serve and fetch, in `group`, until `stop`."""
        if self._config.token is None:
            return
        token = self._config.token.get_secret_value().encode()
        if self._listener is not None:
            self._server = PeerServer(self._listener, token, self._serving, dram, lower, self._metrics)
            self._tasks.append(group.create_task(self._server.run()))
            logger.info("other hosts' agents can fetch chunks at %s", self.address)
        if self._config.may_fetch:
            dialer = Dialer(token, self._dialing)
            self._fetcher = PeerFetcher(dialer, dram, lower, lambda: roster.engines, self._metrics)
            self._tasks.append(group.create_task(self._fetcher.run()))

    async def stop(self) -> None:
        """Break off all conversations: after this no slot is held, read or written for a peer."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()

    def prefetch(self, hint: PeerHint) -> int:
        """See `PeerFetcher.prefetch`."""
        if self._fetcher is None:
            self._metrics.peer_refused.labels("off").inc(len(hint.keys))
            return 0
        return self._fetcher.prefetch(hint)

    def cancel(self, hint: PeerHint) -> int:
        """See `PeerFetcher.cancel`."""
        return self._fetcher.cancel(hint) if self._fetcher is not None else 0

    def rates(self) -> Mapping[str, float]:
        """See `PeerFetcher.rates`."""
        return self._fetcher.rates() if self._fetcher is not None else {}

    def status(self) -> dict[str, Any]:
        """What the agent's `/status` shows."""
        fetcher = self._fetcher
        return {
            "address": self.address,
            "connections": self._server.connections if self._server is not None else 0,
            "fetch": "auto" if fetcher is not None else "off",
            "fetching": fetcher.under_way if fetcher is not None else 0,
            "waiting": fetcher.waiting if fetcher is not None else 0,
            "bytes_per_s": {address: round(rate) for address, rate in self.rates().items()},
        }


@contextlib.contextmanager
def _naming(files: str) -> Iterator[None]:
    """Say which certificate can't be used: TLS's own errors name no file."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise PeersUnavailable(f"peers.tls.{files} can't be used: {reason}") from error
