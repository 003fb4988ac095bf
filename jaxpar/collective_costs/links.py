"""Who takes part in a collective, and what the links between them carry in practice."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from jaxpar.config import InputError
from jaxpar.hardware import Device

Op = Literal["all-reduce", "all-gather", "reduce-scatter"]
Algorithm = Literal["native", "ring", "tree", "halving_doubling", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

NVLINK_SHARE = 0.82  # 368 of 450 GB/s: NCCL's ring on 8 H200, stas00/ml-engineering network/README.md
HOSTS_MEASURED = (2, 4, 8, 16, 32, 64)
NETWORK_SHARE = {
    # Median bus bandwidth over those many hosts of 8 H100 with 8 × 50 GB/s each: The Ultra-Scale Playbook (Hugging
    # Face, 2025), appendix on collectives. What a link could carry says little about what many hosts together get.
    "all-reduce": tuple(gigabytes / 400 for gigabytes in (362, 160, 100, 85, 65, 33)),
    "all-gather": tuple(gigabytes / 400 for gigabytes in (185, 119, 69, 55, 28, 11)),
    "reduce-scatter": tuple(gigabytes / 400 for gigabytes in (182, 116, 69, 55, 28, 11)),
}


@dataclass(frozen=True)
class Group:
    """Devices that take part in a collective.

    Attributes:
        n: how many.
        per_host: how many of them share a host, neighbours in the group; n or more: all of them.

    Raises:
        InputError: when they do not fill whole hosts.

    Example:
        >>> Group(64, 8).hosts, Group(4, 8)
        (8, Group(n=4, per_host=4))
    """

    n: int
    per_host: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_host", min(self.n, self.per_host))
        if self.n < 1 or self.per_host < 1 or self.n % self.per_host:
            raise InputError(
                f"{self.n} devices do not fill hosts of {self.per_host}: {self.n} % {self.per_host} must be 0. "
                f"Use a divisor of {self.n} as the number per host."
            )

    @property
    def hosts(self) -> int:
        """How many hosts they fill."""
        return self.n // self.per_host


class Rates(NamedTuple):
    """Bytes per second of one device: to a neighbour on its host, and through its own network adapter."""

    nvlink: float
    network: float


def rates(op: Op, hosts: int, device: Device) -> Rates:
    """What links carry in practice; between so many hosts as measured, interpolated over their logarithm."""
    position = min(max(math.log2(hosts), 1.0), len(HOSTS_MEASURED)) - 1
    below = min(int(position), len(HOSTS_MEASURED) - 2)
    low, high = NETWORK_SHARE[op][below : below + 2]
    share = low + (position - below) * (high - low)
    return Rates(NVLINK_SHARE * device.nvlink_bytes_per_second, share * device.network_bytes_per_second)
