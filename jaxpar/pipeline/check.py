"""Proves that a schedule table is right, or names the tick in which it is not. No JAX.

Parts of the model are numbered in model order: part c · S + s is chunk c of stage s.
"""

import numpy as np

from jaxpar.config import InputError
from jaxpar.pipeline.schedules import Schedule


class BrokenSchedule(InputError):
    """A table that an executor would compute wrong results from."""


def check(schedule: Schedule) -> tuple[int, ...]:
    """Prove a table: what a lockstep executor needs holds in every tick of it.

    - Each microbatch goes forward and backward through each part exactly once.
    - A forward runs one tick after that of the part before, a backward one tick after that of the part behind; no
      backward runs in a tick before its own forward.
    - A forward writes a slot that no waiting backward needs; the backward reads the slot that its forward wrote.
    - The same for the model's outputs, which the last part's forwards write and its backwards read.
    - The phases cover the ticks one after the other, and allow what happens in them.

    Args:
        schedule: any table, by `make_schedule` or by hand.

    Returns:
        How many chunk inputs each stage holds at most, counted from the slots in use.

    Raises:
        BrokenSchedule: with the tick, the stage and what is wrong there.

    Example:
        >>> from jaxpar.pipeline.schedules import make_schedule
        >>> check(make_schedule("1f1b", stages=4, microbatches=8))
        (7, 5, 3, 1)
    """
    _check_shapes(schedule)
    _check_phases(schedule)
    forward_tick = _when(schedule, schedule.forward, "forward")
    backward_tick = _when(schedule, schedule.backward, "backward")
    _check_arrivals(schedule, forward_tick, backward_tick)
    _check_outputs(schedule)
    return tuple(_check_slots(schedule, stage) for stage in range(schedule.stages))


def _check_shapes(schedule: Schedule) -> None:
    ticks, S = schedule.ticks, schedule.stages
    shapes = {"forward": (ticks, S, 2), "backward": (ticks, S, 2), "output_slot": (ticks, 2)}
    shapes |= {"forward_slot": (ticks, S), "backward_slot": (ticks, S)}
    for name, shape in shapes.items():
        table = getattr(schedule, name)
        if table.shape != shape or not np.issubdtype(table.dtype, np.integer):
            raise BrokenSchedule(f"{name} is {table.dtype}{list(table.shape)}, must be integers {list(shape)}.")


def _check_phases(schedule: Schedule) -> None:
    expected = 0
    for phase in schedule.phases:
        if phase.start != expected or phase.stop <= phase.start:
            raise BrokenSchedule(f"tick {expected}: the phase {phase} does not begin here or is empty.")
        for kind in ("forward", "backward"):
            busy = np.argwhere(getattr(schedule, kind)[phase.start : phase.stop, :, 0] >= 0)
            if len(busy) and not getattr(phase, kind):
                tick, stage = busy[0]
                raise BrokenSchedule(f"tick {phase.start + tick}, stage {stage}: goes {kind} in the phase {phase}.")
        expected = phase.stop
    if expected != schedule.ticks:
        raise BrokenSchedule(f"tick {expected}: no phase has it.")


def _when(schedule: Schedule, table: np.ndarray, kind: str) -> np.ndarray:
    """The tick of each microbatch's pass through each part, [M, v · S], all of them there exactly once."""
    M, v, S = schedule.microbatches, schedule.chunks, schedule.stages
    ticks = np.full((M, v * S), -1)
    for tick, stage in np.argwhere((table != -1).any(axis=-1)):
        m, c = table[tick, stage]
        where = f"tick {tick}, stage {stage}: the {kind} of microbatch {m}, chunk {c}"
        if not (0 <= m < M and 0 <= c < v):
            raise BrokenSchedule(f"{where} does not exist (microbatches 0 to {M - 1}, chunks 0 to {v - 1}).")
        if ticks[m, c * S + stage] >= 0:
            raise BrokenSchedule(f"{where} has run in tick {ticks[m, c * S + stage]} already.")
        ticks[m, c * S + stage] = tick
    for m, part in np.argwhere(ticks < 0):
        raise BrokenSchedule(
            f"tick {schedule.ticks}, stage {part % S}: the table ends without the {kind} of microbatch {m}, "
            f"chunk {part // S}."
        )
    return ticks


