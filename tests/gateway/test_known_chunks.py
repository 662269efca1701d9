"""Digests of chunks seen before: the newest are kept, and so is what is asked for."""

from directory.chunks import pack_tokens
from directory.schemes import ChunkName
from gateway.known_chunks import KnownChunks

CHUNKS_MAX = 100


def chunk(number: int) -> ChunkName:
    return 1, b"before", pack_tokens([number])


def test_no_more_are_kept_than_it_says_and_what_is_asked_for_stays() -> None:
    known = KnownChunks(CHUNKS_MAX)
    assert known.put(chunk(0), b"first") == b"first"
    for number in range(1, 1000):
        known.put(chunk(number), b"%d" % number)
        assert known.get(chunk(0)) == b"first"
        assert len(known) <= CHUNKS_MAX + 1
    assert known.get(chunk(999)) == b"999"
    assert known.get(chunk(1)) is None
