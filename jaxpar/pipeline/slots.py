"""Ring buffers in a scan's carry: what a forward keeps until its backward, and outputs until the head.

A buffer has a leading dim of slots; which slot is used when is the schedule's table's to say.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpar.collectives import varying, varying_axes
from jaxpar.mesh import PIPE

IDLE = 0.0
"""What buffers hold before anything real is in them. Nothing may depend on it: a test puts NaN here."""


def idle_slots(written: np.ndarray, read: np.ndarray) -> np.ndarray:
    """The slots written in each tick, -1 (idle) replaced by the lowest slot that holds nothing then.

    Args:
        written: i32[ticks], in the order of the ticks.
        read: i32[ticks]; a slot is free from the tick after it was read.
    """
    filled, live = written.copy(), set()
    for tick, (new, old) in enumerate(zip(written.tolist(), read.tolist(), strict=True)):
        live |= {new} - {-1}
        if new < 0:
            filled[tick] = next(slot for slot in range(len(live) + 1) if slot not in live)
        live -= {old}
    return filled


def buffers(kinds: list[jax.Array], count: int) -> list[jax.Array]:
    """Ring buffers of so many slots for arrays of these kinds, varying over `pipe` too."""

    def buffer(a: jax.Array) -> jax.Array:
        fill = IDLE if jnp.issubdtype(a.dtype, jnp.floating) else 0
        return varying(jnp.full((count, *a.shape), fill, a.dtype), tuple(varying_axes(a) | {PIPE}))

    return [buffer(a) for a in kinds]


def write(buffers: list[jax.Array], values: list[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """Write into a slot, one value into each buffer."""
    return [lax.dynamic_update_index_in_dim(b, v, slot, 0) for b, v in zip(buffers, values, strict=True)]


def read(buffers: list[jax.Array], slot: jax.Array) -> list[jax.Array]:
    """Read a slot; what -1 gives must not be used."""
    return [lax.dynamic_index_in_dim(b, jnp.maximum(slot, 0), 0, keepdims=False) for b in buffers]
