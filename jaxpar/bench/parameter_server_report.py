"""What `jaxpar bench parameter-server` shows people: a table, what it says in words, and a picture."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxpar.quantities import percent, quantity, seconds

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Colours that the colour-blind can tell apart: https://personal.sron.nl/~pault/."""


def tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """The speed of all cases, and what the busiest server has to do."""
    means = f"means over {result['steps']} steps"
    speed = Table(title=f"Training with {quantity(result['param_bytes'], 'B')} of parameters", caption=means)
    _columns(speed, "training", "servers", "workers", "steps/s", "bytes/s", "CPU time of\nall, a step")
    for row, last in _with_ends(result["rows"]):
        kinds = ("servers", "workers", "coordinator") if row["servers"] else ("workers",)
        work = seconds(sum(row[f"{kind}_cpu_seconds"] for kind in kinds))
        rates = f"{row['steps_per_second']:.3g}", quantity(row["bytes_per_second"], "B")
        speed.add_row(*_case(row), *rates, work, end_section=last)
    yield speed
    limits = "bold: the longer of the two, which limits steps/s where each process has a core"
    busiest = Table(title="A step of the busiest server", caption=f"{means}; busy: of the step's time; {limits}")
    _columns(busiest, "mode", "servers", "workers", "in", "out", "CPU time", "busy", "a worker's\nCPU time")
    for row, last in _with_ends(_served(result)):
        times = row["busiest_cpu_seconds"], row["workers_cpu_seconds"] / row["workers"]
        server, worker = (f"[bold]{seconds(t)}[/bold]" if t == max(times) else seconds(t) for t in times)
        sent = max(row["per_server"], key=lambda server: server["in_bytes"] + server["out_bytes"])
        amounts = (quantity(sent[way], "B") for way in ("in_bytes", "out_bytes"))
        busiest.add_row(*_case(row), *amounts, server, percent(row["busiest_share"]), worker, end_section=last)
    yield busiest


def _columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")


def _case(row: Mapping[str, Any]) -> tuple[str, str, str]:
    name = row["mode"] if row["servers"] else "all-reduce"
    return name, str(row["servers"] or "–"), str(row["workers"])


def _with_ends(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Each row, and whether it is the last of its kind of training."""
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        yield row, following is None or _case(following)[0] != _case(row)[0]


def _served(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if row["servers"]]


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """What sharding does to the busiest server, and what this machine cannot show."""
    rows = _served(result)
    for mode in dict.fromkeys(row["mode"] for row in rows):
        workers = max(row["workers"] for row in rows)
        few, *_, many = [row for row in rows if (row["mode"], row["workers"]) == (mode, workers)] * 2
        if few["servers"] < many["servers"]:
            cpu, sent = ((few[name], many[name]) for name in ("busiest_cpu_seconds", "busiest_bytes"))
            yield (
                f"{mode}, {workers} workers, {few['servers']} → {many['servers']} servers: the busiest server's CPU "
                f"time is {seconds(cpu[0])} → {seconds(cpu[1])} (÷ {cpu[0] / cpu[1]:.1f}), its bytes "
                f"{quantity(sent[0], 'B')} → {quantity(sent[1], 'B')} (÷ {sent[0] / sent[1]:.1f})"
            )
    saved = max(row["saved_bytes"] / (row["saved_bytes"] + _pushed(row)) for row in rows)
    yield f"rows of zeros, which are not pushed: up to {percent(saved)} of the bytes of gradients"
    most = max(row["servers"] + row["workers"] for row in rows)
    if result["on_this_machine"] and most > result["cores"]:
        yield (
            f"All processes, up to {most}, share this machine's {result['cores']} cores, so steps/s cannot grow with "
            f"their number here: look at the busiest server's CPU time and bytes, which more machines would share."
        )


def _pushed(row: Mapping[str, Any]) -> float:
    return sum(server["in_bytes"] for server in row["per_server"])


def draw(result: Mapping[str, Any], file: Path) -> None:
    """A row of pictures for each mode: steps/s over workers, the busiest server's CPU time and bytes over servers."""
    from matplotlib.figure import Figure

    reduced = [row for row in result["rows"] if not row["servers"]]
    served = _served(result)
    modes = list(dict.fromkeys(row["mode"] for row in served))
    figure = Figure(figsize=(15, 1 + 4 * len(modes)), layout="constrained")
    shared = f", all on {result['cores']} cores" if result["on_this_machine"] else ""
    size = quantity(result["param_bytes"], "B")
    figure.suptitle(f"Parameter servers, {size} of parameters, means over {result['steps']} steps{shared}")
    for mode, (rates, cpu, sent) in zip(modes, figure.subplots(len(modes), 3, squeeze=False), strict=True):
        rows = [row for row in served if row["mode"] == mode]
        _lines(rates, rows, "workers", "servers", lambda row: row["steps_per_second"])
        reduced_rates = [row["steps_per_second"] for row in reduced]
        rates.plot([row["workers"] for row in reduced], reduced_rates, "k--", marker=".", label="all-reduce")
        rates.set(title=f"{mode}: speed", xlabel="workers", ylabel="steps/s")
        _lines(cpu, rows, "servers", "workers", lambda row: 1e3 * row["busiest_cpu_seconds"])
        cpu.set(title=f"{mode}: work of the busiest server", xlabel="servers", ylabel="CPU ms per step")
        _lines(sent, rows, "servers", "workers", lambda row: row["busiest_bytes"] / 1e6)
        sent.set(title=f"{mode}: traffic of the busiest server", xlabel="servers", ylabel="MB in and out per step")
        for picture in (rates, cpu, sent):
            picture.set_ylim(bottom=0)
            picture.grid(alpha=0.3)
            picture.spines[["top", "right"]].set_visible(False)
            picture.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False, fontsize=9)
    figure.savefig(file, dpi=150)


def _lines(picture: Any, rows: Sequence[Mapping[str, Any]], over: str, each: str, value: Any) -> None:
    """A line of values over one number of processes for each of the other."""
    for number, color in zip(sorted({row[each] for row in rows}), _cycle(), strict=False):
        line = [row for row in rows if row[each] == number]
        name = f"{number} {each if number > 1 else each[:-1]}"
        picture.plot([row[over] for row in line], [value(row) for row in line], color=color, marker="o", label=name)
    picture.set_xticks(sorted({row[over] for row in rows}))


def _cycle() -> Iterator[str]:
    while True:
        yield from COLORS
