"""The step as a timeline: the compiled program's schedule played at datasheet rates, one lane per stream.

Operations run one after the other. A collective starts when the schedule reaches it and the one before it is done; an
asynchronous one is waited for at its done. It is what the roofline allows, not a prediction of the real time.
"""

from dataclasses import dataclass

from jaxpar.inspect.collectives import collective
from jaxpar.inspect.hlo import Instruction
from jaxpar.inspect.overlap import Schedule

MATRICES, OTHER = "matrix multiplication", "other operations"


@dataclass
class Segment:
    """A stretch of time in which one thing happens.

    Attributes:
        lane: `MATRICES`, `OTHER`, or a collective's `kind over axes`.
        start: seconds since the step began.
        seconds: how long.
    """

    lane: str
    start: float
    seconds: float


class Timeline:
    """Play a schedule.

    Args:
        schedule: of a program for a device that is known.

    Attributes:
        segments: in the order of their starts within each lane; neighbours of one lane are joined.
        seconds: when everything is done.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.roofline = schedule, schedule.roofline
        self.segments: list[Segment] = []
        self._last: dict[str, Segment] = {}
        self._now = self._link_free = 0.0
        self._play(schedule.module.entry.name)
        self.seconds = max(self._now, self._link_free)

    def _play(self, name: str) -> None:
        computation = self.schedule.module.computations[name]
        done_at: dict[str, float] = {}
        for instruction in computation.instructions:
            found = collective(instruction, computation, self.schedule.module, self.schedule.places)
            if found:
                start = max(self._now, self._link_free)
                self._link_free = start + found.seconds(self.roofline.device)
                self._add(f"{found.op} over {' × '.join(found.axes)}", start, self._link_free - start)
                if found.asynchronous:
                    done_at[instruction.name] = self._link_free
                else:
                    self._now = self._link_free
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in done_at:
                self._now = max(self._now, done_at[instruction.operands[0]])
            elif inside := self.schedule.communicating_calls(instruction):
                for _ in range(self.roofline.trips(instruction) if instruction.opcode == "while" else 1):
                    for called in inside:
                        self._play(called)
            else:
                self._operation(instruction, name)

    def _operation(self, instruction: Instruction, name: str) -> None:
        cost = self.roofline.operation(instruction, self.schedule.module.computations[name])
        self._add(MATRICES if cost.flops else OTHER, self._now, cost.seconds)
        self._now += cost.seconds

    def _add(self, lane: str, start: float, seconds: float) -> None:
        if not seconds:
            return
        last = self._last.get(lane)
        if last and start - (last.start + last.seconds) <= 1e-12:
            last.seconds = start + seconds - last.start
        else:
            self._last[lane] = Segment(lane, start, seconds)
            self.segments.append(self._last[lane])
