"""What would make a model fit where nothing does: each thing by itself, with the layout that fits then."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from jaxpar.config import Config, InputError
from jaxpar.hardware import DEVICES
from jaxpar.planner import limits
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.layout import Layout, Workload
from jaxpar.planner.price import Price
from jaxpar.planner.search import Pricing
from jaxpar.planner.space import Space
from jaxpar.planner.words import gigabytes, in_words

DOUBLINGS = 10
"""How often the hosts are doubled, or the sequences halved, at most."""
FULL_HOST = 8
"""Devices of the usual host."""


@dataclass(frozen=True)
class Task:
    """What is to be planned, changed in one thing.

    Attributes:
        change: in words.
        config: as for a search, and so are the others.
        workload: of a step.
        cluster: to lay out over.
        tensor_across_hosts: whether groups over `tensor` may span hosts.
    """

    change: str
    config: Config
    workload: Workload
    cluster: Cluster
    tensor_across_hosts: bool


def remedies(task: Task, ask: Pricing) -> tuple[str, ...]:
    """Find changes after which a layout fits; what layouts can do by themselves, ZeRO and remat, has been tried.

    Args:
        task: that does not fit.
        ask: prices and bounds.

    Returns:
        A sentence for each kind of change, the least one of its kind; never none.
    """
    said = []
    for changes in (_across_hosts(task), _hosts(task), _sequences(task), _devices(task), _dtypes(task)):
        fitting = ((change, price) for change in changes if (price := _first_that_fits(change, ask)))
        if found := next(fitting, None):
            change, price = found
            layout = in_words(price.layout, change.workload)
            said.append(f"{change.change}: {gigabytes(price.memory.total)} with {layout}")
    return tuple(said) or (_beyond(task, ask),)


def _first_that_fits(task: Task, ask: Pricing) -> Price | None:
    """A layout that fits, found among those that save memory in every way that costs only time."""
    space, model = Space(task.config, task.workload, task.cluster), task.config.model
    try:
        meshes = space.meshes()
    except InputError:  # these devices cannot divide the batch
        return None
    bounds = []
    for data, pipe, tensor in meshes:
        least = ask.least_memory_bytes(model, Layout(data, pipe, tensor, zero=3 if data > 1 else 0), task.workload)
        if least > task.cluster.usable_bytes or not (task.tensor_across_hosts or space.inside_host(tensor)):
            continue
        for layout in space.layouts((data, pipe, tensor)):
            size = task.workload.sequences_per_microbatch(layout)
            if layout.remat == "full" and (size == 1 or layout.microbatches == 1):
                bounds.append((ask.least_memory_bytes(model, layout, task.workload), layout))
    for _, layout in sorted(bounds, key=lambda bound: bound[0]):
        price = ask.price(model, layout, task.workload, task.cluster)
        if price.fits:
            return price
    return None


def _across_hosts(task: Task) -> Iterator[Task]:
    if not task.tensor_across_hosts:
        yield replace(task, change="tensor across hosts (--tensor-across-hosts)", tensor_across_hosts=True)


def _hosts(task: Task) -> Iterator[Task]:
    """More hosts; where a host has a single device, more of them on each host before."""
    start, prefix = task.cluster, ""
    if start.per_host == 1:
        for count in (2, 4, FULL_HOST):
            start, prefix = replace(start, per_host=count), f"{count} devices on each host"
            yield replace(task, change=f"{prefix}, {start.devices} in all", cluster=start)
        prefix += " and "
    for times in (2**n for n in range(1, DOUBLINGS + 1)):
        cluster = replace(start, hosts=times * start.hosts)
        if cluster.devices > limits.DEVICES:
            return
        change = f"{prefix}{times} times the hosts, {cluster.hosts} with {cluster.devices} devices"
        yield replace(task, change=change, cluster=cluster)


def _sequences(task: Task) -> Iterator[Task]:
    """As many tokens in shorter sequences."""
    for times in (2**n for n in range(1, DOUBLINGS + 1)):
        length, remainder = divmod(task.workload.sequence_length, times)
        if remainder:
            return
        batch = times * task.workload.global_batch
        config = task.config.model_copy(
            update={
                "data": task.config.data.model_copy(update={"sequence_length": length}),
                "train": task.config.train.model_copy(update={"global_batch": batch}),
            }
        )
        workload = replace(task.workload, sequence_length=length, global_batch=batch)
        yield replace(task, change=f"sequences of {length} tokens (--seq {length})", config=config, workload=workload)


def _devices(task: Task) -> Iterator[Task]:
    has = task.cluster.device.memory_bytes
    for device in sorted(DEVICES.values(), key=lambda device: device.memory_bytes):
        if device.memory_bytes > has:
            change = f"{device.name} instead of {task.cluster.device.name}"
            yield replace(task, change=change, cluster=replace(task.cluster, device=device))


def _dtypes(task: Task) -> Iterator[Task]:
    if task.workload.param_dtype != "bfloat16":
        workload = replace(task.workload, param_dtype="bfloat16")
        yield replace(task, change="parameters and optimizer in bfloat16 (train.param_dtype)", workload=workload)


def _beyond(task: Task, ask: Pricing) -> str:
    """What to say when not even that much helps: how many devices the state alone fills."""
    space = Space(task.config, task.workload, task.cluster)
    layouts: Iterable = (layout for sizes in space.meshes() for layout in space.layouts(sizes))
    least = min(ask.least_memory_bytes(task.config.model, layout, task.workload) for layout in layouts)
    devices = -(-least * task.cluster.devices // task.cluster.usable_bytes)
    return (
        f"more devices of more memory: parameters, gradients and optimizer state alone are at least {gigabytes(least)} "
        f"on each device, {least / task.cluster.usable_bytes:.0f} times what it has; split evenly they fill "
        f"{devices:,.0f} devices"
    )
