"""Draws the timeline of a schedule: coloured cells in the terminal, or a PNG, SVG or PDF file. No JAX.

Forwards are blue, backwards orange, weight gradients (ZB-H1, ZB-H2) grey; the later the chunk, the darker the shade.
"""

from pathlib import Path

from rich.text import Text

from jaxpar.config import InputError
from jaxpar.pipeline.simulate import Event, Timeline

SHADES = {
    "F": ((197, 220, 245), (24, 90, 168)),
    "B": ((253, 217, 168), (196, 92, 12)),
    "W": ((222, 222, 226), (90, 90, 100)),
}
"""Lightest and darkest RGB of each kind of work."""
BRACKETS = {"F": ("", ""), "B": ("(", ")"), "W": ("[", "]")}
"""What tells the kinds of work apart where there is no colour."""
PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def shade(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """Colours of a cell and of the text on it, as "#rrggbb".

    Example:
        >>> shade("F", chunk=0, chunks=2), shade("F", chunk=1, chunks=2)
        (('#8bb1db', '#000000'), ('#5285c2', '#ffffff'))
    """
    light, dark = SHADES[kind]
    part = (chunk + 1) / (chunks + 1)
    cell = [round(a + (b - a) * part) for a, b in zip(light, dark, strict=True)]
    bright = 0.299 * cell[0] + 0.587 * cell[1] + 0.114 * cell[2] > 140  # luma, ITU-R BT.601
    return "#{:02x}{:02x}{:02x}".format(*cell), "#000000" if bright else "#ffffff"


def text(timeline: Timeline, width: int, colour: bool) -> Text:
    """Draw a timeline whose times are whole numbers with characters, a line for each stage.

    A cell bears the microbatch. Without colour a backward stands in (), a weight gradient in [], and a letter names
    the chunk. What does not fit into the width is left out in the middle, and a last line says how much.

    Args:
        timeline: from unit costs.
        width: characters of a line.
        colour: whether the terminal has colours.

    Example:
        >>> from jaxpar.pipeline import schedules, simulate
        >>> schedule = schedules.make_schedule("1f1b", stages=2, microbatches=3)
        >>> print(text(simulate.lockstep(schedule, simulate.Costs()), width=80, colour=False))
        stage 0 │0 1     2 (0)   (1) (2) │
        stage 1 │  0 (0) 1 (1) 2 (2)     │
    """
    columns, unit = round(timeline.total), _unit_width(timeline, colour)
    margin = len(f"stage {timeline.stages - 1} ")
    shown = max((width - margin - 2) // unit, 3)
    windows = [(0, columns)] if shown >= columns else [(0, shown // 2), (columns - (shown - 1) // 2, columns)]
    lines = []
    for stage in range(timeline.stages):
        events = sorted((e for e in timeline.events if e.stage == stage), key=lambda event: event.start)
        cells = [_cells(events, start, stop, unit, timeline.chunks, colour) for start, stop in windows]
        frame = Text("│")
        lines.append(Text(f"stage {stage} ".rjust(margin)) + frame + Text("⋯".center(unit)).join(cells) + frame)
    if colour:
        lines.append(_legend(timeline, margin))
    if len(windows) > 1:
        hidden = windows[1][0] - windows[0][1]
        whole = text_width(timeline, colour)
        lines.append(Text(f"⋯ {hidden} of {columns} columns are left out; the whole takes {whole} characters"))
    return Text("\n").join(lines)


def text_width(timeline: Timeline, colour: bool) -> int:
    """Characters of a line in which `text` shows all."""
    return len(f"stage {timeline.stages - 1} ") + 2 + _unit_width(timeline, colour) * round(timeline.total)


def _unit_width(timeline: Timeline, colour: bool) -> int:
    """Characters of a unit of time, so that every label has room."""
    return max(
        -(-(len(_label(event, timeline.chunks, colour)) + 1) // round(event.stop - event.start))
        for event in timeline.events
    )


def _label(event: Event, chunks: int, colour: bool) -> str:
    number = str(event.work.microbatch)
    if colour:
        return number
    before, after = BRACKETS[event.work.kind]
    return before + number + (chr(ord("a") + event.work.chunk % 26) if chunks > 1 else "") + after


def _cells(events: list[Event], begin: int, end: int, unit: int, chunks: int, colour: bool) -> Text:
    """One stage's columns `begin` to `end`; cells that only partly lie there bear no label."""
    line, column = Text(), begin
    for event in events:
        start, stop = max(round(event.start), begin), min(round(event.stop), end)
        if start >= stop:
            continue
        label = _label(event, chunks, colour) if stop - start == round(event.stop - event.start) else ""
        line.append(" " * unit * (start - column))
        width = unit * (stop - start)
        if colour:
            cell, ink = shade(event.work.kind, event.work.chunk, chunks)
            line.append("▏", f"white on {cell}").append(label.center(width - 1), f"{ink} on {cell}")
        else:
            line.append(label.ljust(width))
        column = stop
    return line.append(" " * unit * (end - column))


def _kinds(timeline: Timeline) -> dict[str, str]:
    """The kinds of work that there are, and what they are called."""
    found = {event.work.kind for event in timeline.events}
    names = {"F": "forward", "B": "input gradient" if "W" in found else "backward", "W": "weight gradient"}
    return {kind: name for kind, name in names.items() if kind in found}


def _legend(timeline: Timeline, margin: int) -> Text:
    line = Text(" " * (margin + 1))
    for kind, name in _kinds(timeline).items():
        for chunk in range(timeline.chunks):
            cell, ink = shade(kind, chunk, timeline.chunks)
            line.append(f" {chunk if timeline.chunks > 1 else ' '} ", f"{ink} on {cell}")
        line.append(f" {name}{', by chunk' if timeline.chunks > 1 else ''}   ")
    return line


def plot(timeline: Timeline, title: str, subtitle: str, path: Path) -> None:
    """Draw a timeline into a file.

    Args:
        timeline: any.
        title: the headline.
        subtitle: a line below it.
        path: a .png, .svg or .pdf file.

    Raises:
        InputError: for another kind of file, one that cannot be written, and where Matplotlib is missing.
    """
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise InputError(f"--plot {path}: the file's name must end in {', '.join(PLOT_SUFFIXES)}.")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch, Rectangle
    except ImportError as error:
        raise InputError("--plot needs Matplotlib: pip install 'jaxpar[plot]'.") from error

    inches = min(max(0.24 * timeline.total, 8.0), 28.0)
    kinds = [(kind, name, chunk) for kind, name in _kinds(timeline).items() for chunk in range(timeline.chunks)]
    legend_columns = int(inches // 1.7)
    legend_rows = -(-(len(kinds) + 1) // legend_columns)
    left, right, top, bottom = 0.75, 0.2, 0.7, 0.65 + 0.2 * legend_rows  # margins in inches
    rows = timeline.stages + (0.95 if timeline.phases else 0.5)
    height = top + 0.42 * rows + bottom
    figure = Figure(figsize=(inches, height), dpi=160)
    axes = figure.add_axes((left / inches, bottom / height, 1 - (left + right) / inches, 0.42 * rows / height))
    per_unit = (inches - left - right) / timeline.total
    for stage in range(timeline.stages):
        axes.add_patch(Rectangle((0, stage - 0.42), timeline.total, 0.84, facecolor="#f3f4f6", linewidth=0))
    digits = len(str(max(event.work.microbatch for event in timeline.events)))
    edge = min(0.8, 10 * per_unit)
    for event in timeline.events:
        cell, ink = shade(event.work.kind, event.work.chunk, timeline.chunks)
        length = event.stop - event.start
        corner, middle = (event.start, event.stage - 0.42), event.start + length / 2
        axes.add_patch(Rectangle(corner, length, 0.84, facecolor=cell, edgecolor="white", linewidth=edge))
        font_size = min(9.0, 100 * per_unit * length / (digits + 0.6))  # a digit is about 0.6 × 1/72 inch a point
        if font_size >= 4:
            label = str(event.work.microbatch)
            axes.text(middle, event.stage, label, ha="center", va="center_baseline", color=ink, fontsize=font_size)
    for phase, begin, end in timeline.phases:
        if (end - begin) * per_unit > 0.85:  # else the label would not fit
            axes.text((begin + end) / 2, -0.62, phase.label, ha="center", va="bottom", color="#4b5563", fontsize=8.5)
        if begin:
            axes.plot(
                [begin, begin], [-0.95, timeline.stages - 0.5], color="#9ca3af", linewidth=0.9, linestyle=(0, (4, 3))
            )
    axes.set(xlim=(0, timeline.total), ylim=(timeline.stages - 0.5, timeline.stages - 0.5 - rows))
    axes.set_yticks(range(timeline.stages), [f"stage {stage}" for stage in range(timeline.stages)])
    axes.set_xlabel("time (one forward of a chunk = 1)", color="#4b5563", fontsize=9)
    axes.tick_params(length=0, colors="#374151", labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.text(left / inches, 1 - 0.36 / height, title, fontsize=13, fontweight="bold", color="#111827")
    figure.text(left / inches, 1 - 0.6 / height, subtitle, fontsize=9.5, color="#4b5563")
    handles = [
        Patch(
            facecolor=shade(kind, chunk, timeline.chunks)[0],
            label=name + (f", chunk {chunk}" if timeline.chunks > 1 else ""),
        )
        for kind, name, chunk in kinds
    ]
    handles.append(Patch(facecolor="#f3f4f6", label="idle"))
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(left / inches, 0.06 / height),
        borderaxespad=0,
        borderpad=0,
        ncols=legend_columns,
        frameon=False,
        fontsize=9,
    )
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):  # text stays text, and ids stay the same
        try:
            figure.savefig(path)
        except OSError as error:
            raise InputError(f"--plot {path}: {error.strerror}.") from error
