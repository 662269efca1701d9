"""A request, and its head as it goes over the wire."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gateway.upstream_http.errors import BadRequest

BODY_METHODS = frozenset({"POST", "PUT", "PATCH"})
"""These say how long their body is though it is empty."""


@dataclass(frozen=True, slots=True)
class Request:
    """`headers` are end-to-end ones: `host`, the body's length and its framing are added here, and nothing else.

    A body that comes in pieces can't be sent twice, so it goes over a fresh connection, chunked.
    """

    method: str
    url: str
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes | AsyncIterator[bytes] = b""

    def head(self, target: bytes, host: bytes) -> bytes:
        """The head, with its empty line. Raises `BadRequest` where a part of it would end its line."""
        lines = [b"%s %s HTTP/1.1\r\nhost: %s" % (self.method.encode(), target, host)]
        lines += [b"%s: %s" % header for header in self.headers]
        if not isinstance(self.body, bytes):
            lines.append(b"transfer-encoding: chunked")
        elif self.body or self.method in BODY_METHODS:
            lines.append(b"content-length: %d" % len(self.body))
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines) or b"\0" in head:
            raise BadRequest("a header of it breaks its line")
        return head + b"\r\n\r\n"
