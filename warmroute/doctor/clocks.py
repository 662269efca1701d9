"""Whose clock differs from the others': every part's own word for the time, read in passing. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from warmroute.doctor.finding import Finding, note, right, wrong

CLOCKS = "clocks"
SKEW_S = 2.0
"""Machines with NTP are within milliseconds."""
HEADER_S = 1.0
"""What a Date header leaves open: it tells whole seconds."""
UNSURE_S = 0.5
"""What an answer that took its time leaves open."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a part's clock was ahead of ours, in seconds, and by how much that may be wrong."""

    part: str
    ahead_s: float
    unsure_s: float


def check_clocks(readings: Sequence[Reading]) -> list[Finding]:
    """Compare each with the middle one of all, ours among them."""
    if not readings:
        return []
    middle = statistics.median([0.0, *(each.ahead_s for each in readings)])
    findings = []
    if abs(middle) > SKEW_S:
        says = f"this machine's clock differs from most by {abs(middle):.1f} s"
        findings.append(note(CLOCKS, "here", says, "set this machine's clock (chrony, systemd-timesyncd)"))
    for each in readings:
        off = each.ahead_s - middle
        if abs(off) - each.unsure_s > SKEW_S:
            way = "ahead of" if off > 0 else "behind"
            says = f"its clock is {abs(off):.1f} s {way} the others'"
            mend = (
                "let its machine keep time (chrony, systemd-timesyncd): templates that tell the date, files' ages and "
                "certificates depend on it"
            )
            findings.append(wrong(CLOCKS, each.part, says, mend))
    if not findings:
        findings.append(
            right(CLOCKS, "all parts", f"within {SKEW_S:g} s of each other ({len(readings)} asked, and this machine)")
        )
    return findings
