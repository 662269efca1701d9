"""How much memory a msgpack payload's decoding would take, counted before it is decoded. Pure; never raises.

A byte of msgpack can stand for an empty list of 64 bytes, so that 16 MiB decode to more than a gigabyte. What decodes
to a small multiple of its bytes is passed over in runs by a pattern: numbers, hashes, and strings that aren't tiny.
The rest, containers and tiny strings, is counted one by one, and counting ends at the bound.
"""

import re

UNCOUNTED_BYTES_MAX = 256 * 2**10
"""Smaller payloads can't decode to more than some 16 MB, and aren't counted."""
PARTS_MAX = 2**19
"""Maps, arrays and tiny strings in a payload: a batch that evicts 200,000 blocks has two maps or arrays for each."""

_NUMBERS = rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]|[\xcc\xd0].|[\xcd\xd1].{2}|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8}"
_TEXTS = b"|".join(re.escape(bytes([0xA0 + length])) + b".{%d}" % length for length in range(3, 32))
_RUN = re.compile(b"(?:" + _NUMBERS + rb"|\xc4\x20.{32}|" + _TEXTS + b")*+", re.DOTALL)
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC7: 2, 0xC8: 3, 0xC9: 5}
"""Of headers that tell how many bytes follow (binary, text, extension): how long the telling is."""
_FOLLOWING = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
"""Of other headers: how many bytes belong to them, but for what an array or a map holds."""


def is_bounded(payload: bytes) -> bool:
    """Whether `payload` has at most `PARTS_MAX` parts that are larger in memory than they are here."""
    if len(payload) <= UNCOUNTED_BYTES_MAX:
        return True
    place, end, parts = 0, len(payload), 0
    while place < end:
        run = _RUN.match(payload, place)
        place = run.end() if run is not None else place
        if place >= end:
            break
        header = payload[place]
        place += 1
        if header in _LENGTH_BYTES:
            place = _after_bytes(payload, place, header)
        else:
            place += _FOLLOWING.get(header, header & 0x1F if 0xA0 <= header < 0xC0 else 0)
        parts += 1
        if parts > PARTS_MAX:
            return False
    return True


def _after_bytes(payload: bytes, place: int, header: int) -> int:
    """Where what stands behind these bytes begins."""
    width = _LENGTH_BYTES[header]
    is_extension = 0xC7 <= header <= 0xC9
    length = int.from_bytes(payload[place : place + width - is_extension], "big")
    return place + width + length
