"""Paths, rings and trees whose slowest link is as fast as possible, on a matrix of link bandwidths. NumPy only.

A path or ring passes through every device once: the bottleneck travelling salesman problem. Links may differ by
direction; 0 is no link. Letters: n devices.
"""

from collections.abc import Sequence

import numpy as np

STARTS = 16
"""Nearest-neighbour rings that the search begins with."""
KICKS = 300
"""Random exchanges after which it goes on."""
MOVES, ELEMENTS = 10_000, 100_000_000
"""Most exchanges, and most elements of the matrix that they look at: some seconds."""


class Paths:
    """The best path between any two devices through all the others, by Held and Karp's recursion over subsets.

    doi:10.1137/0110015, with the slowest link in place of the sum. Takes n² 2^n numbers, 5 MB for 12 devices.

    Args:
        links: bandwidths `[n, n]`, from row to column.

    Attributes:
        best: `[n, n]`: bandwidth of the slowest link on the best path from row to column; 0: there is none.
    """

    def __init__(self, links: np.ndarray) -> None:
        n = len(links)
        self.links = links
        self._best = np.zeros((1 << n, n, n))  # of the paths through each set of devices
        for i in range(n):
            self._best[1 << i, i, i] = np.inf
        for devices in range(1, 1 << n):
            onward = np.minimum(self._best[devices][:, :, None], links).max(axis=1)
            for end in range(n):
                if not devices >> end & 1:
                    self._best[devices | 1 << end, :, end] = onward[:, end]
        self.best = self._best[-1]

    def path(self, start: int, end: int, bandwidth: float) -> list[int]:
        """A path over links of at least this bandwidth; of several the one that ends with the largest numbers."""
        path, devices = [end], len(self._best) - 1
        while path[0] != start:
            devices ^= 1 << path[0]
            reaches = np.minimum(self._best[devices, start], self.links[:, path[0]]) >= bandwidth
            path.insert(0, int(np.flatnonzero(reaches)[-1]))
        return path


def exact_ring(links: np.ndarray) -> list[int] | None:
    """The ring with the best slowest link, beginning at 0; None where there is none. For up to about 12 devices."""
    paths = Paths(links)
    closed = np.minimum(paths.best[0], links[:, 0])
    bandwidth = closed.max()
    return paths.path(0, int(np.flatnonzero(closed == bandwidth)[-1]), bandwidth) if bandwidth else None


