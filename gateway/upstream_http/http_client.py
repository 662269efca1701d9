"""Sends a request and waits for its answer's head: over a kept connection where there is one, else over a new one.

A kept connection may have been closed by its server just then. If it breaks before a byte of an answer came, the
request is sent again, once, over a fresh one; after a byte it never is.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Self

from gateway.upstream_http.addresses import Addresses
from gateway.upstream_http.connection import Connection
from gateway.upstream_http.connection_pool import ConnectionPool
from gateway.upstream_http.errors import AnswerTimedOut, ConnectionBroken, ConnectTimedOut
from gateway.upstream_http.exchange import Exchange
from gateway.upstream_http.origin import Origin, Place, parse_url
from gateway.upstream_http.request import Request


class HttpClient:
    """Use as an async context manager; at its end all connections are closed.

    `connect_s` bounds finding a server's address, connecting and TLS together. `keep_s` is how long a connection may
    lie idle: less than the servers keep theirs. `tls` stands in for the machine's own trust, made when first needed.
    """

    def __init__(self, connect_s: float, keep_s: float, tls: ssl.SSLContext | None = None) -> None:
        self.connect_s, self._keep_s, self._tls = connect_s, keep_s, tls
        self.pool: ConnectionPool  # with the loop
        self._addresses: Addresses

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.pool, self._addresses = ConnectionPool(self._loop, self._keep_s), Addresses(self._loop)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()

    async def send(self, request: Request, timeout_s: float) -> Exchange:
        """Send it; the exchange whose head has come, for which all together may take `timeout_s`. Close it.

        Raises `ExchangeFailed`.
        """
        deadline = self._loop.time() + timeout_s
        place = parse_url(request.url)
        head = request.head(place.target, place.origin.host_header)
        connection = self.pool.take(place.origin) if isinstance(request.body, bytes) else None
        if connection is not None:
            exchange = connection.begin(request.method == "HEAD")
            try:
                return await self._exchange(connection, exchange, request, head, deadline)
            except ConnectionBroken:
                if exchange.has_received:
                    raise
        connection = await self._connect(place, deadline)
        exchange = connection.begin(request.method == "HEAD")
        return await self._exchange(connection, exchange, request, head, deadline)

    async def _exchange(
        self, connection: Connection, exchange: Exchange, request: Request, head: bytes, deadline: float
    ) -> Exchange:
        try:
            if isinstance(request.body, bytes):
                connection.send(head, request.body)
            else:
                connection.write(head)
                await self._send_pieces(connection, exchange, request.body, deadline)
            await exchange.head(deadline)
        except BaseException:
            exchange.close()
            raise
        return exchange

    async def _send_pieces(
        self, connection: Connection, exchange: Exchange, body: AsyncIterator[bytes], deadline: float
    ) -> None:
        """Chunk by chunk, as the server takes them. An answer that is a refusal ends it: the rest isn't wanted."""
        try:
            async with asyncio.timeout_at(deadline):
                async for piece in body:
                    while not connection.is_writable and not _is_decided(exchange):
                        await exchange.wait(deadline)
                    if _is_decided(exchange):
                        return
                    if piece:
                        connection.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        except TimeoutError as error:
            raise AnswerTimedOut("its body was slow to come, or to go") from error
        connection.send_end(b"0\r\n\r\n")

    async def _connect(self, place: Place, deadline: float) -> Connection:
        """A connection to the first address that accepts one; each has its share of the time that is left."""
        origin = place.origin
        end = min(deadline, self._loop.time() + self.connect_s)
        failure: Exception = TimeoutError()
        try:
            async with asyncio.timeout_at(end):
                addresses = await self._addresses.of(origin.host)
                for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
                    share_s = (end - self._loop.time()) / left
                    try:
                        async with asyncio.timeout(share_s):
                            return await self._connect_to(origin, address)
                    except (OSError, TimeoutError) as error:
                        failure = error
        except (OSError, TimeoutError) as error:
            failure = error
        if isinstance(failure, TimeoutError):
            raise ConnectTimedOut("no connection in time") from failure
        raise ConnectionBroken(f"no connection: {type(failure).__name__}") from failure

    async def _connect_to(self, origin: Origin, address: str) -> Connection:
        connection = Connection(origin, self._loop, self.pool)
        try:
            await self._loop.create_connection(
                lambda: connection,
                address,
                origin.port,
                ssl=self._tls_context() if origin.is_tls else None,
                server_hostname=origin.host if origin.is_tls else None,
            )
        except BaseException:
            connection.abort()
            self.pool.lost(connection)  # uvloop doesn't tell, where this was cancelled just when it was connected
            raise
        self._addresses.prefer(origin.host, address)
        return connection

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _is_decided(exchange: Exchange) -> bool:
    """Whether the rest of a request changes nothing any more."""
    return exchange.failure is not None or exchange.is_over or exchange.status >= 300
