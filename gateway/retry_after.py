"""`Retry-After`, in both of its forms (RFC 9110, 10.2.3)."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

RETRY_AFTER_STATUSES = frozenset({429, 503})
_SECONDS = re.compile(rb"\d{1,9}")


def retry_after_s(status: int, headers: Iterable[tuple[bytes, bytes]]) -> float:
    """Seconds after which an engine that answered so wants to be asked again; 0 where it says nothing, or nonsense."""
    if status not in RETRY_AFTER_STATUSES:
        return 0.0
    value = next((value.strip() for name, value in headers if name.lower() == b"retry-after"), b"")
    if _SECONDS.fullmatch(value):
        return float(value)
    try:
        at = parsedate_to_datetime(value.decode("latin-1"))
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return max(0.0, (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp())
