"""What `jaxpar schedule` prints, draws and gives to programs. No JAX."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxpar.pipeline.draw import plot, text, text_width
from jaxpar.pipeline.orders import ORDERS, make_orders
from jaxpar.pipeline.schedules import SCHEDULES, Schedule, check_name, make_schedule
from jaxpar.pipeline.simulate import Costs, Timeline, asynchronous, lockstep

SHORT_BACKWARD = Costs(forward=1, input_gradient=0.5, weight_gradient=0.5)
"""For drawings that must be narrow: a backward as long as a forward."""


def run(name: str, stages: int, microbatches: int, chunks: int, plot_file: Path | None, as_json: bool) -> None:
    """Print a schedule: a drawing and its numbers, or JSON; and draw it into a file where one is named.

    Args:
        name: gpipe, 1f1b, zb-h1 or zb-h2.
        stages: stages.
        microbatches: microbatches.
        chunks: chunks per stage.
        plot_file: a .png, .svg or .pdf file, or None.
        as_json: JSON instead of text.

    Raises:
        InputError: on an unknown name or an impossible size.
    """
    check_name(name, ORDERS)
    schedule = make_schedule(name, stages, microbatches, chunks) if name in SCHEDULES else None
    if schedule:
        timeline = lockstep(schedule, Costs())
        facts, tables = _of_table(schedule), _tables(schedule)
    else:
        orders = make_orders(name, stages, microbatches, chunks)
        timeline = asynchronous(orders, Costs())
        facts, tables = _of_orders(timeline, microbatches), {"orders": orders}
    sizes = {"name": name, "stages": stages, "microbatches": microbatches, "chunks": chunks}
    if plot_file:
        plot(timeline, _title(sizes), _subtitle(facts), plot_file)
    if as_json:
        print(json.dumps({**sizes, **{key: value for key, (value, _) in facts.items()}, **tables}))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{_title(sizes)}[/bold]\n")
    colour = bool(console.color_system)
    if schedule and text_width(timeline, colour) > console.width:
        shorter = lockstep(schedule, SHORT_BACKWARD)
        timeline = min(timeline, shorter, key=lambda timeline: text_width(timeline, colour))
    console.print(text(timeline, console.width, colour), soft_wrap=True)
    numbers = Table.grid(padding=(0, 2))
    for key, (value, said) in facts.items():
        numbers.add_row(key.replace("_", " "), said or str(value))
    console.print()
    console.print(numbers)
    if plot_file:
        console.print(f"drawn in {plot_file}", soft_wrap=True)


Facts = dict[str, tuple[Any, str]]
"""Name to value, and the value in words where it needs more than itself."""


def _title(sizes: dict[str, Any]) -> str:
    count = lambda key, one, more: f"{sizes[key]} {one if sizes[key] == 1 else more}"
    microbatches = count("microbatches", "microbatch", "microbatches")
    title = f"{sizes['name']}: {count('stages', 'stage', 'stages')}, {microbatches}"
    return title + (f", {sizes['chunks']} chunks per stage" if sizes["chunks"] > 1 else "")


def _subtitle(facts: Facts) -> str:
    return f"bubble {facts['bubble'][0]:.1%}, at most {max(facts['live'][0])} chunk inputs live on a stage"


def _of_table(schedule: Schedule) -> Facts:
    S, M, v = schedule.stages, schedule.microbatches, schedule.chunks
    phases = ", ".join(f"{phase.stop - phase.start} {phase.label}" for phase in schedule.phases)
    formula = f"(S - 1) / (v M + S - 1) = {S - 1}/{v * M + S - 1}"
    bubble = f"{schedule.bubble:.2%} of the time, " + (f"more than {formula}" if schedule.gap_ticks else formula)
    facts: Facts = {
        "ticks": (schedule.ticks, f"{schedule.ticks}: {phases}"),
        "bubble": (schedule.bubble, bubble),
        "live": (schedule.live, f"at most {_spaced(schedule.live)} chunk inputs on stages 0 to {S - 1}"),
        "slots": (schedule.slots, f"{schedule.slots} on every stage, {schedule.output_slots} for the model's output"),
        "messages": (schedule.messages, _messages(schedule.messages)),
    }
    if schedule.gap_ticks:
        legal = " or ".join(str(n) for n in (M // S * S, M // S * S + S) if n)
        gap = f"{schedule.gap_ticks} forwards and backwards: {M} is no multiple of {S} stages; none with {legal}"
        facts["gap_ticks"] = (schedule.gap_ticks, gap)
    return facts


def _of_orders(timeline: Timeline, microbatches: int) -> Facts:
    S = timeline.stages
    messages = 2 * microbatches * (S - 1)
    return {
        "time": (timeline.total, f"{timeline.total:g}, where forward, backward and weight gradient take 1 each"),
        "bubble": (timeline.bubble, f"{timeline.bubble:.2%} of the longest stage's time"),
        "live": (timeline.live, f"at most {_spaced(timeline.live)} inputs on stages 0 to {S - 1}"),
        "messages": (messages, _messages(messages)),
        "runs": (False, "no: to look at and to compare; jaxpar trains with gpipe and 1f1b"),
    }


def _spaced(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _messages(messages: int) -> str:
    return f"{messages}: {messages // 2} activations, {messages // 2} gradients"


def _tables(schedule: Schedule) -> dict[str, Any]:
    names = ("forward", "backward", "forward_slot", "backward_slot", "output_slot")
    phases = [{"phase": phase.label, "start": phase.start, "stop": phase.stop} for phase in schedule.phases]
    return {
        "output_slots": schedule.output_slots,
        "phases": phases,
        **{name: getattr(schedule, name).tolist() for name in names},
    }
