"""How long a schedule takes, from the times of its pieces: in lockstep, or with every stage at its own pace. No JAX.

Letters: S stages, v chunks per stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from jaxpar.config import InputError
from jaxpar.pipeline.schedules import Order, Phase, Schedule, Work

Seconds = float | Sequence[Sequence[float]]
"""A time: one number for all chunks and stages, or [v, S] numbers."""


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch, in any one unit.

    Attributes:
        forward: forward of a chunk.
        input_gradient: backward of a chunk, without what only the weights' gradients need; with what is recomputed.
        weight_gradient: gradients of a chunk's weights.
        message: an activation or its gradient from one stage to the next.
    """

    forward: Seconds = 1.0
    input_gradient: Seconds = 1.0
    weight_gradient: Seconds = 1.0
    message: float = 0.0


@dataclass(frozen=True)
class Event:
    """One piece of work on one stage, from `start` to `stop`."""

    stage: int
    work: Work
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """When each stage does what, in the unit of the costs."""

    stages: int
    chunks: int
    events: tuple[Event, ...]
    phases: tuple[tuple[Phase, float, float], ...] = ()
    """The phases of a table with their beginnings and ends, in lockstep."""

    @property
    def total(self) -> float:
        """From the beginning to the end of the last work."""
        return max(event.stop for event in self.events)

    @cached_property
    def longest_stage(self) -> float:
        """The most that a stage takes from its own first work to its own last."""
        begin, end = [np.inf] * self.stages, [0.0] * self.stages
        for event in self.events:
            begin[event.stage] = min(begin[event.stage], event.start)
            end[event.stage] = max(end[event.stage], event.stop)
        return max(stop - start for start, stop in zip(begin, end, strict=True))

    @cached_property
    def bubble(self) -> float:
        """1 − work / longest stage, with the stages' mean work: the bubble rate of Zero Bubble (arXiv:2401.10241)."""
        work = sum(event.stop - event.start for event in self.events)
        return 1 - work / (self.stages * self.longest_stage)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Chunk inputs that each stage holds at most, from a forward until nothing needs them any more."""
        last = "W" if any(event.work.kind == "W" for event in self.events) else "B"
        now, most = [0] * self.stages, [0] * self.stages
        for event in sorted(self.events, key=lambda event: event.start):
            now[event.stage] += (event.work.kind == "F") - (event.work.kind == last)
            most[event.stage] = max(most[event.stage], now[event.stage])
        return tuple(most)


def asynchronous(orders: Sequence[Order], costs: Costs) -> Timeline:
    """Let each stage go through its order as early as its inputs allow.

    Where no order has a W, a backward takes both gradients' time, and its message leaves after that.

    Args:
        orders: for each stage, from `make_orders` or `Schedule.orders`.
        costs: times of a chunk.

    Raises:
        InputError: when stages wait for each other for ever, naming one and what it waits with.

    Example:
        >>> from jaxpar.pipeline.orders import make_orders
        >>> asynchronous(make_orders("1f1b", stages=4, microbatches=8), Costs()).bubble
        0.2727272727272727
    """
    S = len(orders)
    chunks = 1 + max(work.chunk for order in orders for work in order)
    seconds = _seconds(costs, chunks, S, split=any(work.kind == "W" for order in orders for work in order))
    done: dict[tuple[str, int, int], float] = {}  # (kind, microbatch, part of the model): when
    clock, position = [0.0] * S, [0] * S
    events: list[Event] = []
    moved = True
    while moved:
        moved = False
        for s, order in enumerate(orders):
            while position[s] < len(order):
                work = order[position[s]]
                part = work.chunk * S + s
                source = _source(work, part, last_part=chunks * S - 1)
                if source and source not in done:
                    break
                sent = costs.message if source and source[2] % S != s else 0.0
                start = max(clock[s], done[source] + sent if source else 0.0)
                clock[s] = done[work.kind, work.microbatch, part] = start + seconds[work.kind][work.chunk][s]
                events.append(Event(s, work, start, clock[s]))
                position[s] += 1
                moved = True
    for s, order in enumerate(orders):
        if position[s] < len(order):
            raise InputError(f"stage {s} waits for ever with its work number {position[s]}, {order[position[s]]}.")
    return Timeline(S, chunks, tuple(events))


def lockstep(schedule: Schedule, costs: Costs) -> Timeline:
    """Let all stages keep step through a table, as the executor does.

    In a tick the slowest forward, then the slowest backward sets the pace. Where both run, the activation travels
    beside the backward and the gradient beside the forward; otherwise a message takes its own time.

    Args:
        schedule: the table.
        costs: times of a chunk.

    Example:
        >>> from jaxpar.pipeline.schedules import make_schedule
        >>> lockstep(make_schedule("1f1b", stages=4, microbatches=8), Costs()).total  # (8 + 4 - 1) · 3
        33.0
    """
    seconds = _seconds(costs, schedule.chunks, schedule.stages, split=False)
    message = costs.message if schedule.stages > 1 else 0.0
    events: list[Event] = []
    phases: list[tuple[Phase, float, float]] = []
    clock = 0.0
    for phase in schedule.phases:
        begin = clock
        for tick in range(phase.start, phase.stop):
            forwards = _tick_events("F", schedule.forward[tick], seconds["F"], clock)
            forward = max((event.stop - clock for event in forwards), default=0.0)
            # The gradient leaves at the start of the tick, the activation when the forwards are done.
            halfway = clock + (max(forward, message) if phase.backward else forward)
            backwards = _tick_events("B", schedule.backward[tick], seconds["B"], halfway)
            backward = max((event.stop - halfway for event in backwards), default=0.0)
            clock = halfway + (max(backward, message) if phase.forward else backward)
            events += forwards + backwards
        phases.append((phase, begin, clock))
    return Timeline(schedule.stages, schedule.chunks, tuple(events), tuple(phases))


def _tick_events(kind: Literal["F", "B"], work_S2: np.ndarray, seconds: list[list[float]], start: float) -> list[Event]:
    """Start everything that one table has in a tick."""
    return [
        Event(s, Work(kind, m, c), start, start + seconds[c][s]) for s, (m, c) in enumerate(work_S2.tolist()) if m >= 0
    ]


def _source(work: Work, part: int, last_part: int) -> tuple[str, int, int] | None:
    """The work whose result this one needs; only the first part's forward needs none."""
    if work.kind == "F":
        return ("F", work.microbatch, part - 1) if part else None
    if work.kind == "B" and part < last_part:
        return "B", work.microbatch, part + 1
    return "F" if work.kind == "B" else "B", work.microbatch, part


def _seconds(costs: Costs, chunks: int, stages: int, split: bool) -> dict[str, list[list[float]]]:
    """[v][S] times of each kind of work; a backward includes the weights' gradients unless they are `split` off."""
    full = lambda cost: np.broadcast_to(np.asarray(cost, float), (chunks, stages))
    both = full(costs.input_gradient) + full(costs.weight_gradient)
    backward = full(costs.input_gradient) if split else both
    times = {"F": full(costs.forward), "B": backward, "W": full(costs.weight_gradient)}
    return {kind: time.tolist() for kind, time in times.items()}
