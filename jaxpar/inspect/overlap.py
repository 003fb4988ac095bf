"""How much of the communication is hidden behind arithmetic, read from the schedule of a compiled program.

Between the start and the done of an asynchronous collective the operations that stand there run beside it. Their
roofline time over the collective's own time on the link it crosses, at most 1, is the share that is hidden. Time is
spent once: where several collectives are in flight, an operation hides the one that started first, and what is left
of it the next. A synchronous collective, or a start directly before its done, hides nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxpar.hardware import Device
from jaxpar.inspect.collectives import Collective, Places, collective, kind
from jaxpar.inspect.hlo import Computation, Instruction, Module
from jaxpar.inspect.roofline import Roofline


@dataclass
class Execution:
    """A collective instruction and what happens to it in a step.

    Attributes:
        name: of the instruction.
        collective: what it communicates.
        times: how often a step runs it.
        exposed_seconds: what of one run is not hidden.
    """

    name: str
    collective: Collective
    times: int
    exposed_seconds: float

    def hidden_share(self, device: Device | None) -> float:
        """Share of its time that other operations hide, in [0, 1]."""
        seconds = self.collective.seconds(device)
        return 1 - self.exposed_seconds / seconds if seconds else 0.0


class Schedule:
    """A program's collectives as it runs them, and what runs beside them.

    Args:
        module: the program.
        places: where its devices are.
        roofline: what its operations cost.

    Attributes:
        executions: every collective instruction that is reached, in schedule order.
    """

    def __init__(self, module: Module, places: Places, roofline: Roofline) -> None:
        self.module, self.places, self.roofline = module, places, roofline
        self.executions: list[Execution] = []
        self._communicating = _communicating(module)
        self._walk(module.entry, 1)

    def _walk(self, computation: Computation, times: int) -> float:
        """Go through a computation that a step runs `times` times.

        Returns:
            The time of its operations that hid none of its own collectives, of one run.
        """
        flying: dict[str, Execution] = {}
        idle = 0.0
        for instruction in computation.instructions:
            found = collective(instruction, computation, self.module, self.places)
            if found:
                execution = Execution(instruction.name, found, times, found.seconds(self.roofline.device))
                self.executions.append(execution)
                if found.asynchronous:
                    flying[instruction.name] = execution
            elif instruction.opcode.endswith("-done") and instruction.operands[0] in flying:
                del flying[instruction.operands[0]]
            else:
                idle += _hide(flying.values(), self._operation(instruction, computation, times))
        return idle

    def _operation(self, instruction: Instruction, computation: Computation, times: int) -> float:
        """Time of an operation that is no collective, less what hides collectives inside it."""
        inside = self.communicating_calls(instruction)
        if not inside:
            return self.roofline.operation(instruction, computation).seconds
        trips = self.roofline.trips(instruction) if instruction.opcode == "while" else 1
        return trips * sum(self._walk(self.module.computations[name], times * trips) for name in inside)

    def communicating_calls(self, instruction: Instruction) -> list[str]:
        """The computations with collectives that an instruction runs; of a conditional's branches the dearest one."""
        inside = [name for name in instruction.called(*CALLS) if name in self._communicating]
        if inside and instruction.opcode == "conditional":
            return [self.roofline.dearest_branch(instruction, self.wire_bytes)]
        return inside

    def wire_bytes(self, name: str) -> float:
        """What one device sends in a computation, loops left at one iteration: to choose between branches."""
        total = 0.0
        computation = self.module.computations[name]
        for instruction in computation.instructions:
            if found := collective(instruction, computation, self.module, self.places):
                total += found.wire_bytes
            else:
                total += sum(self.wire_bytes(n) for n in instruction.called(*CALLS) if n in self._communicating)
        return total


CALLS = ("body", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")
"""Attributes that name what an instruction runs (a loop's condition and a reduction's operator cost nothing)."""


def _hide(flying: Iterable[Execution], seconds: float) -> float:
    """Spend time on the collectives in flight, the one that started first before the others; returns what is left."""
    for execution in flying:
        spent = min(seconds, execution.exposed_seconds)
        execution.exposed_seconds -= spent
        seconds -= spent
    return seconds


def _communicating(module: Module) -> set[str]:
    """Names of the computations that have a collective, or call one that has."""
    found: set[str] = set()
    for computation in module.computations.values():  # what is called stands before what calls it
        calls = {name for i in computation.instructions for name in i.called(*CALLS)}
        if calls & found or any(kind(i.opcode) for i in computation.instructions):
            found.add(computation.name)
    return found
