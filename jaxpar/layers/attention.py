"""Causal self-attention, split over the `tensor` axis by heads.

Letters: B batch, T tokens, D width, H query heads, G key/value heads, K head width; a lower-case letter is this
device's block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpar.collectives import all_gather, axis_size, block_of, varying
from jaxpar.config import Implementation
from jaxpar.layers.layout import Initializer
from jaxpar.layers.linear import NORMAL, ColumnParallelLinear, RowParallelLinear
from jaxpar.layers.rotary import rotate
from jaxpar.layers.token_sums import add
from jaxpar.mesh import TENSOR


def causal_attention(
    q_BThK: jax.Array, k_BTgK: jax.Array, v_BTgK: jax.Array, *, window: int | None, kernel: Implementation
) -> jax.Array:
    """Attention of each token to itself and earlier tokens, `[B, T, H, K]`; scores scaled by 1/√K.

    `jax.nn.dot_product_attention` does the work. It takes its softmax in float32 whatever the inputs are, so
    float64, which exists to check gradients, has a plain softmax here.

    Args:
        q_BThK: queries.
        k_BTgK: keys; query head h uses key head h·G // H.
        v_BTgK: values.
        window: how many tokens a token sees, itself included; None: all before it.
        kernel: see `choose_implementation`.
    """
    if q_BThK.dtype != jnp.float64:
        sees = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q_BThK, k_BTgK, v_BTgK, is_causal=True, local_window_size=sees, implementation=kernel
        )
    T, h, K = q_BThK.shape[1:]
    repeats = h // k_BTgK.shape[2]
    k_BShK, v_BShK = (jnp.repeat(x, repeats, axis=2) for x in (k_BTgK, v_BTgK))
    scores_BhTS = jnp.einsum("bthk,bshk->bhts", q_BThK, k_BShK) / K**0.5
    distance_TS = jnp.arange(T)[:, None] - jnp.arange(T)
    seen_TS = (distance_TS >= 0) & (distance_TS < (window or T))
    weights_BhTS = jax.nn.softmax(jnp.where(seen_TS, scores_BhTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights_BhTS, v_BShK)


class ParallelAttention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with `query`, `key`, `value` column and `out` row parallel.

    One all-reduce over `tensor` forward, or an all-gather and a reduce-scatter with `sequence_parallel`. When
    there are fewer key/value heads than devices, every device holds all of them, computes only the one that its
    query heads use, and the gradients of `key` and `value` are summed over `tensor`.

    Args:
        features: D.
        num_heads: H, a multiple of the axis size.
        num_kv_heads: G, a divisor of H; by default H. G and the axis size must divide one another.
        head_dim: K; by default D / H.
        rope_frequencies: from `jaxpar.layers.rotary.frequencies`; None: no rotary embedding.
        qkv_bias: biases on `query`, `key`, `value`.
        out_bias: bias on `out`.
        qk_norm: epsilon of an RMS norm over each query and key head (Qwen3); None: no norm.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it; None: all before it.
        implementation: `"xla"`, or `"cudnn"` for flash attention on NVIDIA GPUs (bfloat16 or float16 only).
        sequence_parallel: input and output are split over `tensor` along T.
        kernel_init: initializer of `query`, `key`, `value`.
        out_init: initializer of `out`; by default the same.
        param_dtype: dtype of the parameters.
        rngs: source of the initial weights.

    Raises:
        ValueError: when the heads do not divide.

    Example:
        >>> attention = ParallelAttention(16, num_heads=4, num_kv_heads=2, rngs=nnx.Rngs(0))
        >>> attention(jnp.ones((2, 3, 16))).shape
        (2, 3, 16)
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_frequencies: list[float] | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: float | None = None,
        sliding_window: int | None = None,
        implementation: Implementation = "xla",
        sequence_parallel: bool = False,
        kernel_init: Initializer = NORMAL,
        out_init: Initializer | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads {num_heads} mod num_kv_heads {num_kv_heads} = {num_heads % num_kv_heads}, not 0"
            )
        if head_dim is None and features % num_heads:
            raise ValueError(f"features {features} mod num_heads {num_heads} = {features % num_heads}, not 0")
        self.head_dim = head_dim or features // num_heads
        self.num_kv_heads = num_kv_heads
        column = partial(
            ColumnParallelLinear, features, bias=qkv_bias, kernel_init=kernel_init, param_dtype=param_dtype
        )
        kv = partial(column, num_kv_heads * self.head_dim, heads=num_kv_heads, replicate_heads=True)
        self.query = column(num_heads * self.head_dim, heads=num_heads, rngs=rngs)
        self.key = kv(rngs=rngs)
        self.value = kv(rngs=rngs)
        self.out = RowParallelLinear(
            num_heads * self.head_dim,
            features,
            bias=out_bias,
            heads=num_heads,
            sequence_parallel=sequence_parallel,
            kernel_init=out_init or kernel_init,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        norm = partial(nnx.RMSNorm, self.head_dim, param_dtype=param_dtype, rngs=rngs)
        self.query_norm = norm(epsilon=qk_norm) if qk_norm is not None else None
        self.key_norm = norm(epsilon=qk_norm) if qk_norm is not None else None
        self.rope_frequencies = None if rope_frequencies is None else tuple(rope_frequencies)
        self.sliding_window = sliding_window
        self.implementation: Implementation = implementation
        self.sequence_parallel = sequence_parallel

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply to `[B, T, D]` (or this device's block of T)."""
        # Marked once, so that backward adds the projections' gradients of x before the one all-reduce.
        x_BTD = all_gather(x, TENSOR, dim=1) if self.sequence_parallel else varying(x, TENSOR)
        q_BThK = self._heads(self.query(x_BTD))
        k_BTgK = self._heads(self._key_or_value(self.key, x_BTD))
        v_BTgK = self._heads(self._key_or_value(self.value, x_BTD))
        if self.query_norm is not None and self.key_norm is not None:
            q_BThK, k_BTgK = self.query_norm(q_BThK), self.key_norm(k_BTgK)
        if self.rope_frequencies is not None:
            q_BThK, k_BTgK = rotate(q_BThK, self.rope_frequencies), rotate(k_BTgK, self.rope_frequencies)
        q_BThK, k_BTgK = checkpoint_name(q_BThK, "query"), checkpoint_name(k_BTgK, "key")
        y_BThK = causal_attention(
            q_BThK, k_BTgK, checkpoint_name(v_BTgK, "value"), window=self.sliding_window, kernel=self.implementation
        )
        y_BTf = checkpoint_name(y_BThK.reshape(*y_BThK.shape[:2], -1), "attention_context")
        return self.out(y_BTf)

    def _heads(self, y_BTf: jax.Array) -> jax.Array:
        return y_BTf.reshape(*y_BTf.shape[:2], -1, self.head_dim)

    def _key_or_value(self, layer: ColumnParallelLinear, x_BTD: jax.Array) -> jax.Array:
        """Project; where the heads are replicated, with this device's head alone (no communication forward)."""
        weight_Df = layer.weight[...]
        if axis_size(TENSOR) == 1 or weight_Df.shape[1] < self.num_kv_heads * self.head_dim:
            return layer(x_BTD)
        y_BTK = x_BTD @ block_of(weight_Df, TENSOR, dim=1, blocks=self.num_kv_heads)
        if layer.bias is None:
            return y_BTK
        return add(y_BTK, block_of(layer.bias[...], TENSOR, dim=0, blocks=self.num_kv_heads))
