"""Uses of a parameter whose gradient is a sum over tokens, made in float32 whatever is computed in.

A matrix's gradient is a matrix product, which accumulates in float32 by itself. The gradient of something that is added
to every token, or looked up by it, is a plain sum of as many summands as there are tokens. In bfloat16 it loses what is
smaller than 1/256 of it: with 8,192 tokens biases of values kept 0.58 of their gradient.

Letters: V rows of a table, D width, N any dims.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpar.collectives import varying_axes


def add(x_ND: jax.Array, bias_D: jax.Array) -> jax.Array:
    """`x + bias` in the dtype of `x`; the bias may lack any number of dims in front.

    Args:
        x_ND: activations.
        bias_D: a parameter.
    """
    wide = jnp.promote_types(x_ND.dtype, jnp.float32)
    return (x_ND.astype(wide) + bias_D.astype(wide)).astype(x_ND.dtype)


def look_up(table_VD: jax.Array, rows_N: jax.Array) -> jax.Array:
    """`table[rows]`, `[N, D]`.

    Args:
        table_VD: a parameter.
        rows_N: integers in [0, V).
    """
    rows, dtype = table_VD.shape[0], table_VD.dtype
    wide = jnp.promote_types(dtype, jnp.float32)

    @jax.custom_vjp
    def take(table_VD: jax.Array, rows_N: jax.Array) -> jax.Array:
        return table_VD[rows_N]

    def backward(rows_N: jax.Array, g_ND: jax.Array) -> tuple[jax.Array, None]:
        sums_VD = jnp.zeros((rows, g_ND.shape[-1]), wide).at[rows_N].add(g_ND.astype(wide))
        return sums_VD.astype(dtype), None

    take.defvjp(lambda table_VD, rows_N: (table_VD[rows_N], rows_N), backward)
    # The sums vary as the rows do, and so must the table, over axes of size 1 as well; its gradient is summed there.
    missing = tuple(sorted(varying_axes(rows_N) - varying_axes(table_VD)))
    return take(lax.pcast(table_VD, missing, to="varying") if missing else table_VD, rows_N)
