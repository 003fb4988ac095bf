"""All-reduce as a table of steps: which device sends which blocks of the buffer to which other.

Every algorithm here is such a value. It is printed and followed by hand (`str`, `Exchange.plain`), and the same value
says what the devices do (`all_reduce`, `reduce_scatter`). The buffer is cut into equal blocks. First come steps in
which the receiver adds what arrives to its own, until each block is summed on one device; then steps in which it
takes what arrives for its own. So every device ends with copies of the same sums, bit for bit.

A step is one `lax.ppermute`, in which a device sends to one other at the most and receives from one at the most.
There is no loop around them, so that XLA may run each beside other work. The program grows with that: on GPU a permute
and three kernels for each step and bucket.

Letters: n devices of the axis, B blocks, C elements of a block, N elements of the buffer, K elements of an n-th part
of it, S steps.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Send(NamedTuple):
    """`source` sends its blocks from number `block` on to `target`, for the same blocks there."""

    source: int
    target: int
    block: int


class Step(NamedTuple):
    """What is sent at the same time: `blocks` blocks in every message."""

    blocks: int
    sends: tuple[Send, ...]

    def __str__(self) -> str:
        span = lambda first: f"{first}" if self.blocks == 1 else f"{first}:{first + self.blocks}"
        return "  ".join(f"{s.source}→{s.target} [{span(s.block)}]" for s in self.sends)


@dataclass(frozen=True)
class Exchange:
    """An all-reduce among `devices` devices, which are numbered by their position on the axis.

    Attributes:
        devices: how many.
        blocks: into how many equal blocks the buffer is cut; it is padded with zeros, fewer than `blocks`.
        reduce: steps that add.
        share: steps that copy.
        rows: for each device an n-th part of the buffer that it has the sum of before the end, counted from 0; where
            each device is to have only its own part, it goes there.
        scatter_shares: how many of the steps in `share` that takes, after all of `reduce`.
    """

    devices: int
    blocks: int
    reduce: tuple[Step, ...]
    share: tuple[Step, ...]
    rows: tuple[int, ...]
    scatter_shares: int = 0

    def __str__(self) -> str:
        return "\n".join([*(f"add   {step}" for step in self.reduce), *(f"copy  {step}" for step in self.share)])

    def plain(self, x_nB: Any) -> Iterator[np.ndarray]:
        """The buffers of all devices after each step, in numpy: `[n, B]`, or `[n, B, C]`."""
        x_nB = np.array(x_nB)
        for number, step in enumerate((*self.reduce, *self.share)):
            before_nB = x_nB.copy()
            for source, target, block in step.sends:
                part = slice(block, block + step.blocks)
                own = before_nB[target, part] if number < len(self.reduce) else 0
                x_nB[target, part] = before_nB[source, part] + own
            yield x_nB.copy()


def wide(dtype: Any) -> np.dtype:
    """The type in which values of `dtype` are summed: float32 or wider; integers as they are."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(dtype)


