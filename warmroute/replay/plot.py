"""A picture of replays: how long users wait, in all and over time, and what each tier served. Needs matplotlib."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from directory.tiers import TIERS
from warmroute.replay.report import ReplayReport

PERIODS = 60
"""Into so many the replay is divided for what changes over time."""
SUFFIXES = (".png", ".svg", ".pdf")


class PlotError(Exception):
    """There can be no picture; the message says why."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy's requests: when each was sent, and how long it waited for its first token, in seconds."""

    report: ReplayReport
    sent_at: Sequence[float]
    ttfts: Sequence[float]


def check_plot(path: Path) -> None:
    """Raises `PlotError` where `draw` would, before a long replay."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"--plot writes {', '.join(SUFFIXES)}, not {path.name}")
    if not path.parent.is_dir():
        raise PlotError(f"--plot: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PlotError(f"--plot can't write to {path}")
    _pyplot()


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Write the picture. Raises `PlotError`."""
    pyplot = _pyplot()
    figure, (spread, course, tiers) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for curve in curves:
        ordered = sorted(curve.ttfts)
        shares = [(number + 1) / len(ordered) for number in range(len(ordered))]
        spread.plot(ordered, shares, label=curve.report.policy)
        course.plot(*_means(curve), label=curve.report.policy)
    spread.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", title="TTFT")
    course.set(yscale="log", xlabel="sent at, s", ylabel="mean time to first token, s", title="TTFT over time")
    names, bottom = [curve.report.policy for curve in curves], [0.0] * len(curves)
    for tier in TIERS:
        rates = [curve.report.hit_rate[tier.label] for curve in curves]
        tiers.bar(names, rates, bottom=bottom, label=tier.label)
        bottom = [below + rate for below, rate in zip(bottom, rates, strict=True)]
    tiers.set(ylabel="share of prompt tokens", title="Token hit rate by tier")
    for axes in (spread, course, tiers):
        axes.legend()
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except OSError as error:
        raise PlotError(f"the picture can't be written: {error}") from None
    finally:
        pyplot.close(figure)


def _means(curve: Curve) -> tuple[list[float], list[float]]:
    """The middle of each period in which requests were sent, and their mean wait."""
    length_s = (max(curve.sent_at) or 1.0) / PERIODS
    waits: dict[int, list[float]] = {}
    for at, ttft_s in zip(curve.sent_at, curve.ttfts, strict=True):
        waits.setdefault(min(PERIODS - 1, int(at / length_s)), []).append(ttft_s)
    periods = sorted(waits)
    return [(each + 0.5) * length_s for each in periods], [sum(waits[each]) / len(waits[each]) for each in periods]


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise PlotError("--plot needs matplotlib: pip install 'warmroute[plot]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
