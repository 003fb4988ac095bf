"""The top layouts of a plan as a picture: memory bars and time bars, side by side."""

from pathlib import Path
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

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
    picture(plan).savefig(file, dpi=150)


def picture(plan: Plan) -> Figure:
    """The picture, in no file yet."""
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
    for axes, side in ((memory, "left"), (time, "right")):
        # Half an inch below, not a share of the axes, which are low where there are few bars.
        below = axes.transAxes + ScaledTranslation(0, -0.5, figure.dpi_scale_trans)
        place = {"loc": f"upper {side}", "bbox_to_anchor": (float(side == "right"), 0), "bbox_transform": below}
        axes.legend(**place, borderaxespad=0, ncols=2, fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def bars(axes: Axes, parts: dict[str, list[float]]) -> None:
    """A stacked bar for each layout; parts that are nothing everywhere are left out."""
    left = np.zeros(len(next(iter(parts.values()))))
    for (name, sizes), color in zip(parts.items(), COLORS, strict=True):
        if any(sizes):
            axes.barh(np.arange(len(sizes)), sizes, left=left, color=color, height=0.6, label=name)
            left += sizes
