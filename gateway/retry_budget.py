"""How many requests may be sent again: a share of all, so that a sick fleet isn't asked three times for everything.

A bucket of tokens, one for a retry: each request adds `SHARE`; it holds at most `RETRIES_MAX`, and begins with them.
"""

SHARE = 0.2
"""Retries for each request, in the long run."""
RETRIES_MAX = 1000.0
"""That may follow each other at once: as many requests may be open on an engine when it dies."""


class RetryBudget:
    """One gateway's."""

    def __init__(self) -> None:
        self._tokens = RETRIES_MAX

    def note_request(self) -> None:
        """A client's request came."""
        self._tokens = min(RETRIES_MAX, self._tokens + SHARE)

    @property
    def allows_one(self) -> bool:
        """Whether a request may be sent again now."""
        return self._tokens >= 1

    def take(self) -> bool:
        """A request is to be sent again: whether it may be."""
        if not self.allows_one:
            return False
        self._tokens -= 1
        return True