def to_wire(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` rounded to the type in which it travels; 16-bit floats as their bits.

    XLA's CPU backend computes 16-bit floats in float32 and would send them so (measured); bits it leaves alone.
    """
    x = x.astype(dtype)
    return lax.bitcast_convert_type(x, jnp.uint16) if _as_bits(dtype) else x


def from_wire(x: jax.Array, dtype: Any, to: Any) -> jax.Array:
    """The value that `to_wire(x, dtype)` sent, as type `to`."""
    return (lax.bitcast_convert_type(x, dtype) if _as_bits(dtype) else x).astype(to)


def _as_bits(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def all_reduce(x_N: jax.Array, axis: str, exchange: Exchange, wire: Any = None) -> jax.Array:
    """Sum over `axis` by the steps of `exchange`. In block view. Plain: `x.sum(devices)`, on every device.

    Args:
        x_N: varying over `axis`, of the type in which sums are made.
        axis: of as many devices as the exchange has.
        exchange: what is sent.
        wire: type of what is sent; by default that of `x_N`. Each partial sum that travels is rounded to it, and
            the result as well, on all devices alike.

    Returns:
        The sum, the same on all devices of `axis` (`same_on_all` makes its type say so).
    """
    wire = wire or x_N.dtype
    x_BC = jnp.pad(x_N, (0, -x_N.size % exchange.blocks)).reshape(exchange.blocks, -1)
    x_BC = _add(x_BC, axis, exchange.reduce, wire)
    return _copy(x_BC, axis, exchange.share, wire).reshape(-1)[: x_N.size]


def reduce_scatter(x_nK: jax.Array, axis: str, exchange: Exchange, wire: Any = None) -> jax.Array:
    """Sum over `axis`, of which position i gets row i. In block view. Plain: `x.sum(devices)[i]`.

    Ring and hierarchical send (n-1)/n of the buffer, as does halving and doubling among 2, 4, 8, … devices. The
    others have no such reduce-scatter: a tree, and halving and doubling among other numbers, sum all rows on all
    devices, or those that hosts share.

    Args:
        x_nK: varying over `axis`, of the type in which sums are made.
        axis: as for `all_reduce`.
        exchange: as for `all_reduce`.
        wire: as for `all_reduce`.

    Returns:
        `[K]`, varying over `axis`.
    """
    wire = wire or x_nK.dtype
    n, K = x_nK.shape
    rows = np.array(exchange.rows)
    if (rows != np.arange(n)).any():
        x_nK = x_nK[np.argsort(rows)]
    # Whole blocks make up n rows, and those of a host its rows: neither may be cut.
    x_nK = jnp.pad(x_nK, ((0, 0), (0, -K % (exchange.blocks // math.gcd(n, exchange.blocks)))))
    x_BC = _add(x_nK.reshape(exchange.blocks, -1), axis, exchange.reduce, wire)
    if exchange.scatter_shares:
        x_BC = _copy(x_BC, axis, exchange.share[: exchange.scatter_shares], wire)
    row = jnp.asarray(rows, jnp.uint32)[lax.axis_index(axis)]
    return lax.dynamic_index_in_dim(x_BC.reshape(n, -1), row, keepdims=False)[:K]


def all_gather(x_K: jax.Array, axis: str, exchange: Exchange, wire: Any = None) -> jax.Array:
    """The rows that `reduce_scatter` leaves on the devices of `axis`, on each of them: `[n, K]`.

    By the steps of `share`, or where those alone do not bring them (`scatter_shares`) by adding them to zeros.

    Args:
        x_K: the row of this device's position, varying over `axis`.
        axis: as for `all_reduce`.
        exchange: as for `all_reduce`.
        wire: type of what is sent, to which all rows are rounded; by default that of `x_K`.
    """
    wire = wire or x_K.dtype
    rows = np.array(exchange.rows)
    row = jnp.asarray(rows, jnp.uint32)[lax.axis_index(axis)]
    x_nK = lax.dynamic_update_index_in_dim(jnp.zeros((len(rows), x_K.size), x_K.dtype), x_K, row, 0)
    if exchange.scatter_shares:
        x_nK = all_reduce(x_nK.reshape(-1), axis, exchange, wire).reshape(x_nK.shape)
    else:
        x_nK = _copy(x_nK, axis, exchange.share, wire)
    return x_nK[rows]


def _add(x_BC: jax.Array, axis: str, steps: tuple[Step, ...], wire: Any) -> jax.Array:
    dtype = x_BC.dtype
    pack = lambda part: to_wire(part, wire)
    return _run(x_BC, axis, steps, pack, lambda own, arrived: own + from_wire(arrived, wire, dtype))


def _copy(x_BC: jax.Array, axis: str, steps: tuple[Step, ...], wire: Any) -> jax.Array:
    """All of it is rounded, what stays as well as what is sent, so that all devices have the same."""
    bits_BC = _run(to_wire(x_BC, wire), axis, steps, lambda part: part, lambda own, arrived: arrived)
    return from_wire(bits_BC, wire, x_BC.dtype)


def _run(
    x_BC: jax.Array,
    axis: str,
    steps: tuple[Step, ...],
    pack: Callable[[jax.Array], jax.Array],
    take: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Let each device do what the steps say for its position: send `pack(part)`, keep `take(own part, arrived)`.

    Without the barriers XLA's GPU backend may fuse into each step the updates of all steps before it: 21 s of
    compiling in place of 0.7 for a ring of 8 with bfloat16 on the wire (jax 0.10.2, for H100).
    """
    n = lax.axis_size(axis)
    first_sent = np.zeros((len(steps), n), np.uint32)
    first_taken = np.zeros((len(steps), n), np.uint32)
    takes = np.zeros((len(steps), n), bool)
    for number, step in enumerate(steps):
        for source, target, block in step.sends:
            first_sent[number, source] = block
            first_taken[number, target] = block
            takes[number, target] = True
    sent_S, taken_S, takes_S = (jnp.asarray(t)[:, lax.axis_index(axis)] for t in (first_sent, first_taken, takes))
    for number, step in enumerate(steps):
        part = lax.dynamic_slice_in_dim(x_BC, sent_S[number], step.blocks)
        arrived = lax.ppermute(pack(part), axis, [(send.source, send.target) for send in step.sends])
        own = lax.dynamic_slice_in_dim(x_BC, taken_S[number], step.blocks)
        new = take(own, arrived)
        if not takes[number].all():
            new = jnp.where(takes_S[number], new, own)
        x_BC = lax.optimization_barrier(lax.dynamic_update_slice_in_dim(x_BC, new, taken_S[number], 0))
    return x_BC
