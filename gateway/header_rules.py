"""Which headers pass a gateway, and which end at it; the same rules at every endpoint. Pure.

Ends at each hop: what HTTP says is for one connection (RFC 9110, 7.6.1), with all that `Connection` names, and
`Proxy-*`. Everything else passes, whether it is known here or not: `traceparent` and `tracestate` as well.
"""

import re
from collections.abc import Sequence

HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"})
PROXY = b"proxy-"
"""What begins like this is between two hops, too."""
CREDENTIALS = frozenset({b"authorization", b"x-api-key", b"api-key"})
OURS = frozenset({b"host", b"content-length", b"expect", b"x-warmroute-explain", b"accept-encoding"})
"""Headers of a client that end here. Answers are read on their way, so none is asked for compressed."""
REQUEST_ID = b"x-request-id"
ONCE = frozenset({b"server", b"date", b"content-type", b"retry-after"})
"""Of an answer's headers, those of which a second is nothing that a client could use: proxies refuse some of these."""
_ENDING_HERE = HOP_BY_HOP | OURS
_CONTROLS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

Headers = Sequence[tuple[bytes, bytes]]


def towards_engine(headers: Headers, api_key: str | None) -> list[tuple[bytes, bytes]]:
    """A client's end-to-end headers, in lower case. `api_key` stands in for its credentials, if it is given.

    The request's id is the gateway's own word, and passes though a client's `Connection` names it.
    """
    left_out = _ENDING_HERE | (_connection_named(headers) - {REQUEST_ID})
    if api_key is not None:
        left_out |= CREDENTIALS
    lowered = [(name.lower(), value) for name, value in headers]
    kept = [each for each in lowered if each[0] not in left_out and not each[0].startswith(PROXY)]
    return kept if api_key is None else [*kept, (b"authorization", b"Bearer " + api_key.encode())]


def towards_client(headers: Headers) -> list[tuple[bytes, bytes]]:
    """An engine's end-to-end headers, in their order and case, those in `ONCE` once.

    A value with control characters is nothing HTTP can tell.
    """
    left_out, seen = HOP_BY_HOP | _connection_named(headers), set()
    kept = []
    for name, value in headers:
        lowered = name.lower()
        is_again = lowered in ONCE and lowered in seen
        if lowered in left_out or lowered.startswith(PROXY) or is_again or _CONTROLS.search(value):
            continue
        seen.add(lowered)
        kept.append((name, value))
    return kept


def with_request_id(headers: Headers, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """The headers with this one id, in place of those that are there."""
    return [*((name, value) for name, value in headers if name.lower() != REQUEST_ID), (REQUEST_ID, request_id)]


def _connection_named(headers: Headers) -> frozenset[bytes]:
    """The headers that are for this connection only, because `Connection` names them."""
    values = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(name.strip().lower() for value in values for name in value.split(b","))
