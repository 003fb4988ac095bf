"""Tree: partial sums go up to the root, the sum comes down.

Few steps, each with the whole buffer: for small buffers, and for links of which so many are broken that no ring is
left. A step has one source for each target (it is a permute), so a device with two children hears them one after the
other. Two children for each device would take up to 4⌊log2 n⌋ steps; the tree taken here, in which children are of
different height (a binomial tree), takes 2⌈log2 n⌉. R. Thakur, R. Rabenseifner and W. Gropp, Optimization of
collective communication operations in MPICH (2005).
"""

from collections.abc import Sequence

from jaxpar.collectives.exchange import Exchange, Send, Step
from jaxpar.config import InputError


def tree_steps(n: int, parents: Sequence[int] | None = None) -> Exchange:
    """Up and down a tree: 2⌈log2 n⌉ steps for the one taken by default, each with the whole buffer.

    With `parents` given there are 2 T(root) steps. T of a device without children is 0; of one whose children have
    T₁ ≥ T₂ ≥ …, it is the largest of 1 + T₁, 2 + T₂, … : it hears the highest child last and serves it first. A
    chain of n takes 2(n-1), a star as well.

    There is no reduce-scatter: all of the buffer is summed on every device.

    Args:
        n: devices.
        parents: the parent of each position, -1 for the root; by default the position with its lowest set bit cleared.

    Raises:
        InputError: when `parents` is no tree over all positions.

    Example:
        Five devices. `0→1 [0]` is block 0, here the whole buffer:

        >>> print(tree_steps(5))
        add   4→0 [0]
        add   1→0 [0]  3→2 [0]
        add   2→0 [0]
        copy  0→2 [0]
        copy  0→1 [0]  2→3 [0]
        copy  0→4 [0]

        What the five hold after each step:

        >>> for x_nB in tree_steps(5).plain([[1], [2], [3], [4], [5]]):
        ...     print(x_nB[:, 0].tolist())
        [6, 2, 3, 4, 5]
        [8, 2, 7, 4, 5]
        [15, 2, 7, 4, 5]
        [15, 2, 15, 4, 5]
        [15, 15, 15, 15, 5]
        [15, 15, 15, 15, 15]

        A chain with its root in the middle, where only neighbours are connected:

        >>> print(tree_steps(4, parents=[1, -1, 1, 2]))
        add   0→1 [0]  3→2 [0]
        add   2→1 [0]
        copy  1→2 [0]
        copy  1→0 [0]  2→3 [0]
    """
    usual = [i & (i - 1) if i else -1 for i in range(n)]
    parents = usual if parents is None else list(parents)
    turns = _turns(n, parents)
    if turns is None:
        raise InputError(
            f"tree parents {parents}: must be the parent of each of {n} positions, from 0 to {n - 1}, and -1 for one "
            f"root, which all others reach; as {usual}."
        )
    up = tuple(Step(1, tuple(Send(i, parents[i], 0) for i in turn)) for turn in reversed(turns))
    down = tuple(Step(1, tuple(Send(parents[i], i, 0) for i in turn)) for turn in turns)
    return Exchange(n, blocks=1, reduce=up, share=down, rows=tuple(range(n)), scatter_shares=len(down))


def _turns(n: int, parents: Sequence[int]) -> list[list[int]] | None:
    """The positions that hear from their parents in the first step down, the second, …; None where it is no tree."""
    children = {parent: [i for i, above in enumerate(parents[:n]) if above == parent] for parent in range(-1, n)}
    downward = children[-1][:1]
    for i in downward:  # grows: parents come before their children
        downward += children[i]
    if len(parents) != n or len(downward) != n:
        return None
    steps_below = [0] * n
    for i in reversed(downward):
        children[i].sort(key=lambda child: steps_below[child], reverse=True)
        steps_below[i] = max((turn + steps_below[child] for turn, child in enumerate(children[i], 1)), default=0)
    turns: list[list[int]] = [[] for _ in range(steps_below[downward[0]])]
    heard = [0] * n
    for parent in downward:
        for turn, child in enumerate(children[parent], 1):
            heard[child] = heard[parent] + turn
            turns[heard[child] - 1].append(child)
    return turns
