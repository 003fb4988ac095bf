"""What stages do that run at their own pace: the order of work of GPipe, 1F1B, ZB-H1 and ZB-H2. No JAX.

The simulator and the drawings take them. Only schedules that are tables as well can be run (`make_schedule`).

Letters: S stages, M microbatches, s the stage.
"""

from jaxpar.config import InputError
from jaxpar.pipeline.schedules import SCHEDULES, Order, Work, check_name, check_sizes, make_schedule

ORDERS = (*SCHEDULES, "zb-h1", "zb-h2")
"""The names that `make_orders` knows."""


def make_orders(name: str, stages: int, microbatches: int, chunks: int = 1) -> tuple[Order, ...]:
    """Make the order in which each stage works.

    1f1b on one chunk per stage is the textbook's: S − s forwards, then backwards and forwards in turn. The lockstep
    table goes further ahead, by 2 (S − s) − 1 forwards, because messages take it a tick. On several chunks the table's
    order and Megatron's are the same. ZB-H1 and ZB-H2 (arXiv:2401.10241) put off the weight gradients (W) to fill the
    bubble: after a backward there is a W when more than s (H1) or 2s (H2) of them are due; H2 begins with
    2 (S − s) − 1 forwards.

    Args:
        name: gpipe, 1f1b, zb-h1 or zb-h2.
        stages: S, at least 1.
        microbatches: M, at least 1.
        chunks: chunks per stage, at least 1; 1 for zb-h1 and zb-h2.

    Returns:
        For each stage its work from first to last.

    Raises:
        InputError: on an unknown name or an impossible size, with the nearest legal choice.

    Example:
        >>> [" ".join(f"{w.kind}{w.microbatch}" for w in order) for order in make_orders("zb-h1", 2, 3)]
        ['F0 F1 B0 W0 F2 B1 W1 B2 W2', 'F0 B0 F1 B1 W0 F2 B2 W1 W2']
    """
    check_name(name, ORDERS)
    check_sizes(stages=stages, microbatches=microbatches, chunks=chunks)
    if name.startswith("zb-") and chunks > 1:
        raise InputError(f"chunks = {chunks}: {name} has one chunk per stage. Use chunks = 1.")
    if name == "gpipe" or chunks > 1:
        return make_schedule(name, stages, microbatches, chunks).orders
    ahead = 2 if name == "zb-h2" else 1
    return tuple(
        _one_forward_one_backward(
            microbatches,
            warmup=ahead * (stages - s) - (ahead - 1),
            weight_gradients_due=None if name == "1f1b" else ahead * s,
        )
        for s in range(stages)
    )


def _one_forward_one_backward(M: int, warmup: int, weight_gradients_due: int | None) -> Order:
    """`warmup` forwards, then backwards and forwards in turn; a W follows a backward when more than so many are due."""
    warmup = min(warmup, M)
    order = [Work("F", m, 0) for m in range(warmup)]
    done = 0  # weight gradients
    for m in range(M):
        order.append(Work("B", m, 0))
        if weight_gradients_due is not None and m + 1 - done > weight_gradients_due:
            order.append(Work("W", done, 0))
            done += 1
        if warmup + m < M:
            order.append(Work("F", warmup + m, 0))
    if weight_gradients_due is not None:
        order += [Work("W", m, 0) for m in range(done, M)]
    return tuple(order)
