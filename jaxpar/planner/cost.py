"""How long a step of a jaxpar program takes.

Pipelines run in lockstep (`jaxpar.pipeline.executor`): every tick takes as long as its slowest stage, layers are padded
to the largest part, and head and embedding are shared by all stages. With F and B the times of a part's forward and
backward, communication included, a step is

    ticks with forwards · F + ticks with backwards · B + ticks with the head · head + gradients + optimizer

which `jaxpar.pipeline.simulate.lockstep` gives for its table too (a test compares them). Of this a stage works for
v · M forwards and backwards and M heads; the rest is bubble.

What hides behind computing, as read from programs compiled for H100:

- sums over `tensor` in the backward, behind the multiplications for the weights' gradients; none in the forward;
- messages between stages, in ticks with both a forward and a backward; not in the others;
- sums over `pipe` for the embedding, behind the layers of the same tick; not those for the head;
- scatters of gradients layer by layer (ZeRO-3, ZeRO-2 with one microbatch), behind the backward; not ZeRO-3's gathers;
- nothing of a reduction of gradients once a step.
"""

from dataclasses import dataclass, fields
from typing import cast

from jaxpar.collective_costs import Algorithm, Op
from jaxpar.config import ModelConfig
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.links import collective_seconds, message_seconds, span
from jaxpar.planner.memory import state_bytes
from jaxpar.planner.ticks import Ticks
from jaxpar.planner.traffic import DATA, TENSOR, Transfer, real_axes, runs, transfers
from jaxpar.planner.work import head_seconds, layer_work, memory_seconds

ORDER: tuple[str, ...] = ("data", "pipe", "tensor")
"""Axes of the mesh from slowest to fastest changing, as `jaxpar.mesh` orders devices."""


@dataclass(frozen=True)
class TimeParts:
    """Seconds of a step, by what takes them; they add up.

    Attributes:
        compute: work of a stage, recomputation and padding included.
        data: communication over `data` that nothing hides.
        pipe: over `pipe`, and over `pipe` and `tensor` together.
        tensor: over `tensor`.
        bubble: ticks in which a stage has nothing of its own to do.
        optimizer: the update, and what else is done once a step.
    """

    compute: float
    data: float
    pipe: float
    tensor: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(getattr(self, field.name) for field in fields(self))


def step_seconds(
    model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, height: int, pace: float | None = None
) -> TimeParts:
    """Time of a step.

    Args:
        model: sizes and architecture.
        layout: the layout.
        workload: the batch and the dtypes.
        cluster: the machines.
        height: layers of the largest part (`jaxpar.pipeline.partition`).
        pace: time of the slowest part, in mean layers; None: they all cost the same.
    """
    b, T, M = workload.sequences_per_microbatch(layout), workload.sequence_length, layout.microbatches
    table, rows = runs(layout, height)
    if layout.pipe > 1:
        rows = rows if pace is None else pace
    forward, backward, weights = _part(model, layout, workload, cluster, rows)
    head = sum(head_seconds(model, b, T, layout.pipe * layout.tensor, workload.compute_dtype, cluster))
    own = M * layout.chunks * (forward + backward) + M * head
    ticking = table.forward * forward + table.backward * backward + table.head * head
    exposed, hidden = _communication(transfers(model, layout, workload, height), layout, cluster, table)
    exposed["tensor"] += max(0.0, hidden["tensor"] - table.backward * weights)
    exposed["pipe"] += max(0.0, hidden["pipe"] - ticking)
    exposed["data"] += max(0.0, hidden["data"] - table.backward * (backward - weights))
    return TimeParts(
        compute=own,
        data=exposed["data"],
        pipe=exposed["pipe"],
        tensor=exposed["tensor"],
        bubble=max(0.0, ticking - own),
        optimizer=update_seconds(model, layout, workload, cluster, height),
    )


def _part(
    model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, rows: float
) -> tuple[float, float, float]:
    """Forward and backward of a part on one microbatch, and of the backward the weights' gradients."""
    b, T = workload.sequences_per_microbatch(layout), workload.sequence_length
    dtype = workload.compute_dtype
    work = layer_work(model, b, T, layout.tensor, layout.sequence_parallel, dtype, cluster, workload.attention)
    again = {"none": 0.0, "dots": work.forward - work.projections, "full": work.forward}[layout.remat]
    least = cluster.efficiency.layer_seconds
    forward = max(work.forward, least / 3)
    backward = max(work.backward + again, 2 * least / 3)
    return rows * forward, rows * backward, rows * work.weights


def _communication(
    found: list[Transfer], layout: Layout, cluster: Cluster, table: Ticks
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by axis of what nothing hides, and of what computing beside it may hide."""
    exposed: dict[str, float] = dict.fromkeys(ORDER, 0.0)
    hidden = dict(exposed)
    for t in found:
        axis = "data" if t.axes == DATA else "tensor" if real_axes(t.axes, layout) == TENSOR else "pipe"
        seconds = t.times * _seconds(t, layout, cluster)
        if t.op == "collective-permute":
            beside = table.both / t.times
            exposed[axis] += seconds * (1 - beside)
            hidden[axis] += seconds * beside
        elif t.during == "beside" or (t.during == "backward" and (axis == "tensor" or t.op != "all-gather")):
            hidden[axis] += seconds
        else:
            exposed[axis] += seconds
    return exposed, hidden


def _seconds(t: Transfer, layout: Layout, cluster: Cluster) -> float:
    group = span(t.axes, layout, cluster, ORDER)
    if t.op == "collective-permute":
        return message_seconds(t.bytes, group.hosts > 1, cluster)
    algorithm: Algorithm = layout.algorithm if t.axes == DATA and t.op != "all-gather" else "native"
    return collective_seconds(cast(Op, t.op), algorithm, t.bytes, group, cluster)


def update_seconds(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster, height: int) -> float:
    """The optimizer: it reads gradients, state and parameters, and writes the latter two and a copy to compute with."""
    state = state_bytes(model, layout, workload, height)
    part = layout.data if layout.zero in (1, 2) else 1  # of parameters and gradients, this replica's alone
    moved = 2 * (state.gradients + state.parameters) / part + 2 * state.optimizer + state.copies
    return memory_seconds(moved, cluster) + cluster.efficiency.step_seconds


def least_seconds(model: ModelConfig, layout: Layout, workload: Workload, cluster: Cluster) -> float:
    """A lower bound of the time of a step, cheap: computing and bubble with layers spread evenly, nothing else."""
    b, T, M = workload.sequences_per_microbatch(layout), workload.sequence_length, layout.microbatches
    height = -(-model.num_hidden_layers // (layout.pipe * layout.chunks))
    table, rows = runs(layout, height)
    forward, backward, _ = _part(model, layout, workload, cluster, rows)
    head = sum(head_seconds(model, b, T, layout.pipe * layout.tensor, workload.compute_dtype, cluster))
    return table.forward * forward + table.backward * backward + M * head
