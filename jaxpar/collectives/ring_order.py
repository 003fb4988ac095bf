"""The order of a ring around slow and broken links, or a tree where no ring is left. NumPy only.

A ring is as fast as its slowest link, since all devices send at the same time. Letters: n devices.

| how it is found | when |
|---|---|
| exact | up to 12 devices |
| hosts first | several devices on a host: an order of the hosts, then the best way through their devices for it |
| search | more than 12 devices, or hosts: good, and sometimes certainly the best |
| tree | no ring was found: the spanning tree whose slowest link is fastest, used in both directions |

The same matrix gives the same result in every process, within seconds.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpar.collectives.bottleneck import Paths, connected_parts, exact_ring, searched_ring, spanning_tree
from jaxpar.config import InputError

EXACT = 12
"""Most devices for which the best ring is found for certain; the work grows as n³ 2^n."""


@dataclass(frozen=True)
class Route:
    """A ring, or else a tree.

    Attributes:
        order: positions in the order of the ring, each sending to the next and the last to the first; None: a tree.
        parents: parent of each position, -1 for the root; None: a ring.
        slowest: bandwidth of its slowest link, in the unit of the matrix.
        slowest_link: from and to; None for a single device.
        how: a sentence: how it was found, and whether it is certainly the best.
    """

    order: tuple[int, ...] | None
    parents: tuple[int, ...] | None
    slowest: float
    slowest_link: tuple[int, int] | None
    how: str


def ring_order(bandwidth: Sequence[Sequence[float]] | np.ndarray, per_host: int = 1) -> Route:
    """The ring whose slowest link is fastest, or a tree where there is no ring.

    Args:
        bandwidth: `[n, n]`, from row to column, in any unit; 0: broken. The diagonal is not read.
        per_host: so many neighbouring positions share a host: the ring passes through each host once, so that as
            few links as possible cross hosts; only where no such ring is found it may come back.

    Raises:
        InputError: the matrix is none, per_host is no divisor of n, or there is not even a tree: names the parts.

    Example:
        Four devices, where 0 and 1 are badly connected:

        >>> route = ring_order([[0, 1, 9, 9], [1, 0, 9, 9], [9, 9, 0, 9], [9, 9, 9, 0]])
        >>> route.order, route.slowest, route.how
        ((0, 2, 1, 3), 9.0, 'exact: no ring has a faster slowest link')

        Device 3 has only one link that is not broken: no ring passes through it, a tree reaches it.

        >>> route = ring_order([[0, 5, 5, 0], [5, 0, 5, 0], [5, 5, 0, 5], [0, 0, 5, 0]])
        >>> route.parents, route.how
        ((-1, 0, 0, 2), 'no ring passes through all devices: the tree whose slowest link is fastest')
    """
    links = _checked(bandwidth)
    n = len(links)
    if per_host < 1 or n % per_host:
        raise InputError(f"per_host = {per_host} must divide the {n} devices that the matrix of link bandwidths has.")
    if n == 1:
        return Route((0,), None, np.inf, None, "there is only one device")
    order, how = None, ""
    if 1 < per_host < n and per_host <= EXACT:
        order, how = _hosts_first(links, per_host)
    if order is None:
        order, how = _ring(links)
    if order is None:
        return _tree(links, how)
    return Route(tuple(order), None, *_slowest(links, _pairs(order)), how)


def read_links(path: str | Path, n: int) -> np.ndarray:
    """Read the bandwidths that `grad_reduce.links` names: a JSON list of n rows of n numbers.

    Raises:
        InputError: there is no such file, it holds no such matrix, or its size is not n.
    """
    try:
        links = _checked(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"grad_reduce.links = {path}: cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise InputError(f"grad_reduce.links = {path}: {error}") from None
    if len(links) != n:
        raise InputError(f"grad_reduce.links = {path}: has {len(links)} rows, but mesh.data = {n}.")
    return links


def _checked(bandwidth: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
    try:
        links = np.array(bandwidth, float)
    except (TypeError, ValueError):
        raise InputError("link bandwidths must be a matrix of numbers, with rows of equal length.") from None
    if links.ndim != 2 or links.shape[0] != links.shape[1] or not links.size:
        raise InputError(f"link bandwidths must be a square matrix, but the shape is {list(links.shape)}.")
    np.fill_diagonal(links, 0)
    if wrong := np.argwhere(~np.isfinite(links) | (links < 0)).tolist():
        i, j = wrong[0]
        more = f", and {len(wrong) - 1} others are wrong, too" if wrong[1:] else ""
        raise InputError(
            f"the bandwidth from {i} to {j} is {links[i, j]:g}, must be a finite number, 0 (broken) or above{more}."
        )
    return links


def _pairs(ring: Sequence[int]) -> list[tuple[int, int]]:
    return [(i, ring[(k + 1) % len(ring)]) for k, i in enumerate(ring)]


def _slowest(links: np.ndarray, pairs: Sequence[tuple[int, int]]) -> tuple[float, tuple[int, int]]:
    slowest = min(pairs, key=lambda pair: links[pair])
    return float(links[slowest]), slowest


def _ring(links: np.ndarray) -> tuple[list[int] | None, str]:
    """The best ring, or a good one; and how it was found, or that there is none."""
    if len(links) <= EXACT:
        order, certain, how = exact_ring(links), True, "exact"
    else:
        (order, certain), how = searched_ring(links), "search"
    if order is None:
        return None, "no ring passes through all devices" if certain else "no ring was found through all devices"
    return order, f"{how}: " + ("no ring has a faster slowest link" if certain else "there may be a better ring")


def _hosts_first(links: np.ndarray, g: int) -> tuple[list[int] | None, str]:
    """A ring that passes through each host of g devices once: an order of the hosts, then the best way for it."""
    N = len(links) // g
    blocks = links.reshape(N, g, N, g).transpose(0, 2, 1, 3)  # [from host, to host, from device, to device]
    between = blocks.max(axis=(2, 3))
    np.fill_diagonal(between, 0)
    hosts, how = _ring(between) if N > 1 else ([0], "")
    if hosts is None:
        return None, ""
    inside = [Paths(blocks[h, h]) for h in hosts]
    # From each device at which the ring may enter the first host to each at which it may enter the next ones.
    entered = [np.where(np.eye(g, dtype=bool), np.inf, 0.0)]
    steps = [blocks[h, after] for h, after in _pairs(hosts)]
    for paths, step in zip(inside, steps, strict=True):
        entered.append(_product(_product(entered[-1], paths.best), step))
    bandwidth = entered[-1].diagonal().max()
    if not bandwidth:
        return None, ""
    first = entry = int(entered[-1].diagonal().argmax())
    order: list[int] = []
    for h, paths, step, before in [*zip(hosts, inside, steps, entered[:-1], strict=True)][::-1]:
        ways = np.minimum(np.minimum(before[first][:, None], paths.best), step[:, entry]) >= bandwidth
        leave = int(np.flatnonzero(ways.any(axis=0))[-1])
        entry = int(np.flatnonzero(ways[:, leave])[0])
        order = [h * g + i for i in paths.path(entry, leave, bandwidth)] + order
    return order, f"hosts first, each once; {how.replace('ring', 'order of hosts')}"


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The best slowest link from row of `a` to column of `b`, by way of any column of `a`."""
    return np.minimum(a[:, :, None], b).max(axis=1)


def _tree(links: np.ndarray, why: str) -> Route:
    both = np.minimum(links, links.T)
    parents, bandwidth = spanning_tree(both)
    if not bandwidth:
        parts = "; ".join(", ".join(map(str, part)) for part in connected_parts(both))
        raise InputError(
            f"the devices are not connected: no link that works in both directions joins these parts: {parts}. "
            f"Leave devices out, or repair a link."
        )
    pairs = [pair for i, parent in enumerate(parents) if parent >= 0 for pair in ((i, parent), (parent, i))]
    return Route(None, tuple(parents), *_slowest(links, pairs), f"{why}: the tree whose slowest link is fastest")
