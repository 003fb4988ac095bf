"""What fills the memory of one device while a compiled program runs."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from jaxpar.inspect.hlo import Module


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments_bytes: everything that goes in.
        outputs_bytes: what comes out and does not take the place of an argument.
        temp_bytes: what the program needs while it runs: activations, gradients, buffers of collectives.
        peak_bytes: arguments, outputs and temporaries together. XLA takes the temporaries as one piece for the whole
            program, so this is what the device must have.
        device_bytes: what the device has; None where that is not known.
        parameters_bytes: of the arguments, the model as stored; None for a program that is not a train step.
        optimizer_bytes: of the arguments, the optimizer's state; None likewise.
        batch_bytes: of the arguments, one step's tokens, targets and mask; None likewise.
        gradients_bytes: of the temporaries, the gradients, as they are summed over microbatches; None likewise.
    """

    arguments_bytes: int
    outputs_bytes: int
    temp_bytes: int
    peak_bytes: int
    device_bytes: int | None
    parameters_bytes: int | None = None
    optimizer_bytes: int | None = None
    batch_bytes: int | None = None
    gradients_bytes: int | None = None

    @property
    def known_arguments(self) -> dict[str, int]:
        """Of the arguments, those whose part is known, by name."""
        parts = {
            "parameters": self.parameters_bytes,
            "optimizer state": self.optimizer_bytes,
            "batch": self.batch_bytes,
        }
        return {name: size for name, size in parts.items() if size is not None}

    @property
    def overshoot_bytes(self) -> int:
        """By how much it does not fit; 0 where it does, or where the device's memory is not known."""
        return max(0, self.peak_bytes - self.device_bytes) if self.device_bytes else 0


def memory(compiled: jax.stages.Compiled, parts: Mapping[str, int], device_bytes: int | None) -> Memory:
    """What XLA says of a compiled program, and what is known of its arguments.

    Args:
        compiled: the program.
        parts: `parameters_bytes` and so on, where they are known.
        device_bytes: memory of the device.
    """
    stats = compiled.memory_analysis()
    assert stats is not None, "XLA tells of every program that it has compiled"
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        arguments_bytes=stats.argument_size_in_bytes,
        outputs_bytes=outputs,
        temp_bytes=stats.temp_size_in_bytes,
        peak_bytes=stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes,
        device_bytes=device_bytes,
        **parts,
    )


@dataclass(frozen=True)
class Value:
    """A large array that a program makes.

    Attributes:
        bytes: its size on one device.
        shape: element type and dims.
        made_by: the operation in the model's source that it comes from, as JAX names it.
    """

    bytes: int
    shape: str
    made_by: str


NOT_MADE = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "constant")


def largest_values(module: Module, count: int = 5) -> list[Value]:
    """The largest arrays that a program makes, each shape and source operation once.

    They need not be alive at the same time: XLA does not tell here which are.
    """
    fused = {n for c in module.computations.values() for i in c.instructions for n in i.called("calls", "to_apply")}
    made: dict[tuple[str, str], Value] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions if computation.name not in fused else ():
            if instruction.opcode in NOT_MADE or instruction.opcode.endswith(("-start", "-done")):
                continue
            scratch = "__cublas" in instruction.attributes  # all but the first of its results
            for shape in instruction.shapes[:1] if scratch else instruction.shapes:
                text = f"{shape.dtype}[{','.join(map(str, shape.dims))}]"
                value = Value(shape.bytes, text, instruction.source)
                made.setdefault((value.shape, value.made_by), value)
    return sorted(made.values(), key=lambda value: -value.bytes)[:count]
