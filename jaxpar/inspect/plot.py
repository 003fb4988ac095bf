"""The report as a picture: memory as a stacked bar, and the step's timeline in schedule order."""

from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpar.inspect.memory import Memory
from jaxpar.inspect.summary import Report, read_schedule
from jaxpar.inspect.timeline import MATRICES, OTHER, Timeline
from jaxpar.quantities import percent, quantity

MEMORY_COLORS = {
    "parameters": "#4477aa",
    "optimizer state": "#66ccee",
    "batch": "#228833",
    "other arguments": "#bbbbbb",
    "gradients": "#ccbb44",
    "other temporaries": "#ee6677",
    "outputs": "#aa3377",
}
LANE_COLORS = {MATRICES: "#4477aa", OTHER: "#99bbdd"}
COLLECTIVE_COLORS = {"network": "#cc3311", "host": "#ee7733"}
"""Colours that the colour-blind can tell apart: https://personal.sron.nl/~pault/."""


def draw(report: Report, compiled: jax.stages.Compiled, mesh: Mesh, file: Path) -> None:
    """Draw into a file; its ending (.png, .svg, .pdf) chooses the format.

    Args:
        report: on the program.
        compiled: the program.
        mesh: its mesh.
        file: is written over.
    """
    schedule = read_schedule(compiled, mesh)
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    memory_side, time_side = cast(np.ndarray, figure.subfigures(1, 2, width_ratios=(1, 4)))
    axes = " × ".join(f"{name} {size}" for name, size in report.mesh.items())
    figure.suptitle(f"One device of {report.target}, mesh {axes}")
    draw_memory(memory_side.subplots(), report.memory)
    if schedule.roofline.device is None:
        time_side.text(0.5, 0.5, "no timeline: this device's rates are not known", ha="center", va="center")
    else:
        timeline = Timeline(schedule)
        across = {f"{row.op} over {' × '.join(row.axes)}" for row in report.collectives if row.crosses_hosts}
        whole, detail = time_side.subplots(2, 1)
        draw_timeline(whole, timeline, across, (0, timeline.seconds))
        draw_timeline(detail, timeline, across, middle(timeline))
    figure.savefig(file, dpi=150)


def draw_memory(axes: Axes, memory: Memory) -> None:
    """A stacked bar of what fills the device, with a line where the device ends."""
    bottom = 0.0
    for name, size in memory_parts(memory).items():
        axes.bar(
            0, size / 1e9, bottom=bottom, color=MEMORY_COLORS[name], width=0.6, label=f"{name} {quantity(size, 'B')}"
        )
        bottom += size / 1e9
    if memory.device_bytes:
        axes.axhline(memory.device_bytes / 1e9, color="black", linestyle="--", linewidth=1.2)
        axes.annotate(
            f"device {quantity(memory.device_bytes, 'B')}", (0.5, memory.device_bytes / 1e9), ha="right", va="bottom"
        )
    axes.set(title=f"Memory: {quantity(memory.peak_bytes, 'B')}", ylabel="GB", xlim=(-0.5, 0.5), xticks=[])
    axes.set_ylim(0, 1.1 * max(bottom, (memory.device_bytes or 0) / 1e9))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def memory_parts(memory: Memory) -> dict[str, int]:
    """What to stack, from the bottom; it adds up to the peak, up to parts too small to be seen."""
    known = memory.known_arguments
    gradients = memory.gradients_bytes or 0
    parts = known | {
        "other arguments": memory.arguments_bytes - sum(known.values()),
        "gradients": gradients,
        "other temporaries": memory.temp_bytes - gradients,
        "outputs": memory.outputs_bytes,
    }
    return {name: size for name, size in parts.items() if size > memory.peak_bytes / 1000}


def middle(timeline: Timeline, segments: int = 120) -> tuple[float, float]:
    """A stretch of the step, around its middle, in which about so many things happen."""
    starts = sorted(segment.start for segment in timeline.segments)
    first = max(0, len(starts) // 2 - segments // 2)
    return starts[first], starts[min(first + segments, len(starts) - 1)]


def draw_timeline(axes: Axes, timeline: Timeline, across_hosts: set[str], window: tuple[float, float]) -> None:
    """A lane for each kind of work, with the share of the window that it is busy.

    Args:
        axes: to draw into.
        timeline: of the step.
        across_hosts: the lanes that use the network.
        window: the seconds to show, from and to.
    """
    start, end = window
    unit, scale = ("s", 1.0) if end - start >= 1 else ("ms", 1e3)
    bars: dict[str, list[tuple[float, float]]] = {segment.lane: [] for segment in timeline.segments}
    for segment in timeline.segments:
        begin, finish = max(segment.start, start), min(segment.start + segment.seconds, end)
        if begin < finish:
            bars[segment.lane].append((begin * scale, (finish - begin) * scale))
    lanes = sorted(bars, key=lambda lane: (lane not in LANE_COLORS, lane not in across_hosts, lane))
    names = []
    for y, lane in enumerate(lanes):
        network = lane in across_hosts
        color = LANE_COLORS[lane] if lane in LANE_COLORS else COLLECTIVE_COLORS["network" if network else "host"]
        style: dict[str, Any] = {"facecolors": color, "edgecolors": color, "linewidth": 0.3}
        axes.broken_barh(bars[lane], (y - 0.35, 0.7), **style)
        busy = sum(length for _, length in bars[lane]) / ((end - start) * scale)
        names.append(f"{lane}{' (network)' if network else ''}  {percent(busy)}")
    axes.set_yticks(range(len(lanes)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(start * scale, end * scale)
    whole = end - start >= timeline.seconds
    title = "A step in schedule order, played at datasheet rates" if whole else "From its middle"
    axes.set(xlabel=unit, title=f"{title}: {(end - start) * scale:.3g} {unit}")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
