"""Pipeline schedules as plain tables: what each stage does in each tick, and which buffer slots it uses. No JAX.

A stage may do one forward and one backward in a tick, the forward first. Whatever a tick produces is used exactly one
tick later: the activation by the next stage (after the last one by the first, for its next chunk), the gradient by
the stage before. So the executor needs no buffers for messages, and all stages keep step.

Letters: S stages, M microbatches m, v chunks c per stage, s the stage. Chunk c of stage s is part c · S + s of the
model.
"""

import difflib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from jaxpar.config import InputError

SCHEDULES = ("gpipe", "1f1b")
"""The names that `make_schedule` knows. Interleaved 1F1B is 1f1b with two chunks or more."""


class Work(NamedTuple):
    """One piece of work of a stage: the forward (F), backward (B) or weight gradient (W) of a microbatch and chunk."""

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int


Order = tuple[Work, ...]
"""What one stage does, from first to last. Where it has no W, each B finds the weight gradient too."""


@dataclass(frozen=True)
class Phase:
    """The ticks start .. stop − 1, which one scan runs."""

    forward: bool  # some stage may go forward in it
    backward: bool  # some stage may go backward in it
    start: int
    stop: int

    @property
    def label(self) -> str:
        """What happens in it: both, forward only or backward only."""
        return "both" if self.forward and self.backward else f"{'forward' if self.forward else 'backward'} only"


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule. `make_schedule` makes the known ones; `jaxpar.pipeline.check.check` proves any.

    Attributes:
        name: what it is called.
        stages: S, the size of the pipe axis.
        chunks: v, model parts per stage.
        microbatches: M.
        forward: i32[ticks, S, 2], the (microbatch, chunk) that goes forward, (-1, -1) where a stage is idle.
        backward: i32[ticks, S, 2], the same for what goes backward.
        forward_slot: i32[ticks, S], the slot in which a forward leaves what its backward needs, -1 idle.
        backward_slot: i32[ticks, S], the slot that a backward reads, free from the next tick on, -1 idle.
        slots: slots that each stage must have.
        output_slot: i32[ticks, 2], where the model's output is kept from the last forward of a microbatch to its
            first backward, in which the head's loss and gradient are computed: the slot written, then the slot read
            in this tick, which may be the same one; -1 none.
        output_slots: slots for outputs.
        phases: the runs of ticks that have forwards only, both, or backwards only.
    """

    name: str
    stages: int
    chunks: int
    microbatches: int
    forward: np.ndarray
    backward: np.ndarray
    forward_slot: np.ndarray
    backward_slot: np.ndarray
    slots: int
    output_slot: np.ndarray
    output_slots: int
    phases: tuple[Phase, ...]

    @property
    def ticks(self) -> int:
        """Ticks from the first forward to the last backward."""
        return len(self.forward)

    @cached_property
    def bubble(self) -> float:
        """Share of the time in which a stage has no work, counted in the table, forwards and backwards alike.

        It is (S − 1) / (v · M + S − 1) exactly, whatever a backward takes in terms of a forward, because there are as
        many ticks with forwards as ticks with backwards. It is more where v > 1 and M is no multiple of S.
        """
        places = self.stages * sum((p.forward + p.backward) * (p.stop - p.start) for p in self.phases)
        work = int((self.forward[..., 0] >= 0).sum() + (self.backward[..., 0] >= 0).sum())
        return 1 - work / places

    @property
    def gap_ticks(self) -> int:
        """Ticks longer than v · M + S − 1 forwards would take: (v − 1) (S − M mod S) where M is no multiple of S."""
        with_forwards = sum(p.stop - p.start for p in self.phases if p.forward)
        return with_forwards - (self.chunks * self.microbatches + self.stages - 1)

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Chunk inputs that each stage holds at most: gone forward, and not yet backward in an earlier tick."""
        begun = np.cumsum(self.forward[..., 0] >= 0, axis=0)
        ended = np.cumsum(self.backward[..., 0] >= 0, axis=0)
        ended_before = np.concatenate([np.zeros_like(ended[:1]), ended[:-1]])
        return tuple(np.max(begun - ended_before, axis=0).tolist())

    @property
    def messages(self) -> int:
        """Activations and gradients that go from one stage to another: 2 · M · (v · S − 1), none where S is 1."""
        return 2 * self.microbatches * (self.chunks * self.stages - 1) if self.stages > 1 else 0

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        """What each stage does, one after the other."""
        orders: list[list[Work]] = [[] for _ in range(self.stages)]
        for tick in range(self.ticks):
            for s, order in enumerate(orders):
                (m, c), (n, d) = self.forward[tick, s].tolist(), self.backward[tick, s].tolist()
                order += [Work("F", m, c)] if m >= 0 else []
                order += [Work("B", n, d)] if n >= 0 else []
        return tuple(map(tuple, orders))


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Make the table of a named schedule.

    With k = ⌊m/S⌋ · S · v + c · S + m mod S, stage s runs chunk c of microbatch m forward at tick k + s. With
    k' = ⌊m/S⌋ · S · v + (v − 1 − c) · S + m mod S it runs it backward at tick k' + (S − 1 − s) + o, where o is
    v · S − 1 under 1f1b: the last stage goes backward in the very tick in which it went forward. Under gpipe o is the
    number of ticks with forwards. For v = 1 the order is 1F1B's (PipeDream, arXiv:1806.03377) in lockstep, for v > 1
    that of Megatron's interleaved schedule (arXiv:2104.04473).

    At most 2S − 1 (v = 1) or S (v + 1) − 1 chunk inputs are live on a stage under 1f1b, v · M under gpipe.

    M need not be a multiple of S. With v > 1 the places of the microbatches that the last group of S lacks are left
    idle, which costs (v − 1) (S − M mod S) ticks. That is the least this timing allows, S − M mod S ticks fewer than
    running masked microbatches in those places; and refusing would rule out batches that no multiple of S divides.

    Args:
        name: gpipe or 1f1b; interleaved 1F1B is 1f1b with two chunks or more.
        stages: S, at least 1.
        microbatches: M, at least 1.
        chunks: v, at least 1.

    Raises:
        InputError: on an unknown name or a size below 1, with the nearest legal choice.

    Example:
        >>> schedule = make_schedule("1f1b", stages=2, microbatches=3)
        >>> schedule.forward[:, :, 0].tolist()
        [[0, -1], [1, 0], [2, 1], [-1, 2], [-1, -1]]
        >>> schedule.backward[:, :, 0].tolist()
        [[-1, -1], [-1, 0], [0, 1], [1, 2], [2, -1]]
        >>> schedule.slots, schedule.output_slots, schedule.bubble
        (3, 1, 0.25)
    """
    check_name(name, SCHEDULES)
    check_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    S, v = stages, chunks
    m, c, s = np.ogrid[:microbatches, :v, :S]
    begin = m // S * S * v + m % S
    forward_tick = begin + c * S + s
    forward_ticks = int(forward_tick.max()) + 1
    first_backward = v * S - 1 if name == "1f1b" else forward_ticks
    backward_tick = begin + (v - 1 - c) * S + (S - 1 - s) + first_backward
    ticks = int(backward_tick.max()) + 1

    forward = np.full((ticks, S, 2), -1, np.int32)
    backward = np.full((ticks, S, 2), -1, np.int32)
    forward[forward_tick, s] = backward[backward_tick, s] = np.stack(np.broadcast_arrays(m, c), axis=-1)

    slot = np.stack([_lowest_free_slots(forward_tick[..., i], backward_tick[..., i]) for i in range(S)], axis=-1)
    forward_slot = np.full((ticks, S), -1, np.int32)
    backward_slot = np.full((ticks, S), -1, np.int32)
    forward_slot[forward_tick, s] = backward_slot[backward_tick, s] = slot

    written, read = forward_tick[:, v - 1, S - 1], backward_tick[:, v - 1, S - 1]
    output_slot = np.full((ticks, 2), -1, np.int32)
    output_slot[written, 0] = output_slot[read, 1] = outputs = _lowest_free_slots(written, read)

    for table in (forward, backward, forward_slot, backward_slot, output_slot):
        table.flags.writeable = False
    bounds = sorted({0, first_backward, forward_ticks, ticks})
    return Schedule(
        name=name,
        stages=S,
        chunks=v,
        microbatches=microbatches,
        forward=forward,
        backward=backward,
        forward_slot=forward_slot,
        backward_slot=backward_slot,
        slots=int(slot.max()) + 1,
        output_slot=output_slot,
        output_slots=int(outputs.max()) + 1,
        phases=tuple(
            Phase(forward=start < forward_ticks, backward=start >= first_backward, start=start, stop=stop)
            for start, stop in pairwise(bounds)
        ),
    )


def _lowest_free_slots(written: np.ndarray, read: np.ndarray) -> np.ndarray:
    """Give each value the lowest slot that is free from the tick in which it is written through that of its read."""
    slots = np.empty(written.size, np.int32)
    busy: list[tuple[int, int]] = []  # heap of (tick of the read, slot)
    free: list[int] = []
    reads = read.ravel()
    for i in np.argsort(written, axis=None):
        while busy and busy[0][0] < written.flat[i]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slots[i] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (int(reads[i]), int(slots[i])))
    return slots.reshape(written.shape)


def check_name(name: str, names: Sequence[str]) -> None:
    """Refuse a schedule's name that is not among `names`, with the nearest that is.

    Raises:
        InputError: naming the choice.
    """
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        if "interleaved" in name:
            hint = " Interleaved 1F1B is 1f1b with chunks = 2 or more."
        raise InputError(f"schedule = {name}: must be one of {', '.join(names)}.{hint}")


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1.

    Raises:
        InputError: naming the size.
    """
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} = {size}: must be at least 1. Use 1.")
