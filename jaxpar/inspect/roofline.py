"""What the operations of a compiled program cost: matrix FLOPs, bytes of memory, and the time both allow at best.

The time of an operation is its FLOPs over the peak or its bytes over the memory's rate, whichever is longer (the
roofline model, doi:10.1145/1498765.1498785). FLOPs are those of matrix multiplications alone. Bytes are what an
operation reads and writes: a fusion that takes one slice of a large array reads that slice, and one that updates a
slice in place writes that slice. Collectives cost nothing here: they have times of their own (`collectives`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxpar.hardware import SHARE_OF_PEAK, Device
from jaxpar.inspect.collectives import kind
from jaxpar.inspect.hlo import Computation, Instruction, Module, Shape

FREE = {
    "add-dependency",
    "after-all",
    "async-update",
    "bitcast",
    "constant",
    "get-tuple-element",
    "opt-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


@dataclass(frozen=True)
class Cost:
    """Of one operation, or of several one after the other.

    Attributes:
        flops: of matrix multiplications, a multiplication and an addition counting as two.
        flops_seconds: those at the device's peak for their dtypes.
        bytes: read and written.
        seconds: by the roofline, operation by operation; 0 where the device is not known.
    """

    flops: float = 0.0
    flops_seconds: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.flops_seconds + other.flops_seconds,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
        )

    def __mul__(self, times: float) -> "Cost":
        return Cost(self.flops * times, self.flops_seconds * times, self.bytes * times, self.seconds * times)


class Roofline:
    """Costs of a program's operations on a device.

    Args:
        module: the program.
        device: its datasheet figures; None: FLOPs and bytes only.

    Attributes:
        notes: what had to be assumed, in words for people.
    """

    def __init__(self, module: Module, device: Device | None) -> None:
        self.module, self.device = module, device
        self.notes: dict[str, None] = {}
        self._computations: dict[str, Cost] = {}

    def computation(self, name: str) -> Cost:
        """Everything in a computation, once."""
        if name not in self._computations:
            computation = self.module.computations[name]
            costs = (self.operation(i, computation) for i in computation.instructions)
            self._computations[name] = sum(costs, Cost())
        return self._computations[name]

    def operation(self, instruction: Instruction, computation: Computation) -> Cost:
        """One instruction of a computation, loops by their trip count, and the dearest branch of a conditional."""
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith("-done") or kind(opcode):
            return Cost()
        if opcode == "while":
            return self.computation(instruction.called("body")[0]) * self.trips(instruction)
        if opcode == "conditional":
            return self.computation(self.dearest_branch(instruction))
        if opcode in ("call", "async-start"):
            return sum((self.computation(name) for name in instruction.called("to_apply", "calls")), Cost())
        if opcode.startswith("fusion"):
            (name,) = instruction.called("calls")
            inside = self.module.computations[name]
            matrices = sum((self._matrices(i, inside) for i in inside.instructions), Cost())
            return self._timed(matrices + Cost(bytes=_fusion_bytes(inside)))
        return self._timed(self._matrices(instruction, computation) + Cost(bytes=_bytes(instruction, computation)))

    def trips(self, loop: Instruction) -> int:
        """How often a loop runs its body; one whose count the program does not tell is counted once, with a note."""
        trips = self.module.trip_count(loop)
        if trips is None:
            self.notes["a loop whose number of iterations is not known when compiling is counted once"] = None
        return 1 if trips is None else trips

    def dearest_branch(self, conditional: Instruction, price: Callable[[str], float] | None = None) -> str:
        """The branch that is counted: the one that costs most, by `price` first, then by time, FLOPs and bytes."""
        branches = conditional.called("branch_computations", "true_computation", "false_computation")
        self.notes["of a conditional's branches the most expensive one is counted"] = None

        def cost(name: str) -> tuple[float, ...]:
            own = self.computation(name)
            return price(name) if price else 0.0, own.seconds, own.flops, own.bytes

        return max(branches, key=cost)

    def _timed(self, cost: Cost) -> Cost:
        if self.device is None:
            return cost
        seconds = max(cost.flops_seconds, cost.bytes / self.device.memory_bytes_per_second)
        return Cost(cost.flops, cost.flops_seconds, cost.bytes, seconds)

    def _matrices(self, instruction: Instruction, computation: Computation) -> Cost:
        """FLOPs of a `dot`, or of a call of cuBLAS: two for each element of the result and of the summed dims."""
        if instruction.opcode == "dot":
            summed = instruction.numbers("lhs_contracting_dims")
        elif instruction.opcode == "custom-call" and "__cublas" in instruction.attributes:
            summed = instruction.numbers("lhs_contracting_dimensions")
        else:
            return Cost()
        left = computation.operand_shapes(instruction)[0]
        flops = 2.0 * instruction.shapes[0].elements
        for dim in summed:
            flops *= left.dims[dim]
        return Cost(flops, flops / self._peak(left)) if self.device else Cost(flops)

    def _peak(self, operand: Shape) -> float:
        """FLOPs per second for an operand's dtype; twice bf16's for 8 bits; others, which nothing here uses, bf16's."""
        assert self.device
        share = 2.0 if operand.dtype.startswith("f8") else SHARE_OF_PEAK.get(DTYPES.get(operand.dtype, ""), 1.0)
        return self.device.flops_per_second * share


def _bytes(instruction: Instruction, computation: Computation) -> float:
    """What an instruction outside a fusion reads and writes."""
    inputs = computation.operand_shapes(instruction)
    output = instruction.output_bytes
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * output
    if instruction.opcode == "dynamic-update-slice":
        return 2 * inputs[1].bytes
    if instruction.opcode == "copy-start":
        return 2 * sum(shape.bytes for shape in inputs)
    if instruction.opcode == "custom-call" and "__cublas" in instruction.attributes:
        output = instruction.shapes[0].bytes  # the others are scratch space
    return output + sum(shape.bytes for shape in inputs)


def _fusion_bytes(fused: Computation) -> float:
    """What a fusion reads of its parameters and writes of its results."""
    parameters = [i for i in fused.instructions if i.opcode == "parameter"]
    results = [fused.root]
    if fused.root.opcode == "tuple":
        results = [fused.by_name[name] for name in fused.root.operands]
    return sum(_read(i, fused) for i in parameters) + sum(_written(i, fused) for i in results)


def _read(value: Instruction, fused: Computation) -> float:
    """Bytes read of a fusion's parameter: slices where all its users take slices, none where it is updated in place."""
    total = 0.0
    for user in fused.users[value.name]:
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == value.name:
            total += user.output_bytes
        elif user.opcode in ("bitcast", "reshape"):
            total += _read(user, fused)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != value.name:
            return value.output_bytes
    return min(total, value.output_bytes)


def _written(value: Instruction, fused: Computation) -> float:
    """Bytes written of a fusion's result: the update alone where it updates a parameter in place."""
    while value.opcode in ("bitcast", "reshape", "copy"):
        value = fused.by_name[value.operands[0]]
    if value.opcode == "dynamic-update-slice":
        return fused.operand_shapes(value)[1].bytes
    if value.opcode == "custom-call" and "__cublas" in value.attributes:
        return value.shapes[0].bytes
    return value.output_bytes
