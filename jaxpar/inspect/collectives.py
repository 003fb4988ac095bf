"""The collectives of a compiled program: which mesh axes they run over, and how many bytes that takes.

XLA writes for each collective the groups of devices that take part in it. Device number i of those groups is the
i-th device of the mesh (`mesh.devices.flat[i]`); the axes of a collective are those along which the devices of one
group lie apart. Nothing is guessed from names.

Bytes on the wire are what one device sends, by the usual bus factors for a buffer of b bytes in a group of n
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md); the buffer is the whole array: what goes into
an all-reduce, reduce-scatter or all-to-all, and what comes out of an all-gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxpar.hardware import Device
from jaxpar.inspect import hlo
from jaxpar.inspect.hlo import Computation, Instruction, Module

WIRE_FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-broadcast": lambda n: 1.0,
    "collective-permute": lambda n: 1.0,
}
"""By kind of collective: bytes that one device sends for each byte of the buffer."""


def kind(opcode: str) -> str | None:
    """The kind of collective that an opcode is or starts, or None.

    Example:
        >>> kind("all-gather-start"), kind("all-gather-done"), kind("fusion")
        ('all-gather', None, None)
    """
    name = opcode.removesuffix("-start")
    return name if name in WIRE_FACTORS else None


class MeshLike(Protocol):
    """A `jax.sharding.Mesh`, as far as it is read here."""

    axis_names: tuple[str, ...]
    devices: np.ndarray


class Places:
    """Where the devices of a mesh are: coordinates along its axes, and hosts.

    Args:
        mesh: the mesh that the program was compiled for.
    """

    def __init__(self, mesh: MeshLike) -> None:
        self.axes = mesh.axis_names
        self.coordinates = np.array(list(np.ndindex(mesh.devices.shape)))
        self.hosts = np.array([device.process_index for device in mesh.devices.flat])

    def apart(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The axes along which devices of the same group lie apart."""
        differ = np.zeros(len(self.axes), bool)
        for group in groups:
            differ |= np.ptp(self.coordinates[list(group)], axis=0) > 0
        return tuple(name for name, apart in zip(self.axes, differ, strict=True) if apart)

    def per_host(self, groups: Sequence[Sequence[int]]) -> int:
        """How many devices of one group share a host, in the group that is spread most."""
        return min(int(np.unique(self.hosts[list(group)], return_counts=True)[1].min()) for group in groups)


@dataclass(frozen=True)
class Collective:
    """One collective instruction, executed once.

    Attributes:
        op: kind.
        axes: mesh axes that it runs over, in the mesh's order.
        group_size: devices in a group.
        per_host: devices of a group that share a host.
        crosses_hosts: whether any group has devices on more than one host.
        buffer_bytes: of the whole array, see above.
        wire_bytes: what one device sends.
        asynchronous: other operations may run between its start and its done.
    """

    op: str
    axes: tuple[str, ...]
    group_size: int
    per_host: int
    crosses_hosts: bool
    buffer_bytes: int
    wire_bytes: float
    asynchronous: bool

    def link_seconds(self, device: Device | None) -> dict[str, float]:
        """Time that each link needs at its datasheet rate: `nvlink` and, across hosts, `network`.

        A group with g devices on each host uses their g network adapters for the bytes that one ring between the
        hosts carries; in an all-to-all each device sends its own share, (n-g)/n, through its own.
        """
        if device is None:
            return {"nvlink": 0.0, "network": 0.0}
        n, g = self.group_size, self.per_host
        inside = self.wire_bytes / device.nvlink_bytes_per_second
        if not self.crosses_hosts:
            return {"nvlink": inside, "network": 0.0}
        if self.op in ("all-to-all", "ragged-all-to-all"):
            outside = self.wire_bytes * (n - g) / (n - 1)
        else:
            outside = self.wire_bytes / g
        return {"nvlink": inside if g > 1 else 0.0, "network": outside / device.network_bytes_per_second}

    def seconds(self, device: Device | None) -> float:
        """Time on the slowest link that it uses; 0 where the device is not known."""
        return max(self.link_seconds(device).values())


def collective(instruction: Instruction, computation: Computation, module: Module, places: Places) -> Collective | None:
    """What an instruction communicates; None when it is no collective, or one among single devices.

    Args:
        instruction: any instruction; an `async-start` stands for the collective it wraps.
        computation: the one it stands in.
        module: the program.
        places: where the devices are.
    """
    source = instruction
    if instruction.opcode == "async-start":
        wrapped = (i for name in instruction.called("calls") for i in module.computations[name].instructions)
        source = next((i for i in wrapped if kind(i.opcode)), instruction)
    op = kind(source.opcode)
    if op is None:
        return None
    if op == "collective-permute":
        groups = [pair for pair in hlo.source_target_pairs(source.attributes) if pair[0] != pair[1]]
    else:
        groups = [g for g in hlo.replica_groups(source.attributes, len(places.hosts)) if len(g) > 1]
    if not groups:
        return None
    size = max(len(group) for group in groups)
    operand_bytes = sum(shape.bytes for shape in computation.operand_shapes(instruction))
    buffer_bytes = operand_bytes * size if op == "all-gather" else operand_bytes
    return Collective(
        op=op,
        axes=places.apart(groups),
        group_size=size,
        per_host=places.per_host(groups),
        crosses_hosts=any(len(set(places.hosts[list(group)])) > 1 for group in groups),
        buffer_bytes=buffer_bytes,
        wire_bytes=buffer_bytes * WIRE_FACTORS[op](size),
        asynchronous=instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes,
    )
