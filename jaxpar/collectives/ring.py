"""Ring: each block travels once around to be summed, and once more to be shared.

P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (2009): no all-reduce
sends fewer bytes. The number of steps grows with the devices, so it is for large buffers.
"""

from collections.abc import Sequence
from typing import Any

import jax

from jaxpar.collectives.exchange import Exchange, Send, Step, all_gather, reduce_scatter
from jaxpar.collectives.views import axis_size
from jaxpar.config import InputError


def ring_steps(n: int, order: Sequence[int] | None = None) -> Exchange:
    """Reduce-scatter, then all-gather: 2(n-1) steps, each with one of n blocks.

    Block i is summed along the whole ring and complete at position i, whatever the order. A device sends 2(n-1)/n of
    the buffer.

    Args:
        n: devices.
        order: the positions as they follow each other in the ring; by default 0, 1, 2, …

    Raises:
        InputError: when `order` has not each position once.

    Example:
        Three devices. Block 0 starts at device 1, is added to at 2 and 0, and goes on to 1 and 2:

        >>> print(ring_steps(3))
        add   0→1 [2]  1→2 [0]  2→0 [1]
        add   0→1 [1]  1→2 [2]  2→0 [0]
        copy  0→1 [0]  1→2 [1]  2→0 [2]
        copy  0→1 [2]  1→2 [0]  2→0 [1]

        What the three hold after each step, a row each. The sums are 111, 222, 333:

        >>> for x_nB in ring_steps(3).plain([[1, 2, 3], [10, 20, 30], [100, 200, 300]]):
        ...     print(x_nB.tolist())
        [[1, 202, 3], [10, 20, 33], [110, 200, 300]]
        [[111, 202, 3], [10, 222, 33], [110, 200, 333]]
        [[111, 202, 333], [111, 222, 33], [110, 222, 333]]
        [[111, 222, 333], [111, 222, 333], [111, 222, 333]]

        In another order, as `ring_order` finds it around slow links:

        >>> print(ring_steps(4, order=[0, 2, 1, 3]).reduce[0])
        0→2 [3]  2→1 [0]  1→3 [2]  3→0 [1]
    """
    order = list(range(n)) if order is None else list(order)
    if sorted(order) != list(range(n)):
        raise InputError(
            f"ring order {order}: must have each position from 0 to {n - 1} once, as {list(range(n))} does."
        )
    turn = lambda lag: Step(1, tuple(Send(order[k], order[(k + 1) % n], order[(k - lag) % n]) for k in range(n)))
    return Exchange(
        devices=n,
        blocks=n,
        reduce=tuple(turn(lag) for lag in range(1, n)),
        share=tuple(turn(lag) for lag in range(n - 1)),
        rows=tuple(range(n)),
    )


def ring_reduce_scatter(
    x_nK: jax.Array, axis: str, order: Sequence[int] | None = None, wire_dtype: Any = None
) -> jax.Array:
    """Sum over `axis`, in the type of `x_nK`; position i gets row i, `[K]`. n-1 permutes of K elements.

    Plain: `x.sum(devices)[i]`. See `jaxpar.collectives.exchange.reduce_scatter`.
    """
    return reduce_scatter(x_nK, axis, ring_steps(axis_size(axis), order), wire_dtype)


def ring_all_gather(x_K: jax.Array, axis: str, order: Sequence[int] | None = None, wire_dtype: Any = None) -> jax.Array:
    """The rows of all devices of `axis`, `[n, K]`, that of position i in row i. n-1 permutes of K elements.

    Plain: `stack(x of each device)`. See `jaxpar.collectives.exchange.all_gather`.
    """
    return all_gather(x_K, axis, ring_steps(axis_size(axis), order), wire_dtype)
