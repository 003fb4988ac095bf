"""The report for people."""

import re
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from jaxpar.inspect.memory import Memory
from jaxpar.inspect.summary import Report
from jaxpar.quantities import percent, quantity, seconds


def source(op_name: str) -> str:
    """The name of an operation without what all operations of a step share.

    Example:
        >>> source("jit(train_step)/shard_map/while/body/closed_call/jvp()/while/body/closed_call/dot_general")
        'while/jvp()/while/dot_general'
    """
    plain = re.sub(r"^jit\([^)]*\)/(shard_map/)?|/(body|closed_call|eval_jaxpr|checkpoint)(?=/)", "", op_name)
    return plain or "XLA itself"


def show(report: Report) -> None:
    """Print a report; into a file or pipe as wide as its tables need."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    for part in parts(report):
        console.print(part, soft_wrap=not isinstance(part, Table), highlight=False)


def parts(report: Report) -> Iterator[RenderableType]:
    """The tables and lines of a report."""
    axes = " × ".join(f"{name} {size}" for name, size in report.mesh.items())
    yield f"{report.target}, mesh {axes}; everything is for one device and one step, unless it says otherwise"
    yield memory_table(report.memory)
    yield fit(report.memory)
    largest = Table(title="Largest arrays it makes (not all at the same time)")
    for column in ("bytes", "array", "made by"):
        largest.add_column(column, justify="right" if column == "bytes" else "left", overflow="fold")
    for value in report.largest_values:
        largest.add_row(quantity(value.bytes, "B"), value.shape, source(value.made_by))
    yield largest
    yield collective_table(report)
    yield from bounds(report)
    if report.compile_seconds is not None and report.trace_seconds is not None:
        yield f"traced in {seconds(report.trace_seconds)}, compiled in {seconds(report.compile_seconds)}"
    yield from (f"note: {note}" for note in report.notes)


def memory_table(memory: Memory) -> Table:
    """What fills the device."""
    table = Table(title="Memory")
    table.add_column("held by")
    table.add_column("bytes", justify="right")
    known = memory.known_arguments
    for name, size in known.items():
        table.add_row(name, quantity(size, "B"))
    table.add_row(
        "other arguments" if known else "arguments", quantity(memory.arguments_bytes - sum(known.values()), "B")
    )
    gradients = f" (gradients among them: {quantity(memory.gradients_bytes, 'B')})" if memory.gradients_bytes else ""
    table.add_row(f"temporaries{gradients}", quantity(memory.temp_bytes, "B"))
    table.add_row("outputs that replace no argument", quantity(memory.outputs_bytes, "B"), end_section=True)
    table.add_row("all together", quantity(memory.peak_bytes, "B"))
    if memory.device_bytes is not None:
        table.add_row("the device has", quantity(memory.device_bytes, "B"))
    return table


def fit(memory: Memory) -> Text:
    """Whether it fits, in a sentence."""
    if memory.device_bytes is None:
        return Text("Whether it fits is not said: the memory of this device is not known.")
    share = f"{percent(memory.peak_bytes / memory.device_bytes)} of the device's memory"
    if memory.overshoot_bytes:
        return Text(f"Does not fit: {quantity(memory.overshoot_bytes, 'B')} too much, it takes {share}.", "bold red")
    return Text(f"Fits: it takes {share}.", "green")


def collective_table(report: Report) -> Table:
    """A row for each kind and set of axes."""
    hidden = "" if report.hidden_fraction is None else f", {percent(report.hidden_fraction)} hidden behind arithmetic"
    table = Table(title=f"Collectives{hidden}")
    for column in ("kind", "axes", "count", "buffer", "on the wire", "time", "hidden", "crosses hosts"):
        left = column in ("kind", "axes", "crosses hosts")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in report.collectives:
        table.add_row(
            row.op,
            " × ".join(row.axes),
            f"{row.count_per_step:,}",
            quantity(row.buffer_bytes_per_step, "B"),
            quantity(row.wire_bytes_per_step, "B"),
            seconds(row.seconds_per_step) if report.lower_bound else "–",
            percent(row.hidden_fraction),
            "yes" if row.crosses_hosts else "no",
        )
    return table


def bounds(report: Report) -> Iterator[RenderableType]:
    """FLOPs, and what they and the bytes take at least."""
    if report.flops_per_step is not None:
        yield f"FLOPs of a step by formula: {quantity(report.flops_per_step, 'FLOP')} over all devices"
    moved = "" if report.bytes_per_flop is None else f", {report.bytes_per_flop:.2g} bytes per FLOP"
    yield (
        f"counted in the program: {quantity(report.compiled_flops, 'FLOP')} of matrix multiplications (recomputation "
        f"counts), {quantity(report.compiled_bytes, 'B')} read and written{moved}"
    )
    if bound := report.lower_bound:
        table = Table(title=f"A step takes at least ({bound.source})")
        for name in ("compute", "memory", "nvlink", "network"):
            table.add_column(f"{name} (binding)" if name == bound.binding else name, justify="right")
        table.add_row(
            *(seconds(s) for s in (bound.compute_seconds, bound.memory_seconds, bound.nvlink_seconds)),
            seconds(bound.network_seconds),
        )
        yield table
