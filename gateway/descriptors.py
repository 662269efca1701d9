"""File descriptors: every open request takes two, and a process without any left refuses clients without a word."""

import resource

PER_REQUEST = 2
"""The client's connection and the engine's."""
RESERVED = 128
"""Listening sockets, the directory's connections, health checks, files."""


def raise_limit() -> int:
    """Allow this process as many descriptors as it may allow itself; how many that is. Its children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft >= hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # the system's own bound is lower than what the process may ask for
        return soft
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def room(limit: int) -> int:
    """How many requests at once so many descriptors are enough for."""
    return max(0, (limit - RESERVED) // PER_REQUEST)


def shortfall(limit: int, requests_max: int) -> str | None:
    """What to tell where so many requests at once need more descriptors than there are."""
    if room(limit) >= requests_max:
        return None
    return (
        f"at most {limit} file descriptors may be open (ulimit -n), enough for {room(limit)} requests at once; "
        f"{requests_max} need {requests_max * PER_REQUEST + RESERVED}"
    )