def searched_ring(links: np.ndarray) -> tuple[list[int] | None, bool]:
    """A good ring beginning at 0, or None where none is found; and whether it is certain that there is no better.

    Starts from one device to the nearest not yet visited, and so on; then exchanges pieces of the ring while that
    removes the slowest link; then exchanges some at random and goes on from there.
    """
    n = len(links)
    limit, moves = _limit(links), min(MOVES, ELEMENTS // n**2)
    rng = np.random.default_rng(0)
    best = np.arange(n)
    for attempt in range(STARTS + KICKS):
        if attempt < STARTS:
            ring = _nearest(links, attempt * n // STARTS)
        else:
            i, j, k = np.sort(rng.choice(n, 3, replace=False))
            ring = np.concatenate([best[:i], best[j:k], best[i:j], best[k:]])
        ring, moves = _exchanged(links, ring, moves)
        best = max(best, ring, key=lambda ring: _quality(links, ring))
        if _quality(links, best)[0] == limit or not moves:
            break
    slowest = _quality(links, best)[0]
    return np.roll(best, -int(np.flatnonzero(best == 0)[0])).tolist() if slowest else None, slowest == limit


def _quality(links: np.ndarray, ring: np.ndarray) -> tuple[float, int]:
    used = links[ring, np.roll(ring, -1)]
    return float(used.min()), -int(np.count_nonzero(used == used.min()))


def _limit(links: np.ndarray) -> float:
    """What no slowest link can exceed: each device needs a link from one other and a link to yet another."""
    into, out = np.sort(links, axis=0)[-2:], np.sort(links, axis=1)[:, -2:].T
    same = links.argmax(axis=0) == links.argmax(axis=1)
    apart = np.minimum(into[1], out[1])
    return np.where(same, np.maximum(np.minimum(into[0], out[1]), np.minimum(into[1], out[0])), apart).min()


def _nearest(links: np.ndarray, start: int) -> np.ndarray:
    ring, left = [start], np.ones(len(links), bool)
    for _ in links[1:]:
        left[ring[-1]] = False
        ring.append(int(np.where(left, links[ring[-1]], -1).argmax()))
    return np.array(ring)


def _exchanged(links: np.ndarray, ring: np.ndarray, moves: int) -> tuple[np.ndarray, int]:
    """Remove the slowest link as long as an exchange does so without another as slow; returns the moves left too."""
    while moves:
        moves -= 1
        ring = np.roll(ring, -1 - int(links[ring, np.roll(ring, -1)].argmin()))  # from the last to the first
        a, z, left, right = ring[0], ring[-1], ring[:-1], ring[1:]  # cut in two between left and right
        back = links[right, left]
        # The first piece backwards, or the second; or, cut in three, the second and third swapped.
        first = np.minimum(links[z, left], links[a, right])
        first[1:] = np.minimum(first[1:], np.minimum.accumulate(back)[:-1])
        second = np.minimum(links[left, z], links[right, a])
        second[:-1] = np.minimum(second[:-1], np.minimum.accumulate(back[::-1])[::-1][1:])
        swapped = np.minimum(np.minimum(links[np.ix_(left, right)], links[z, right][:, None]), links[left, a])
        swapped[np.tri(len(left), dtype=bool)] = -1
        gains = first.max(), second.max(), swapped.max()
        if max(gains) <= links[z, a]:
            break
        if gains[0] == max(gains):
            cut = int(first.argmax()) + 1
            ring = np.concatenate([ring[:cut][::-1], ring[cut:]])
        elif gains[1] == max(gains):
            cut = int(second.argmax()) + 1
            ring = np.concatenate([ring[:cut], ring[cut:][::-1]])
        else:
            i, j = (int(at) + 1 for at in np.unravel_index(swapped.argmax(), swapped.shape))
            ring = np.concatenate([ring[:i], ring[j:], ring[i:j]])
    return ring, moves


def spanning_tree(links: np.ndarray) -> tuple[list[int], float]:
    """The tree whose slowest link is fastest: parents, -1 for the root, and that bandwidth; 0: it is not connected.

    Of such trees one that takes few rounds, in each of which a device serves one child: each device that is reached
    takes on the neighbour with most links; the best of several roots.

    Args:
        links: bandwidths `[n, n]`, the same in both directions.
    """
    fastest, slowest = links[0].copy(), np.inf  # link from the tree to each device outside
    fastest[0] = -1
    for _ in links[1:]:  # Prim's algorithm
        slowest = min(slowest, fastest.max())
        added = int(fastest.argmax())
        fastest = np.where(fastest < 0, -1, np.maximum(fastest, links[added]))
        fastest[added] = -1
    if not slowest:
        return [], 0.0
    linked = links >= slowest
    roots = np.argsort(-linked.sum(axis=1), kind="stable")[:STARTS]
    return min((_served(linked, int(root)) for root in roots), key=lambda tree: tree[1])[0], float(slowest)


def _served(linked: np.ndarray, root: int) -> tuple[list[int], int]:
    """Parents, and the rounds in which all are reached."""
    degrees, left = linked.sum(axis=1), np.ones(len(linked), bool)
    parents, reached, rounds = [-1] * len(linked), [root], 0
    left[root] = False
    while left.any():
        rounds += 1
        for parent in np.array(reached)[(linked[reached] & left).any(axis=1)].tolist():
            choice = np.where(linked[parent] & left, degrees, -1)
            child = int(choice.argmax())
            if choice[child] > 0:  # else another has just taken the last one
                parents[child], left[child] = parent, False
                reached.append(child)
    return parents, rounds


def connected_parts(links: np.ndarray) -> list[list[int]]:
    """The sets of devices between which there are links, each in ascending order."""
    left, parts = set(range(len(links))), []
    while left:
        part: Sequence[int] = [min(left)]
        for i in part:  # grows
            left.discard(i)
            part += [j for j in np.flatnonzero(links[i]).tolist() if j in left and j not in part]
        parts.append(sorted(part))
    return parts
