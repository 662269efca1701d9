"""What a check found: a verdict on one thing of the fleet, in plain words, and how to mend it."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Verdict(enum.Enum):
    """`NOTE` works, and costs something or surprises; `UNKNOWN` couldn't be looked at, and so isn't right."""

    RIGHT = "right"
    NOTE = "note"
    WRONG = "WRONG"
    UNKNOWN = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `check` is one of `CHECKS`, `subject` the part looked at; `mend` is empty where right."""

    check: str
    subject: str
    verdict: Verdict
    says: str
    mend: str = ""
    has_failed: bool = False
    """It was to be looked at, and couldn't be."""


CHECKS = {
    "gateway": "what /fleet says: engines ready, encodings exact, the directory read, requests degraded",
    "directory": "the servers' settings, functions, rights, memory, and the time of a lookup",
    "identities": "engines of one model that differ; names taken twice; lives that lapsed; versions",
    "agents": "reachable, guarded, tiers and drives on, direct I/O, engines attached",
    "settings": "what an engine's launch can be seen to lack",
    "ids": "own token ids against the engine's, over many kinds of request",
    "cache": "a prompt sent twice: a hit, and the same greedy answer",
    "clocks": "parts whose clocks differ",
}
"""What is looked at, in the order of the report."""
_AN_ENGINE = "an engine: --engine URL, or --gateway URL of a fleet that has one"
NEEDS = {
    "gateway": "--gateway URL",
    "directory": "--directory URL",
    "identities": "--gateway URL or --directory URL",
    "agents": "--agent URL, or --gateway URL of a fleet that has some",
    "settings": f"{_AN_ENGINE}, vLLM or SGLang",
    "ids": _AN_ENGINE,
    "cache": _AN_ENGINE,
    "clocks": "a part that answers",
}
"""What must be named, or be there, for each."""


def counted(count: int, thing: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def right(check: str, subject: str, says: str) -> Finding:
    """All is well."""
    return Finding(check, subject, Verdict.RIGHT, says)


def note(check: str, subject: str, says: str, mend: str) -> Finding:
    """It works; somebody may want to know, or to change it."""
    return Finding(check, subject, Verdict.NOTE, says, mend)


def wrong(check: str, subject: str, says: str, mend: str) -> Finding:
    """It must be mended."""
    return Finding(check, subject, Verdict.WRONG, says, mend)


def unknown(check: str, subject: str, why: str, mend: str = "") -> Finding:
    """There is no way to look at it from here; the mend may say how there would be one."""
    return Finding(check, subject, Verdict.UNKNOWN, why, mend)


def failed(check: str, subject: str, why: str, mend: str = "") -> Finding:
    """It should have been looked at, and whoever was asked didn't answer as it should."""
    return Finding(check, subject, Verdict.UNKNOWN, why, mend, has_failed=True)


def exit_status(findings: Sequence[Finding], is_strict: bool = False) -> int:
    """0 all right, 1 something is wrong (with `is_strict`: or noted), 2 nothing wrong was seen, but not all looked at.

    What there is no way to look at counts for nothing.
    """
    verdicts = {each.verdict for each in findings}
    if Verdict.WRONG in verdicts or (is_strict and Verdict.NOTE in verdicts):
        return 1
    return 2 if Verdict.RIGHT not in verdicts or any(each.has_failed for each in findings) else 0
