"""The feed-forward block, split over the `tensor` axis.

Letters: B batch, T tokens, D width, F feed-forward width; a lower-case letter is this device's block.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpar.collectives import all_gather, varying
from jaxpar.layers.layout import Initializer
from jaxpar.layers.linear import NORMAL, ColumnParallelLinear, RowParallelLinear
from jaxpar.mesh import TENSOR


@jax.custom_jvp
def exact_gelu(x: jax.Array) -> jax.Array:
    """`x Φ(x)` with the normal distribution's Φ (arXiv:1606.08415).

    Its derivative is written out because jax 0.12 cannot differentiate `erf` and `erfc` in block view ("Primitive
    polynomial requires varying manual axes to match").
    """
    return jax.nn.gelu(x, approximate=False)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    cumulative = lax.erfc(-x * math.sqrt(0.5)) / 2
    density = jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return exact_gelu(x), (cumulative + x * density) * dx


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": exact_gelu,
    "gelu_new": partial(jax.nn.gelu, approximate=True),
}
"""By Hugging Face's names: `gelu_new` is the tanh approximation that GPT-2 uses."""


class ParallelMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))` (SwiGLU, arXiv:2002.05202), or `down(act(up(x)))` when not gated.

    `gate` and `up` are column parallel, `down` is row parallel: one all-reduce over `tensor` forward, or an
    all-gather and a reduce-scatter with `sequence_parallel`.

    Args:
        features: D.
        hidden: F, a multiple of the axis size.
        activation: a name in `ACTIVATIONS`.
        gated: multiply by a second projection.
        bias: biases on all projections.
        sequence_parallel: input and output are split over `tensor` along T.
        kernel_init: initializer of `gate` and `up`.
        out_init: initializer of `down`; by default the same.
        param_dtype: dtype of the parameters.
        rngs: source of the initial weights.

    Example:
        >>> mlp = ParallelMLP(8, 16, rngs=nnx.Rngs(0))
        >>> mlp(jnp.ones((2, 3, 8))).shape
        (2, 3, 8)
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        sequence_parallel: bool = False,
        kernel_init: Initializer = NORMAL,
        out_init: Initializer | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        column = partial(
            ColumnParallelLinear, features, hidden, bias=bias, kernel_init=kernel_init, param_dtype=param_dtype
        )
        self.gate = column(rngs=rngs) if gated else None
        self.up = column(rngs=rngs)
        self.down = RowParallelLinear(
            hidden,
            features,
            bias=bias,
            sequence_parallel=sequence_parallel,
            kernel_init=out_init or kernel_init,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.activation = activation
        self.sequence_parallel = sequence_parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to `[B, T, D]` (or this device's block of T)."""
        # Marked once, so that backward adds the projections' gradients of x before the one all-reduce.
        x_BTD = all_gather(x, TENSOR, dim=1) if self.sequence_parallel else varying(x, TENSOR)
        act = ACTIVATIONS[self.activation]
        up_BTf = self.up(x_BTD)
        h_BTf = act(up_BTf) if self.gate is None else act(self.gate(x_BTD)) * up_BTf
        return self.down(checkpoint_name(h_BTf, "mlp_hidden"))
