"""The report for people, fitted to a terminal, and for programs."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from warmroute.directory_tables import printable
from warmroute.doctor.finding import CHECKS, Finding, Verdict

WIDTH_MIN, WIDTH_MAX = 60, 160
SUBJECT_CHARS_MAX = 24
"""A name that is longer stands on a line of its own."""
_ONE, _MANY = {Verdict.NOTE: "note"}, {Verdict.NOTE: "notes"}


def as_page(findings: Sequence[Finding], width: int) -> str:
    """A paragraph for each finding, under the check's name; the count of verdicts at the end."""
    width = min(max(width, WIDTH_MIN), WIDTH_MAX)
    verdicts = max(len(each.value) for each in Verdict)
    subjects = min(max((len(printable(each.subject)) for each in findings), default=0), SUBJECT_CHARS_MAX)
    margin = " " * (verdicts + subjects + 6)
    lines: list[str] = []
    check = ""
    for finding in sorted(findings, key=_order):
        if finding.check != check:
            check = finding.check
            lines += ["", check] if lines else [check]
        head = f"  {finding.verdict.value:<{verdicts}}  {printable(finding.subject):<{subjects}}  "
        if len(head) > len(margin):  # a long name
            lines.append(head.rstrip())
            head = margin
        lines += _wrapped(finding.says, width, head, margin)
        if finding.mend:
            lines += _wrapped(finding.mend, width, f"{margin}mend: ", f"{margin}      ")
    return "\n".join([*lines, "", summary(findings)])


def as_rows(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """A JSON object for each finding, in the same order."""
    return [
        {
            "check": each.check,
            "subject": each.subject,
            "verdict": each.verdict.value.lower(),
            "says": each.says,
            "mend": each.mend or None,
        }
        for each in sorted(findings, key=_order)
    ]


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each verdict, the worst first."""
    counts = Counter(each.verdict for each in findings)
    order = (Verdict.WRONG, Verdict.NOTE, Verdict.UNKNOWN, Verdict.RIGHT)
    words = [f"{counts[each]} {(_ONE if counts[each] == 1 else _MANY).get(each, each.value.lower())}" for each in order]
    return ", ".join(words)


def _order(finding: Finding) -> tuple[int, str]:
    return list(CHECKS).index(finding.check), finding.subject


def _wrapped(text: str, width: int, first: str, margin: str) -> list[str]:
    return textwrap.wrap(printable(text), width, initial_indent=first, subsequent_indent=margin, break_on_hyphens=False)
