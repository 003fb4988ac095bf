"""Dropout whose mask depends on the example, the layer and the position, and not on the layout.

Letters: B batch, T tokens, D width.
"""

import jax
import jax.numpy as jnp

from jaxpar.collectives import axis_index
from jaxpar.mesh import TENSOR


def dropout(x: jax.Array, keys_B: jax.Array | None, rate: float, *, sequence_parallel: bool = False) -> jax.Array:
    """Zero a share `rate` of x and scale up the rest by 1 / (1 - rate).

    Args:
        x: `[B, T, D]`, or this device's block of T with `sequence_parallel`.
        keys_B: one PRNG key per example, already made for this layer and place; None: no dropout.
        rate: probability of zero, in [0, 1).
        sequence_parallel: x is split over `tensor` along T.

    Returns:
        The same shape and dtype. A token gets the same mask whichever device holds it.
    """
    if keys_B is None or rate == 0.0:
        return x
    tokens, width = x.shape[1:]
    positions_T = jnp.arange(tokens) + (axis_index(TENSOR) * tokens if sequence_parallel else 0)

    def token_mask(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, position), 1 - rate, (width,))

    keep_BTD = jax.vmap(jax.vmap(token_mask, (None, 0)), (0, None))(keys_B, positions_T)
    return jnp.where(keep_BTD, x / (1 - rate), 0).astype(x.dtype)


def fold_in(keys_B: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    """New keys for a layer, or for a place inside it; None stays None."""
    return None if keys_B is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys_B)


def example_keys(seed: int, step: jax.Array, rows_B: jax.Array) -> jax.Array:
    """One key per example, from the seed, the step and the example's row in the global batch."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)
