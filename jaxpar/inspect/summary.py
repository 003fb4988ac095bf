"""The report on a compiled program: memory, collectives, overlap, and what bounds the time of a step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpar import hardware
from jaxpar.hardware import Device
from jaxpar.inspect import hlo
from jaxpar.inspect.collectives import Places
from jaxpar.inspect.memory import Memory, Value, largest_values, memory
from jaxpar.inspect.overlap import Execution, Schedule
from jaxpar.inspect.roofline import Cost, Roofline


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one kind over the same mesh axes, per step and device.

    Attributes:
        op: `all-reduce`, `all-gather`, ...
        axes: mesh axes that it runs over.
        count_per_step: how many, loops multiplied in; one that carries several arrays together counts once.
        buffer_bytes_per_step: bytes of the whole arrays.
        wire_bytes_per_step: what one device sends.
        seconds_per_step: at the datasheet rate of the link; 0 where the device is not known.
        hidden_fraction: share that runs beside arithmetic, weighted by bytes.
        crosses_hosts: whether it leaves the host.
    """

    op: str
    axes: tuple[str, ...]
    count_per_step: int
    buffer_bytes_per_step: int
    wire_bytes_per_step: float
    seconds_per_step: float
    hidden_fraction: float
    crosses_hosts: bool


@dataclass(frozen=True)
class LowerBound:
    """The shortest time that a step can take if all but one thing were free, at datasheet rates.

    Attributes:
        compute_seconds: matrix multiplications of the compiled program at the peak for their dtypes.
        memory_seconds: what its operations read and write, at the memory's rate.
        nvlink_seconds: what a device sends within its host.
        network_seconds: what it sends to other hosts.
        binding: `compute`, `memory`, `nvlink` or `network`, whichever is longest.
        source: of the rates.
    """

    compute_seconds: float
    memory_seconds: float
    nvlink_seconds: float
    network_seconds: float
    binding: str
    source: str


@dataclass(frozen=True)
class Report:
    """What a compiled program does. All but `flops_per_step` is for one device.

    Attributes:
        target: the devices it was compiled for.
        mesh: axis sizes.
        memory: bytes by what holds them.
        largest_values: the largest arrays that it makes.
        collectives: a row for each kind and set of axes, largest first.
        hidden_fraction: of all bytes of collectives; None when there are none.
        flops_per_step: by the model's formula, over all devices (`jaxpar.flops`); None for a program that is no step.
        compiled_flops: matrix FLOPs counted in the program; recomputation counts.
        compiled_bytes: read and written by its operations.
        bytes_per_flop: of the two.
        lower_bound: on the time of a step; None where the device is not known.
        trace_seconds: time to trace; None where that was done elsewhere.
        compile_seconds: time to compile; None likewise.
        notes: what had to be assumed or was chosen.
    """

    target: str
    mesh: dict[str, int]
    memory: Memory
    largest_values: list[Value]
    collectives: list[CollectiveRow]
    hidden_fraction: float | None
    flops_per_step: int | None
    compiled_flops: float
    compiled_bytes: float
    bytes_per_flop: float | None
    lower_bound: LowerBound | None
    trace_seconds: float | None
    compile_seconds: float | None
    notes: list[str]

    @property
    def fits(self) -> bool:
        """Whether it fits the device's memory, as far as that is known."""
        return self.memory.overshoot_bytes == 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        values["memory"]["overshoot_bytes"] = self.memory.overshoot_bytes
        return values | {"fits": self.fits}


def read_schedule(compiled: jax.stages.Compiled, mesh: Mesh) -> Schedule:
    """Read a compiled function's schedule, with its collectives placed on the mesh and its operations costed."""
    text = compiled.as_text()
    assert text is not None, "XLA gives the text of every program that it has compiled"
    module = hlo.parse(text)
    device = hardware.find(mesh.devices.flat[0].device_kind)
    return Schedule(module, Places(mesh), Roofline(module, device))


