"""XLA's own collectives with a narrower type on the wire, and sums in a wider.

XLA's all-reduce adds in the type that it sends. So what it does is done here in two halves: an all-to-all brings each
device all the pieces of its part, which it adds up itself, and an all-gather brings the sums to all.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives.exchange import from_wire, to_wire


def narrow_reduce_scatter(x_nK: jax.Array, axis: str, wire: Any) -> jax.Array:
    """Sum over `axis`, of which position i gets row i, `[K]`. Sends (n-1)/n of the buffer, in the type `wire`.

    Args:
        x_nK: varying over `axis`, of the type in which sums are made.
        axis: of n devices.
        wire: type of what is sent; only the n summands are rounded to it.
    """
    pieces_nK = lax.all_to_all(to_wire(x_nK, wire), axis, split_axis=0, concat_axis=0, tiled=True)
    return from_wire(pieces_nK, wire, x_nK.dtype).sum(0)


def narrow_all_reduce(x_N: jax.Array, axis: str, wire: Any) -> jax.Array:
    """Sum over `axis`, the same on all its devices. Sends 2(n-1)/n of the buffer, in the type `wire`.

    Args:
        x_N: as for `narrow_reduce_scatter`; padded with zeros to a multiple of n.
        axis: of n devices.
        wire: type of what is sent, to which the n summands and the sum are rounded.
    """
    n = lax.axis_size(axis)
    sum_K = narrow_reduce_scatter(jnp.pad(x_N, (0, -x_N.size % n)).reshape(n, -1), axis, wire)
    sums_nK = from_wire(lax.all_gather(to_wire(sum_K, wire), axis), wire, x_N.dtype)
    return sums_nK.reshape(-1)[: x_N.size]
