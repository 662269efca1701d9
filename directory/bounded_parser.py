"""BoundedParser: redis-py's hiredis parser, for servers that aren't trusted with this process's memory.

hiredis makes room for as many elements as a reply announces before any of them has come, and keeps what came of a
reply until it is whole. So a reply that announces too much, or is too long, is refused while it is read: its
connection is closed, and the call fails. A server that ends a connection before it says anything is one that expects
TLS as a rule, and the error says so.
"""

import re
from typing import Any

from redis._parsers.hiredis import _AsyncHiredisParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

ELEMENTS_DIGITS_MAX = 6
"""A list in a reply has fewer than a million elements: rows of the fleet's table, records of a lookup."""

REPLY_BYTES_MAX = 256 << 20
"""Bytes read of the replies to one call: a thousand records of 10,000 holders are 90 MB."""

SAID_NOTHING = "the server ended the connection before it said anything, as one does that expects TLS (rediss://)"
_TLS_ALERT = b"\x15\x03"

_TOO_MANY = re.compile(rb"\n[*%%~>|][0-9]{%d}" % (ELEMENTS_DIGITS_MAX + 1))
"""A list's head: it follows the end of another line or text, and hiredis takes no zeros or signs before the number.

Searched for in the bytes as they come, because reading their structure would cost a lookup more than decoding it does.
A record's bytes look like one by chance once in 10**10 megabytes; then its call fails, as with any broken reply.
"""
_HEAD_BYTES = 2 + ELEMENTS_DIGITS_MAX + 1


class BoundedParser(_AsyncHiredisParser):
    """As `_AsyncHiredisParser`. Raises `InvalidResponse` for a reply beyond the bounds."""

    _reader: Any

    def on_connect(self, connection: Any) -> None:
        """Begin with a new connection's first reply."""
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self.begin()
        self._before = b"\n"
        self._has_heard = False

    def begin(self) -> None:
        """Count anew: what is read from here on answers another call, be it by one reply or several."""
        self._reply_bytes = 0

    async def read_from_socket(self) -> bool:
        """Read what has come and hand it to hiredis, unless it goes beyond the bounds."""
        assert self._stream is not None
        came = await self._stream.read(self._read_size)
        if not came or (came.startswith(_TLS_ALERT) and not self._has_heard):
            raise RedisConnectionError(SAID_NOTHING if not self._has_heard else "the server closed the connection")
        self._has_heard = True
        self._reply_bytes += len(came)
        if self._reply_bytes > REPLY_BYTES_MAX:
            raise InvalidResponse(f"the reply to a call is longer than {REPLY_BYTES_MAX} bytes")
        if _TOO_MANY.search(self._before + came[:_HEAD_BYTES]) or _TOO_MANY.search(came):
            raise InvalidResponse(f"a reply announces a list of 10**{ELEMENTS_DIGITS_MAX} elements or more")
        self._before = (self._before + came[-_HEAD_BYTES:])[-_HEAD_BYTES:]
        self._reader.feed(came)
        return True
