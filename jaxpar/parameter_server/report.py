"""What a run with parameter servers says of itself: before the first step and after the last."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.filesize import decimal

from jaxpar.config import Config
from jaxpar.data.sources import Data
from jaxpar.names import Named
from jaxpar.parameter_server.coordinator import Coordinator
from jaxpar.parameter_server.slices import nbytes, take
from jaxpar.parameter_server.whole import Whole
from jaxpar.start_report import run_report


def report_lines(config: Config, whole: Whole, data: Data, resumed: int | None) -> list[str]:
    """What a person wants to know before the first step, a line each."""
    settings, mesh = config.parameter_server, config.mesh
    held = [sum(nbytes(rows) for rows in take(_ones(whole.params), s).values()) for s in whole.slices]
    sizes = ", ".join(decimal(size) for size in held)
    axes = f"data {mesh.data} × pipe {mesh.pipe} × tensor {mesh.tensor}"
    several = "s" * (settings.workers > 1)
    where = settings.ray_address or "this machine"
    return [
        f"parameter servers: {settings.servers} on {where}, which hold {sizes} of parameters, {settings.mode}",
        f"workers: {settings.workers} worker{several}, each on a mesh {axes}; at least {settings.min_workers} to go on",
        f"batch: {config.batch_derivation()}",
        *run_report(config, whole.program.facts, data, "cpu", resumed),
    ]


def _ones(shapes: Mapping[str, Any]) -> Named:
    """Arrays of these shapes that take no memory."""
    return {name: np.broadcast_to(np.zeros((), shape.dtype), shape.shape) for name, shape in shapes.items()}


def write_report(
    folder: Path, steps: tuple[int, int], coordinator: Coordinator, busy_seconds: Any, totals: Mapping[str, int]
) -> list[str]:
    """Write `report.json`; returns what people are told: bytes, and in async mode how stale gradients were.

    Args:
        folder: where to.
        steps: the first and the last one since this start of the run, which is what is told of.
        coordinator: of the run.
        busy_seconds: each server's; None: not known.
        totals: bytes that workers sent and did not send.
    """
    counts = {stale: count for stale, count in sorted(coordinator.staleness.items()) if count}
    staleness, refused = {str(stale): count for stale, count in counts.items()}, coordinator.refused
    report = {"steps": steps, "staleness": staleness, "refused": refused, "busy_seconds": busy_seconds, **totals}
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    told = [f"steps {steps[0]} to {steps[1]}: {_traffic(totals)}"]
    return told + _histogram(counts, refused) if coordinator.asynchronous else told


def _traffic(totals: Mapping[str, int]) -> str:
    pulled, pushed, saved = (decimal(totals[name]) for name in ("pulled_bytes", "pushed_bytes", "saved_bytes"))
    return f"workers pulled {pulled} of parameters and pushed {pushed} of gradients; rows of zeros saved {saved}"


def _histogram(staleness: Mapping[int, int], refused: int) -> list[str]:
    """How many updates were how stale, as bars."""
    most = max([*staleness.values(), 1])
    bars = [f"  {stale:3d}  {'█' * round(40 * n / most):40}  {n}" for stale, n in staleness.items()]
    return ["staleness of updates, in versions:", *bars, f"  {refused} gradients were refused as too stale"]
