"""Hierarchical: reduce-scatter inside each host, all-reduce between hosts, all-gather inside.

Each device of a host takes its share of the buffer to the other hosts, so that all network adapters work and the slow
links carry 1/g of the bytes, for g devices on a host.
"""

from collections.abc import Callable

from jaxpar.collectives.exchange import Exchange, Send, Step
from jaxpar.collectives.ring import ring_steps
from jaxpar.config import InputError


def hierarchical_steps(n: int, per_host: int, across: Callable[[int], Exchange] = ring_steps) -> Exchange:
    """Rings of `per_host` devices inside hosts, and between hosts the steps of `across` on 1/per_host of the buffer.

    2(g-1) steps with 1/g of the buffer, for g devices on a host, and between them those of `across` with g times
    smaller pieces. With `per_host` 1 it is `across` among all devices, with n a ring.

    The reduce-scatter sends (n-1)/n of the buffer where that of `across` does; otherwise the devices with the same
    place on their hosts sum the same 1/g of it.

    Args:
        n: devices.
        per_host: devices on each host; their positions follow each other.
        across: the steps among so many hosts.

    Raises:
        InputError: when the devices do not divide over the hosts.

    Example:
        Two hosts with the devices 0, 1 and 2, 3. The hosts swap in the second step and the third:

        >>> print(hierarchical_steps(4, per_host=2))
        add   0→1 [2:4]  1→0 [0:2]  2→3 [2:4]  3→2 [0:2]
        add   0→2 [1]  1→3 [3]  2→0 [0]  3→1 [2]
        copy  0→2 [0]  1→3 [2]  2→0 [1]  3→1 [3]
        copy  0→1 [0:2]  1→0 [2:4]  2→3 [0:2]  3→2 [2:4]
    """
    if n % per_host:
        near = min((g for g in range(1, n + 1) if n % g == 0), key=lambda g: abs(g - per_host))
        raise InputError(f"per_host {per_host}: {n} devices % {per_host} = {n % per_host}, must be 0; nearest: {near}.")
    hosts = n // per_host
    inside, between = ring_steps(per_host), across(hosts)
    pieces = between.blocks

    def in_each_host(step: Step) -> Step:
        sends = ((host * per_host, send) for host in range(hosts) for send in step.sends)
        return Step(step.blocks * pieces, tuple(Send(at + s, at + t, b * pieces) for at, (s, t, b) in sends))

    def between_hosts(step: Step) -> Step:
        sends = ((place, send) for send in step.sends for place in range(per_host))
        at = lambda host, place: host * per_host + place
        return Step(step.blocks, tuple(Send(at(s, i), at(t, i), i * pieces + b) for i, (s, t, b) in sends))

    return Exchange(
        devices=n,
        blocks=per_host * pieces,
        reduce=(*map(in_each_host, inside.reduce), *map(between_hosts, between.reduce)),
        share=(*map(between_hosts, between.share), *map(in_each_host, inside.share)),
        rows=tuple(i % per_host * hosts + between.rows[i // per_host] for i in range(n)),
        scatter_shares=between.scatter_shares,
    )
