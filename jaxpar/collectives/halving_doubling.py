"""Halving and doubling: pairs swap halves, then quarters, then eighths; and back.

As few steps as a tree and, for 2, 4, 8, … devices, as few bytes as a ring. R. Thakur, R. Rabenseifner and W. Gropp,
Optimization of collective communication operations in MPICH (2005); there it is Rabenseifner's algorithm.
"""

from jaxpar.collectives.exchange import Exchange, Send, Step


def halving_doubling_steps(n: int) -> Exchange:
    """Recursive halving (reduce-scatter), then recursive doubling (all-gather), among p = 2^⌊log2 n⌋ devices.

    2 log2 p steps; a device sends 2(p-1)/p of the buffer. The nearest pairs swap first, and the most: where
    neighbours share a host, the larger pieces stay inside it. For n other than p, the last n - p devices first
    send all they have to the first n - p, and get the sums at the end: two more steps, each with the whole buffer.

    The reduce-scatter is the halving alone, (p-1)/p of the buffer, where n = p; otherwise all of the buffer is
    summed on every device.

    Args:
        n: devices.

    Example:
        >>> print(halving_doubling_steps(4))
        add   0→1 [2:4]  1→0 [0:2]  2→3 [2:4]  3→2 [0:2]
        add   0→2 [1]  1→3 [3]  2→0 [0]  3→1 [2]
        copy  0→2 [0]  1→3 [2]  2→0 [1]  3→1 [3]
        copy  0→1 [0:2]  1→0 [2:4]  2→3 [0:2]  3→2 [2:4]

        >>> *_, x_nB = halving_doubling_steps(4).plain([[1, 2, 3, 4], [10, 20, 30, 40], [0, 0, 0, 0], [5, 5, 5, 5]])
        >>> x_nB.tolist()
        [[16, 27, 38, 49], [16, 27, 38, 49], [16, 27, 38, 49], [16, 27, 38, 49]]

        Three devices: two, and one that is folded in.

        >>> print(halving_doubling_steps(3))
        add   2→0 [0:2]
        add   0→1 [1]  1→0 [0]
        copy  0→1 [0]  1→0 [1]
        copy  0→2 [0:2]
    """
    p = 1 << (n.bit_length() - 1)
    first = [0] * p  # the first of the blocks that each device still sums
    halving, doubling = [], []
    half, distance = p // 2, 1
    while half:
        first = [first[i] + (half if i & distance else 0) for i in range(p)]
        pairs = [(i, i ^ distance) for i in range(p)]
        halving.append(Step(half, tuple(Send(i, other, first[other]) for i, other in pairs)))
        doubling.append(Step(half, tuple(Send(i, other, first[i]) for i, other in pairs)))
        half, distance = half // 2, distance * 2
    doubling.reverse()
    if n == p:
        return Exchange(n, blocks=p, reduce=tuple(halving), share=tuple(doubling), rows=tuple(first))
    fold = Step(p, tuple(Send(p + i, i, 0) for i in range(n - p)))
    unfold = Step(p, tuple(Send(i, p + i, 0) for i in range(n - p)))
    return Exchange(
        devices=n,
        blocks=p,
        reduce=(fold, *halving),
        share=(*doubling, unfold),
        rows=tuple(range(n)),
        scatter_shares=len(doubling) + 1,
    )
