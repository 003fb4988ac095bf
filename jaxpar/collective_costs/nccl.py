"""NCCL's choice between ring and tree, and the time it takes, by its own model (src/graph/tuning.cc, 2026-06).

Like there: time = latency + bytes / bandwidth, for each algorithm and protocol. LL and LL128 start sooner and carry
less than Simple. Left out: NVLS and CollNet, which sum in the switches, and hosts without NVLink.

Evaluated for hosts of 8 H100: on one host the ring wins at every size; from two hosts on the tree wins small buffers,
up to 8 to 64 MB on 2 to 4 hosts and above 1 GB from 8 hosts on.
"""

import math
from typing import NamedTuple

from jaxpar.collective_costs.links import NVLINK_SHARE, Group, Op, Rates
from jaxpar.hardware import Device


class Latency(NamedTuple):
    """Microseconds: to start, and for each hop inside a host and between hosts."""

    start: float
    nvlink: float
    network: float


# NVIDIA/nccl, src/graph/tuning.cc (2026-06): baseLatencies, hwLatencies.
NCCL_LATENCY = {
    ("ring", "LL"): Latency(6.6, 0.6, 2.7),
    ("ring", "LL128"): Latency(14.0, 1.9, 4.0),
    ("ring", "Simple"): Latency(8.4, 3.4, 14.0),
    ("tree", "LL"): Latency(6.8, 0.6, 5.0),
    ("tree", "LL128"): Latency(14.0, 1.25, 8.5),
    ("tree", "Simple"): Latency(8.4, 4.0, 14.0),
}
LL_SHARE = 0.31  # the same, llMaxBws: 141 GB/s of 450 on Hopper, 282 of 900 on Blackwell, 87.7 of 300 on Ampere
LL_BYTES_PER_SECOND = (39e9, 20.4e9)  # the same, between two hosts and on more (Intel's CPUs, as in DGX H100)
POST_MICROSECONDS = {"LL": 1.0, "LL128": 1.0, "Simple": 3.0}  # the same, getNetOverhead: least time of a ring's hop
PLATEAU = 1.4  # the same, ncclTopoGetAlgoTime: "plateau effect of ring"; Simple across hosts, all but tiny buffers
CHANNELS = 16  # of the ring on 8 H100; only decides from which size on the plateau counts
TREE_CORRECTION = {  # the same, treeCorrectionFactor: for buffers of 64 B, 128 B, ..., 256 MB
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, *[0.6] * 6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    "Simple": (*[0.9] * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}


def nccl_kind(op: Op, buffer_bytes: float, group: Group, device: Device) -> tuple[str, str]:
    """Algorithm (ring or tree) and protocol (LL, LL128, Simple) that NCCL takes, by its own idea of bandwidths.

    Example:
        >>> from jaxpar.hardware import DEVICES
        >>> nccl_kind("all-reduce", 2**20, Group(16, 8), DEVICES["H100"])
        ('tree', 'LL128')
    """
    nominal = Rates(NVLINK_SHARE * device.nvlink_bytes_per_second, device.network_bytes_per_second)
    kinds = [kind for kind in NCCL_LATENCY if op == "all-reduce" or kind[0] == "ring"]
    return min(kinds, key=lambda kind: nccl_seconds(op, *kind, buffer_bytes, group, device, nominal))


def nccl_seconds(
    op: Op, algorithm: str, protocol: str, buffer_bytes: float, group: Group, device: Device, real: Rates
) -> float:
    """`ncclTopoTuneModel` and `ncclTopoGetAlgoTime` of tuning.cc.

    Args:
        op: which collective; all but the all-reduce go by the ring.
        algorithm: ring or tree.
        protocol: LL, LL128 or Simple.
        buffer_bytes: of the whole array.
        group: the devices; more than one.
        device: what they are.
        real: what the links carry.
    """
    n, g, N = group.n, group.per_host, group.hosts
    start, nvlink, network = NCCL_LATENCY[algorithm, protocol]
    if g == 1:
        network = NCCL_LATENCY["tree", protocol].network
    bus = min(real.nvlink if g > 1 else math.inf, g * real.network if N > 1 else math.inf)
    ll = LL_SHARE * device.nvlink_bytes_per_second if N == 1 else LL_BYTES_PER_SECOND[N > 2]
    if algorithm == "ring":
        passes = 2 if op == "all-reduce" else 1
        bus = {"LL": min(ll, bus / 2), "LL128": 0.92 * bus, "Simple": bus}[protocol]
        hop = nvlink if N == 1 else max(nvlink, POST_MICROSECONDS[protocol])
        latency = start + passes * ((n - N) * hop + (N - 1) * network)
        if op == "all-reduce" and protocol == "Simple" and N > 1 and buffer_bytes / (CHANNELS * n) >= 64:
            latency *= PLATEAU
        return latency * 1e-6 + buffer_bytes * passes * (n - 1) / n / bus
    ll128 = 7 / 9 if N == 1 else 120 / 128
    bus *= 0.92
    bus = {"LL": min(ll, bus / 3.8), "LL128": ll128 * bus, "Simple": bus}[protocol]
    if 64 <= buffer_bytes < 2**29:
        bus *= TREE_CORRECTION[protocol][int(math.log2(buffer_bytes / 64))]
    latency = start + 2 * ((g - 1) * nvlink + int(math.log2(N)) * network)
    return latency * 1e-6 + 2 * buffer_bytes / bus
