"""A form (`multipart/form-data`) as a request's body: where its text fields stand in it. Nothing is copied or decoded.

Files come in forms, so a body may be large: only the parts' heads are looked at, and the values of fields that aren't
files. What is malformed is refused here, for an engine would be asked in vain.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import InvalidRequest

PARTS_MAX = 1000
"""Parts of a form; the parsers behind engines take no more."""
PART_HEAD_BYTES_MAX = 8192
FIELD_BYTES_MAX = 65_536
"""Longer values are left to the engine: none that is read here is that long."""
MEDIA_TYPE = "multipart/form-data"
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb';\s*name=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)
_FILE = re.compile(rb";\s*filename\*?=", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FormField:
    """A field that is no file: its value is `body[start:end]`."""

    name: str
    start: int
    end: int


def is_form(content_type: str) -> bool:
    """Whether a body of this `Content-Type` is a form."""
    return content_type.partition(";")[0].strip().lower() == MEDIA_TYPE


def form_fields(body: bytes, content_type: str) -> tuple[FormField, ...]:
    """The fields of a form in their order. Raises `InvalidRequest` for what isn't one (RFC 7578)."""
    delimiter = b"--" + _boundary(content_type)
    if not body.startswith(delimiter) and (b"\r\n" + delimiter) not in body[:PART_HEAD_BYTES_MAX]:
        raise InvalidRequest("the form doesn't begin with the boundary that its content-type names")
    fields: list[FormField] = []
    place = body.index(delimiter) + len(delimiter)
    for _ in range(PARTS_MAX):
        if body.startswith(b"--", place):
            return tuple(fields)
        head_start = body.find(b"\r\n", place) + 2
        head_end = body.find(b"\r\n\r\n", head_start - 2, head_start + PART_HEAD_BYTES_MAX)
        if head_start < 2 or head_end < 0:
            raise InvalidRequest("the form has a part without a head, or ends before its last boundary")
        end = body.find(b"\r\n" + delimiter, head_end + 2)
        if end < 0:
            raise InvalidRequest("the form ends before its last boundary")
        name = _field_name(body[head_start:head_end].split(b"\r\n"))
        start = head_end + 4
        if name is not None and end - start <= FIELD_BYTES_MAX:
            fields.append(FormField(name, min(start, end), end))
        place = end + 2 + len(delimiter)
    raise InvalidRequest(f"the form has more than {PARTS_MAX} parts")


def _boundary(content_type: str) -> bytes:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidRequest("a form's content-type must name its boundary")
    return (found[1] or found[2]).encode("latin-1")


def _field_name(lines: Sequence[bytes]) -> str | None:
    """The name in a part's head; `None` for a file, or a part that has no name."""
    for line in lines:
        if line.lower().startswith(b"content-disposition:"):
            named = _NAME.search(line)
            if named is None or _FILE.search(line):
                return None
            return (named[1] if named[1] is not None else named[2]).decode("utf-8", "replace")
    return None
