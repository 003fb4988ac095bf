"""How long a collective takes, on the devices and links of a cluster.

Latency plus bytes over the bus bandwidth. Inside a host that bandwidth is NVLink's; between hosts it is what was
measured over as many hosts, and never more than the network adapters of the devices that take part:

    bandwidth = min(measured at that number of hosts, devices per host · adapter)

The measured figures are medians over full hosts. Groups with few devices on each host (`data` beside a large `tensor`)
are not slowed down in proportion: steps on up to 32 hosts show their adapters' full rate.

By these medians the reduce-scatter of a buffer takes longer than its all-reduce from 32 hosts on, though it is a part
of it. It is not capped: programs run NCCL's reduce-scatter and no all-reduce in its place, and measured steps agree. Of
the study's runs on 32 hosts with pipe 1 and tensor up to 4, all eight pairs that differ in ZeRO alone were slower with
stage 1 than with 0, in the median by 74 ms where 38 ms are priced.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxpar.collective_costs import Algorithm, Group, Op, seconds, seconds_between
from jaxpar.planner.cached import cached
from jaxpar.planner.cluster import Cluster
from jaxpar.planner.layout import Layout

HOSTS = (1, 2, 4, 8, 16, 32, 64)
GIGABYTES_PER_SECOND = {
    # Median bus bandwidth on so many hosts of 8 H100: The Ultra-Scale Playbook (Hugging Face, 2025), appendix on
    # collectives. The figure for one host stands for 450 GB/s of NVLink, the others for 50 GB/s adapters.
    "all-reduce": (436, 362, 160, 100, 85, 65, 33),
    "all-gather": (250, 185, 119, 69, 55, 28, 11),
    "reduce-scatter": (250, 182, 116, 69, 55, 28, 11),
}
PASSES = {"all-reduce": 2.0, "all-gather": 1.0, "reduce-scatter": 1.0}
# NVIDIA/nccl, src/graph/tuning.cc (2026-06), ring, Simple: to start, a hop inside a host, a hop between hosts.
START_SECONDS, NVLINK_HOP_SECONDS, NETWORK_HOP_SECONDS = 8.4e-6, 3.4e-6, 14e-6


class Span(NamedTuple):
    """The devices of a collective: how many, and on how many hosts."""

    n: int
    hosts: int


def span(axes: tuple[str, ...], layout: Layout, cluster: Cluster, order: tuple[str, ...]) -> Span:
    """Where the devices of a group lie, when the last axis of `order` changes fastest.

    Example:
        >>> from jaxpar.planner.cluster import parse_cluster
        >>> span(("data",), Layout(8, 2, 4), parse_cluster("8xh100x8"), ("data", "pipe", "tensor"))
        Span(n=8, hosts=8)
    """
    return _span(axes, (layout.data, layout.pipe, layout.tensor), cluster.per_host, order)


@cached
def _span(axes: tuple[str, ...], sizes: tuple[int, int, int], per_host: int, order: tuple[str, ...]) -> Span:
    size_of: dict[str, int] = dict(zip(("data", "pipe", "tensor"), sizes, strict=True))
    strides, stride = [], 1  # of the group's axes
    for axis in reversed(order):
        strides += [(size_of[axis], stride)] if axis in axes else []
        stride *= size_of[axis]
    devices = np.zeros(1, int)  # of the group with the first device; those of others may lie on one host more
    for size, step in strides:
        devices = np.add.outer(devices, step * np.arange(size)).ravel()
    return Span(len(devices), len(np.unique(devices // per_host)))


@cached
def collective_seconds(op: Op, algorithm: Algorithm, buffer_bytes: float, group: Span, cluster: Cluster) -> float:
    """Time of one collective over a whole buffer.

    Where all-reduces over such a group were measured, a native one takes as long, the other two half of that.
    Algorithms of our own take as many times longer than `native` as by `jaxpar.collective_costs`.
    """
    if group.n == 1 or not buffer_bytes:
        return 0.0
    n, hosts = group
    passes, efficiency = PASSES[op], cluster.efficiency
    if points := cluster.all_reduce.get(f"{n}x{n / hosts:g}"):
        taken = passes / 2 * seconds_between(points, buffer_bytes)
    else:
        hops = (n - hosts) * NVLINK_HOP_SECONDS + (hosts - 1) * NETWORK_HOP_SECONDS * efficiency.latency
        latency = START_SECONDS + passes * hops
        taken = latency + buffer_bytes * passes * (n - 1) / n / bus_bandwidth(op, group, cluster)
    if algorithm == "native":
        return taken
    whole = Group(n, max(1, n // hosts))
    own, native = (_modelled(op, name, buffer_bytes, whole, cluster) for name in (algorithm, "native"))
    return taken * own / native


def _modelled(op: Op, algorithm: Algorithm, buffer_bytes: float, group: Group, cluster: Cluster) -> float:
    return seconds(op, algorithm, buffer_bytes, group, cluster.device)


@cached
def bus_bandwidth(op: str, group: Span, cluster: Cluster) -> float:
    """Bytes per second, in the convention that an all-reduce sends 2(n-1)/n of its buffer."""
    device, network = cluster.device, cluster.efficiency.network
    measured = GIGABYTES_PER_SECOND[op]
    if group.hosts == 1:
        return measured[0] / 450 * device.nvlink_bytes_per_second
    position = min(math.log2(group.hosts), len(measured) - 1.0)
    below = min(int(position), len(measured) - 2)
    at = math.exp(
        math.log(measured[below]) + (position - below) * (math.log(measured[below + 1]) - math.log(measured[below]))
    )
    usual = at / 50 * device.network_bytes_per_second
    adapters = max(1, group.n // group.hosts) * device.network_bytes_per_second
    return min(network * min(usual, adapters), measured[0] / 450 * device.nvlink_bytes_per_second)


def message_seconds(message_bytes: float, crosses_hosts: bool, cluster: Cluster) -> float:
    """Time of a message to the next stage, of one device."""
    device, efficiency = cluster.device, cluster.efficiency
    rate = efficiency.network * device.network_bytes_per_second if crosses_hosts else device.nvlink_bytes_per_second
    return efficiency.hop_seconds + message_bytes / min(rate, device.nvlink_bytes_per_second)
