"""Answers as they go over the wire, and what is to be read from them."""

from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st

Framing = Literal["length", "chunked", "close"]


@dataclass(frozen=True, slots=True)
class WireAnswer:
    """An answer and its bytes."""

    wire: bytes
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    framing: Framing
    keeps_alive: bool


def build(
    body: list[bytes],
    framing: Framing,
    status: int = 200,
    headers: tuple[tuple[bytes, bytes], ...] = (),
    before: bytes = b"",
    extension: bytes = b"",
    trailers: bytes = b"",
    version: bytes = b"1.1",
) -> WireAnswer:
    """An answer whose body consists of these pieces. `before` are 1xx answers."""
    whole = b"".join(body)
    framed = {
        "length": ((b"Content-Length", b"%d" % len(whole)),),
        "chunked": ((b"Transfer-Encoding", b"chunked"),),
        "close": (),
    }[framing]
    every = (*headers, *framed)
    head = b"HTTP/%s %d Fine\r\n" % (version, status) + b"".join(b"%s:  %s \r\n" % each for each in every) + b"\r\n"
    wire = whole
    if framing == "chunked":
        wire = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in body if piece)
        wire += b"0\r\n" + trailers + b"\r\n"
    return WireAnswer(before + head + wire, status, every, whole, framing, framing != "close" and version == b"1.1")


names = st.sampled_from([b"X-A", b"x-b-1", b"Content-Type", b"SERVER", b"x"])
values = st.sampled_from(
    [b"", b"a", b"text/plain; charset=utf-8", b"a\tb  c", b'"quoted: \\"', b"caf\xc3\xa9 \xff", b"x" * 40]
)
answers = st.builds(
    build,
    body=st.lists(st.binary(max_size=40), max_size=5),
    framing=st.sampled_from(["length", "chunked", "close"]),
    status=st.sampled_from([200, 201, 400, 404, 429, 500, 503]),
    headers=st.lists(st.tuples(names, values), max_size=4).map(tuple),
    before=st.sampled_from(
        [b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 2]
    ),
    extension=st.sampled_from([b"", b"", b";a=b", b';a="b c"']),
    trailers=st.sampled_from([b"", b"", b"X-Sum: 12\r\n"]),
    version=st.sampled_from([b"1.1", b"1.1", b"1.0"]),
)
SAMPLES = (
    build([b"one", b"two", b"x" * 20], "length", headers=((b"Content-Type", b"text/plain"),)),
    build([b"data: 1\n\n", b"data: [DONE]\n\n"], "chunked", before=b"HTTP/1.1 100 Continue\r\n\r\n", extension=b";a=b"),
    build([b"data: 1\n\n", b"data: 2\n\n"], "chunked", trailers=b"X-Sum: 12\r\n"),
    build([b"until", b"the end"], "close"),
    build([], "length", status=500),
)