def _check_arrivals(schedule: Schedule, forward_tick: np.ndarray, backward_tick: np.ndarray) -> None:
    """Inputs come from the tick before: the wrong work that comes first in time is named."""
    S, faults = schedule.stages, []
    late = forward_tick[:, 1:] != forward_tick[:, :-1] + 1
    faults += [(forward_tick[m, i + 1], m, i + 1, "forward", forward_tick[m, i]) for m, i in np.argwhere(late)]
    late = backward_tick[:, :-1] != backward_tick[:, 1:] + 1
    faults += [(backward_tick[m, i], m, i, "backward", backward_tick[m, i + 1]) for m, i in np.argwhere(late)]
    for tick, m, part, kind, source in sorted(faults)[:1]:
        raise BrokenSchedule(
            f"tick {tick}, stage {part % S}: the {kind} of microbatch {m}, chunk {part // S} needs what tick "
            f"{tick - 1} sends, but its input is made in tick {source}."
        )
    for m, part in np.argwhere(backward_tick < forward_tick)[:1]:
        raise BrokenSchedule(
            f"tick {backward_tick[m, part]}, stage {part % S}: the backward of microbatch {m}, chunk {part // S} "
            f"comes before its forward in tick {forward_tick[m, part]}."
        )


def _check_slots(schedule: Schedule, stage: int) -> int:
    """Walk through one stage's slots; how many hold something at most."""
    holds: dict[int, tuple[int, int]] = {}  # slot to (microbatch, chunk)
    most = 0
    for tick in range(schedule.ticks):
        where = f"tick {tick}, stage {stage}"
        written, read = int(schedule.forward_slot[tick, stage]), int(schedule.backward_slot[tick, stage])
        _put(holds, written, _work(schedule.forward, tick, stage), schedule.slots, where)
        most = max(most, len(holds))
        _take(holds, read, _work(schedule.backward, tick, stage), where)
    return most


def _check_outputs(schedule: Schedule) -> None:
    """Walk through the slots of the model's outputs."""
    holds: dict[int, tuple[int, int]] = {}
    last = schedule.chunks - 1
    for tick in range(schedule.ticks):
        where = f"tick {tick}, output"
        forward, backward = (_work(table, tick, -1) for table in (schedule.forward, schedule.backward))
        written, read = map(int, schedule.output_slot[tick])
        _put(holds, written, forward if forward[1] == last else (-1, -1), schedule.output_slots, where)
        _take(holds, read, backward if backward[1] == last else (-1, -1), where)


def _work(table: np.ndarray, tick: int, stage: int) -> tuple[int, int]:
    m, c = table[tick, stage].tolist()
    return m, c


def _put(holds: dict[int, tuple[int, int]], slot: int, work: tuple[int, int], slots: int, where: str) -> None:
    m, c = work
    if (m >= 0) != (slot >= 0) or slot < -1:
        raise BrokenSchedule(f"{where}: the forward of microbatch {m}, chunk {c} writes slot {slot}.")
    if slot >= slots:
        raise BrokenSchedule(f"{where}: slot {slot} is written, but there are only {slots}.")
    if slot in holds:
        raise BrokenSchedule(
            f"{where}: the forward of microbatch {m}, chunk {c} overwrites slot {slot}, which still holds microbatch "
            f"{holds[slot][0]}, chunk {holds[slot][1]}."
        )
    if slot >= 0:
        holds[slot] = work


def _take(holds: dict[int, tuple[int, int]], slot: int, work: tuple[int, int], where: str) -> None:
    m, c = work
    if (m >= 0) != (slot >= 0) or slot < -1:
        raise BrokenSchedule(f"{where}: the backward of microbatch {m}, chunk {c} reads slot {slot}.")
    if slot >= 0 and holds.pop(slot, None) != work:
        raise BrokenSchedule(f"{where}: the backward of microbatch {m}, chunk {c} reads slot {slot}, which is not its.")
