"""Timing two programs in turn, so that a machine that drifts drifts for both.

CPU-seconds are user + system time of this process: on a shared machine they move far less than wall time, and on
virtual CPU devices they are the work that a step does.
"""

import os
import statistics
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table


def cpu_seconds(work: Callable[[], Any]) -> float:
    """User and system seconds of this process during a call, which must wait for what it started."""
    before = os.times()
    work()
    after = os.times()
    return after.user + after.system - before.user - before.system


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int, label: str) -> dict[str, Any]:
    """Time two calls in turn, after one of each that does not count.

    Returns:
        `jaxpar_cpu_seconds` and `other_cpu_seconds`, medians; `ratio`, the median over pairs of jaxpar over the
        other; `ratios`, all of them.
    """
    ours()
    theirs()
    times: dict[bool, list[float]] = {True: [], False: []}
    for pair in track(range(pairs), label, console=Console(stderr=True), transient=True):
        for mine in (True, False) if pair % 2 else (False, True):  # neither always runs on the warmer cache
            times[mine].append(cpu_seconds(ours if mine else theirs))
    ratios = [a / b for a, b in zip(times[True], times[False], strict=True)]
    return {
        "jaxpar_cpu_seconds": statistics.median(times[True]),
        "other_cpu_seconds": statistics.median(times[False]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows of `compare`, each with a `name`, for people."""
    out = Table(title=title)
    for column in ("", "jaxpar", "other", "jaxpar / other", "range"):
        out.add_column(column)
    for row in rows:
        seconds = (f"{row[key]:.3f}" for key in ("jaxpar_cpu_seconds", "other_cpu_seconds", "ratio"))
        out.add_row(row["name"], *seconds, f"{min(row['ratios']):.3f} – {max(row['ratios']):.3f}")
    return out
