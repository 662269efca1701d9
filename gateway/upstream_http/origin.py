"""Who a request is for: a URL's origin, which pools connections, and its target."""

import functools
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from gateway.upstream_http.errors import BadRequest

DEFAULT_PORTS = {"http": 80, "https": 443}
URLS_KEPT_MAX = 4096
"""Parsed URLs that are remembered: engines times paths; those with ids in them pass through."""
_UNWRITABLE = re.compile(rb"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class Origin:
    """A server: where to connect, whether by TLS, and what it is called in `Host`."""

    host: str
    port: int
    is_tls: bool
    host_header: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """A URL, taken apart. The target is written as it is."""

    origin: Origin
    target: bytes


@functools.lru_cache(maxsize=URLS_KEPT_MAX)
def parse_url(url: str) -> Place:
    """The place that a URL names; what is escaped stays so, bytes above 127 are Latin-1. Raises `BadRequest`."""
    try:
        parts = urlsplit(url)
        host, port, default = parts.hostname, parts.port, DEFAULT_PORTS[parts.scheme]
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        written = target.encode("latin-1")
        name = (host or "").encode("idna" if not (host or "").isascii() else "ascii")
    except (ValueError, KeyError) as error:
        raise BadRequest("its URL is none of HTTP") from error
    if not host or port == 0 or _UNWRITABLE.search(written) or _UNWRITABLE.search(name):
        raise BadRequest("its URL is none of HTTP")
    if ":" in host:
        name = b"[%s]" % name.partition(b"%")[0]  # a zone means nothing to the other side
    if port not in (None, default):
        name += b":%d" % (port or default)
    return Place(Origin(host, port or default, parts.scheme == "https", name), written)
