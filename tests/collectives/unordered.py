"""Which communicating operations of a compiled program could run at the same time and take each other's values."""

import re

from jaxpar.inspect import hlo
from jaxpar.inspect.collectives import kind
from jaxpar.inspect.hlo import Instruction, Module

CALLED = ("body", "condition", "to_apply", "calls", "true_computation", "false_computation", "branch_computations")


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs of names: a loop that communicates and another operation of its kind that does not need its data.

    XLA's CPU runtime tells collectives apart by kind, channel and devices; those that differ in these may meet.
    """
    module = hlo.parse(text)
    pairs = []
    for computation in module.computations.values():
        before: dict[str, set[str]] = {}
        sends = {i.name: s for i in computation.instructions if (s := _sends(module, i))}
        for instruction in computation.instructions:
            before[instruction.name] = {
                name for operand in instruction.operands for name in (before[operand] | {operand}) if name in sends
            }
        loops = {name for name in sends if kind(computation.by_name[name].opcode) is None}
        pairs += [
            (loop, other)
            for loop in loops
            for other in sends.keys() - {loop}
            if sends[loop] & sends[other] and loop not in before[other] and other not in before[loop]
        ]
    return pairs


def _sends(module: Module, instruction: Instruction) -> set[tuple[str, ...]]:
    """Kind, channel and devices of all collectives that an instruction is or runs."""
    if name := kind(instruction.opcode):
        found = re.search(r"channel_id=(\d+)", instruction.attributes)
        groups = re.search(r"replica_groups=(.*?), (?:dimensions|use_global|to_apply)", instruction.attributes)
        return {(name, found[1] if found else "", groups[1] if groups else "")}
    called = (module.computations[name] for name in instruction.called(*CALLED) if name in module.computations)
    return {sent for computation in called for i in computation.instructions for sent in _sends(module, i)}