def report(
    compiled: jax.stages.Compiled,
    mesh: Mesh,
    *,
    target: str | None = None,
    memory_parts: Mapping[str, int] | None = None,
    flops_per_step: int | None = None,
    trace_seconds: float | None = None,
    compile_seconds: float | None = None,
    notes: tuple[str, ...] = (),
) -> Report:
    """Report on any compiled function.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns.
        mesh: the mesh that its arguments are laid out on, in the same device order.
        target: the devices' name in the report; by default what they call themselves.
        memory_parts: bytes per device of known arguments, as attributes of `Memory`.
        flops_per_step: by formula, over all devices.
        trace_seconds: how long tracing took.
        compile_seconds: how long compiling took.
        notes: more to say.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxpar.mesh import make_mesh
        >>> mesh = make_mesh(tensor=4)
        >>> total = jax.shard_map(lambda x: jax.lax.psum(x, "tensor"), mesh=mesh,
        ...                       in_specs=jax.P("tensor"), out_specs=jax.P())
        >>> compiled = jax.jit(total).lower(jax.ShapeDtypeStruct((8, 100), "float32")).compile()
        >>> row = report(compiled, mesh).collectives[0]
        >>> row.op, row.axes, row.count_per_step, row.buffer_bytes_per_step, row.wire_bytes_per_step
        ('all-reduce', ('tensor',), 1, 800, 1200.0)
    """
    schedule = read_schedule(compiled, mesh)
    roofline = schedule.roofline
    device = roofline.device
    cost = roofline.computation(roofline.module.entry.name)
    rows = collective_rows(schedule.executions, device)
    return Report(
        target=target or f"{mesh.size} × {mesh.devices.flat[0].device_kind}",
        mesh=dict(mesh.shape),
        memory=memory(compiled, memory_parts or {}, device.memory_bytes if device else None),
        largest_values=largest_values(roofline.module),
        collectives=rows,
        hidden_fraction=_by_bytes(rows) if rows else None,
        flops_per_step=flops_per_step,
        compiled_flops=cost.flops,
        compiled_bytes=cost.bytes,
        bytes_per_flop=cost.bytes / cost.flops if cost.flops else None,
        lower_bound=lower_bound(cost, schedule.executions, device) if device else None,
        trace_seconds=trace_seconds,
        compile_seconds=compile_seconds,
        notes=[*notes, *roofline.notes],
    )


def collective_rows(executions: list[Execution], device: Device | None) -> list[CollectiveRow]:
    """Sum up the executions of the same kind over the same axes, those that send most first."""
    groups: dict[tuple[str, tuple[str, ...]], list[Execution]] = {}
    for e in executions:
        groups.setdefault((e.collective.op, e.collective.axes), []).append(e)
    rows = []
    for (op, axes), group in groups.items():
        buffer_bytes = sum(e.times * e.collective.buffer_bytes for e in group)
        hidden_bytes = sum(e.times * e.collective.buffer_bytes * e.hidden_share(device) for e in group)
        rows.append(
            CollectiveRow(
                op=op,
                axes=axes,
                count_per_step=sum(e.times for e in group),
                buffer_bytes_per_step=buffer_bytes,
                wire_bytes_per_step=sum(e.times * e.collective.wire_bytes for e in group),
                seconds_per_step=sum(e.times * e.collective.seconds(device) for e in group),
                hidden_fraction=hidden_bytes / buffer_bytes if buffer_bytes else 0.0,
                crosses_hosts=any(e.collective.crosses_hosts for e in group),
            )
        )
    return sorted(rows, key=lambda row: -row.wire_bytes_per_step)


def _by_bytes(rows: list[CollectiveRow]) -> float:
    """The hidden share of all rows together."""
    total = sum(row.buffer_bytes_per_step for row in rows)
    return sum(row.hidden_fraction * row.buffer_bytes_per_step for row in rows) / max(total, 1)


def lower_bound(cost: Cost, executions: list[Execution], device: Device) -> LowerBound:
    """The times that compute, memory and each link need by themselves."""
    links = [(e.times, e.collective.link_seconds(device)) for e in executions]
    seconds = {
        "compute": cost.flops_seconds,
        "memory": cost.bytes / device.memory_bytes_per_second,
        "nvlink": sum(times * link["nvlink"] for times, link in links),
        "network": sum(times * link["network"] for times, link in links),
    }
    binding = max(seconds, key=lambda name: seconds[name])
    return LowerBound(**{f"{name}_seconds": s for name, s in seconds.items()}, binding=binding, source=device.source)
