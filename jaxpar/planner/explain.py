"""A plan for people: the layouts in their order, what their time and memory go into, and why the others lose."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from jaxpar.flops import parameter_count
from jaxpar.pipeline.partition import Partition
from jaxpar.planner.attention import attention_in_words
from jaxpar.planner.plan import Plan
from jaxpar.planner.price import Price
from jaxpar.planner.words import MEMORY, TIME, gigabytes, in_words, too_much
from jaxpar.quantities import seconds


def show(plan: Plan) -> None:
    """Print a plan; into a file or pipe as wide as its tables need."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for part in parts(plan):
        console.print(part, soft_wrap=not isinstance(part, Table), highlight=False)


def parts(plan: Plan) -> Iterator[RenderableType]:
    """The tables and lines of a plan."""
    yield task(plan)
    yield f"priced for jax {plan.jax}, with {attention_in_words(plan.model, plan.workload)}"
    if plan.best is None:
        yield from _nothing_fits(plan)
    else:
        yield layouts(plan)
        yield time_table(plan.ranked)
        yield memory_table(plan.ranked)
        if plan.best.layout.pipe > 1:
            yield f"layers of 1: {Partition(plan.best.counts, plan.best.layout.pipe)}"
    yield reasons(plan)
    if plan.advice:
        yield plan.advice.text
    yield f"{plan.priced:,} layouts were priced, {plan.bounded:,} more were left out by bounds."
    yield from (f"note: {note}" for note in plan.notes)


def task(plan: Plan) -> str:
    """What was asked, in a sentence."""
    work, cluster, parameters = plan.workload, plan.cluster, parameter_count(plan.model)
    size = f"{parameters / 1e9:.3g} billion" if parameters > 1e8 else f"{parameters / 1e6:.3g} million"
    return (
        f"{plan.model.architecture}, {size} parameters; "
        f"{work.global_batch:,} sequences × {work.sequence_length:,} = {work.tokens_per_step:,} tokens a step; "
        f"{cluster.hosts} × {cluster.per_host} {cluster.device.name} = {cluster.devices} "
        f"device{'' if cluster.devices == 1 else 's'}, of each {gigabytes(cluster.usable_bytes)} usable"
    )


def layouts(plan: Plan) -> Table:
    """The ranked list."""
    shown = f"{len(plan.ranked)} of the {plan.meshes} that fit" if len(plan.ranked) < plan.meshes else "all that fit"
    table = Table(title=f"The fastest layout on each mesh: {shown}")
    left = ("schedule", "remat", "reduction")
    columns = ("", "data", "pipe", "tensor", "ZeRO", "schedule", "microbatches", "remat", "seq. par.", "reduction")
    for column in (*columns, "tokens/s", "TFLOP/s", "MFU", "memory"):
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for number, price in enumerate(plan.ranked, 1):
        layout = price.layout
        chunks = f", {layout.chunks} chunks" if layout.chunks > 1 else ""
        table.add_row(
            *map(str, (number, layout.data, layout.pipe, layout.tensor, layout.zero)),
            layout.schedule + chunks if layout.pipe > 1 else "–",
            f"{layout.microbatches} × {plan.workload.sequences_per_microbatch(layout)}",
            layout.remat,
            "yes" if layout.sequence_parallel else "no",
            layout.algorithm if layout.data > 1 else "–",
            f"{price.tokens_per_second:,.0f}",
            f"{price.tflops_per_device:.3g}",
            f"{price.mfu:.1%}",
            gigabytes(price.memory.total),
        )
    return table


def time_table(ranked: tuple[Price, ...]) -> Table:
    """What the time of a step goes into."""
    table = Table(title="Time of a step; communication is what no arithmetic hides")
    for column in ("", "compute", "over data", "over pipe", "over tensor", "bubble", "optimizer", "all together"):
        table.add_column(column, justify="right")
    for number, price in enumerate(ranked, 1):
        times = [getattr(price.time, name) for name in TIME]
        table.add_row(str(number), *map(seconds, (*times, price.time.total)))
    return table


def memory_table(ranked: tuple[Price, ...]) -> Table:
    """What fills a device of the fullest stage."""
    table = Table(title="Memory of a device of the fullest stage")
    for column in ("", "stage", *MEMORY.values(), "all together"):
        table.add_column(column, justify="right")
    for number, price in enumerate(ranked, 1):
        sizes = [getattr(price.memory, name) for name in MEMORY]
        table.add_row(str(number), str(price.stage), *map(gigabytes, (*sizes, price.memory.total)))
    return table


def reasons(plan: Plan) -> Table:
    """Why the other values of each choice lose."""
    of = "the best layout with each other value, against 1" if plan.best else "the least memory with each value"
    table = Table(title=f"Why not: {of}", show_lines=False)
    table.add_column("choice", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in plan.rejected:
        above = " and above" if row.and_above else ""
        table.add_row(f"{row.choice} {row.value}{above}", row.reason)
    return table


def _nothing_fits(plan: Plan) -> Iterator[RenderableType]:
    assert plan.nearest, "where nothing fits there is a nearest"
    yield Text("Nothing fits.", "bold red")
    yield f"The nearest takes {too_much(plan.nearest.memory, plan.cluster.usable_bytes)}:"
    yield f"  {in_words(plan.nearest.layout, plan.workload)}"
    yield memory_table((plan.nearest,))
    yield "It would fit with"
    yield from (f"  {remedy}" for remedy in plan.remedies)
