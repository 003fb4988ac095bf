"""Linear layers split over the `tensor` axis.

In `Y = X W`, column parallel splits W's output dim and row parallel its input dim, as in Megatron-LM
(arXiv:1909.08053, section 3). Texts that write `Y = W X` and split the rows of W mean our column parallel.
Used as a pair, column then row, a block needs one sum: no communication in between.

Letters: B batch, T tokens, D input width, F output width; a lower-case letter is this device's block.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpar.collectives import all_gather, psum, reduce_scatter
from jaxpar.layers.layout import Initializer
from jaxpar.layers.token_sums import add
from jaxpar.mesh import TENSOR

NORMAL = nnx.initializers.normal(0.02)


class ColumnParallelLinear(nnx.Module):
    """`Y = X W + b` with W `[D, F/tensor]` and b `[F/tensor]`.

    In: `[B, T, D]`, the same on every device of `tensor`; with `sequence_parallel` `[B, T/tensor, D]`, gathered
    first (all-gather over `tensor`, B·T·D elements). Out: `[B, T, F/tensor]`. In the backward pass the gradient
    of X is summed over `tensor` (all-reduce; reduce-scatter with `sequence_parallel`).

    Args:
        in_features: D.
        out_features: F, a multiple of the axis size.
        bias: add b.
        heads: how many attention heads F holds; the split then falls between heads.
        replicate_heads: keep the whole W on every device when there are fewer heads than devices.
        sequence_parallel: the input is split over `tensor` along T.
        kernel_init: initializer of W.
        param_dtype: dtype of W and b.
        rngs: source of the initial weights.

    Example:
        >>> layer = ColumnParallelLinear(8, 12, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 8))).shape
        (2, 3, 12)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        heads: int | None = None,
        replicate_heads: bool = False,
        sequence_parallel: bool = False,
        kernel_init: Initializer = NORMAL,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        metadata: dict[str, Any] = ({"heads": heads} if heads else {}) | (
            {"replicate_heads": True} if replicate_heads else {}
        )
        weight = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.weight = nnx.Param(weight, layout=P(None, TENSOR), **metadata)
        zeros = nnx.Param(jnp.zeros(out_features, param_dtype), layout=P(TENSOR), **metadata)
        self.bias = zeros if bias else None
        self.sequence_parallel = sequence_parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to `[B, T, D]` (or this device's block of T)."""
        x_BTD = all_gather(x, TENSOR, dim=-2 % x.ndim) if self.sequence_parallel else x
        y_BTf = x_BTD @ self.weight[...]
        return y_BTf if self.bias is None else add(y_BTf, self.bias[...])


class RowParallelLinear(nnx.Module):
    """`Y = X W + b` with W `[F/tensor, D]` and b `[D]` replicated.

    In: `[B, T, F/tensor]`. Out: `[B, T, D]`, summed over `tensor` (all-reduce, B·T·D elements); with
    `sequence_parallel` `[B, T/tensor, D]` (reduce-scatter). The bias is added once, after the sum.

    Args:
        in_features: F, a multiple of the axis size.
        out_features: D.
        bias: add b.
        heads: how many attention heads F holds.
        sequence_parallel: leave the output split over `tensor` along T.
        kernel_init: initializer of W.
        param_dtype: dtype of W and b.
        rngs: source of the initial weights.

    Example:
        >>> layer = RowParallelLinear(12, 8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 12))).shape
        (2, 3, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        heads: int | None = None,
        sequence_parallel: bool = False,
        kernel_init: Initializer = NORMAL,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        weight = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        metadata: dict[str, Any] = {"heads": heads} if heads else {}
        self.weight = nnx.Param(weight, layout=P(TENSOR, None), **metadata)
        self.bias = nnx.Param(jnp.zeros(out_features, param_dtype)) if bias else None
        self.sequence_parallel = sequence_parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to this device's block `[B, T, f]`."""
        y_BTD_part = x @ self.weight[...]
        y = reduce_scatter(y_BTD_part, TENSOR, dim=x.ndim - 2) if self.sequence_parallel else psum(y_BTD_part, TENSOR)
        return y if self.bias is None else add(y, self.bias[...])
