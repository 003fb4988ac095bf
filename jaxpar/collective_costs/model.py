"""How long a collective takes, by algorithm: a latency-bandwidth model.

Every time is latency + bytes / bandwidth, summed over the steps that follow one another. `native` is NCCL: it takes
the ring or the tree by its own model, which stands here as in its source. Our own algorithms are made of permutes:
each step starts a kernel, crosses one link, and where it sums, reads two buffers and writes one in device memory.

| algorithm | steps of an all-reduce of b bytes over n devices, g on each of N hosts |
|---|---|
| ring | 2(n-1) of b/n |
| tree | 2⌈log2 n⌉ of b |
| halving_doubling | 2 log2 n of b/2, b/4, ..., b/n and back; for other n, two more of b (n: the power of two below) |
| hierarchical | 2(g-1) of b/g inside a host, and an all-reduce of b/g across N hosts |

A reduce-scatter is the first half of a ring, of halving_doubling with n a power of two, or of hierarchical, and an
all-gather the second; the others sum everything and take their block, or gather by adding zeros.

The model ranks algorithms; it does not predict times to better than a factor of two (on one host of 8 H100 it gives
66 GB/s of bus bandwidth at 1 MB, where 40 was measured). Where times matter, measure: `jaxpar bench collectives`.
"""

from dataclasses import dataclass

from jaxpar.collective_costs.links import Algorithm, Group, Op, Rates, rates
from jaxpar.collective_costs.nccl import NCCL_LATENCY, nccl_kind, nccl_seconds
from jaxpar.hardware import Device

PERMUTE = NCCL_LATENCY["ring", "Simple"]
"""A permute is one kernel of NCCL that makes one hop."""


def seconds(
    op: Op, algorithm: Algorithm, buffer_bytes: float, group: Group, device: Device, across: Algorithm = "ring"
) -> float:
    """Time of a collective by the model.

    Args:
        op: which one.
        algorithm: by which algorithm.
        buffer_bytes: of the whole array: what an all-gather returns, what a reduce-scatter is given.
        group: the devices.
        device: what they are.
        across: the algorithm between hosts, for hierarchical.

    Example:
        >>> from jaxpar.hardware import DEVICES
        >>> f"{seconds('all-reduce', 'native', 2**30, Group(8, 8), DEVICES['H100']) * 1e3:.2f} ms"
        '5.15 ms'
    """
    if group.n == 1:
        return 0.0
    real = rates(op, group.hosts, device)
    if algorithm == "native":
        kind = nccl_kind(op, buffer_bytes, group, device)
        return nccl_seconds(op, *kind, buffer_bytes, group, device, real)
    steps = _steps(op, algorithm, buffer_bytes, group, across)
    return sum(step.seconds(real, device) for step in steps)


@dataclass(frozen=True)
class Step:
    """Permutes that follow one another, each of so many bytes; it crosses hosts, and sums what arrives, or not."""

    times: int
    message_bytes: float
    crosses: bool
    adds: bool

    def seconds(self, real: Rates, device: Device) -> float:
        """All of them."""
        hop, rate = (PERMUTE.network, real.network) if self.crosses else (PERMUTE.nvlink, real.nvlink)
        moved = self.message_bytes * (1 / rate + self.adds * 3 / device.memory_bytes_per_second)
        return self.times * ((PERMUTE.start + hop) * 1e-6 + moved)


def _steps(op: Op, algorithm: Algorithm, b: float, group: Group, across: Algorithm) -> list[Step]:
    n, g, N = group.n, group.per_host, group.hosts
    scatters, gathers = op != "all-gather", op != "reduce-scatter"
    if algorithm == "hierarchical" and 1 < N < n:
        before = _steps("reduce-scatter", "ring", b, Group(g, g), across) if scatters else []
        after = _steps("all-gather", "ring", b, Group(g, g), across) if gathers else []
        return [*before, *_steps(op, across, b / g, Group(N, 1), across), *after]
    if algorithm in ("ring", "hierarchical"):  # the latter on one host, or with one device on each, is a ring
        way = [(n - 1, b / n, N > 1)]
    elif algorithm == "tree":
        way = [(1, b, _crosses(level, group)) for level in range((n - 1).bit_length())]
    else:
        way = [(1, b / 2 ** (level + 1), _crosses(level, group)) for level in range(n.bit_length() - 1)]
        way = [(1, b, N > 1), *way] if n & (n - 1) else way
    if algorithm == "tree" or (algorithm == "halving_doubling" and n & (n - 1)):
        scatters = gathers = True
    halves = [adds for adds, runs in ((True, scatters), (False, gathers)) if runs]
    return [Step(times, message_bytes, crosses, adds) for adds in halves for times, message_bytes, crosses in way]


def _crosses(level: int, group: Group) -> bool:
    """Whether any pair at distance 2^level lies on two hosts: pairs fill aligned runs of twice that distance."""
    return group.hosts > 1 and group.per_host % 2 ** (level + 1) != 0
