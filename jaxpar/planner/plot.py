"""The top layouts of a plan as a picture: memory bars and time bars, side by side."""

from pathlib import Path
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxpar.planner.plan import Plan
from jaxpar.planner.words import MEMORY, TIME, rest

COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377")
"""Colours that the colour-blind can tell apart: https://personal.sron.nl/~pault/."""


def draw(plan: Plan, file: Path) -> None:
    """Draw into a file; its ending (.png, .svg, .pdf) chooses the format.

    Args:
        plan: with ranked layouts, or where nothing fits with the nearest.
        file: is written over.
    """
    shown = plan.ranked or ((plan.nearest,) if plan.nearest else ())
    names = [
        f"{number}  {p.layout.data} × {p.layout.pipe} × {p.layout.tensor}\n{rest(p.layout, plan.workload)}"
        for number, p in enumerate(shown, 1)
    ]
    figure = Figure(figsize=(15, 2 + 0.6 * len(shown)), layout="constrained")
    memory, time = cast(np.ndarray, figure.subplots(1, 2, sharey=True))
    cluster = plan.cluster
    figure.suptitle(f"Layouts (data × pipe × tensor) on {cluster.hosts} × {cluster.per_host} {cluster.device.name}")
    bars(memory, {MEMORY[part]: [getattr(p.memory, part) / 1e9 for p in shown] for part in MEMORY})
    usable = cluster.usable_bytes / 1e9
    memory.axvline(usable, color="black", linestyle="--", linewidth=1.2, label=f"usable {usable:.1f} GB")
    memory.set(title="Memory of the fullest stage", xlabel="GB")
    bars(time, {TIME[part]: [getattr(p.time, part) for p in shown] for part in TIME})
    time.set(title="Time of a step", xlabel="s")
    memory.set_yticks(range(len(shown)), names, fontsize=8)
    memory.invert_yaxis()
    for axes in (memory, time):
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2, fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def bars(axes: Axes, parts: dict[str, list[float]]) -> None:
    """A stacked bar for each layout; parts that are nothing everywhere are left out."""
    left = np.zeros(len(next(iter(parts.values()))))
    for (name, sizes), color in zip(parts.items(), COLORS, strict=True):
        if any(sizes):
            axes.barh(np.arange(len(sizes)), sizes, left=left, color=color, height=0.6, label=name)
            left += sizes
