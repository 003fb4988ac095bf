"""How many ticks and buffers a schedule table has, in closed form: what a plan needs of it, without making the table.

A test holds each against `jaxpar.pipeline.schedules.make_schedule` and the executor's own tables.

Letters: S stages, M microbatches, v chunks per stage.
"""

from dataclasses import dataclass

import numpy as np

from jaxpar.planner.cached import cached


@dataclass(frozen=True)
class Ticks:
    """Counts of one schedule, as the executor runs it.

    Attributes:
        forward: ticks with forwards.
        backward: ticks with backwards.
        both: ticks with both.
        head: ticks in which the head and its loss are computed.
        slots: slots of the ring that holds what forwards keep, one for idle writes included where it takes one.
        outputs: slots for outputs that wait for the head, likewise.
    """

    forward: int
    backward: int
    both: int
    head: int
    slots: int
    outputs: int


FULL = 3
"""Groups of S microbatches after which a 1F1B schedule repeats itself."""


@cached
def ticks(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Ticks:
    """Count, for `gpipe` or `1f1b` and at least two stages.

    Example:
        >>> ticks("1f1b", stages=4, microbatches=8)
        Ticks(forward=11, backward=11, both=8, head=8, slots=7, outputs=1)
    """
    S, M, v = stages, microbatches, chunks
    forward = (M - 1) // S * S * v + (v - 1) * S + (M - 1) % S + S
    first_backward = v * S - 1 if schedule == "1f1b" else forward
    both = max(0, forward - first_backward)
    if schedule == "gpipe":  # every output waits for the last forward, and the first idle write finds all slots full
        return Ticks(forward, forward, both, forward, v * M + 1, M + 1)
    # No more are alive after as many microbatches as it takes to fill the stages: a group of S more repeats the last.
    slots = _slots(S, min(M, FULL * S + M % S), v, first_backward)
    return Ticks(forward, forward, both, both, slots, 1)


def _slots(S: int, M: int, v: int, first_backward: int) -> int:
    """Slots of stage 0, which holds what it keeps for longest: most alive at once, and one more for idle writes."""
    m, c = np.ogrid[:M, :v]
    begin = m // S * S * v + m % S
    written = (begin + c * S).ravel()
    read = (begin + (v - 1 - c) * S + S - 1 + first_backward).ravel()
    change = np.zeros(int(read.max()) + 2, np.int64)
    np.add.at(change, written, 1)
    np.add.at(change, read + 1, -1)
    alive = np.cumsum(change)[:-1]
    idle = np.ones(len(alive), bool)
    idle[written] = False
    most = int(alive.max())
    return max(most, int(alive[idle].max(initial=0)) + 1)
